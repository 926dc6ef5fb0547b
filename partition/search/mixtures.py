"""Make plans from others: mixtures of two, loops in segments, for all steps or a part, or other checkpoints.

Two neighbours of a menu may lie far apart. A mixture saves the values of one neighbour at the beginning of the program,
and the values of the other at the end. So it lies between them in peak and in time: each neighbour gives half of the
bytes in which they differ.

A loop keeps more checkpoints than it does by default, or fewer; the fewer, the more steps it runs again. Of several
loops, the one gives up checkpoints first that takes the least time for each byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from jointcut.partition.bodies.checkpoints import Numbers, steps_again, with_rows
from jointcut.partition.errors import PlanError, message
from jointcut.partition.lower.reruns import best_length, segmentable, similar_length
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem, bytes_in
from jointcut.partition.plans.runs import needed
from jointcut.partition.plans.saved import Saved
from jointcut.partition.prices.cost import CostModel
from jointcut.partition.program.graph import Graph, Value
from jointcut.partition.search.copies import seconds_of

#: The ends of the strategies of plans with loops in segments, and of plans with other numbers of checkpoints.
SEGMENTS, FEWER, MORE = ", segments", ", fewer checkpoints", ", more checkpoints"

#: A loop keeps this part of its checkpoints when it gives up some, and a menu has at most this many numbers of them.
_SHARE, _MOST_NUMBERS = 2, 8

#: Loops give up checkpoints together if they cost at most this factor of the least seconds for each byte.
_ALIKE = 1.05


def mixed(problem: Problem, large: Plan, small: Plan) -> Iterator[Plan]:
    """Plans that save one half of the values of each of two plans, without plans that do not close.

    They drop the values that `small` drops, as far as they compute these again.
    """
    reasons = {s.value: s.reason for s in (*large.saved, *small.saved)}
    for saved in mixtures(problem, large.values, small.values):
        try:
            plan = Plan.of(problem, saved, strategy="mixed", reasons=reasons)
        except PlanError:  # the mixture does not close: a value that it needs is not saved and must not run again
            continue
        again, makers = {*plan.recomputed, *plan.deferred}, problem.graph.values
        yield replace(plan, dropped=tuple(v for v in small.dropped if makers[v].maker in again))


def mixtures(problem: Problem, large: Iterable[int], small: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Two ways to take one half from each of two sets of values to save: split at the same place of the program.

    The way with the end of the program from `large` comes first: values saved late are not alive for long.
    """
    some, others = frozenset(large), frozenset(small)
    apart = sorted(some ^ others)
    if len(apart) < 2:
        return
    sizes = np.cumsum([problem.prices[v] for v in apart])
    split = apart[min(int(np.searchsorted(sizes, sizes[-1] / 2)) + 1, len(apart) - 1)]
    for early, late in ((others, some), (some, others)):
        yield useful(problem, {v for v in early if v < split} | {v for v in late if v >= split})


def useful(problem: Problem, saved: Iterable[int]) -> tuple[int, ...]:
    """The saved values that the backward reads, itself or to compute others again."""
    chosen = frozenset(saved)
    reached = needed(problem, chosen)
    read = {v for i in reached.ops for v in problem.graph.ops[i].inputs} | problem.sides.wanted
    return tuple(sorted(chosen & read))


def in_segments(problem: Problem, plan: Plan) -> Plan | None:
    """The plan with its long loops run in segments; None where that would not keep fewer bytes."""
    lengths, bytes_spared = [], 0
    values, ancestors = problem.graph.values, problem.graph.ancestors
    kept = problem.must_keep.union(plan.offloaded)
    kept_whole = {values[v].loop for v in kept}
    for loop, sizes in segmentable(problem, plan).items():
        steps = best_length(sizes.length, sizes.carry_bytes, sizes.residual_bytes)
        carries = -(-sizes.length // steps) * sizes.carry_bytes
        holds_whole = any(loop in ancestors[other] for other in kept_whole)
        if carries + steps * sizes.residual_bytes < sizes.length * sizes.residual_bytes and not holds_whole:
            lengths.append((loop, steps))
            bytes_spared += sizes.length * sizes.residual_bytes - carries
    if not lengths:
        return None
    return replace(plan, strategy=f"{plan.strategy}{SEGMENTS}", segments=tuple(lengths), bytes_spared=bytes_spared)


def partly(problem: Problem, plan: Plan, share: float) -> Plan:
    """A plan in segments, with about a share of the last steps of each such loop kept whole.

    Raises `PlanError` where the share is not between 0 and 1. A loop of one step does not change.
    """
    if not 0 < share < 1:
        cure = "Give a number between them: 0 would be the plan itself, and 1 one without segments."
        raise PlanError(message("share", f"is {share}, not between 0 and 1.", cure))
    loops, segments, kept_steps, bytes_spared = segmentable(problem, plan), [], [], plan.bytes_spared
    for loop, steps, before in plan.loops_in_segments:
        sizes, length = loops[loop], loops[loop].length
        kept = min(max(round(share * length), 1), length - 1)
        new = similar_length(length - kept, steps)
        fewer = -(-(length - before) // steps) - -(-(length - kept) // new)
        bytes_spared += (before - kept) * sizes.residual_bytes + fewer * sizes.carry_bytes
        segments.append((loop, new))
        kept_steps += [(loop, kept)] if kept else []
    strategy = f"{plan.strategy.partition(SEGMENTS)[0]}{SEGMENTS}, {share:.0%} of steps kept"
    parts = {"segments": tuple(segments), "kept_steps": tuple(kept_steps), "bytes_spared": bytes_spared}
    return replace(plan, strategy=strategy, **parts)


def kept_share(graph: Graph, plan: Plan) -> float:
    """The share of steps outside segments, in the loops that run in segments; 1 if none does."""
    shares = [kept / graph.loops[loop].length for loop, _, kept in plan.loops_in_segments]
    return sum(shares) / len(shares) if shares else 1.0


# ------------------------------------------------------------------------------------------ numbers of checkpoints


class NumbersOfCheckpoints:
    """The numbers of checkpoints that plans of one problem may choose, and the time that each choice takes."""

    def __init__(self, problem: Problem, model: CostModel) -> None:
        """Take a problem, and a cost model for the steps that run again."""
        self.problem, self.model, self.loops = problem, model, problem.adjustable
        self.own = {op: loop.number for op, loop in self.loops.items()}
        self.most = {op: loop.most for op, loop in self.loops.items()}
        self.rows = frozenset(v for loop in self.loops.values() for v in loop.rows)

    @property
    def fewest(self) -> Numbers:
        """One checkpoint for each loop."""
        return tuple((op, 1) for op in self.own)

    @property
    def largest(self) -> Numbers:
        """The most checkpoints that each loop may have."""
        return self._numbers(self.most)

    def _trips(self, op: int) -> int | None:
        return self.problem.graph.nested[self.loops[op].back[0]].trips

    def seconds(self, numbers: Numbers) -> float:
        """The time that loops with these numbers of checkpoints take beyond the time with the most they may have."""
        chosen = self.own | dict(numbers)
        moved = (op for op, number in chosen.items() if number < self.most[op])
        return sum(self._most_seconds[op] * self._share(op, chosen[op]) for op in moved)

    @cached_property
    def _most_seconds(self) -> dict[int, float]:
        """The time that each loop takes longer with one checkpoint than with the most."""
        few, most = self.problem.at(self.fewest), self.problem.at(self.largest)
        return {
            op: sum(seconds_of(few, self.model, i) - seconds_of(most, self.model, i) for i in loop.back)
            for op, loop in self.loops.items()
        }

    def _share(self, op: int, number: int) -> float:
        """The share of the steps that run again with one checkpoint, beyond those with the most checkpoints."""
        most, trips = self.most[op], self._trips(op)
        some, none, every = (steps_again(most if trips is None else trips, slots) for slots in (number, most, 1))
        return (some - none) / (every - none) if every > none else 0.0

    @cached_property
    def choices(self) -> list[Numbers]:
        """The numbers of checkpoints worth trying, ever fewer, the most first; the last are one for each loop."""
        now, found = dict(self.most), [self.largest]
        while prices := {op: self._price(op, number) for op, number in now.items() if number > 1}:
            least = _ALIKE * min(prices.values())
            now = now | {op: max(now[op] // _SHARE, 1) for op, price in prices.items() if price <= least}
            found.append(self._numbers(now))
        found = [numbers for numbers in found if numbers]
        places = np.linspace(0, len(found) - 1, min(len(found), _MOST_NUMBERS))
        return [found[i] for i in places.round().astype(int)]

    def _numbers(self, chosen: dict[int, int]) -> Numbers:
        return tuple((op, number) for op, number in chosen.items() if number != self.own[op])

    def _price(self, op: int, number: int) -> float:
        """The time that a loop of this number of checkpoints takes more for each byte, if it gives up its next ones."""
        values = (self.problem.graph.values[v] for v in self.loops[op].rows)
        row_bytes = sum(value.saved_bytes // value.shape[0] for value in values)
        less = max(number // _SHARE, 1)
        seconds = self._most_seconds[op] * (self._share(op, less) - self._share(op, number))
        return seconds / max(row_bytes * (number - less), 1)

    def plan(self, plan: Plan, numbers: Numbers) -> Plan:
        """The plan with these numbers of checkpoints, instead of its own."""
        if numbers == plan.checkpoints:
            return plan
        both = (with_rows(self.problem.graph, self.loops, each) for each in (numbers, plan.checkpoints))
        (values, nested), (before, _) = both
        saved = tuple(self._resized(s, values[s.value]) if s.value in self.rows else s for s in plan.saved)
        less = sum(before[v].saved_bytes - values[v].saved_bytes for v in self.rows)
        bound = plan.bound_bytes and max(plan.bound_bytes - max(less, 0), 0)
        more = all(number > self.own[op] for op, number in numbers)
        strategy = plan.strategy.replace(FEWER, "").replace(MORE, "") + (MORE if more else FEWER) * bool(numbers)
        figures = {"strategy": strategy, "saved": saved, "bound_bytes": bound}
        return replace(plan, **figures, checkpoints=numbers, nested=tuple(nested.values()))

    def _resized(self, saved: Saved, value: Value) -> Saved:
        return replace(saved, shape=value.shape, bytes=bytes_in(value, saved.form))

    def between(self, large: Plan, small: Plan) -> Numbers:
        """The numbers of checkpoints halfway between those of two plans."""
        if large.checkpoints == small.checkpoints:
            return large.checkpoints
        one, other = (self.own | dict(plan.checkpoints) for plan in (large, small))
        return self._numbers({op: round(math.sqrt(number * other[op])) for op, number in one.items()})
