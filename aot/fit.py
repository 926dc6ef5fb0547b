"""Compile plans until one fits the budget.

The model of `partition.budget` proposes, XLA decides: a plan holds a budget when `memory_analysis()` of its compiled
program says so. The fastest plan whose predicted peak fits is compiled first; where it does not fit, the prediction is
scaled by what was measured and the next one is tried. Where none fits, those with the least predicted peak are, until
one does, and the error names the smallest that was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from jointcut.aot.limits import Limit, free_bytes
from jointcut.aot.traced import TracedCall
from jointcut.partition.budget import Candidate, Planner, ranked
from jointcut.partition.errors import BudgetError, message
from jointcut.partition.plan import Plan
from jointcut.wrappers.record import Record

#: How many plans are compiled because they should fit, and how many because they are the smallest.
MOST_PROPOSED, MOST_SMALLEST = 4, 4

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


@dataclass(frozen=True)
class Fitted(Generic[_T]):
    """The plan that holds the budget, compiled, and all that were tried for it, in order."""

    plan: Plan
    measured: Weighed[_T]
    trail: tuple[Attempt, ...]


class _Search(Generic[_T]):
    """The plans of one program on the way to one budget; sizes are bytes of temporaries."""

    def __init__(
        self, planner: Planner, measure: Callable[[Plan], Weighed[_T]], allowed: Callable[[Weighed[_T]], float]
    ) -> None:
        self.planner, self.measure, self.allowed = planner, measure, allowed
        self.ratio = planner.calibration
        self.trail: list[Attempt] = []
        self.found: dict[int, tuple[Plan, Weighed[_T]]] = {}

    def try_out(self, candidate: Candidate) -> bool:
        """Compile a candidate; whether it fits."""
        measured = self.measure(candidate.plan)
        fixed = measured.peak_bytes - measured.activation_bytes
        fits = measured.activation_bytes <= self.allowed(measured)
        promised = fixed + math.ceil(self.ratio * candidate.peak_bytes)
        plan = self.planner.promising(candidate.plan, promised)
        figures = promised, measured.peak_bytes, measured.activation_bytes, fits, measured.compile_ms
        self.trail.append(Attempt(plan.strategy, plan.bytes_saved, *figures))
        self.found[id(candidate)] = plan, measured
        self.ratio = max(self.ratio, measured.activation_bytes / max(candidate.peak_bytes, 1))
        return fits

    def fitted(self, candidate: Candidate) -> Fitted[_T]:
        """The result, with this candidate chosen."""
        return Fitted(*self.found[id(candidate)], tuple(self.trail))


def fit(planner: Planner, budget: Limit, traced: TracedCall, measure: Callable[[Plan], Weighed[_T]]) -> Fitted[_T]:
    """The fastest plan that holds a budget; `measure` compiles a plan for the traced call.

    Raises `BudgetError` where none of the smallest plans fits; with a fraction of 0.0 the smallest one is returned.
    """
    if budget.of_device:
        budget = Limit(peak_bytes=free_bytes(traced.bound.leaves))
    if budget.fraction is None:
        peak = budget.peak_bytes or 0
        room: float = peak - traced.fixed_bytes
        search = _Search(planner, measure, lambda m: peak - (m.peak_bytes - m.activation_bytes))
    else:
        room = budget.fraction * traced.plain_memory.temp_bytes if budget.fraction else 0.0
        search = _Search(planner, measure, lambda _: room)
    menu = ranked(planner.menu)
    smallest = sorted(planner.menu, key=lambda c: (c.peak_bytes, c.step_seconds))
    if budget.fraction == 0.0:
        return _least(search, smallest)
    for _ in range(MOST_PROPOSED):
        untried = [c for c in menu if id(c) not in search.found]
        chosen = next((c for c in untried if search.ratio * c.peak_bytes <= room), None)
        if chosen is None:
            break
        if search.try_out(chosen):
            return search.fitted(_faster(search, menu, chosen))
        room = search.allowed(search.found[id(chosen)][1])
    for chosen in [c for c in smallest if id(c) not in search.found][:MOST_SMALLEST]:
        if search.try_out(chosen):
            return search.fitted(chosen)
    raise refused(search, budget, menu)


def _least(search: _Search[_T], smallest: Sequence[Candidate]) -> Fitted[_T]:
    """The smallest of the plans with the least predicted peak."""
    tried = list(smallest[: MOST_PROPOSED + MOST_SMALLEST])
    for candidate in tried:
        search.try_out(candidate)
    return search.fitted(min(tried, key=lambda c: search.found[id(c)][1].activation_bytes))


def _faster(search: _Search[_T], menu: Sequence[Candidate], chosen: Candidate) -> Candidate:
    """A faster plan that fits as well, where the model was too careful; tried once."""
    measured = search.found[id(chosen)][1]
    ratio = measured.activation_bytes / max(chosen.peak_bytes, 1)
    room = search.allowed(measured)
    for candidate in menu:
        if candidate is chosen:
            break
        if id(candidate) not in search.found and ratio * candidate.peak_bytes <= room:
            return candidate if search.try_out(candidate) else chosen
    return chosen


def refused(search: _Search[_T], budget: Limit, menu: Sequence[Candidate]) -> BudgetError:
    """The error that names the smallest peak found and what holds it up."""
    plan, measured = min(search.found.values(), key=lambda found: found[1].peak_bytes)
    alive = search.planner.replay(plan).alive[:5]
    fixed = measured.peak_bytes - measured.activation_bytes
    lines = [
        f"The smallest peak found is {measured.peak_bytes:,} bytes ({len(search.trail)} plans compiled): "
        f"{fixed:,} are arguments and results, {measured.activation_bytes:,} temporaries. Alive there, by the model:",
        *(f"    {buffer}" for buffer in alive),
        "Give at least that much, a smaller batch, or budget=0.0 for the least that is found.",
    ]
    return BudgetError(message("budget", f"of {budget} cannot be met.", "\n".join(lines)))
