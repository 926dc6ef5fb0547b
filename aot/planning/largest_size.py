"""Find the largest size of an axis for which a step holds a budget.

The peak of a step is nearly affine in a size such as the batch's. First it is predicted at a few sizes, by the
planner's replay, which compiles nothing. Then XLA is asked at the size where the prediction meets the budget, and at
sizes that follow from its figures by secants. Last, the search for the fastest plan within the budget compiles the step
of the largest size.

Where plans can be weighed (on a CPU), the smallest peak of a size is found at once, and sizes are asked until one that
holds and one that does not lie within two per cent. Elsewhere each question is a compilation of one plan. XLA's bytes
for each predicted byte differ between kinds of plans. So the next plan is of the kind that may reach the largest size:
by XLA's figures for the kind, or as predicted if none of it was tried.

Rows may run in blocks (`size_blocks`). Then a size is looked for twice, first without. Where each question is a
compilation, the first time nothing is asked.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from jointcut.aot.options.limits import Limit
from jointcut.aot.planning.request import Request
from jointcut.aot.planning.size_blocks import in_blocks
from jointcut.aot.planning.size_search import (
    FIRST,
    MOST_COMPILED,
    NEAR,
    LargestFound,
    SizeSearch,
    Smallest,
    at_zero,
    meeting,
)
from jointcut.partition.errors import BudgetError
from jointcut.partition.plans.plan import Plan
from jointcut.partition.search.candidates import Candidate

#: The most sizes at which plans are weighed.
MOST_WEIGHED = 12

#: The next allowed size above one is looked for up to twice that one and so many more.
_STEPS = 256

#: How far below an estimate a size lies at which a plan is compiled, by the number of compilations that are left; and
#: where none has held so far and one is left.
_BELOW = 0.01, 0.005, 0.003, 0.003
_SURELY = 0.05

#: Kinds that were not tried may take this share of the predicted bytes, where a compilation is left to find out.
_HOPED = 0.85

#: Where the step of the largest size takes less than this share of the budget, a faster plan is looked for.
_FULL = 0.87

#: Plans whose replayed peak is at most this factor of the least are looked at.
_SPREAD = 1.1

#: The most plans that are weighed at the largest size since they are faster than the smallest one.
_MOST_FASTER = 3

Kind = tuple[str, bool]


def largest_size(
    axis: str, budget_bytes: int, request: Callable[[int], Request], below: Callable[[int], int], may_tile: bool
) -> LargestFound:
    """Return the largest size of an axis for which a plan holds a budget, and the fastest such plan, compiled.

    `request` makes the request of a size. `below` gives the largest allowed size up to a number, 0 where there is none;
    some size is allowed. Rows run in blocks if they may and a larger size holds by that. Raises `BudgetError` if not
    even the smallest size holds.
    """
    given = axis, Limit(peak_bytes=budget_bytes)
    whole = _predicted(*given, request, below)
    if not may_tile or not whole.request(min(whole.predicted)).is_tileable:
        return _compiled(whole)
    refusal = _asked(whole) if isinstance(whole, _ByWeighing) else None
    if (tiled := in_blocks(whole)) is None:
        return _compiled(whole)
    parted = _predicted(*given, tiled.request, partial(tiled.below, below=below), max(whole.predicted))
    if _asked(parted) is None and parted.held > (1 + NEAR) * whole.held:
        if isinstance(parted, _ByWeighing):
            tiled.fewer(parted)
        found = _compiled(parted)
        tiled.remember(parted)
        rows = [row for row in whole.tried() if row.fits and row.size < min(row.size for row in found.tried)]
        return replace(found, tried=(*rows, *found.tried))
    if refusal is not None:
        raise refusal
    whole.compiled |= parted.compiled
    return _compiled(whole)


def _predicted(
    axis: str, budget: Limit, request: Callable[[int], Request], below: Callable[[int], int], begin: int = FIRST
) -> _Search:
    """Return a search that has predicted peaks, from those of a size to begin with."""
    search = _ByCompiling(axis, budget, request, below)
    search.predict(begin)
    is_quick = search.request(min(search.predicted)).weighing.is_quick
    return _ByWeighing(axis, budget, request, below, search.requests, search.predicted) if is_quick else search


def _asked(search: _Search) -> BudgetError | None:
    """Ask XLA at sizes until no question is left; returns the refusal where not even the smallest size holds."""
    try:
        while (size := search.upcoming()) is not None:
            search.ask(size)
    except BudgetError as refusal:
        return refusal
    return None


def _compiled(search: _Search) -> LargestFound:
    """Return the largest size and its step, compiled; raises `BudgetError` if not even the smallest size holds."""
    while True:
        if (refusal := _asked(search)) is not None:
            raise refusal
        if (answer := search.answer()) is not None:
            return LargestFound(search.held, answer, search.tried(answer))


class _ByWeighing(SizeSearch):
    """A search that weighs plans: the smallest peak of a size is known, once it is asked about."""

    def ask(self, size: int) -> None:
        """Find the smallest peak of a size."""
        fitted = self.request(size).within(Limit(fraction=0.0), to_run=False).fitted
        assert fitted is not None, "a search was made"
        self.known[size] = Smallest(fitted.plan, fitted.measured, len(fitted.trail))

    def upcoming(self) -> int | None:
        """Return the next size to weigh; None if the largest size is known, or no question is left.

        Raises `BudgetError` if the smallest size does not hold.
        """
        held, end = self.held, self.end
        if end == self.first:
            raise self.refusal()
        if len(self.known) >= MOST_WEIGHED:
            return None
        size = self.near(self._estimate())
        if not held:
            return self.near(min((1 - NEAR / 2) * size, end - 1)) if end is not None else size
        most = math.inf if end is None else self.below(end - 1)
        if most <= (1 + 2 * NEAR) * held and (most <= held or held * NEAR >= 1):
            return None
        if size <= (1 + NEAR) * held:
            size = self.below(math.ceil((1 + 1.5 * NEAR) * held))
        if len(self.known) > MOST_WEIGHED // 2 and most < math.inf:
            size = self.below((held + int(most)) // 2)
        size = int(min(size, most))
        return size if size > held else self._after(held)

    def faster(self, size: int) -> Plan | None:
        """Return the fastest plan that takes hardly more than the smallest one of a size, and holds the budget."""
        request, known = self.request(size), self.known[size]
        planner = request.planner
        most_seconds = (1 - NEAR) * planner.step_seconds(known.plan)
        near = (c for c in planner.small(0.0, _SPREAD) if c.step_seconds < most_seconds)
        plans = [c.plan for c in sorted(near, key=lambda c: c.step_seconds)[:_MOST_FASTER]]
        measure = request.weighing.ways(to_run=False).measure
        return next((plan for plan in plans if measure(plan).peak_bytes <= self.budget_bytes), None)

    def _after(self, size: int) -> int | None:
        """Return the next larger size that is allowed; None where none is found."""
        sizes = range(2 * size + _STEPS + 1)
        after = bisect_right(sizes, size, size, key=self.below)
        return after if after in sizes else None

    def _estimate(self) -> float:
        """Return the size where the smallest peak is expected to meet the budget."""
        peaks = {size: float(found.weighed.peak_bytes) for size, found in self.known.items()}
        if len(peaks) != 1:
            return meeting(peaks or self.predicted, self.budget_bytes)
        ((size, peak),) = peaks.items()
        fixed = at_zero(self.predicted, self.budget_bytes)
        if not 0 <= fixed < min(peak, self.budget_bytes):
            return size * self.budget_bytes / peak
        return size * (self.budget_bytes - fixed) / (peak - fixed)


@dataclass
class _ByCompiling(SizeSearch):
    """A search that compiles plans, one for each question.

    `ratios` holds XLA's bytes of temporaries for each predicted byte, by kind of plan, and `peaks` XLA's peaks by kind
    and size. `chosen` is the next plan to compile, with its kind.
    """

    ratios: dict[Kind, float] = field(default_factory=dict)
    peaks: dict[Kind, dict[int, float]] = field(default_factory=dict)
    chosen: tuple[Kind, Candidate] | None = None

    def ask(self, size: int) -> None:
        """Compile the chosen plan, and keep its figures if it is the smallest of its size."""
        assert self.chosen is not None, "a plan was chosen with the size"
        request, (kind, candidate) = self.request(size), self.chosen
        self.compiled.add((size, candidate.plan.key))
        weighed = request.weighing.measure(candidate.plan)
        self.ratios[kind] = weighed.activation_bytes / max(candidate.predicted_bytes, 1.0)
        self.peaks.setdefault(kind, {})[size] = weighed.peak_bytes
        new = Smallest(candidate.plan, weighed, 0)
        known = self.known.get(size, new)
        smallest = min(known, new, key=lambda found: found.weighed.peak_bytes)
        self.known[size] = replace(smallest, tried=known.tried + 1)

    def upcoming(self) -> int | None:
        """Return the next size at which a plan is compiled, and choose the plan; None and raises as for weighing."""
        left = MOST_COMPILED - len(self.compiled)
        for size, kind in self._aims(left) if left else ():
            candidate = self._kinds(size).get(kind)
            if candidate is not None and (size, candidate.plan.key) not in self.compiled:
                self.chosen = kind, candidate
                return size
        if self.first in self.known and not self.held:
            raise self.refusal()
        return None

    def _aims(self, left: int) -> list[tuple[int, Kind]]:
        """Return sizes and kinds of plans to compile there, the best first; `left` is the number of compilations."""
        kinds = {kind: self.ratios.get(kind, 1.0) for size in self.requests for kind in self._kinds(size)}
        if not self.held and left == 1 and self.ratios:
            return self._sorted({kind: (1 - _SURELY) * self._reach(kind, ratio) for kind, ratio in self.ratios.items()})
        reach = {kind: (1 - _BELOW[left - 1]) * self._reach(kind, ratio) for kind, ratio in kinds.items()}
        if not self.held:
            return self._sorted(reach)
        more = {kind: size for kind, size in reach.items() if self.near(size) > (1 + NEAR) * self.held}
        if more:
            known = {kind: size for kind, size in more.items() if kind in self.ratios}
            return self._sorted(known if known and left == 1 else more)
        if left == 1 and self.known[self.held].weighed.peak_bytes < _FULL * self.budget_bytes:
            return []  # the last one may find a faster plan
        enough = self.below(math.ceil((1 + 3 * NEAR) * self.held))
        untried = {kind: self._reach(kind, _HOPED) for kind in kinds if kind not in self.ratios}
        hoped = self._sorted({kind: size for kind, size in untried.items() if size > enough})
        return [(enough, kind) for _, kind in hoped if enough > self.held]

    def _sorted(self, reach: Mapping[Kind, float]) -> list[tuple[int, Kind]]:
        return sorted(((self.near(size), kind) for kind, size in reach.items()), reverse=True)

    def _reach(self, kind: Kind, ratio: float) -> float:
        """Return the size at which plans of a kind meet the budget, if XLA takes so many bytes for a predicted one.

        Between sizes that hold and that do not, XLA's own peaks are interpolated.
        """
        asked = self.peaks.get(kind, {0: 0.0})
        if min(asked.values()) <= self.budget_bytes < max(asked.values()):
            return meeting(asked, self.budget_bytes)
        peaks = dict[int, float]()
        for size, request in self.requests.items():
            if (found := self._kinds(size).get(kind)) is not None:
                peaks[size] = request.program.fixed_bytes + ratio * found.predicted_bytes
        return meeting(peaks, self.budget_bytes)

    def _kinds(self, size: int) -> dict[Kind, Candidate]:
        """Return the plan of each kind whose peak is predicted to be the smallest at a size."""
        kinds: dict[Kind, Candidate] = {}
        for candidate in self.request(size).planner.small(0.0, _SPREAD):
            kinds.setdefault(_kind(candidate.plan), candidate)
        return kinds


_Search = _ByWeighing | _ByCompiling


def _kind(plan: Plan) -> Kind:
    """Return the first word of the strategy, and whether loops run in segments."""
    return plan.strategy.replace(",", " ").split()[0], bool(plan.segments)
