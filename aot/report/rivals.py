"""Turn the policies of `jax.checkpoint` into plans, to compare with.

A policy is a rule for single equations. Its plan saves the values that the policy names, if the backward needs them,
and the values that cannot be recomputed. The plan runs by jointcut's own schedule, so that it can be shown in the same
picture as other plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jointcut.partition.errors import PlanError
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Op
from jointcut.partition.program.outline import PSEUDO
from jointcut.partition.program.primitives import PACKING
from jointcut.partition.program.sides import first_met
from jointcut.partition.search.budget import Planner


def _has_no_batch(op: Op) -> bool:
    numbers = None if op.payload is None else op.payload.params.get("dimension_numbers")
    return op.name == "dot_general" and numbers is not None and not any(numbers[1])


#: The policies, by their names in `jax.checkpoint_policies`.
POLICIES: dict[str, Callable[[Op], bool]] = {
    "nothing_saveable": lambda op: False,
    "dots_with_no_batch_dims_saveable": _has_no_batch,
    "dots_saveable": lambda op: op.name in PACKING,
}


def rivals(planner: Planner) -> Iterator[tuple[str, Plan]]:
    """Yield the name and priced plan of each policy that gives a valid plan."""
    for name, saves in POLICIES.items():
        try:
            plan = Plan.of(planner.problem, _saved(planner.problem, saves), strategy=name)
        except PlanError:  # some value can neither be saved nor recomputed
            continue
        yield name, planner.priced(plan)


def _saved(problem: Problem, saves: Callable[[Op], bool]) -> list[int]:
    """Walk back from the values that the backward reads; return the first that are saved or cannot run again."""
    graph, verdicts = problem.graph, problem.verdicts

    def stops(v: int, op: Op) -> bool:
        must_keep = bool(verdicts[v].not_recomputed) and not verdicts[v].is_costly
        return op.name not in PSEUDO and (saves(op) or must_keep)

    return first_met(graph, problem.sides.wanted, stops)
