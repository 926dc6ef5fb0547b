"""Find the fastest plan that fits a budget.

`partition.search.budget` predicts peaks, XLA decides: a plan holds a budget when `memory_analysis()` of its compiled
program says so. The default plan comes first, if it is expected to fit. Then comes a plan that takes most of the budget
and would fit even if its prediction were some per cent too small. Otherwise plans are *weighed*: XLA tells their memory
before it makes code for them (`aot.run.weigh`), in a fraction of the time. Two are weighed at once. The expected peaks
of the others are scaled by XLA's figures for their neighbours, until the fastest plan that fits is known and compiled.

Where plans cannot be weighed, they are compiled instead, and fewer are tried. Where no plan fits, the ones with the
smallest predicted peaks are tried, two at once, and the error names the smallest peak of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from jointcut.aot.options.limits import Limit, Room
from jointcut.aot.options.options import Options
from jointcut.aot.options.target import rates_for
from jointcut.aot.planning.agreed import is_deciding
from jointcut.aot.planning.budgets.attempts import Attempt, Fitted, Ways, Weighed, attempt
from jointcut.aot.planning.budgets.link import host_rate
from jointcut.aot.planning.budgets.rates import rates
from jointcut.aot.planning.budgets.refusals import refusal
from jointcut.aot.progress.progress import tell
from jointcut.partition.errors import BudgetError, PlanError, message
from jointcut.partition.figures import counted
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import CostModel
from jointcut.partition.search.best import best
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.candidates import WIDE, Candidate, least_bytes

#: The most rounds in which plans that are expected to fit are weighed, and the most of the smallest plans that are.
MOST_ROUNDS, MOST_SMALLEST = 3, 6

#: How many plans are weighed at once.
AT_ONCE = 2

#: A prediction is at most this far off, nearly always: as a factor, up or down.
SPREAD = 1.1

#: Once plans were weighed, XLA takes at most this many times the expected bytes, in four of five cases.
SURE = 1.065

#: Where all scatters together read more than this share of the room, no plan is sure to fit, and a safe one must
#: leave more room: XLA may delay a scatter, and its operands stay alive.
SCATTERED = 0.5

#: A plan that takes at least this share of the room is taken without looking for a faster one.
FULL = 0.87

#: The smallest plan is tried early if it is expected to take this share of the room, or more.
NEARLY = 0.75

#: Plans that are expected to take less than the room times this factor may fit.
NEAR = 1.03

#: Least share of the predicted time that a faster plan must gain to be tried.
TIE = 0.01

_T = TypeVar("_T")


class _Tried(NamedTuple):
    """A candidate that was weighed or compiled: its plan with the promised peak, and XLA's figures.

    `runs` says that it was compiled to run.
    """

    candidate: Candidate
    plan: Plan
    weighed: Weighed[Any]
    runs: bool


class _FitSearch(Generic[_T]):
    """The search of one program for a plan within one budget; sizes are bytes of temporaries.

    `asked` are the candidates whose expected peak the search has asked for.
    """

    def __init__(self, planner: Planner, ways: Ways[_T], room: Room, default: Plan | None) -> None:
        self.planner, self.ways = planner, ways
        self.standard = None if default is None else planner.large(default)
        self._room = room
        self.trail: list[Attempt] = []
        self.tried: dict[int, _Tried] = {}
        self.asked: dict[int, Candidate] = {}

    @property
    def room(self) -> float:
        """The bytes that temporaries may take."""
        return self._room(next(reversed(self.tried.values())).weighed if self.tried else None)

    @property
    def is_scattered(self) -> bool:
        """Whether scatters read so much that plans are predicted less well."""
        return self.planner.scattered_bytes > SCATTERED * self.room

    def expected(self, candidate: Candidate) -> float:
        """Return XLA's peak of a candidate that was tried, or the predicted peak of another one, scaled by `ratio`."""
        self.asked[id(candidate)] = candidate
        if (tried := self.tried.get(id(candidate))) is not None:
            return tried.weighed.activation_bytes
        predicted = candidate.predicted_bytes
        return predicted * self.ratio(candidate, predicted)

    def ratio(self, candidate: Candidate, predicted: float) -> float:
        """Return XLA's bytes for each predicted byte: interpolated between the nearest tried plans, one on each side.

        Plans that run the same loops in segments as the candidate are preferred.
        """
        if not self.tried:
            return 1.0
        size = math.log(max(predicted, 1))
        kind = bool(candidate.plan.segments)
        alike = [t for t in self.tried.values() if bool(t.candidate.plan.segments) == kind] or [*self.tried.values()]
        sizes_tried = [math.log(max(t.candidate.predicted_bytes, 1)) for t in alike]
        taken = [math.log(max(t.weighed.activation_bytes, 1)) for t in alike]
        pairs = sorted((before, after - before) for before, after in zip(sizes_tried, taken, strict=True))
        sizes, ratios = zip(*pairs, strict=True)
        return math.exp(float(np.interp(size, sizes, ratios)))

    def tries(self, candidates: Sequence[Candidate]) -> bool:
        """Weigh candidates that were not tried yet, at once; where they cannot be weighed, compile the first of them.

        Returns whether there was a candidate to try.
        """
        new = [c for c in dict.fromkeys(candidates) if id(c) not in self.tried]
        if self.ways.weigh is None:
            for candidate in new[:1]:
                self.compiles(candidate)
        elif new:
            promised = list(map(self.expected, new))
            tell(lambda: f"weighing {counted(len(new), 'plan')} after {len(self.trail)}")
            weighed = self.ways.weigh([candidate.plan for candidate in new])
            for candidate, expected, figures in zip(new, promised, weighed, strict=True):
                self.notes(candidate, expected, figures.result(), runs=False)
        return bool(new)

    def compiles(self, candidate: Candidate) -> bool:
        """Compile a candidate, to run it, and return whether it holds the budget."""
        if (tried := self.tried.get(id(candidate))) is None or not tried.runs:
            expected = self.expected(candidate)
            tell(lambda: f"compiling a plan after {counted(len(self.trail), 'attempt')}")
            self.notes(candidate, expected, self.ways.measure(candidate.plan), runs=True)
        return self.fits(candidate)

    def notes(self, candidate: Candidate, expected: float, weighed: Weighed[Any], runs: bool) -> None:
        """Remember XLA's figures of a candidate."""
        promised = weighed.fixed_bytes + math.ceil(round(expected, 3))
        plan = replace(candidate.plan, peak_bytes=promised)
        self.tried.pop(id(candidate), None)
        self.tried[id(candidate)] = _Tried(candidate, plan, weighed, runs)
        self.trail.append(attempt(plan, promised, weighed, self.fits(candidate), not runs))

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate that was tried holds the budget."""
        weighed = self.tried[id(candidate)].weighed
        return weighed.activation_bytes <= self._room(weighed)

    @property
    def fitting(self) -> Candidate | None:
        """The fastest of the tried candidates that hold the budget."""
        fits = [t.candidate for t in self.tried.values() if self.fits(t.candidate)]
        return min(fits, key=lambda c: (c.step_seconds, c.peak_bytes), default=None)

    def default(self) -> Candidate | None:
        """Return the default plan, if it holds the budget: compiled if it surely fits, weighed if it might."""
        if (candidate := self.standard) is None or least_bytes(candidate.plan) > self.room:
            return None
        expected = self.expected(candidate)
        if expected > SPREAD * self.room:
            return None
        if expected * SPREAD > self.room and self.ways.weigh is not None:
            self.tries([candidate])
            if not self.fits(candidate):
                return None
        return candidate if self.compiles(candidate) else None

    def proposed(self) -> Candidate | None:
        """Return the fastest candidate that fits, found by trying candidates that are expected to; None without one.

        After a first candidate that did not fit, the smallest one comes next if the room is hardly more than it takes.
        """
        for number in range(MOST_ROUNDS):
            best = self.fitting
            if best is not None and (self.ways.weigh is None or self.expected(best) >= FULL * self.room):
                break
            chosen = self.planner.fastest(self.room, self.expected)
            if not number and best is None and self.tries(self.first_pair(chosen)):
                continue
            if chosen is None or id(chosen) in self.tried:
                if best is None or not (others := self.perhaps(best)):
                    break
                self.tries(others)
                continue
            if best is not None and chosen.step_seconds > (1 - TIE) * best.step_seconds:
                break
            if number and best is None:
                untried = next((c for c in self.nearly if id(c) not in self.tried), chosen)
                chosen = untried if self.expected(untried) >= NEARLY * self.room else chosen
            self.tries([chosen])
        return self.fitting

    def first_pair(self, chosen: Candidate | None) -> list[Candidate]:
        """Return the candidates to try first where the `chosen` one may not fit: none if it is nearly sure to fit.

        The chosen candidate is the fastest of many that are expected to fit, so it often does not fit. It is tried
        together with the fastest candidate that fits more surely. Where there is none, it is tried with the smallest
        candidates; no more of them are looked for if one that was `asked` for so far may fit. Plans that drop values
        are predicted less well than others. So are all plans where scatters read much.
        """

        def at_most(c: Candidate) -> float:
            return self.expected(c) * (SURE * SPREAD if c.plan.dropped or self.is_scattered else SURE)

        if self.ways.weigh is None or (chosen is not None and at_most(chosen) <= self.room):
            return []
        if chosen is not None and (safe := self.planner.fastest(self.room, at_most)) is not None:
            return [chosen, safe]
        smallest = sorted([*self.asked.values()], key=lambda c: (self.expected(c), c.peak_bytes))
        first = [] if chosen is None else [chosen]
        return self.may_fit([*first, *smallest]) or self.may_fit(self.nearly)

    def may_fit(self, row: Iterable[Candidate]) -> list[Candidate]:
        """Return the first candidates of a row that were not tried and may fit, as many as are weighed at once."""
        untried = (c for c in dict.fromkeys(row) if id(c) not in self.tried)
        return list(islice((c for c in untried if self.expected(c) <= NEAR * self.room), AT_ONCE))

    def perhaps(self, best: Candidate) -> list[Candidate]:
        """Return small candidates that are faster than one that fits, and would fit if the model were right."""
        faster = (c for c in self.nearly if c.step_seconds < (1 - TIE) * best.step_seconds)
        return [c for c in faster if id(c) not in self.tried and c.predicted_bytes <= self.room][:AT_ONCE]

    @property
    def nearly(self) -> list[Candidate]:
        """Return candidates that may be the smallest by expected peak: one of each strategy, and the smallest one."""
        row = sorted(self.small, key=self.expected)
        smallest = sorted(row, key=lambda c: c.peak_bytes)[:1]
        chosen = {id(c) for c in (*_of_each_strategy(row), *smallest)}
        return [c for c in row if id(c) in chosen]

    @property
    def small(self) -> list[Candidate]:
        """Return candidates with small peaks by the model's own replay, and the default plan."""
        row = self.planner.small(0.0 if math.isinf(self.room) else self.room, SPREAD)
        standard = [] if self.standard is None else [self.standard]
        wide = [c for c in row[: 6 * self.planner.looks] if c.peak_bytes <= WIDE * row[0].peak_bytes]
        return [*dict.fromkeys([*standard, *_of_each_strategy(row)[: 2 * MOST_SMALLEST], *wide])]

    def smallest(self) -> Iterator[None]:
        """Try the smallest of each strategy by predicted peak, and the default plan: predictions are not that good.

        Yields after each try. Ends when the last two are no smaller than those before, or, where plans are compiled,
        when XLA's peaks do not differ.
        """
        row, peaks = self.nearly[:MOST_SMALLEST], list[float]()
        if self.standard is not None:
            row = [*dict.fromkeys([self.standard, *row])]
        while row:
            count = 1 if self.ways.weigh is None else AT_ONCE
            self.tries(row[:count])
            yield
            peaks += map(self.expected, row[:count])
            is_even = self.ways.weigh is not None or max(peaks[-3:]) <= 1.01 * min(peaks)
            if len(peaks) >= 3 and is_even and min(peaks[-2:]) >= 0.99 * min(peaks[:-2]):
                return
            row = row[count:]

    @property
    def least(self) -> Candidate:
        """The tried candidate that takes the fewest bytes."""
        tried = min(self.tried.values(), key=lambda t: (t.weighed.activation_bytes, t.candidate.step_seconds))
        return tried.candidate

    def fitted(self, candidate: Candidate) -> Fitted[_T]:
        """Return the result, with this candidate chosen and compiled."""
        self.compiles(candidate)
        tried = self.tried[id(candidate)]
        return Fitted(tried.plan, tried.weighed, tuple(self.trail))


def _of_each_strategy(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first candidate of each strategy, in order."""
    first: dict[str, Candidate] = {}
    for c in candidates:
        first.setdefault(c.plan.strategy, c)
    return [*first.values()]


def prices(options: Options) -> CostModel:
    """Return the cost model of the options, or the rates of its target, or of the device: known or else measured ones.

    Raises `BudgetError` without a cost model where several processes take part, and do not leave the decision to one of
    them: each would measure its own device, and they might choose different plans.
    """
    are_apart = jax.process_count() > 1 and not is_deciding()
    if options.cost is None and are_apart and rates_for(options.goal) is None:
        cure = "Give all of them the same rates: aot.function(cost=Roofline(...)) from jointcut.partition.prices.cost."
        what = f"must lead to one plan in all {jax.process_count()} processes, and each would measure its own device."
        raise BudgetError(message("budget", what, cure))
    return options.cost or rates_for(options.goal) or rates()


def planner_for(problem: Problem, options: Options) -> Planner:
    """Return the planner of a problem, with the `prices` of the options; raises as they do.

    If the options permit it, plans may offload more than the problem demands.
    """
    model = prices(options)
    link = (getattr(model, "host_bytes_per_s", None) or host_rate()) if options.offload else None
    return Planner(problem.timed(model), _tell_number, link)


def _tell_number(number: int, most: int) -> None:
    tell(lambda: f"plan {number} of at most {most}")


def fit(
    planner: Planner,
    budget: Limit,
    room: Room,
    ways: Ways[_T],
    default: Plan | None = None,
    found_least: Callable[[Plan, Weighed[Any]], None] = lambda plan, weighed: None,
) -> Fitted[_T]:
    """Return the default plan if it holds a budget, else the fastest plan that does, compiled.

    `room` is the budget as bytes of temporaries. Raises `BudgetError` where none of the smallest plans fits. With a
    fraction of 0.0 the smallest plan is returned. In both cases `found_least` is called with it.
    """
    search = _FitSearch(planner, ways, room, default)
    if budget.fraction == 0.0:
        for _ in search.smallest():
            pass
        smallest = search.fitted(search.least)
        found_least(smallest.plan, smallest.measured)
        return smallest
    if (chosen := search.default()) is not None:
        return search.fitted(chosen)
    for chosen in _fitting(search):
        if search.compiles(chosen):
            return search.fitted(chosen)
    least = search.tried[id(search.least)]
    found_least(least.plan, least.weighed)
    replay = planner.replay(least.plan)
    raise refusal(budget, search.room, least.weighed, len(search.tried), replay, least.plan.baseline)


def default_plan(problem: Problem) -> Plan | None:
    """Return the plan that is taken without a budget; None where the rules of cost and the demands leave none."""
    try:
        return best(problem)
    except PlanError:
        return None


def of_default(planner: Planner, room: Room, ways: Ways[_T], default: Plan | None) -> Fitted[_T] | None:
    """Return the default plan if it holds a budget, compiled; None where it does not."""
    search = _FitSearch(planner, ways, room, default)
    if (chosen := search.standard) is None or search.expected(chosen) > WIDE * search.room:
        return None
    if ways.weigh is not None and search.tries([chosen]) and not search.fits(chosen):
        return None
    return search.fitted(chosen) if search.compiles(chosen) else None


def _fitting(search: _FitSearch[Any]) -> Iterator[Candidate]:
    """Yield candidates that fit, the best first; each later one because the one before did not fit after all."""
    while (chosen := search.proposed()) is not None:
        yield chosen
    for _ in search.smallest():
        while (chosen := search.proposed() if search.fitting else None) is not None:
            yield chosen
