"""Cut one step of a reverse sweep: choose the values that its forward keeps for its backward.

The pullback of a step is a joint program of its own, and the sweep runs both of its halves at once, step by step. Its
residuals are temporaries of the step. The minimum cut makes them smaller where the step is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jointcut.partition.bodies.read import read
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.memory.replay import Replayer
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.plans.backend import PORTABLE
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import ONCE
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.roles import Role, Roles
from jointcut.partition.program.sizes import is_symbolic
from jointcut.partition.rewrite import simplify
from jointcut.partition.search.mincut import min_cut, save_all
from jointcut.partition.split import Split, halved

#: The least bytes, and the least share of the peak, that the cut must save over the step as JAX derives it. Below that
#: a barrier costs more than it gives: a small step stays in the cache, and XLA makes one loop of it.
LEAST_BYTES, LEAST_SHARE = 2**20, 0.1


@dataclass(frozen=True)
class CutStep:
    """A step and its pullback, `(constants, primals, cotangents) -> gradients`, cut in two.

    Attributes:
        split: both halves; they return the step's results as well, which a sweep does not need.
        constants: arrays of the program's own, its first inputs.
        has_branches: whether the step has conditionals, whose branches are cut.
    """

    split: Split
    constants: tuple[Any, ...]
    has_branches: bool

    @classmethod
    def of(cls, closed: Any, num_primals: int, num_outputs: int) -> CutStep:
        """Cut a program `(primals, cotangents) -> (outputs, gradients)` whose calls are opened.

        The plan is the minimum cut if that is worth its barriers, else plain JAX's residuals.
        """
        jaxpr, constants = jaxprs.opened(closed)
        invars = [*jaxpr.constvars, *jaxpr.invars]
        num_primals += len(constants)
        ahead = _forward_ops(jaxpr.eqns, invars[num_primals:])
        eqns, outvars, ahead = simplify.merged(jaxpr.eqns, jaxpr.outvars, ahead)
        joint = jaxprs.build(invars, outvars, eqns)
        roles = Roles(
            (Role.PRIMAL,) * num_primals + (Role.COTANGENT,) * (len(invars) - num_primals),
            (Role.OUTPUT,) * num_outputs + (Role.GRADIENT,) * (len(outvars) - num_outputs),
            ahead,
        )
        problem = Problem.of(read(joint, roles), backend=PORTABLE)
        has_branches = any(op.name in ONCE for op in problem.graph.ops)
        return cls(halved(problem, lambda _: _chosen(problem)), tuple(constants), has_branches)

    @property
    def pays(self) -> bool:
        """Whether it pays to run the halves instead of the program that JAX derives."""
        return self.has_branches or self.split.plan.runs_again

    def __call__(self, *flat: Any) -> list[Any]:
        """The gradients, by both halves."""
        count = len(self.split.graph.role_inputs(Role.PRIMAL)) - len(self.constants)
        return self.split([*self.constants, *flat[:count]], flat[count:])[1]


def _forward_ops(eqns: Sequence[Any], cotangents: Sequence[Any]) -> int:
    """Return the number of equations before the first one that reads a cotangent."""
    known = set(cotangents)
    return next((i for i, eqn in enumerate(eqns) if not known.isdisjoint(jaxprs.variables(eqn.invars))), len(eqns))


def has_sizes(closed: Any) -> bool:
    """Whether the sizes of all arrays of a step are numbers: a step with symbolic sizes is not cut."""
    jaxpr, _ = jaxprs.opened(closed)
    made = (v for eqn in jaxpr.eqns for v in eqn.outvars)
    return not any(is_symbolic(getattr(v.aval, "shape", ())) for v in (*jaxpr.invars, *made))


def is_large(closed: Any) -> bool:
    """Whether a step makes enough arrays for a cut to be worthwhile."""
    jaxpr, _ = jaxprs.opened(closed)
    made = (abstract.aval_bytes(v.aval) for eqn in jaxpr.eqns for v in eqn.outvars)
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
