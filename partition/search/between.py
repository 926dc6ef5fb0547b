"""Make plans from others: mixtures of two, and loops that run in segments, for all of their steps or a part.

Two neighbours of a menu may lie far apart. A mixture saves what one of them saves of the beginning, and the other of
the end, so that it lies between them in peak and in time: each gives half of the bytes in which they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from jointcut.partition.errors import PlanError, message
from jointcut.partition.lower.reruns import best_length, segmentable, similar_length
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.runs import needed
from jointcut.partition.program.graph import Graph

#: The end of the strategies of plans with loops in segments.
SEGMENTS = ", segments"


def mixed(problem: Problem, large: Plan, small: Plan) -> Iterator[Plan]:
    """Plans that save one half of what two others save, without those that do not close.

    They drop what `small` drops, as far as they compute it again.
    """
    reasons = {s.value: s.reason for s in (*large.saved, *small.saved)}
    for saved in mixtures(problem, large.values, small.values):
        try:
            plan = Plan.of(problem, saved, strategy="mixed", reasons=reasons)
        except PlanError:  # one of them saves what the other has no need to, and what must not run again
            continue
        again, makers = {*plan.recomputed, *plan.deferred}, problem.graph.values
        yield replace(plan, dropped=tuple(v for v in small.dropped if makers[v].maker in again))


def mixtures(problem: Problem, large: Iterable[int], small: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Two ways to take one half from each of two sets of values to save: split at the same place of the program.

    The end of the program from `large` comes first: what is saved late is not alive for long.
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
    """Those of some values to save that the backward reads, itself or to compute others again."""
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
    """A plan in segments, with about a share of the steps of each such loop kept whole: its last ones.

    Raises `PlanError` where the share is not between 0 and 1. A loop of one step stays as it is.
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
    """The share of the steps that are in no segment, of those loops that run in segments; 1 if none does."""
    shares = [kept / graph.loops[loop].length for loop, _, kept in plan.loops_in_segments]
    return sum(shares) / len(shares) if shares else 1.0
