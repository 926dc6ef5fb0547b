"""Let no plan keep more of a part of a program than its `aot.budget`.

Which values may be saved is chosen once, by minimum cuts: values of the part that a cut saves, the largest first, are
taken out until those that are left fit. All other values of the part may then not be saved, whatever plan is made. So
the bound holds for every strategy, budget and plan, and the last cut shows that there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from jointcut.partition.errors import BudgetError, message
from jointcut.partition.figures import human_bytes
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.bounds import Bound
from jointcut.partition.prices.rules import CheckpointPolicy, Constraint, judge
from jointcut.partition.search.mincut import min_cut

#: After so many cuts all of a part is taken out that can be.
MOST_CUTS = 12


def bounded(problem: Problem, bounds: Sequence[Bound]) -> Problem:
    """The problem, with constraints under which no plan breaks one of the bounds.

    Raises `BudgetError` for a part that cannot keep so little, with the least that was found.
    """
    if not bounds or all(_most(problem, bound) <= bound.most_bytes for bound in bounds):
        return replace(problem, bounds=tuple(bounds))
    out: dict[int, Bound] = {}
    for number in range(MOST_CUTS + 1):
        plan = min_cut(_without(problem, out))
        broken = [bound for bound in bounds if problem.kept_bytes(bound, plan.values) > bound.most_bytes]
        if not broken:
            break
        for bound in broken:
            out.update(dict.fromkeys(_taken_out(problem, plan, bound, out, everything=number == MOST_CUTS - 1), bound))
    rest: dict[int, Bound] = {}
    for bound in bounds:
        rest.update(dict.fromkeys((v for v in bound.values.difference(plan.values, out) if _counts(problem, v)), bound))
    return replace(_without(problem, out, rest), bounds=tuple(bounds))


def _taken_out(problem: Problem, plan: Plan, bound: Bound, out: Iterable[int], everything: bool) -> list[int]:
    """Values of a part that are not to be saved, so that those that a plan saves besides fit, the largest first.

    Raises `BudgetError` where there are no more.
    """
    kept = problem.kept_bytes(bound, plan.values)
    values = bound.values.difference(out) if everything else bound.values.intersection(plan.values)
    free = [v for v in values if _counts(problem, v) and not _is_fixed(problem, v)]
    if not free:
        what = f"is {human_bytes(bound.most_bytes)} for {bound.part}, which keeps {human_bytes(kept)} at the least."
        fixed = max(bound.values.intersection(plan.values), key=lambda v: problem.prices[v])
        why = problem.verdicts[fixed].not_recomputed
        cure = f"Give it more, or less to do: the largest is {problem.graph.where(fixed)}, not computed again: {why}."
        raise BudgetError(message("aot.budget", what, cure))
    taken: list[int] = []
    for v in sorted(free, key=lambda v: (-problem.prices[v], v)):
        if everything or kept > bound.most_bytes:
            taken.append(v)
            kept -= problem.prices[v]
    return taken


def _without(problem: Problem, out: dict[int, Bound], rest: dict[int, Bound] | None = None) -> Problem:
    """The problem in which some values are not saved; those in `rest` are not to be computed again for that."""
    recompute, rest = CheckpointPolicy.MUST_RECOMPUTE, rest or {}
    both = sorted([*out.items(), *rest.items()], key=lambda pair: pair[0])
    demands = (*problem.constraints, *(Constraint(v, recompute, b.reason, False, v in rest) for v, b in both))
    return replace(problem, constraints=demands, verdicts=tuple(judge(problem.graph, problem.sides, demands)))


def _most(problem: Problem, bound: Bound) -> int:
    """The bytes of all values of a part that could be saved."""
    return sum(problem.prices[v] for v in bound.values if _counts(problem, v))


def _counts(problem: Problem, v: int) -> bool:
    """Whether a value takes memory of the device if it is saved, and may be."""
    verdict = problem.verdicts[v]
    return bool(problem.prices[v]) and not verdict.not_saved and not problem.sides.is_late(v)


def _is_fixed(problem: Problem, v: int) -> bool:
    """Whether a value cannot be computed again, whatever that would save."""
    verdict = problem.verdicts[v]
    return bool(verdict.not_recomputed) and (v in problem.sides.escaping or not verdict.is_costly)
