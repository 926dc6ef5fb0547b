"""Compile plans until one fits the budget.

The model of `partition.budget` proposes, XLA decides: a plan holds a budget when `memory_analysis()` of its compiled
program says so. The fastest plan whose predicted peak fits is compiled first; where it does not fit, predictions near
it are scaled by what was measured and the next one is tried. Where none fits, those with the least predicted peak are,
until one does, and the error names the smallest that was found.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax

from jointcut.aot.budget.rates import rates
from jointcut.aot.limits import Limit, free_bytes
from jointcut.aot.options import Options
from jointcut.aot.progress.progress import tell
from jointcut.partition.errors import BudgetError, message
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import CostModel
from jointcut.partition.search.budget import Candidate, Planner
from jointcut.wrappers.record import Record

#: How many plans are compiled because they should fit, and how many because they are the smallest.
MOST_PROPOSED, MOST_SMALLEST = 4, 5

#: What XLA takes for each byte that the model predicts, before anything was compiled: about the median on CPU.
CALIBRATION = 1.25

#: Of the predicted time: for less another plan is not compiled.
TIE = 0.01

_SHOWN = 5  # arrays of those that are alive where a step takes most

_T = TypeVar("_T")


@dataclass(frozen=True)
class Attempt(Record):
    """One plan that was compiled on the way to a budget.

    Attributes:
        strategy: how the plan came about.
        bytes_saved: what it hands from the forward to the backward.
        promised_bytes: the peak that the model predicted when the plan was chosen.
        peak_bytes: the peak of the compiled step, by XLA's account.
        activation_bytes: its temporaries alone.
        fits: whether that holds the budget.
        compile_ms: what compiling took.
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
    """A compiled plan: XLA's peak of the step and of its temporaries, in bytes, and what compiling took."""

    made: _T
    peak_bytes: int
    activation_bytes: int
    compile_ms: float

    @property
    def fixed_bytes(self) -> int:
        """Arguments and results."""
        return self.peak_bytes - self.activation_bytes


@dataclass(frozen=True)
class Fitted(Generic[_T]):
    """The plan that holds the budget, compiled, and all that were tried for it, in order.

    Where another way of calling the same program searched before, these are the plans that were tried then.
    """

    plan: Plan
    measured: Weighed[_T]
    trail: tuple[Attempt, ...]


class _Search(Generic[_T]):
    """The plans of one program on the way to one budget; sizes are bytes of temporaries."""

    def __init__(
        self, planner: Planner, measure: Callable[[Plan], Weighed[_T]], room: Callable[[Weighed[Any] | None], float]
    ) -> None:
        self.planner, self.measure, self.room = planner, measure, room
        self.trail: list[Attempt] = []
        self.found: dict[int, tuple[Candidate, Plan, Weighed[_T]]] = {}

    def expected(self, candidate: Candidate) -> float:
        """What XLA would make of a predicted peak: as much more as of the nearest that was compiled."""
        peak = max(candidate.peak_bytes, 1)
        near = min(self.found.values(), key=lambda f: abs(math.log(max(f[0].peak_bytes, 1) / peak)), default=None)
        return peak * (CALIBRATION if near is None else near[2].activation_bytes / max(near[0].peak_bytes, 1))

    def fits(self, candidate: Candidate) -> bool:
        """Compile a candidate; whether it holds the budget."""
        expected, number = self.expected(candidate), len(self.trail) + 1
        tell(lambda: f"attempt {number} of at most {MOST_PROPOSED + MOST_SMALLEST + 1}")
        measured = self.measure(candidate.plan)
        fits = measured.activation_bytes <= self.room(measured)
        promised = measured.fixed_bytes + math.ceil(expected)
        plan = replace(candidate.plan, peak_bytes=promised)
        figures = promised, measured.peak_bytes, measured.activation_bytes, fits, measured.compile_ms
        self.trail.append(Attempt(plan.strategy, plan.bytes_saved, *figures))
        self.found[id(candidate)] = candidate, plan, measured
        return fits

    def proposed(self, room: float) -> Candidate | None:
        """The fastest candidate that should fit and was not compiled yet."""
        untried = (c for c in self.planner.by_time(room) if id(c) not in self.found)
        return next((c for c in untried if self.expected(c) <= room), None)

    def faster(self, chosen: Candidate) -> Candidate:
        """A plan that is faster by more than `TIE` and fits as well, where the model was too careful; tried once."""
        better = self.proposed(self.room(self.found[id(chosen)][2]))
        if better is not None and better.step_seconds < (1 - TIE) * chosen.step_seconds and self.fits(better):
            return better
        return chosen

    def smallest(self) -> Iterator[Candidate]:
        """The candidates of least predicted peak, of each kind of plan one, until XLA finds no difference."""
        best: dict[str, Candidate] = {}
        for c in sorted(self.planner.menu, key=lambda c: (c.peak_bytes, c.step_seconds)):
            best.setdefault(c.plan.strategy, c)
        floor: list[int] = []
        for c in list(best.values())[:MOST_SMALLEST]:
            if len(floor) >= 3 and max(floor[-3:]) <= 1.01 * min(floor):
                return
            yield c
            floor.append(self.found[id(c)][2].activation_bytes)

    def fitted(self, candidate: Candidate) -> Fitted[_T]:
        """The result, with this candidate chosen."""
        return Fitted(*self.found[id(candidate)][1:], tuple(self.trail))


def followed(plan: Plan, weighed: Weighed[_T]) -> Fitted[_T]:
    """The result of a search that was spared: a plan that was known, and is now compiled."""
    promised = plan.peak_bytes or weighed.peak_bytes
    figures = promised, weighed.peak_bytes, weighed.activation_bytes, True, weighed.compile_ms
    tried = Attempt(plan.strategy, plan.bytes_saved, *figures)
    return Fitted(replace(plan, peak_bytes=promised), weighed, (tried,))


def prices(options: Options) -> CostModel:
    """The cost model of the options, or what the device was measured to do.

    Raises `BudgetError` without a cost model where several processes take part: each would measure its own device, and
    they might choose different plans.
    """
    if options.cost is None and jax.process_count() > 1:
        cure = "Give all of them the same rates: aot.function(cost=Roofline(...)) from jointcut.partition.prices.cost."
        what = f"must lead to one plan in all {jax.process_count()} processes, and each would measure its own device."
        raise BudgetError(message("budget", what, cure))
    return options.cost or rates()


def planner_for(problem: Problem, options: Options) -> Planner:
    """The plans of a problem by the `prices` of the options; raises as these do."""
    return Planner(problem.timed(prices(options)), _told)


def _told(number: int, most: int) -> None:
    tell(lambda: f"plan {number} of at most {most}")


#: What temporaries may take, given the step that was compiled, or None before one was.
Room = Callable[[Weighed[Any] | None], float]


def fit(planner: Planner, budget: Limit, room: Room, measure: Callable[[Plan], Weighed[_T]]) -> Fitted[_T]:
    """The fastest plan that holds a budget; `measure` compiles a plan, `room` is the budget as bytes of temporaries.

    Raises `BudgetError` where none of the smallest plans fits; with a fraction of 0.0 the smallest one is returned.
    """
    search = _Search(planner, measure, room)
    if budget.fraction == 0.0:
        for candidate in search.smallest():
            search.fits(candidate)
        return search.fitted(min(search.found.values(), key=lambda f: (f[2].activation_bytes, f[0].step_seconds))[0])
    left = room(None)
    for _ in range(MOST_PROPOSED):
        chosen = search.proposed(left)
        if chosen is None:
            break
        if search.fits(chosen):
            return search.fitted(search.faster(chosen))
        left = room(search.found[id(chosen)][2])
    for chosen in search.smallest():
        known = search.found.get(id(chosen))
        fits = known[2].activation_bytes <= room(known[2]) if known else search.fits(chosen)
        if fits:
            return search.fitted(search.faster(chosen))
    raise refused(search, budget)


def room_for(budget: Limit, leaves: Iterable[Any], fixed_bytes: int, plain_bytes: Callable[[], int]) -> Room:
    """What temporaries may take.

    `leaves` are the arguments of the call, `fixed_bytes` what arguments and results take as far as that is known before
    a step was compiled, `plain_bytes` what plain JAX's temporaries take.
    """
    if budget.fraction is not None:
        share = budget.fraction * plain_bytes() if budget.fraction else math.inf
        return lambda measured: share
    peak = free_bytes(leaves) if budget.of_device else budget.peak_bytes or 0
    return lambda measured: peak - (fixed_bytes if measured is None else measured.fixed_bytes)


def refused(search: _Search[_T], budget: Limit) -> BudgetError:
    """The error that names the smallest peak found and what holds it up."""
    _, plan, measured = min(search.found.values(), key=lambda found: found[2].peak_bytes)
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
