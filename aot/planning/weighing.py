"""Compile the plans of one program, or weigh them, where it is called.

A call has programs of ours. A part of a program of the user's (in `jax.jit`, under `jax.grad` or `jax.shard_map`) is
compiled later, and its surroundings are not known: both halves are weighed in one program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jointcut.aot.options.options import Options
from jointcut.aot.options.target import Target
from jointcut.aot.planning.budgets.attempts import Fitted, Ways, Weighed
from jointcut.aot.planning.budgets.notes import Held
from jointcut.aot.planning.budgets.searches import way
from jointcut.aot.run.compile import ProgramMemory
from jointcut.aot.run.meshed import lowered
from jointcut.aot.run.runnable import Runnable
from jointcut.aot.run.weigh import aside, begin, can_weigh, weigh
from jointcut.aot.trace.data import Trace
from jointcut.aot.trace.joint import Joint
from jointcut.partition.errors import RoomError
from jointcut.partition.lower import verify
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.jax import abstract, meshes, runtime
from jointcut.partition.program.roles import Role
from jointcut.partition.split import Split, halved


@dataclass(frozen=True)
class Answer:
    """A program that was cut.

    Attributes:
        request: the `Request` that this answers.
        split: the plan and the two jaxprs.
        runnable: its programs; None in a program of the user's.
        fitted: the search that found the plan, if there was a budget.
    """

    request: Any
    split: Split
    runnable: Runnable | None = field(default=None, repr=False)
    fitted: Fitted[Any] | None = field(default=None, repr=False, compare=False)

    @property
    def plan(self) -> Plan:
        """The values saved, the ops recomputed, and the reasons."""
        return self.split.plan

    @property
    def made(self) -> Runnable:
        """Its programs."""
        assert self.runnable is not None, "a part of a program of the user's has no programs of its own"
        return self.runnable

    @property
    def is_apart(self) -> bool:
        """Whether it runs as two programs although one could run both halves."""
        return self.runnable is not None and self.runnable.is_apart

    def chosen(self, fitted: Fitted[Any], cut_ms: float) -> Answer:
        """Return the same cut with the search that found its plan; programs compiled during the search are reused."""
        known = self.plan  # a plan from a note does not contain the policy
        plan = replace(fitted.plan, problem=known.problem, packed=known.packed)
        plan = replace(plan, overruled=plan.overruled or known.overruled)
        split = replace(self.split, plan=plan, cut_ms=cut_ms)
        return Answer(self.request, split, self.runnable and replace(self.runnable, split=split), fitted)


@dataclass(frozen=True)
class Weighing:
    """The plans of one program that were cut, weighed and compiled so far.

    Attributes:
        program, options: the program that is cut, and the options of the function.
        trace: of the call; None where the step is a part of a program of the user's.
        cut: cuts the program by a plan.
    """

    program: Joint
    options: Options
    trace: Trace | None
    cut: Callable[[Plan], Answer]
    _cuts: dict[Any, Answer] = field(default_factory=dict)
    _begun: dict[Any, Future[Weighed[Any]]] = field(default_factory=dict)
    _compiled: dict[Any, Weighed[Answer]] = field(default_factory=dict)

    @property
    def goal(self) -> Target | None:
        """The target; the caller's programs have one if it has as many devices as their mesh."""
        goal = self.options.goal
        if self.trace is not None or goal is None:
            return goal
        layout = self.program.layout
        mesh = meshes.manual_mesh() or (layout.mesh if layout is not None and layout.is_known else None)
        return goal if mesh is not None and mesh.size == goal.count else None

    @property
    def executables(self) -> int:
        """The number of programs of a step."""
        return 1 if self.trace is None or self.trace.is_scalar else 2

    @property
    def is_quick(self) -> bool:
        """Whether weighing is quicker than compiling; steps of two programs are not weighed."""
        return self.trace is None or (self.executables == 1 and can_weigh(self.goal))

    def way(self, to_run: bool) -> str:
        """Return a name for how plans are compiled."""
        is_ours = self.trace is not None
        weighed = ", weighed" if is_ours and self.is_quick and not to_run else ""
        return way(self.options, self.executables, is_ours) + weighed

    def ways(self, to_run: bool) -> Ways[Any]:
        """Return how plans are compiled and weighed; unless it is `to_run`, they are weighed where that is quicker."""
        if self.is_quick and (self.trace is None or not to_run):
            return Ways(self._weigh, self._weigh_all, compiles=False)
        return Ways(self.measure, self._weigh_all if self.is_quick else None)

    def plain(self) -> Future[ProgramMemory]:
        """Begin to weigh plain JAX's step."""
        if self.trace is not None:
            return begin(self.trace.plain_lowered, self.goal)
        closed = self.program.plain.closed
        return begin(self._inside(lambda primals, cts: runtime.evaluate(closed, *primals, *cts), closed))

    def _lowered(self, cut: Answer) -> jax.stages.Lowered:
        if self.trace is not None:
            return cut.made.jits.lowered("step")
        halves, graph = cut.split.halves, cut.split.graph
        return self._inside(lambda primals, cts: verify.run(halves, graph, primals, cts), self.program.closed)

    def _inside(self, step: Callable[[Sequence[Any], Sequence[Any]], Any], closed: Any) -> jax.stages.Lowered:
        """Lower a step of primals and cotangents, with the types of a jaxpr, as a part of the caller's program."""
        count = len(self.program.roles.inputs) - self.program.roles.inputs.count(Role.PRIMAL)

        def whole(*flat: Any) -> Any:
            first = len(flat) - count
            return step(flat[:first], seeds(flat[first:]))

        return lowered(whole, closed, self.program.layout, self.goal)

    def measure(self, plan: Plan) -> Weighed[Answer]:
        """Compile a plan, to run it. If XLA finds no room for it on a target that is not here, only weigh it."""
        if (key := plan.key) not in self._compiled:
            start, cut = time.perf_counter(), self._cut(plan)
            made = cut.made
            count = made.count()
            try:
                made.compile(count)
                figures = made.peak_bytes(count), made.activation_bytes(count), made.compile_ms(count)
            except RoomError as error:
                peak_bytes = made.trace.program.fixed_bytes + error.temp_bytes
                figures = peak_bytes, error.temp_bytes, 1e3 * (time.perf_counter() - start)
            self._compiled[key] = Weighed(cut, *figures)
        return self._compiled[key]

    def _weigh_all(self, plans: Sequence[Plan]) -> list[Future[Weighed[Any]]]:
        """Begin to weigh plans, each once; plans whose halves run apart are compiled at once."""
        return [self._begun.get(plan.key) or self._begin(plan) for plan in plans]

    def _begin(self, plan: Plan) -> Future[Weighed[Any]]:
        start, cut = time.perf_counter(), self._cut(plan)
        if cut.is_apart:
            compiled = Future[Weighed[Any]]()
            compiled.set_result(self.measure(plan))
            return compiled
        program = self._lowered(cut)

        def figures() -> Weighed[None]:
            memory = weigh(program, self.goal)
            return Weighed(None, memory.peak_bytes, memory.temp_bytes, 1e3 * (time.perf_counter() - start))

        return self._begun.setdefault(plan.key, aside(figures))

    def _weigh(self, plan: Plan) -> Weighed[Answer]:
        return replace(self._weigh_all([plan])[0].result(), made=self._cut(plan))

    def take(self, plan: Plan, held: Held, to_run: bool = True) -> Weighed[Answer]:
        """Return a plan with known figures, to be compiled when it first runs, or unless it is `to_run`, if at all."""
        known = Weighed(self._cut(plan), held.peak_bytes, held.activation_bytes, held.compile_ms)
        return self._compiled.setdefault(plan.key, known) if to_run else self._compiled.get(plan.key, known)

    def forget(self) -> None:
        """Let go of the programs that were only weighed; their memory figures stay known."""
        for key in [key for key in self._cuts if key not in self._compiled]:
            self._cuts.pop(key, None)

    def _cut(self, plan: Plan) -> Answer:
        if (cut := self._cuts.get(plan.key)) is None:
            cut = self._cuts[plan.key] = self.cut(plan)
        return cut


def seeds(cotangents: Sequence[Any]) -> list[Any]:
    """Return the cotangents for measuring a program: the constant 1 for a scalar output, as in `jax.grad`.

    Inside `jax.shard_map` it stays an argument, since it may differ between devices.
    """
    is_loss = len(cotangents) == 1 and cotangents[0].shape == () and meshes.manual_mesh() is None
    return [abstract.full(c.aval, 1) for c in cotangents] if is_loss else list(cotangents)


def storing(made: Runnable, forms: Mapping[int, str]) -> Runnable:
    """Return the same cut with other values in smaller forms."""
    plan, problem = made.split.plan, made.split.problem.without_forms
    kept = {name: getattr(plan, name) for name in ("segments", "kept_steps", "dropped", "offloaded", "checkpoints")}
    other = Plan.of(problem, plan.values, stored=forms, **kept)
    return Runnable(made.trace, halved(problem, lambda graph: other, made.split.passes))
