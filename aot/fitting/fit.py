"""Find the fastest plan that fits a budget.

`partition.search.budget` predicts peaks, XLA decides: a plan holds a budget when `memory_analysis()` of its compiled
program says so. The default plan comes first, if it is expected to fit; then a plan that takes most of the budget and
would fit even if its prediction were some per cent too small. Otherwise plans are *weighed*: XLA tells what they take
before it makes code for them (`aot.run.weigh`), and that takes a fraction of the time. Two are weighed at once. What is
expected of the others is scaled by what XLA says of their neighbours, until the fastest plan that fits is known. That
one is compiled, and runs.
Where plans cannot be weighed, they are compiled instead, and fewer are tried. Where no plan fits, the ones with the
smallest predicted peaks are tried, two at once, and the error names the smallest peak of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from jointcut.aot.choices.limits import Limit, Room
from jointcut.aot.choices.options import Options
from jointcut.aot.choices.target import rates_for
from jointcut.aot.fitting.attempts import Attempt, Fitted, Ways, Weighed, attempt
from jointcut.aot.fitting.link import host_rate
from jointcut.aot.fitting.rates import rates
from jointcut.aot.fitting.refusals import refusal
from jointcut.aot.progress.progress import tell
from jointcut.partition.errors import BudgetError, message
from jointcut.partition.figures import counted
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import CostModel
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.candidates import WIDE, Candidate, least_bytes

#: How often plans that are expected to fit are weighed, and how many of the smallest plans are.
MOST_ROUNDS, MOST_SMALLEST = 3, 6

#: How many plans are weighed at once.
AT_ONCE = 2

#: A prediction is at most this far off, nearly always: as a factor, up or down.
SPREAD = 1.1

#: Where the backend is followed, XLA takes at most so many bytes for each predicted one in four of five cases, and of
#: the default plan in nine of ten (`benchmarks.predicted`). A plan that fits by this measure is compiled without
#: weighing; another than the default only if it then takes at least the share `SURELY_FULL` of what the budget leaves.
SURE, DEFAULT_SURE, SURELY_FULL = 1.065, 1.04, 0.92

#: Where all scatters together read more than this share of what the budget leaves, no plan is sure, and a safe one must
#: leave more room: XLA may wait with a scatter, and what it reads stays alive.
SCATTERED = 0.5

#: A plan that takes at least this share of what the budget leaves is taken without looking for a faster one.
FULL = 0.87

#: The smallest plan is tried early if it is expected to take this share of what the budget leaves, or more.
NEARLY = 0.75

#: Where the backend is followed, plans rarely take less than their prediction divided by this factor.
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


class _Search(Generic[_T]):
    """The search of one program for a plan within one budget; sizes are bytes of temporaries.

    `asked` are the candidates for whose expected peak the search asked.
    """

    def __init__(self, planner: Planner, ways: Ways[_T], room: Room, default: Plan | None) -> None:
        self.planner, self.ways = planner, ways
        self.standard = None if default is None else planner.known(planner.priced(default))
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
        """XLA's peak of a candidate that was tried; of another one the predicted peak, scaled as `ratio` says."""
        self.asked[id(candidate)] = candidate
        if (tried := self.tried.get(id(candidate))) is not None:
            return tried.weighed.activation_bytes
        predicted = candidate.predicted_bytes
        return predicted * self.ratio(candidate, predicted)

    def ratio(self, candidate: Candidate, predicted: float) -> float:
        """XLA's bytes for each predicted byte: interpolated between the nearest tried plans, one of them on each side.

        Plans that run loops in segments as the candidate does are preferred.
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

    def tries(self, candidates: Sequence[Candidate], looks_ahead: bool = False) -> bool:
        """Weigh candidates that were not tried yet, at once; where they cannot be weighed, compile the first of them.

        While a single one is weighed, those that would come next are followed if the search `looks_ahead`. Returns
        whether there was one to try.
        """
        new = [c for c in dict.fromkeys(candidates) if id(c) not in self.tried]
        if self.ways.weigh is None:
            for candidate in new[:1]:
                self.compiles(candidate)
        elif new:
            promised = list(map(self.expected, new))
            tell(lambda: f"weighing {counted(len(new), 'plan')} after {len(self.trail)}")
            weighed = self.ways.weigh([candidate.plan for candidate in new])
            if looks_ahead and len(new) == 1:
                self.follows_while(weighed[0])
            for candidate, expected, figures in zip(new, promised, weighed, strict=True):
                self.notes(candidate, expected, figures.result(), runs=False)
        return bool(new)

    def follows_while(self, weighing: Future[Any]) -> None:
        """Follow the small candidates while one is weighed. If that one does not fit, they are known sooner.

        How many are followed hangs on the clock, so none of them is `asked` for.
        """
        for candidate in self.small:
            if weighing.done():
                return
            _ = candidate.predicted_bytes  # which is kept

    def compiles(self, candidate: Candidate) -> bool:
        """Compile a candidate, to run it; whether it holds the budget."""
        if (tried := self.tried.get(id(candidate))) is None or not tried.runs:
            expected = self.expected(candidate)
            tell(lambda: f"compiling a plan after {counted(len(self.trail), 'attempt')}")
            self.notes(candidate, expected, self.ways.measure(candidate.plan), runs=True)
        return self.fits(candidate)

    def notes(self, candidate: Candidate, expected: float, weighed: Weighed[Any], runs: bool) -> None:
        """Remember what XLA says of a candidate."""
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
        """The default plan, if it holds the budget: compiled if it surely fits, weighed if it might."""
        if (candidate := self.standard) is None or least_bytes(candidate.plan) > self.room:
            return None
        expected = self.expected(candidate)
        if expected > (SPREAD if candidate.follow is None else NEAR) * self.room:
            return None
        factor = SPREAD if candidate.follow is None else DEFAULT_SURE
        if expected * factor > self.room and self.ways.weigh is not None:
            self.tries([candidate])
            if not self.fits(candidate):
                return None
        return candidate if self.compiles(candidate) else None

    def sure(self) -> Candidate | None:
        """The fastest candidate that is nearly sure to fit and to fill the room, compiled; None where there is none.

        Plans that drop values are predicted less well, and programs that scatter much: none of them is sure. Where one
        does not fit after all, the search goes on and knows more.
        """
        if self.ways.weigh is None or not self.ways.compiles:
            return None
        if self.is_scattered:
            return None
        chosen = self.planner.fastest(self.room, lambda c: SURE * self.expected(c))
        if chosen is None or chosen.follow is None or chosen.plan.dropped:
            return None
        if SURE * self.expected(chosen) < SURELY_FULL * self.room:
            return None
        return chosen if self.compiles(chosen) else None

    def proposed(self) -> Candidate | None:
        """The fastest candidate that fits, found by trying those that are expected to; None where none of them does.

        Once one did not fit, the smallest one comes next if the room is hardly more than it takes.
        """
        for number in range(MOST_ROUNDS):
            best = self.fitting
            if best is not None and (self.ways.weigh is None or self.expected(best) >= FULL * self.room):
                break
            chosen = self.planner.fastest(self.room, self.expected)
            if not number and best is None and self.tries(self.first_pair(chosen), looks_ahead=True):
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
        """The candidates that are tried first where the `chosen` one may not fit: none if that is nearly sure to.

        That one is the fastest of many that are expected to fit, so that it often does not. The fastest one that fits
        more surely is tried with it. Where there is none, the smallest are, without looking further where one of those
        that were `asked` for so far may fit. Plans that drop values are predicted less well than others, and so are all
        where much is scattered.
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
        """The first of a row that were not tried and may fit, as many as are weighed at once."""
        untried = (c for c in dict.fromkeys(row) if id(c) not in self.tried)
        return list(islice((c for c in untried if self.expected(c) <= NEAR * self.room), AT_ONCE))

    def perhaps(self, best: Candidate) -> list[Candidate]:
        """Small candidates that are faster than one that fits, and would fit if they took what the model says."""
        faster = (c for c in self.nearly if c.step_seconds < (1 - TIE) * best.step_seconds)
        return [c for c in faster if id(c) not in self.tried and c.predicted_bytes <= self.room][:AT_ONCE]

    @property
    def nearly(self) -> list[Candidate]:
        """Candidates that may be the smallest, by expected peak: one of each strategy, and the smallest by replay."""
        row = sorted(self.small, key=self.expected)
        smallest = sorted(row, key=lambda c: c.peak_bytes)[:1]
        chosen = {id(c) for c in (*_of_each_strategy(row), *smallest)}
        return [c for c in row if id(c) in chosen]

    @property
    def small(self) -> list[Candidate]:
        """Candidates that take little by the model's own replay, and the default plan."""
        row = self.planner.small(0.0 if math.isinf(self.room) else self.room, SPREAD)
        standard = [] if self.standard is None else [self.standard]
        wide = [c for c in row[: 6 * self.planner.looks] if c.peak_bytes <= WIDE * row[0].peak_bytes]
        return [*dict.fromkeys([*standard, *_of_each_strategy(row)[: 2 * MOST_SMALLEST], *wide])]

    def smallest(self) -> Iterator[None]:
        """Try the smallest of each strategy by predicted peak, and the default plan if it is among them.

        Where the backend is not followed, predictions are less good: the default plan is tried in any case. Yields
        after each try. Ends when the last two are no smaller than those before, or, where plans are compiled, when
        XLA's peaks do not differ.
        """
        row, peaks = self.nearly[:MOST_SMALLEST], list[float]()
        if self.standard is not None and self.standard.follow is None:
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
        """Of the tried candidates the one that takes the fewest bytes."""
        tried = min(self.tried.values(), key=lambda t: (t.weighed.activation_bytes, t.candidate.step_seconds))
        return tried.candidate

    def fitted(self, candidate: Candidate) -> Fitted[_T]:
        """The result, with this candidate chosen and compiled."""
        self.compiles(candidate)
        tried = self.tried[id(candidate)]
        return Fitted(tried.plan, tried.weighed, tuple(self.trail))


def _of_each_strategy(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first candidate of each strategy, in order."""
    first: dict[str, Candidate] = {}
    for c in candidates:
        first.setdefault(c.plan.strategy, c)
    return [*first.values()]


def prices(options: Options) -> CostModel:
    """The cost model of the options, or the rates of its target, or of the device: known ones, else measured ones.

    Raises `BudgetError` without a cost model where several processes take part: each would measure its own device, and
    they might choose different plans.
    """
    if options.cost is None and jax.process_count() > 1 and rates_for(options.goal) is None:
        cure = "Give all of them the same rates: aot.function(cost=Roofline(...)) from jointcut.partition.prices.cost."
        what = f"must lead to one plan in all {jax.process_count()} processes, and each would measure its own device."
        raise BudgetError(message("budget", what, cure))
    return options.cost or rates_for(options.goal) or rates()


def planner_for(problem: Problem, options: Options) -> Planner:
    """The planner of a problem, with the `prices` of the options; raises as they do.

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
    """The default plan if it holds a budget, else the fastest plan that does, compiled.

    `room` is the budget as bytes of temporaries. Raises `BudgetError` where none of the smallest plans fits. With a
    fraction of 0.0 the smallest plan is returned. In both cases `found_least` is told of it.
    """
    search = _Search(planner, ways, room, default)
    if budget.fraction == 0.0:
        for _ in search.smallest():
            pass
        smallest = search.fitted(search.least)
        found_least(smallest.plan, smallest.measured)
        return smallest
    if (chosen := search.default() or search.sure()) is not None:
        return search.fitted(chosen)
    for chosen in _fitting(search):
        if search.compiles(chosen):
            return search.fitted(chosen)
    least = search.tried[id(search.least)]
    found_least(least.plan, least.weighed)
    replay = planner.replay(least.plan)
    raise refusal(budget, search.room, least.weighed, len(search.tried), replay, least.plan.baseline)


def _fitting(search: _Search[Any]) -> Iterator[Candidate]:
    """Candidates that fit, the best first; each after the first because the one before did not fit after all."""
    while (chosen := search.proposed()) is not None:
        yield chosen
    for _ in search.smallest():
        while (chosen := search.proposed() if search.fitting else None) is not None:
            yield chosen
