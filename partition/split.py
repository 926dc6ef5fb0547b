"""Take a joint jaxpr and return two: the whole folder in one function.

>>> import jax, jax.numpy as jnp
>>> from jointcut.partition import Roles, split
>>> def joint(x, ct):
...     y, pullback = jax.vjp(lambda x: jnp.sum(jnp.sin(jnp.cos(x))), x)
...     return y, *pullback(ct)
>>> halves = split(jax.make_jaxpr(joint)(jnp.ones(8), 1.0), Roles.simple(1, 1, 1, 1))
>>> halves.plan.bytes_saved  # everything is cheap to recompute from x
0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from jointcut.partition import loops, verify
from jointcut.partition.backend import Backend
from jointcut.partition.best import STRATEGIES
from jointcut.partition.classify import Facts, classify
from jointcut.partition.emit import Halves
from jointcut.partition.errors import StrategyError, choices, message
from jointcut.partition.graph import Graph
from jointcut.partition.memory import residual_bytes, spared
from jointcut.partition.plan import Plan, checked
from jointcut.partition.roles import Roles
from jointcut.partition.segments import written

Strategy = str | Callable[[Graph], Plan]


@dataclass(frozen=True)
class Split:
    """A joint program cut in two by a plan.

    Attributes:
        graph: the joint program.
        facts: what must run forward and what backward.
        plan: what is saved and what is recomputed.
        backend: what the halves were written for.
        halves: the two jaxprs.
        cut_ms, emit_ms: wall times of planning and of writing.
    """

    graph: Graph
    facts: Facts
    plan: Plan
    backend: Backend
    halves: Halves
    cut_ms: float
    emit_ms: float

    @property
    def forward(self) -> Any:
        """The forward jaxpr: `primals -> (outputs, saved residuals)`."""
        return self.halves.forward

    @property
    def backward(self) -> Any:
        """The backward jaxpr: `(residuals, cotangents) -> gradients`."""
        return self.halves.backward

    @property
    def residual_bytes(self) -> int:
        """Bytes alive between the halves, beyond what the caller holds."""
        return residual_bytes(self.halves)

    def on(self, backend: Backend) -> Self:
        """The same plan written for another backend."""
        return self if backend == self.backend else replace(self, backend=backend, halves=self._written(backend))

    def _written(self, backend: Backend) -> Halves:
        halves = written(self.graph, self.facts, self.plan, backend)
        verify.verify_structure(self.graph, halves)
        return halves

    def __call__(self, primals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run both halves on flat values: outputs and gradients."""
        return verify.run(self.halves, self.graph, primals, cotangents)


def split(
    joint: Any,
    roles: Roles,
    strategy: Strategy = "best",
    *,
    graph: Graph | None = None,
    backend: Backend | None = None,
) -> Split:
    """Cut a joint jaxpr `(primals, cotangents) -> (outputs, gradients)` without constants.

    `strategy` is `"best"` (see `best`), `"min_cut"` (least bytes saved, nothing heavy recomputed), `"save_all"` (what
    JAX would keep), or a function from the `Graph` to a `Plan`; `graph` is the joint program's own, where it was read
    before; `backend` is JAX's default one unless another is given. Raises `StrategyError`, `PlanError` or `GraphError`.
    """
    start = time.perf_counter()
    graph = graph or loops.read(joint, roles)
    plan = decide(graph, strategy)
    middle = time.perf_counter()
    facts = classify(graph)
    backend = backend or Backend.here()
    halves = written(graph, facts, plan, backend)
    verify.verify_structure(graph, halves)
    end = time.perf_counter()
    return Split(graph, facts, spared(plan, halves), backend, halves, 1e3 * (middle - start), 1e3 * (end - middle))


def decide(graph: Graph, strategy: Strategy) -> Plan:
    """Ask a strategy for a plan, and make sure that the plan closes."""
    if callable(strategy):
        plan = strategy(graph)
        if not isinstance(plan, Plan):
            name = getattr(strategy, "__name__", repr(strategy))
            cure = "Return Plan.of(graph, saved=[...]) from jointcut.partition."
            raise StrategyError(message(f"strategy {name}", f"returned {type(plan).__name__}, not a Plan.", cure))
        return checked(graph, classify(graph), plan)
    if strategy not in STRATEGIES:
        known = choices(strategy, STRATEGIES) + " A function Graph -> Plan is welcome as well."
        raise StrategyError(message("strategy", f"{strategy!r} is unknown.", known))
    return STRATEGIES[strategy](graph)
