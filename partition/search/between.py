"""Mix two plans: what one saves of the beginning, and the other of the end.

Two neighbours of a menu may lie far apart. A mixture lies between them, in peak and in time: each gives half of the
bytes in which they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from jointcut.partition.errors import PlanError
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.runs import needed


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
