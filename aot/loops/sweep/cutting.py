"""Cut one step of a reverse sweep: what its forward part keeps for its backward part.

The pullback of a step is a joint program of its own, and the sweep runs both of its halves at once, step by step. What
the one keeps for the other is a temporary of the step. The minimum cut makes it smaller where the step is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jointcut.partition.branches import cut_branches
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.replay import Replayer
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.nesting.read import read
from jointcut.partition.plans.backend import PORTABLE
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program import jaxprs
from jointcut.partition.program.roles import Role, Roles
from jointcut.partition.program.sizes import is_symbolic
from jointcut.partition.rewrite import simplify
from jointcut.partition.search.mincut import min_cut, save_all
from jointcut.partition.split import Split, halved

#: The cut must take so many bytes less at its peak than the step as JAX derives it, and so much of the peak. Below that
#: a barrier costs more than it gives: a small step stays in the cache, and XLA makes one loop of it.
LEAST_BYTES, LEAST_SHARE = 2**20, 0.1


@dataclass(frozen=True)
class CutStep:
    """A step and its pullback, `(constants, primals, cotangents) -> gradients`, cut in two.

    Attributes:
        split: both halves; they return the step's results as well, which a sweep does not need.
        constants: arrays of the program's own, its first inputs.
        has_branches: whether conditionals of the step were cut before (see `branches`).
    """

    split: Split
    constants: tuple[Any, ...]
    has_branches: bool

    @classmethod
    def of(cls, closed: Any, num_primals: int, num_outputs: int) -> CutStep:
        """Cut a program `(primals, cotangents) -> (outputs, gradients)` whose calls are opened.

        The plan is that of the minimum cut where this is worth its barriers, else what JAX keeps.
        """
        jaxpr, constants = jaxprs.opened(closed)
        invars = [*jaxpr.constvars, *jaxpr.invars]
        num_primals += len(constants)
        ahead = _forward_ops(jaxpr.eqns, invars[num_primals:])
        eqns, outvars, ahead = simplify.merged(jaxpr.eqns, jaxpr.outvars, ahead)
        joint = jaxprs.build(invars, outvars, eqns)
        cut = cut_branches(joint, ahead)
        roles = Roles(
            (Role.PRIMAL,) * num_primals + (Role.COTANGENT,) * (len(invars) - num_primals),
            (Role.OUTPUT,) * num_outputs + (Role.GRADIENT,) * (len(outvars) - num_outputs),
            ahead,
        )
        problem = Problem.of(read(cut, roles), backend=PORTABLE)
        return cls(halved(problem, lambda _: _chosen(problem)), tuple(constants), cut is not joint)

    @property
    def pays(self) -> bool:
        """Whether the halves are worth running in the place of the program as JAX derives it."""
        return self.has_branches or self.split.plan.runs_again

    def __call__(self, *flat: Any) -> list[Any]:
        """The gradients, by both halves."""
        count = len(self.split.graph.role_inputs(Role.PRIMAL)) - len(self.constants)
        return self.split([*self.constants, *flat[:count]], flat[count:])[1]


def _forward_ops(eqns: Sequence[Any], cotangents: Sequence[Any]) -> int:
    """How many equations come before the first one that reads a cotangent."""
    known = set(cotangents)
    return next((i for i, eqn in enumerate(eqns) if any(v in known for v in _variables(eqn))), len(eqns))


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, jaxprs.Literal)]


def has_sizes(closed: Any) -> bool:
    """Whether the sizes of all arrays of a step are numbers: one with symbolic sizes is not cut."""
    jaxpr, _ = jaxprs.opened(closed)
    made = (v for eqn in jaxpr.eqns for v in eqn.outvars)
    return not any(is_symbolic(getattr(v.aval, "shape", ())) for v in (*jaxpr.invars, *made))


def is_large(closed: Any) -> bool:
    """Whether a step makes arrays enough for a cut to be worth a thought."""
    jaxpr, _ = jaxprs.opened(closed)
    made = (jaxprs.aval_bytes(v.aval) for eqn in jaxpr.eqns for v in eqn.outvars)
    return has_sizes(closed) and sum(made) >= LEAST_BYTES


def _chosen(problem: Problem) -> Plan:
    kept = save_all(problem)
    if kept.bytes_saved < LEAST_BYTES:
        return kept
    try:
        less = min_cut(problem)
    except PlanError:  # no plan fits the rules
        return kept
    replayer = Replayer(problem.graph)
    before, after = (replayer.rows(schedule(problem, plan)).peak_bytes for plan in (kept, less))
    return less if before - after >= max(LEAST_BYTES, LEAST_SHARE * before) else kept
