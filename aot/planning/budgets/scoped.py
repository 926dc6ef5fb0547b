"""Let no plan keep more of a part of a program than its `aot.budget`.

The values that may be saved are chosen once, by minimum cuts. Values of the part that a cut saves, the largest first,
are taken out until the rest fits. All other values of the part may then not be saved, whatever plan is made. So the
bound holds for every strategy, budget and plan, and the last cut shows that there is a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from jointcut.partition.errors import BudgetError, PlanError, message
from jointcut.partition.figures import human_bytes
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.allowances import Allowance
from jointcut.partition.prices.rules import CheckpointPolicy, Constraint, judge
from jointcut.partition.search.mincut import min_cut

#: The most cuts; the least that was found by then is the least there is.
MOST_CUTS = 24


def bounded(problem: Problem, bounds: Sequence[Allowance]) -> Problem:
    """Return the problem, with constraints under which no plan breaks one of the bounds.

    Raises `BudgetError` for a part that cannot keep so little, with the least that was found.
    """
    if not bounds or all(_most(problem, bound) <= bound.most_bytes for bound in bounds):
        return replace(problem, bounds=tuple(bounds))
    found = _Search(problem, bounds)
    rest: dict[int, Allowance] = {}
    for bound in bounds:
        left_out = bound.values.difference(found.plan.values, found.out)
        rest.update(dict.fromkeys((v for v in left_out if _counts(problem, v)), bound))
    return replace(_without(problem, found.out, rest), bounds=tuple(bounds))


class _Search:
    """The values that are taken out of the parts, so that the minimum cut of the others holds all bounds.

    `plan` is that cut. `needed` are values without which there is no cut.
    """

    def __init__(self, problem: Problem, bounds: Sequence[Allowance]) -> None:
        """Search; raises `BudgetError` where nothing more can be taken out."""
        self.problem, self.bounds = problem, bounds
        self.plan, self.out, self.needed = min_cut(problem), dict[int, Allowance](), set[int]()
        is_single = False
        for _ in range(MOST_CUTS):
            broken = self.broken()
            more = self.largest(broken)[: 1 if is_single else None] if broken else []
            if broken is None or not more:
                break
            try:
                out = {**self.out, **dict.fromkeys(more, broken)}
                self.plan, self.out = min_cut(_without(problem, out)), out
            except PlanError:
                self.needed.update(more if len(more) == 1 else ())
                is_single = True
        if (broken := self.broken()) is not None:
            self.refuse(broken)

    def broken(self) -> Allowance | None:
        """Return the first bound that the plan breaks."""
        return next((b for b in self.bounds if self.problem.kept_bytes(b, self.plan.values) > b.most_bytes), None)

    def largest(self, bound: Allowance) -> list[int]:
        """Return the largest saved values of a part, as many as it takes for the others to fit, if possible."""
        prices, kept = self.problem.prices, self.problem.kept_bytes(bound, self.plan.values)
        free = bound.values.intersection(self.plan.values).difference(self.needed)
        taken: list[int] = []
        for v in sorted(free, key=lambda v: (-prices[v], v)):
            if kept > bound.most_bytes and _counts(self.problem, v) and not _is_fixed(self.problem, v):
                taken.append(v)
                kept -= prices[v]
        return taken

    def refuse(self, bound: Allowance) -> NoReturn:
        """Raise `BudgetError` for a part."""
        problem, values = self.problem, bound.values.intersection(self.plan.values)
        kept = human_bytes(problem.kept_bytes(bound, values))
        what = f"is {human_bytes(bound.most_bytes)} for {bound.part}, which keeps {kept} at the least."
        largest = max(values, key=lambda v: problem.prices[v])
        why = problem.verdicts[largest].not_recomputed or "the backward needs it"
        cure = f"Give it more, or less to do: the largest is {problem.graph.where(largest)}, which is saved: {why}."
        raise BudgetError(message("aot.budget", what, cure))


def _without(problem: Problem, out: dict[int, Allowance], rest: dict[int, Allowance] | None = None) -> Problem:
    """Return the problem with some values not saved; values in `rest` are not to be computed again for that."""
    recompute, rest = CheckpointPolicy.MUST_RECOMPUTE, rest or {}
    both = sorted([*out.items(), *rest.items()], key=lambda pair: pair[0])
    demands = (*problem.constraints, *(Constraint(v, recompute, b.reason, False, v in rest) for v, b in both))
    return replace(problem, constraints=demands, verdicts=tuple(judge(problem.graph, problem.sides, demands)))


def _most(problem: Problem, bound: Allowance) -> int:
    """Return the bytes of all values of a part that could be saved."""
    return sum(problem.prices[v] for v in bound.values if _counts(problem, v))


def _counts(problem: Problem, v: int) -> bool:
    """Whether a value takes memory of the device if it is saved, and may be."""
    verdict = problem.verdicts[v]
    return bool(problem.prices[v]) and not verdict.not_saved and not problem.sides.is_late(v)


def _is_fixed(problem: Problem, v: int) -> bool:
    """Whether a value cannot be computed again at any price."""
    verdict = problem.verdicts[v]
    return bool(verdict.not_recomputed) and (v in problem.sides.escaping or not verdict.is_costly)
