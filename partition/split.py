"""The entry point: a joint jaxpr goes in, forward and backward come out.

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

import jax

from jointcut.partition.bodies.read import read
from jointcut.partition.errors import StrategyError, choices, message
from jointcut.partition.lower import verify
from jointcut.partition.lower.emit import Halves, emit
from jointcut.partition.lower.listing import Schedule
from jointcut.partition.lower.memory.replay import spared
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.packing.packing import BFLOAT16, FLOAT16, HOOK
from jointcut.partition.passes import HalfPass, passed
from jointcut.partition.plans.backend import Backend
from jointcut.partition.plans.plan import Plan, validated
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.saved import PackedBytes
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.roles import Role, Roles
from jointcut.partition.rewrite import simplify
from jointcut.partition.search.best import RATES, STRATEGIES
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.forms.choose import formed

#: The rates by which the program of one block is cut.
BLOCK_RATES = RATES["cpu"]

Strategy = str | Callable[[Graph], Plan]


@dataclass(frozen=True)
class Split:
    """A joint program cut in two by a plan.

    Attributes:
        problem: the joint program, and the backend that the halves were written for.
        plan: the values that are saved and the ops that are recomputed.
        schedule: the steps of both halves.
        halves: the two jaxprs.
        cut_ms, emit_ms: wall times of planning and of writing.
        passes: the passes that rewrote the halves after they were written.
    """

    problem: Problem
    plan: Plan
    schedule: Schedule
    halves: Halves
    cut_ms: float
    emit_ms: float
    passes: tuple[HalfPass, ...] = ()

    @property
    def graph(self) -> Graph:
        """The joint program."""
        return self.problem.graph

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
        """Bytes alive between the halves, beyond the arrays that the caller holds."""
        return self.halves.residual_bytes

    def on(self, backend: Backend) -> Self:
        """The same plan written for another backend."""
        if backend == self.problem.backend:
            return self
        problem = replace(self.problem, backend=backend)
        steps = schedule(problem, self.plan)
        return replace(self, problem=problem, schedule=steps, halves=self._written(problem, steps))

    @property
    def underived(self) -> Halves:
        """The halves for programs that nobody differentiates.

        In these, bfloat16 waits as integers of the same bits if the compiler would also hold it as float32. A float16
        waits in its own dtype.
        """
        stored = {form for forms in self.schedule.stored.values() for form in forms}
        if FLOAT16 not in stored and not (BFLOAT16 in stored and self.problem.backend.widens_bfloat16):
            return self.halves
        return _verified(self.problem, self.schedule, self.passes, in_bits=True)

    def _written(self, problem: Problem, steps: Schedule) -> Halves:
        return _verified(problem, steps, self.passes)

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
    passes: Sequence[HalfPass] = (),
) -> Split:
    """Cut a joint jaxpr `(primals, cotangents) -> (outputs, gradients)` without constants.

    `strategy` is `"best"` (see `best`), `"min_cut"` (least bytes saved, nothing heavy recomputed), `"save_all"` (the
    values that JAX would keep), or a function from the `Graph` to a `Plan`. `graph` is the graph of the joint program,
    if it has been read already. `backend` is JAX's default backend unless another is given. `passes` rewrite the halves
    before XLA gets them. Raises `StrategyError`, `PlanError` or `GraphError`, and `TraceError` for a pass that gives
    other inputs or outputs.
    """
    start = time.perf_counter()
    if graph is None:
        graph = read(joint, roles)
        graph = graph if strategy == "save_all" else formed(graph)
    problem = Problem.of(graph, backend=backend or Backend.here())
    read_ms = 1e3 * (time.perf_counter() - start)
    made = halved(problem, strategy, passes)
    return replace(made, cut_ms=read_ms + made.cut_ms)


def halved(problem: Problem, strategy: Strategy, passes: Sequence[HalfPass] = ()) -> Split:
    """Cut a joint program in two by a strategy, as `split`."""
    start = time.perf_counter()
    plan = decide(problem, strategy)
    middle = time.perf_counter()
    steps = schedule(problem, plan)
    halves = _verified(problem, steps, passes)
    end = time.perf_counter()
    times = 1e3 * (middle - start), 1e3 * (end - middle)
    plan = replace(spared(steps.graph, plan, steps), packed=_packed(problem, steps))
    return Split(problem, plan, steps, halves, *times, tuple(passes))


def cut_within(backend: Backend, most_bytes: int, closed: Any, roles: Roles) -> Any:
    """Return a joint jaxpr in which the backward computes values again, as one program for a part of another.

    Its plan is the fastest whose temporaries are predicted to take at most so many bytes, or the smallest plan. Rates
    are fixed, so that one program is always cut alike.
    """
    graph = formed(read(closed, roles), True)
    problem = Problem.of(graph, backend=backend).timed(BLOCK_RATES)
    planner = Planner(problem)
    fastest = planner.fastest(most_bytes, lambda c: c.predicted_bytes)
    chosen = fastest or min(planner.small(0.0, 1.0), key=lambda c: c.predicted_bytes)
    halves = halved(problem, lambda graph: chosen.plan).halves
    jaxpr, _ = jaxprs.opened(closed)
    first = [role is Role.PRIMAL for role in roles.inputs]

    def whole(*flat: Any) -> list[Any]:
        primals, cotangents = ([x for x, one in zip(flat, first, strict=True) if one is on] for on in (True, False))
        outputs, gradients = map(iter, verify.run(halves, graph, primals, cotangents))
        return [next(outputs if role is Role.OUTPUT else gradients) for role in roles.outputs]

    made = jax.make_jaxpr(whole)(*(abstract.struct(v.aval) for v in jaxpr.invars))
    return simplify.inlined(made)


def _packed(problem: Problem, steps: Schedule) -> PackedBytes | None:
    """The bytes of handed-over values that the user's functions pack; None if they are given nothing."""
    before, after, packings = list[int](), list[int](), problem.packings
    for v, forms in steps.stored.items():
        if forms[-1] == HOOK:
            value = steps.graph.values[v]
            for sizes, own in ((before, forms[:-1]), (after, forms)):
                sizes.append(value.copies * sum(map(abstract.aval_bytes, packings.types(value.payload, own))))
    return PackedBytes(len(after), sum(after), sum(before)) if after else None


def _verified(problem: Problem, steps: Schedule, passes: Sequence[HalfPass], in_bits: bool = False) -> Halves:
    halves = emit(steps.graph, steps, replace(problem.packings, in_bits=in_bits))
    verify.verify_structure(problem.graph, halves)
    return passed(halves, passes)


def decide(problem: Problem, strategy: Strategy) -> Plan:
    """Ask a strategy for a plan, and make sure that the plan closes."""
    if callable(strategy):
        plan = strategy(problem.graph)
        if not isinstance(plan, Plan):
            name = getattr(strategy, "__name__", repr(strategy))
            cure = "Return Plan.of(graph, saved=[...]) from jointcut.partition."
            raise StrategyError(message(f"strategy {name}", f"returned {type(plan).__name__}, not a Plan.", cure))
        return validated(problem, plan)
    if strategy not in STRATEGIES:
        known = choices(strategy, STRATEGIES) + " A function Graph -> Plan is welcome as well."
        raise StrategyError(message("strategy", f"{strategy!r} is unknown.", known))
    return STRATEGIES[strategy](problem)
