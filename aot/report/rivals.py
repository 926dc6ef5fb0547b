"""Say what a policy of `jax.checkpoint` would save of a program.

The policies are rules for single equations. Here each becomes a plan of the whole program, run by jointcut's own
schedule, so that it can stand on the same picture: it saves what the policy names, as far as the backward reads it or
something computed from it, and what cannot be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jointcut.partition.errors import PlanError
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Op
from jointcut.partition.program.outline import PSEUDO
from jointcut.partition.search.budget import Planner

_PRODUCTS = ("dot_general", "conv_general_dilated")


def _has_no_batch(op: Op) -> bool:
    numbers = None if op.payload is None else op.payload.params.get("dimension_numbers")
    return op.name == "dot_general" and numbers is not None and not any(numbers[1])


#: The policies, by their names in `jax.checkpoint_policies`.
POLICIES: dict[str, Callable[[Op], bool]] = {
    "nothing_saveable": lambda op: False,
    "dots_with_no_batch_dims_saveable": _has_no_batch,
    "dots_saveable": lambda op: op.name in _PRODUCTS,
}


def rivals(planner: Planner) -> Iterator[tuple[str, Plan]]:
    """A plan for each policy that names one which closes; priced."""
    for name, saves in POLICIES.items():
        try:
            plan = Plan.of(planner.problem, _saved(planner.problem, saves), strategy=name)
        except PlanError:  # something can neither be saved nor run again, so there is no such plan
            continue
        yield name, planner.priced(plan)


def _saved(problem: Problem, saves: Callable[[Op], bool]) -> list[int]:
    """What is met first, going back from what the backward reads, that is saved or cannot run again."""
    graph, verdicts = problem.graph, problem.verdicts

    def stops(v: int, op: Op) -> bool:
        must_keep = bool(verdicts[v].not_recomputed) and not verdicts[v].is_costly
        return op.name not in PSEUDO and (saves(op) or must_keep)

    return graph.first_met(problem.sides.wanted, stops)
