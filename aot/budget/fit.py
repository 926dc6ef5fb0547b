"""Compile plans until one fits the budget.

`partition.search.budget` predicts peaks, XLA decides: a plan holds a budget when `memory_analysis()` of its compiled
program says so. The fastest plan whose predicted peak fits is compiled first. Where it does not fit, predictions near
it are scaled by the measured peak and the next plan is tried. After `MOST_PROPOSED` plans the ones with the smallest
predicted peaks are tried. Where none fits, the error names the smallest peak found.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from jointcut.aot.budget.rates import rates
from jointcut.aot.choices.limits import Limit, free_bytes
from jointcut.aot.choices.options import Options
from jointcut.aot.progress.progress import tell
from jointcut.partition.errors import BudgetError, message
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import CostModel
from jointcut.partition.search.budget import Candidate, Planner
from jointcut.wrappers.record import Record

#: Most plans compiled because their predicted peak fits, and most compiled because they are the smallest.
MOST_PROPOSED, MOST_SMALLEST = 4, 6

#: XLA's bytes for each predicted byte, until a plan was compiled: about the median on CPU.
CALIBRATION = 1.25

#: Least share of the predicted time that a faster plan must gain to be compiled.
TIE = 0.01

_SHOWN = 5  # arrays alive at the peak that the error names

_T = TypeVar("_T")


@dataclass(frozen=True)
class Attempt(Record):
    """One plan that was compiled during a search.

    Attributes:
        strategy: how the plan was chosen.
        bytes_saved: bytes handed from the forward to the backward.
        promised_bytes: predicted peak, from when the plan was chosen.
        peak_bytes: peak of the compiled step, as XLA reports it.
        activation_bytes: its temporaries alone.
        fits: whether it holds the budget.
        compile_ms: milliseconds of compilation.
    """

    strategy: str
    bytes_saved: int
    promised_bytes: int
    peak_bytes: int
    activation_bytes: int
    fits: bool
    compile_ms: float

    def __str__(self) -> str:
        """`front: promised 61,000,000 bytes, takes 62,500,000: fits (compiled in 812 ms)`."""
        verdict = "fits" if self.fits else "does not fit"
        took = f"promised {self.promised_bytes:,} bytes, takes {self.peak_bytes:,}"
        return f"{self.strategy}: {took}: {verdict} (compiled in {self.compile_ms:.0f} ms)"


@dataclass(frozen=True)
class Weighed(Generic[_T]):
    """A compiled plan: XLA's peak of the step and of its temporaries, and the milliseconds of compilation."""

    made: _T
    peak_bytes: int
    activation_bytes: int
    compile_ms: float

    @property
    def fixed_bytes(self) -> int:
        """Bytes of arguments and results."""
        return self.peak_bytes - self.activation_bytes


@dataclass(frozen=True)
class Fitted(Generic[_T]):
    """The compiled plan that holds the budget, and the plans that were tried, in order.

    Where the plan of an earlier search was reused, these are the plans tried then.
    """

    plan: Plan
    measured: Weighed[_T]
    trail: tuple[Attempt, ...]


class _Tried(NamedTuple, Generic[_T]):
    """A candidate that was compiled: its plan, with the promised peak, and the figures of its compiled step."""

    candidate: Candidate
    plan: Plan
    weighed: Weighed[_T]


class _Search(Generic[_T]):
    """The search of one program for a plan within one budget; sizes are bytes of temporaries."""

    def __init__(
        self, planner: Planner, measure: Callable[[Plan], Weighed[_T]], room: Callable[[Weighed[Any] | None], float]
    ) -> None:
        self.planner, self.measure, self.room = planner, measure, room
        self.trail: list[Attempt] = []
        self.tried: dict[int, _Tried[_T]] = {}

    def expected(self, candidate: Candidate) -> float:
        """Predicted peak, scaled by the XLA/model ratio of the nearest compiled plan."""
        peak = max(candidate.peak_bytes, 1)
        near = min(
            self.tried.values(), key=lambda t: abs(math.log(max(t.candidate.peak_bytes, 1) / peak)), default=None
        )
        if near is None:
            return peak * CALIBRATION
        return peak * (near.weighed.activation_bytes / max(near.candidate.peak_bytes, 1))

    def fits(self, candidate: Candidate) -> bool:
        """Compile a candidate; whether it holds the budget."""
        expected, number = self.expected(candidate), len(self.trail) + 1
        tell(lambda: f"attempt {number} of at most {MOST_PROPOSED + MOST_SMALLEST + 1}")
        weighed = self.measure(candidate.plan)
        fits = weighed.activation_bytes <= self.room(weighed)
        promised = weighed.fixed_bytes + math.ceil(expected)
        plan = replace(candidate.plan, peak_bytes=promised)
        self.trail.append(_attempt(plan, promised, weighed, fits))
        self.tried[id(candidate)] = _Tried(candidate, plan, weighed)
        return fits

    def proposed(self, room: float) -> Candidate | None:
        """The fastest candidate that should fit and was not compiled yet."""
        untried = (c for c in self.planner.by_time(room) if id(c) not in self.tried)
        return next((c for c in untried if self.expected(c) <= room), None)

    def faster(self, chosen: Candidate) -> Candidate:
        """A plan that fits and is faster by more than `TIE`, else the chosen one; compiles at most one plan."""
        better = self.proposed(self.room(self.tried[id(chosen)].weighed))
        if better is not None and better.step_seconds < (1 - TIE) * chosen.step_seconds and self.fits(better):
            return better
        return chosen

    def smallest(self) -> Iterator[Candidate]:
        """The smallest candidate of each strategy, by predicted peak, until XLA's peaks no longer differ."""
        best: dict[str, Candidate] = {}
        for c in sorted(self.planner.menu, key=lambda c: (c.peak_bytes, c.step_seconds)):
            best.setdefault(c.plan.strategy, c)
        peaks: list[int] = []
        for c in list(best.values())[:MOST_SMALLEST]:
            if len(peaks) >= 3 and max(peaks[-3:]) <= 1.01 * min(peaks):
                return
            yield c
            peaks.append(self.tried[id(c)].weighed.activation_bytes)

    def fitted(self, candidate: Candidate) -> Fitted[_T]:
        """The result, with this candidate chosen."""
        tried = self.tried[id(candidate)]
        return Fitted(tried.plan, tried.weighed, tuple(self.trail))


def _attempt(plan: Plan, promised: int, weighed: Weighed[Any], fits: bool) -> Attempt:
    figures = promised, weighed.peak_bytes, weighed.activation_bytes, fits, weighed.compile_ms
    return Attempt(plan.strategy, plan.bytes_saved, *figures)


def followed(plan: Plan, weighed: Weighed[_T]) -> Fitted[_T]:
    """The result without a search: a plan that was known, now compiled."""
    promised = plan.peak_bytes or weighed.peak_bytes
    return Fitted(replace(plan, peak_bytes=promised), weighed, (_attempt(plan, promised, weighed, True),))


def prices(options: Options) -> CostModel:
    """The cost model of the options, or the measured rates of the device.

    Raises `BudgetError` without a cost model where several processes take part: each would measure its own device, and
    they might choose different plans.
    """
    if options.cost is None and jax.process_count() > 1:
        cure = "Give all of them the same rates: aot.function(cost=Roofline(...)) from jointcut.partition.prices.cost."
        what = f"must lead to one plan in all {jax.process_count()} processes, and each would measure its own device."
        raise BudgetError(message("budget", what, cure))
    return options.cost or rates()


def planner_for(problem: Problem, options: Options) -> Planner:
    """The planner of a problem, with the `prices` of the options; raises as they do."""
    return Planner(problem.timed(prices(options)), _tell_number)


def _tell_number(number: int, most: int) -> None:
    tell(lambda: f"plan {number} of at most {most}")


#: Bytes that temporaries may take, given a compiled step, or None before the first one.
Room = Callable[[Weighed[Any] | None], float]


def fit(planner: Planner, budget: Limit, room: Room, measure: Callable[[Plan], Weighed[_T]]) -> Fitted[_T]:
    """The fastest plan that holds a budget; `measure` compiles a plan, `room` is the budget as bytes of temporaries.

    Raises `BudgetError` where none of the smallest plans fits. With a fraction of 0.0 the smallest plan is returned.
    """
    search = _Search(planner, measure, room)
    if budget.fraction == 0.0:
        for candidate in search.smallest():
            search.fits(candidate)
        smallest = min(search.tried.values(), key=lambda t: (t.weighed.activation_bytes, t.candidate.step_seconds))
        return search.fitted(smallest.candidate)
    most_bytes = room(None)
    for _ in range(MOST_PROPOSED):
        chosen = search.proposed(most_bytes)
        if chosen is None:
            break
        if search.fits(chosen):
            return search.fitted(search.faster(chosen))
        most_bytes = room(search.tried[id(chosen)].weighed)
    for chosen in search.smallest():
        tried = search.tried.get(id(chosen))
        if tried.weighed.activation_bytes <= room(tried.weighed) if tried else search.fits(chosen):
            return search.fitted(search.faster(chosen))
    raise refused(search, budget)


def room_for(budget: Limit, leaves: Iterable[Any], fixed_bytes: int, plain_bytes: Callable[[], int]) -> Room:
    """The budget as bytes of temporaries.

    `leaves` are the arguments of the call, `fixed_bytes` the bytes of arguments and results as known before a step was
    compiled, `plain_bytes` gives the bytes of plain JAX's temporaries.
    """
    if budget.fraction is not None:
        share = budget.fraction * plain_bytes() if budget.fraction else math.inf
        return lambda measured: share
    peak = free_bytes(leaves) if budget.of_device else budget.peak_bytes or 0
    return lambda measured: peak - (fixed_bytes if measured is None else measured.fixed_bytes)


def refused(search: _Search[_T], budget: Limit) -> BudgetError:
    """The error that names the smallest peak found and the largest arrays there."""
    _, plan, measured = min(search.tried.values(), key=lambda tried: tried.weighed.peak_bytes)
    alive = Counter(map(str, search.planner.replay(plan).alive[:_SHOWN]))
    share = ""
    if budget.fraction and (room := search.room(None)):
        share = f" ({100 * measured.activation_bytes * budget.fraction / room:.0f}% of plain JAX's activations)"
    lines = [
        f"The smallest peak found is {measured.peak_bytes:,} bytes ({len(search.trail)} plans compiled): "
        f"{measured.fixed_bytes:,} are arguments and results, {measured.activation_bytes:,} temporaries.",
        *(["Alive there, by the model:"] if alive else []),
        *(f"    {buffer}" if times == 1 else f"    {times} × {buffer}" for buffer, times in alive.items()),
        f"Give at least that much{share}, a smaller batch, or budget=0.0 for the least that is found.",
    ]
    return BudgetError(message("budget", f"of {budget} cannot be met.", "\n".join(lines)))
