"""Predict peaks at sizes of an axis, compile the step of the largest one, and list the sizes tried.

`SizeSearch` is without its questions to XLA: `largest_size` asks these, by weighing plans or by compiling them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

from jointcut.aot.options.limits import Limit
from jointcut.aot.planning.budgets.attempts import Fitted, Ways, Weighed, followed
from jointcut.aot.planning.budgets.refusals import holds_no_size
from jointcut.aot.planning.budgets.searches import keep, keep_least, settled
from jointcut.aot.planning.request import Request
from jointcut.aot.planning.weighing import Answer
from jointcut.partition.errors import BudgetError
from jointcut.partition.plans.plan import Plan
from jointcut.partition.search.candidates import Candidate
from jointcut.wrappers.record import Record

#: The most compilations of steps.
MOST_COMPILED = 4

#: The most sizes at which a peak is predicted to find the first one to ask XLA about, and the size to begin with.
MOST_PREDICTED, FIRST = 6, 8

#: A size is near enough if no other one may hold that is larger by more than this share.
NEAR = 0.01


@dataclass(frozen=True)
class TriedSize(Record):
    """A size that was tried.

    Attributes:
        size: of the axis.
        peak_bytes: of the whole step, with arguments and results.
        step_seconds: the time of a step, as predicted.
        fits: whether the peak holds the budget.
        how: `"compiled"` or `"weighed"`, by XLA's account, or `"predicted"`, by the model. Where XLA was asked, the
            plan is the smallest that is known. Else it is the fastest that is predicted to fit, or the smallest.
        strategy: of the plan.
        blocks: the number of blocks in which rows run; 1 where they run together.
    """

    size: int
    peak_bytes: int
    step_seconds: float
    fits: bool
    how: str
    strategy: str
    blocks: int = 1

    @property
    def seconds_per_example(self) -> float:
        """The predicted time of a step, divided by the size."""
        return self.step_seconds / self.size


@dataclass(frozen=True)
class LargestFound:
    """The largest size that holds a budget, the answer of its request, and the sizes that were tried, in order."""

    size: int
    answer: Answer
    tried: tuple[TriedSize, ...]


class _NoMoreError(Exception):
    """No further compilation is allowed."""


@dataclass(frozen=True)
class Smallest:
    """The smallest plan that is known at a size, its figures, and the number of plans that were tried there."""

    plan: Plan
    weighed: Weighed[Any]
    tried: int


@dataclass
class SizeSearch:
    """The search of one function for a size.

    `predicted` and `known` hold smallest peaks by size, by the model and by XLA's account. `compiled` holds the steps
    that were compiled, as size and key of the plan.
    """

    axis: str
    budget: Limit
    make: Callable[[int], Request]
    below: Callable[[int], int]
    requests: dict[int, Request] = field(default_factory=dict)
    predicted: dict[int, float] = field(default_factory=dict)
    known: dict[int, Smallest] = field(default_factory=dict)
    compiled: set[Any] = field(default_factory=set)

    @property
    def budget_bytes(self) -> int:
        """The budget."""
        return self.budget.peak_bytes or 0

    @cached_property
    def first(self) -> int:
        """The smallest size that is allowed."""
        return next(n for n in count(1) if self.below(n))

    @property
    def held(self) -> int:
        """The largest size that is known to hold the budget; 0 where none is."""
        return max((n for n, found in self.known.items() if found.weighed.peak_bytes <= self.budget_bytes), default=0)

    @property
    def end(self) -> int | None:
        """The smallest size above `held` that does not hold the budget; None where none is known."""
        return min((n for n in self.known if n > self.held), default=None)

    def request(self, size: int) -> Request:
        """Return the request of a size, made once."""
        if size not in self.requests:
            self.requests[size] = self.make(size)
        return self.requests[size]

    def predict(self, begin: int = FIRST) -> None:
        """Predict smallest peaks at sizes that come nearer to the budget, from one to begin with."""
        size = max(self.first, self.below(begin))
        for _ in range(MOST_PREDICTED):
            if size in self.predicted:
                return
            request = self.request(size)
            self.predicted[size] = request.program.fixed_bytes + _small(request).predicted_bytes
            twice = max(self.first, self.below(2 * size))
            size = twice if len(self.predicted) == 1 else self.near(meeting(self.predicted, self.budget_bytes))

    def near(self, size: float) -> int:
        """Return the largest allowed size that is no larger, or else the smallest allowed one."""
        return max(self.first, self.below(math.floor(size)))

    def answer(self) -> Answer | None:
        """Return the fastest plan within the budget at the largest size; None if, once compiled, it does not hold.

        Raises `BudgetError` where no size is known that holds.
        """
        size = self.held
        if not size:
            raise self.refusal()
        request, smallest = self.request(size), self.known[size]
        wanted = request.wanted(self.budget)
        keep_least(wanted, smallest.plan, smallest.weighed)

        def search(request: Request) -> Fitted[Any]:
            if (fast := self.faster(size)) is not None:
                self.compiled.add((size, fast.key))
                fitted = followed(fast, request.weighing.measure(fast))
                if fitted.measured.peak_bytes <= self.budget_bytes:
                    keep(wanted, fitted)
                    return fitted
            try:
                return settled(replace(wanted, ways=self._capped(size, request, wanted.ways)))
            except (_NoMoreError, BudgetError):
                self.compiled.add((size, smallest.plan.key))
                return followed(smallest.plan, request.weighing.measure(smallest.plan))
            finally:
                request.weighing.forget()

        answer = request.within(self.budget, search=search)
        assert answer.fitted is not None, "a search was made"
        if (measured := answer.fitted.measured).peak_bytes <= self.budget_bytes:
            return answer
        self.known[size] = replace(smallest, weighed=measured)
        return None

    def faster(self, size: int) -> Plan | None:
        """Return a plan that is faster than the smallest of a size, and holds the budget; None where none is known."""
        del size
        return None

    def _capped(self, size: int, request: Request, ways: Ways[Any]) -> Ways[Any]:
        """Return ways that compile as long as a compilation is left for the smallest plan."""
        smallest = size, self.known[size].plan.key

        def measure(plan: Plan) -> Weighed[Any]:
            if (key := (size, plan.key)) not in self.compiled:
                if len({*self.compiled, key, smallest}) > MOST_COMPILED:
                    raise _NoMoreError
                self.compiled.add(key)
            return request.weighing.measure(plan)

        return replace(ways, measure=measure)

    def refusal(self) -> BudgetError:
        """Return the error for a budget that not even the smallest of the sizes that were tried holds."""
        size = min(self.known)
        found = self.known[size]
        replay = self.request(size).planner.replay(found.plan)
        return holds_no_size(self.budget, self.axis, size, found.weighed, found.tried, replay)

    # ------------------------------------------------------------------------------------------------ the table

    def tried(self, answer: Answer | None = None) -> tuple[TriedSize, ...]:
        """Return the sizes that were tried, and half of the largest, in order; XLA's figures replace predicted ones.

        `answer` is that of the largest size, if it was compiled.
        """
        sizes = {*self.predicted, *[self.near(self.held / 2)] * bool(self.held)}
        rows = [self._predicted(size) for size in sizes if size < (1 - NEAR) * min(self.known, default=math.inf)]
        others = ((n, found) for n, found in self.known.items() if answer is None or n != self.held)
        rows += [self._row(n, found.plan, found.weighed.peak_bytes, self._how(n)) for n, found in others]
        if answer is not None:
            assert answer.fitted is not None, "a search was made"
            rows.append(self._row(self.held, answer.plan, answer.fitted.measured.peak_bytes, "compiled"))
        return tuple(sorted(rows, key=lambda row: row.size))

    def _how(self, size: int) -> str:
        return "compiled" if any(size == n for n, _ in self.compiled) else "weighed"

    def _predicted(self, size: int) -> TriedSize:
        request = self.request(size)
        fixed, planner = request.program.fixed_bytes, request.planner
        fastest = planner.fastest(self.budget_bytes - fixed, lambda c: c.predicted_bytes)
        candidate = fastest or _small(request)
        return self._row(size, candidate.plan, fixed + math.ceil(candidate.predicted_bytes), "predicted")

    def _row(self, size: int, plan: Plan, peak_bytes: int, how: str) -> TriedSize:
        planner = self.request(size).planner
        seconds = planner.common_seconds + planner.step_seconds(plan)
        blocks = max((tile.blocks for tile in self.request(size).program.roles.tiles), default=1)
        return TriedSize(size, peak_bytes, seconds, peak_bytes <= self.budget_bytes, how, plan.strategy, blocks)


def _small(request: Request) -> Candidate:
    """Return the plan whose peak is predicted to be the smallest."""
    return request.planner.small(0.0, 1.0)[0]


def _line(peaks: Mapping[int, float], budget_bytes: int) -> tuple[float, float]:
    """Return offset and slope of the line through two sizes: around the budget, or else the two nearest to it."""
    row = sorted(peaks.items())
    if len(row) == 1:
        return 0.0, row[0][1] / row[0][0]
    over = next((i for i, (_, peak) in enumerate(row) if peak > budget_bytes), len(row))
    place = min(max(over, 1), len(row) - 1)
    (a, low), (b, high) = row[place - 1], row[place]
    slope = (high - low) / (b - a)
    return low - slope * a, slope


def meeting(peaks: Mapping[int, float], budget_bytes: int) -> float:
    """Return the size at which peaks meet a budget; where they do not grow, double or half of the known sizes."""
    offset, slope = _line(peaks, budget_bytes)
    if slope <= 0:
        is_above = max(peaks.values()) > budget_bytes
        return min(peaks) / 2 if is_above else 2.0 * max(peaks)
    return (budget_bytes - offset) / slope


def at_zero(peaks: Mapping[int, float], budget_bytes: int) -> float:
    """Return the part of the peaks that does not grow with the size."""
    return _line(peaks, budget_bytes)[0]
