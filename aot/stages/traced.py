"""Hold one traced call: what every later stage needs to know of it.

The joint program, which flat position is which, what one look at the function taught us, the caller's side of such a
call, and the plans there are. `Traced`, `Cut` and `Compiled` extend JAX's own stages `Traced`, `Lowered`, `Compiled`:
`f.trace(*args).partition().compile()`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.budget.fit import CALIBRATION, Weighed, planner_for
from jointcut.aot.budget.notes import Held
from jointcut.aot.budget.pareto import Pareto, ParetoPoint
from jointcut.aot.budget.searches import Wanted, settled, summary, way
from jointcut.aot.limits import Budget, Limit, limit
from jointcut.aot.options import Options, wanted_plan
from jointcut.aot.progress.progress import Stage
from jointcut.aot.run.compile import ProgramMemory
from jointcut.aot.stages.compiled import Compiled
from jointcut.aot.stages.cut import Cut
from jointcut.aot.trace.analyse import analyse, plain_meta
from jointcut.aot.trace.joint import Joint
from jointcut.aot.trace.trees import Call
from jointcut.partition.drawing.displays import graph_page
from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.figures import counted
from jointcut.partition.nesting.read import read
from jointcut.partition.plans.backend import Backend
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program import jaxprs
from jointcut.partition.program.graph import Graph
from jointcut.partition.search.budget import Candidate, Planner, ranked
from jointcut.partition.split import Strategy, halved
from jointcut.wrappers.arguments import containers
from jointcut.wrappers.arguments.tree import Bound, struct
from jointcut.wrappers.metadata.convention import Convention, slot
from jointcut.wrappers.metadata.schemas import InputAliasInfo, SubclassMeta, TensorAlias, ViewAndMutationMeta
from jointcut.wrappers.stack import Wrapped


@dataclass(frozen=True)
class Traced:
    """A function traced for one signature into a joint forward and backward program, ready to be cut.

    Of PyTorch's stage records it answers to `AOTState` and `AOTGraphCapture`, as `Cut` does to what its partitioner
    returns. They hold jaxprs, which have no JSON form: `metadata`, `signature` and `options` have.

    `joint` is the closed jaxpr `(constants, arguments, cotangents) -> (outputs, gradients)`, `convention` says which
    flat position is which.

    Attributes:
        name: of the function.
        options: those of `aot.function`.
        bound: the arguments, bound to the function's parameters and flattened.
        inputs: a record of each argument, as far as it is known before the trace.
        wrapped: what the wrappers made of the function.
        program: the joint program with its roles.
        wanted: flat positions of the arguments that are differentiated.
        trace_ms: wall time of tracing.
    """

    name: str
    options: Options
    bound: Bound
    inputs: tuple[InputAliasInfo, ...]
    wrapped: Wrapped
    program: Joint
    wanted: tuple[int, ...]
    trace_ms: float

    def __repr__(self) -> str:
        """`<Traced loss: 7 inputs, 1 output, 143 equations>`."""
        inner, _ = jaxprs.opened(self.joint)
        inputs, outputs = len(self.bound.leaves), self.program.results.num_returned
        return (
            f"<Traced {self.name}: {counted(inputs, 'input')}, {counted(outputs, 'output')}, "
            f"{counted(len(inner.eqns), 'equation')}>"
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """In a notebook the joint program as a graph."""
        return {"text/plain": repr(self), "text/html": framed(page(graph_page(self.name, repr(self), self.graph)))}

    @property
    def owners(self) -> tuple[int, ...]:
        """The flat argument that each flat gradient belongs to."""
        return self.call.owners

    @property
    def is_scalar(self) -> bool:
        """Whether the function returns one real number (and aux), so that `value_and_grad` is defined."""
        return self.call.is_scalar

    @property
    def structs(self) -> list[Any]:
        """The types of what enters the forward, with the places of what was put somewhere."""
        return [*map(struct, self.consts), *self.bound.unique]

    @property
    def convention(self) -> Convention:
        """The meaning of each array that enters to the caller; one that stands at two places enters once."""
        return self.wrapped.target.convention

    @cached_property
    def metadata(self) -> ViewAndMutationMeta:
        """All that one look at the function taught us of its inputs and outputs."""
        return analyse(self.program, self.bound, self.inputs)

    @cached_property
    def handed_back(self) -> dict[int, TensorAlias]:
        """Outputs that stay out of the compiled programs, by position."""
        return self.metadata.handed_back

    @cached_property
    def call(self) -> Call:
        """The caller's side: the way from flat results to his trees."""
        return Call.of(self.name, self.options, self.bound, self.program, self.wanted)

    @property
    def subclass_metadata(self) -> SubclassMeta:
        """The same, with how gradients are put back into containers."""
        if not self.program.is_train:
            return SubclassMeta(self.metadata)
        jaxpr, _ = jaxprs.opened(self.program.closed)
        flat = [jaxprs.struct(v.aval) for v in jaxpr.outvars[len(self.program.results.avals) :]]
        leaves = [slot("", leaf).struct for leaf in self.bound.leaves]

        def gradients(flat: Sequence[Any], leaves: Sequence[Any]) -> Any:
            return self.call.gradients(flat, self.options.chosen, replace(self.bound, leaves=tuple(leaves)), True)

        found, tree = jax.tree.flatten(jax.eval_shape(gradients, flat, leaves))
        return SubclassMeta(self.metadata, containers.metas(tree, [plain_meta(i, x) for i, x in enumerate(found)]))

    @property
    def joint(self) -> Any:
        """The joint program as a closed jaxpr without constants."""
        return self.program.closed

    @cached_property
    def graph(self) -> Graph:
        """The joint program as ops and values, the bodies of its loops joined."""
        return read(self.program.closed, self.program.roles)

    @property
    def consts(self) -> tuple[Any, ...]:
        """The arrays that the function closes over: leading inputs of every program made from it."""
        return self.program.consts

    @property
    def in_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arrays that enter, in order."""
        return tuple(slot.struct for slot in self.convention.inputs)

    @cached_property
    def plain_memory(self) -> ProgramMemory:
        """XLA's account of `jax.jit(jax.value_and_grad(f))`: forward and backward as they were traced, uncut."""
        return ProgramMemory.of(self.plain_program)

    @cached_property
    def plain_program(self) -> jax.stages.Compiled:
        """`jax.jit(jax.value_and_grad(f))`, compiled from the joint program uncut."""
        closed, structs = self.program.closed, self.structs
        ones = self.call.ones() if self.is_scalar else ()
        given = jaxprs.input_structs(closed)[len(structs) + len(ones) :]  # cotangents of what is no scalar
        program = jax.jit(lambda *flat: jaxprs.evaluate(closed, *flat, *ones))
        return program.lower(*structs, *given).compile()

    # -------------------------------------------------------------------------------------------- plans

    def partition(
        self, strategy: Strategy | None = None, *, budget: Budget | None = None, plan: Plan | str | None = None
    ) -> Cut:
        """Choose what the forward saves for the backward, and write the two jaxprs.

        By a `strategy`, within a `budget` (plans are compiled until one holds it) or by a `plan` that was made for this
        program, or its text; see `aot.function`. By default as the function's options say. Raises `StrategyError`,
        `PlanError`, or `BudgetError` naming the smallest peak that was found.
        """
        how = wanted_plan(self.options, strategy, budget, plan)
        if how.budget is None:
            return self._cut(how.strategy)
        return self._within(limit(how.budget))

    def _cut(self, strategy: Strategy) -> Cut:
        with Stage("cut", self.name) as now, jaxprs.paused_collection():
            problem = self.problem
            read_ms = 1e3 * now.seconds
            made = halved(problem, strategy, self.options.passes)
            now.ends(lambda: f"cut by {made.plan.strategy} in {now}, {summary(made.plan)}")
        return Cut(self, replace(made, cut_ms=made.cut_ms + read_ms))  # pyright: ignore[reportArgumentType]

    @cached_property
    def problem(self) -> Problem:
        """The joint program for JAX's default backend, with all that is known before a plan is searched for."""
        return Problem.of(self.graph, backend=Backend.here())

    @cached_property
    def planner(self) -> Planner:
        """The plans of this program, priced by the cost model of the options, or by what the device was measured to do.

        Raises `PlanError` where that model gives a price that is none.
        """
        return planner_for(self.problem, self.options)

    @cached_property
    def _weighed(self) -> dict[Any, Weighed[Compiled]]:
        """The plans that were compiled, for other budgets."""
        return {}

    def _within(self, budget: Limit) -> Cut:
        """The cut whose compiled step holds a budget."""
        start = time.perf_counter()
        found = settled(self._wanted(budget))
        return found.measured.made.cut.chosen(found, 1e3 * (time.perf_counter() - start))

    def _wanted(self, budget: Limit) -> Wanted[Compiled]:
        """What a search for a budget needs to know, and to do."""
        executables = 1 if self.is_scalar else 2

        def measure(plan: Plan) -> Weighed[Compiled]:
            key = (plan.values, plan.segments)
            if key not in self._weighed:
                made = self._cut(lambda graph: plan).compile()
                self._weighed[key] = Weighed(made, made.peak_bytes, made.activation_bytes, made.compile_ms)
            return self._weighed[key]

        def take(plan: Plan, held: Held) -> Weighed[Compiled]:
            key = (plan.values, plan.segments)
            if key not in self._weighed:
                made = Compiled(self._cut(lambda graph: plan), executables)
                self._weighed[key] = Weighed(made, held.peak_bytes, held.activation_bytes, held.compile_ms)
            return self._weighed[key]

        leaves, how = (*self.consts, *self.bound.leaves), way(self.options, executables, True)
        given = self.name, self.program, self.options, budget, self.graph, leaves, how
        return Wanted(*given, lambda: self.planner, measure, take, lambda: self.plain_memory.temp_bytes)

    def pareto(self) -> Pareto:
        """What each budget would cost: the plans that no other betters in both peak and time, by the model."""
        return self._pareto(None)

    def _pareto(self, chosen: Plan | None) -> Pareto:
        with Stage("weigh", self.name) as now:
            menu = self.planner.menu
            found = ranked(menu)
            mine = None if chosen is None else self.planner.candidate(self.planner.priced(chosen))
            plain = next((c for c in menu if c.plan.strategy == "save_all"), None)
            now.ends(lambda: f"weighed {len(menu)} plans in {now}, {len(found)} on the front")
        points = tuple(map(self._point, found))
        common = self.planner.common_seconds
        return Pareto(self.name, points, mine and self._point(mine), plain and self._point(plain), common)

    def _point(self, c: Candidate) -> ParetoPoint:
        peak = self.program.fixed_bytes + math.ceil(CALIBRATION * c.peak_bytes)
        return ParetoPoint(peak, c.step_seconds, replace(c.plan, peak_bytes=peak))
