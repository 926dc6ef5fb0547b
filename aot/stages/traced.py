"""Hold one traced call, for all later stages.

It has the joint program, the meaning of each flat position, the metadata, the caller's trees, and the plans. `Traced`,
`Cut` and `Compiled` correspond to JAX's stages `Traced`, `Lowered`, `Compiled`: `f.trace(*args).partition().compile()`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.choices.limits import Budget, Limit, limit
from jointcut.aot.choices.options import Options, check_error, wanted_plan, with_budget
from jointcut.aot.choices.policies import GivenPolicy, has_forms, read_policy
from jointcut.aot.choices.target import with_excess_logged
from jointcut.aot.fitting.attempts import Fitted
from jointcut.aot.fitting.checkpoints import in_budget
from jointcut.aot.fitting.fit import planner_for
from jointcut.aot.fitting.inexact import FORM, WORTH, Examples, Rounding, searched, why_none
from jointcut.aot.fitting.pareto import Pareto, ParetoPoint
from jointcut.aot.fitting.searches import Wanted, settled, summary, way
from jointcut.aot.progress.progress import Stage
from jointcut.aot.run.compile import ProgramMemory, compiled
from jointcut.aot.run.weigh import begin
from jointcut.aot.stages.compiled import Compiled
from jointcut.aot.stages.cut import Cut
from jointcut.aot.stages.offloading import on_devices, problem_for
from jointcut.aot.stages.weighing import Weighing
from jointcut.aot.trace.analyse import analyse, plain_meta
from jointcut.aot.trace.joint import Joint
from jointcut.aot.trace.trees import Call
from jointcut.partition.drawing.displays import graph_page
from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.errors import BudgetError
from jointcut.partition.figures import counted
from jointcut.partition.nesting.read import read
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.saved import GradientError
from jointcut.partition.program import jaxprs
from jointcut.partition.program.graph import Graph
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.candidates import Candidate, ranked
from jointcut.partition.search.forms.choose import formed
from jointcut.partition.search.forms.exact import may_wait
from jointcut.partition.split import Strategy, halved
from jointcut.wrappers.arguments import containers
from jointcut.wrappers.arguments.tree import Bound, struct
from jointcut.wrappers.metadata.convention import Convention, slot
from jointcut.wrappers.metadata.schemas import InputAliasInfo, SubclassMeta, TensorAlias, ViewAndMutationMeta
from jointcut.wrappers.stack import Wrapped


@dataclass(frozen=True)
class Traced:
    """A function traced for one signature into a joint forward and backward program, ready to be cut.

    It corresponds to PyTorch's `AOTState` and `AOTGraphCapture`, and `Cut` to the result of its partitioner. They hold
    jaxprs, which have no JSON form; `metadata`, `signature` and `options` have one.

    `joint` is the closed jaxpr `(constants, arguments, cotangents) -> (outputs, gradients)`. `convention` gives the
    meaning of each flat position.

    Attributes:
        name: the function's name.
        options: the options of `aot.function`.
        bound: the arguments, bound to the function's parameters and flattened.
        inputs: a record of each argument, as far as it is known before the trace.
        wrapped: the function within its wrappers.
        program: the joint program with its roles.
        wanted: flat positions of the arguments that are differentiated.
        trace_ms: wall time of tracing.
        examples: the arguments of the call, if an error is to be measured at them and they are arrays.
        forms: values that wait in a smaller form beside those of the policy, by a bound on the error; an empty tuple if
            a plan brings its own, None if nothing waits so.
    """

    name: str
    options: Options
    bound: Bound
    inputs: tuple[InputAliasInfo, ...]
    wrapped: Wrapped
    program: Joint
    wanted: tuple[int, ...]
    trace_ms: float
    examples: Bound | None = field(default=None, repr=False, compare=False)
    forms: tuple[tuple[int, str], ...] | None = None

    def __repr__(self) -> str:
        """`<Traced loss: 7 inputs, 1 output, 143 equations>`."""
        inner, _ = jaxprs.opened(self.joint)
        inputs, outputs = len(self.bound.leaves), self.program.results.num_returned
        return (
            f"<Traced {self.name}: {counted(inputs, 'input')}, {counted(outputs, 'output')}, "
            f"{counted(len(inner.eqns), 'equation')}>"
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The joint program as a graph, for notebooks."""
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
        """The types of the forward's inputs, with the shardings of committed arrays."""
        return self.placed([*map(struct, self.consts), *self.bound.unique])

    def placed(self, structs: Iterable[Any]) -> list[Any]:
        """Types of arrays on the devices of the target, if there is one."""
        goal = self.options.goal
        return list(structs) if goal is None else list(map(goal.placed, structs))

    @property
    def convention(self) -> Convention:
        """The caller's meaning of each input array; an array passed twice is one input."""
        return self.wrapped.target.convention

    @cached_property
    def metadata(self) -> ViewAndMutationMeta:
        """The records of the function's inputs and outputs; see `analyse`."""
        return analyse(self.program, self.bound, self.inputs)

    @cached_property
    def handed_back(self) -> dict[int, TensorAlias]:
        """Outputs that the compiled programs do not return, by position."""
        return self.metadata.handed_back

    @cached_property
    def call(self) -> Call:
        """The arguments and results as the caller sees them."""
        return Call.of(self.name, self.options, self.bound, self.program, self.wanted)

    @property
    def subclass_metadata(self) -> SubclassMeta:
        """`metadata`, with the containers of the gradients."""
        if not self.program.is_train:
            return SubclassMeta(self.metadata)
        jaxpr, _ = jaxprs.opened(self.program.closed)
        flat = [jaxprs.struct(v.aval) for v in jaxpr.outvars[len(self.program.results.avals) :]]
        leaves = [slot("", leaf).struct for leaf in self.bound.leaves]

        def gradients(flat: Sequence[Any], leaves: Sequence[Any]) -> Any:
            return self.call.gradients(flat, self.options.chosen, replace(self.bound, leaves=tuple(leaves)), True)

        types, tree = jax.tree.flatten(jax.eval_shape(gradients, flat, leaves))
        return SubclassMeta(self.metadata, containers.metas(tree, [plain_meta(i, x) for i, x in enumerate(types)]))

    @property
    def joint(self) -> Any:
        """The joint program as a closed jaxpr without constants."""
        return self.program.closed

    @cached_property
    def graph(self) -> Graph:
        """The joint program as ops and values, the bodies of its loops joined, with the cheaper forms of values.

        Unless the options have a budget, those are left out that are slower by the options' cost model.
        """
        graph = read(self.program.to_cut, self.program.roles)
        has_smaller, model = self.forms is not None or has_forms(self.options.policy), self.options.cost_of_forms
        return graph if self.program.is_as_jax else formed(graph, has_smaller, model)

    @property
    def consts(self) -> tuple[Any, ...]:
        """The arrays that the function closes over: leading inputs of every program made from it."""
        return self.program.consts

    @property
    def in_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the input arrays, in order."""
        return tuple(slot.struct for slot in self.convention.inputs)

    @cached_property
    def plain_memory(self) -> ProgramMemory:
        """XLA's memory figures for `jax.jit(jax.value_and_grad(f))`, which is compiled only to read them."""
        return self._plain_weighed.result()

    @cached_property
    def _plain_weighed(self) -> Future[ProgramMemory]:
        return begin(self.plain_lowered, self.options.goal)

    @cached_property
    def plain_program(self) -> jax.stages.Compiled:
        """`jax.jit(jax.value_and_grad(f))`, compiled from the joint program uncut."""
        return compiled(self.plain_lowered, self.options.goal)

    @cached_property
    def plain_lowered(self) -> jax.stages.Lowered:
        """`jax.jit(jax.value_and_grad(f))`, not compiled."""
        plain, ones = self.program.plain, self.call.ones() if self.is_scalar else ()
        closed, structs = plain.closed, self.placed([*map(struct, plain.consts), *self.bound.unique])
        others = jaxprs.input_structs(closed)[len(structs) + len(ones) :]
        cotangents = self.placed(others)  # if the output is not a scalar
        whole = jax.jit(lambda *flat: jaxprs.evaluate(closed, *flat, *ones), donate_argnums=plain.roles.replaced)
        return whole.lower(*structs, *cotangents)

    # -------------------------------------------------------------------------------------------- plans

    def partition(
        self,
        strategy: Strategy | None = None,
        *,
        budget: Budget | None = None,
        plan: Plan | str | None = None,
        policy: GivenPolicy | None = None,
    ) -> Cut:
        """Choose the values that the forward saves for the backward, and write the two jaxprs.

        The choice is by a `strategy`, within a `budget` (by XLA's account of the compiled step), or by a `plan` made
        for this program, or its text; see `aot.function`. The default is by the function's options. A `policy` replaces
        that of the options. Raises `StrategyError`, `PlanError`, or `BudgetError` with the smallest peak found.
        """
        if policy is not None:
            rules = read_policy(policy)
            options, program = replace(self.options, policy=rules), replace(self.program, policy=rules)
            check_error(options)
            return replace(self, options=options, program=program).partition(strategy, budget=budget, plan=plan)
        how = wanted_plan(self.options, strategy, budget, plan)
        if how.budget is None:
            forms = () if how.keeps_forms else self.forms
            is_same = self.examples is None and forms == self.forms
            cut = (self if is_same else replace(self, examples=None, forms=forms))._cut(how.strategy)
            if self.options.error is None or how.keeps_forms:
                return cut
            unused = GradientError(self.options.error, unused="there is no budget for which it could be")
            return replace(cut, split=replace(cut.split, plan=replace(cut.plan, gradient_error=unused)))
        if self._for_budgets is not self:
            return self._for_budgets.partition(budget=how.budget)
        bytes_limit = with_excess_logged(self.options.goal, limit(how.budget))
        if self.options.error is None or not self.program.is_train or jaxprs.tracing():
            return self._within(bytes_limit)
        alone, examples = replace(self, examples=None), Examples.of(self.examples, self.bound)
        return alone._within(bytes_limit, search=lambda traced: traced._inexact(bytes_limit, alone, examples))

    @cached_property
    def _for_budgets(self) -> Traced:
        """The same trace with the lossless forms that were left out as slower, if any were: they take fewer bytes."""
        if self.options.cost_of_forms is None:
            return self
        other = replace(self, options=with_budget(self.options, 1.0))
        return self if other.graph.forms == self.graph.forms else other

    @cached_property
    def as_jax(self) -> Traced:
        """The same trace with its conditionals as JAX wrote them and no other forms, for what plain JAX keeps."""
        is_same = self.program.to_cut is self.program.closed and not self.graph.forms
        return self if is_same else replace(self, program=replace(self.program, is_as_jax=True))

    def _cut(self, strategy: Strategy) -> Cut:
        if strategy == "save_all" and self.as_jax is not self and self.options.policy is None:
            return self.as_jax._cut(strategy)
        with Stage("cut", self.name) as now, jaxprs.paused_collection():
            problem = self.problem
            read_ms = 1e3 * now.seconds
            split = halved(problem, strategy, self.options.passes)
            now.ends(lambda: f"cut by {split.plan.strategy} in {now}, {summary(split.plan)}")
        return Cut(self, replace(split, cut_ms=split.cut_ms + read_ms))  # pyright: ignore[reportArgumentType]

    @cached_property
    def problem(self) -> Problem:
        """The planning problem of the joint program for its target, under the options' policy."""
        places, count = self.bound.places, len(self.bound.unique)  # an array that is passed twice is one input
        differentiated = sorted({places[i] - count for i in self.program.differentiated})
        problem = problem_for(self.graph, self.options, differentiated, self.forms)
        return on_devices(problem, self.options.goal, (*self.consts, *self.bound.leaves))

    @cached_property
    def planner(self) -> Planner:
        """The plans of this program, priced by the options' cost model, or by the device's measured rates.

        Raises `PlanError` if the model returns an invalid price.
        """
        return planner_for(self.problem, self.options)

    @cached_property
    def _weighing(self) -> Weighing:
        return Weighing(self)  # pyright: ignore[reportArgumentType]

    def _within(
        self, budget: Limit, to_run: bool = True, search: Callable[[Traced], Fitted[Compiled]] | None = None
    ) -> Cut:
        """The cut whose compiled step holds a budget; unless it is `to_run`, weighing is enough."""
        start = time.perf_counter()
        search = search or (lambda traced: traced._settled(budget, self, to_run))
        fitted = in_budget(self.program, budget, lambda form: search(self._with(form)))
        return fitted.measured.made.cut.chosen(fitted, 1e3 * (time.perf_counter() - start))

    def _settled(self, budget: Limit, given: Traced, to_run: bool) -> Fitted[Compiled]:
        """The plan for a budget; programs that were weighed for it are let go."""
        try:
            return settled(self._wanted(budget, given, to_run))
        finally:
            self._weighing.forget()

    def _inexact(self, budget: Limit, given: Traced, examples: Examples | None) -> Fitted[Compiled]:
        """The plan for a budget, with values in smaller forms where that is faster and the gradient stays near."""
        most, exact, refusal = self.options.error or 0.0, None, None
        try:
            exact = self._settled(budget, given, True)
        except BudgetError as error:
            refusal = error
        worth = 0.0 if exact is None else (exact.plan.seconds or 0.0) - WORTH * self.planner.common_seconds
        if exact is not None and worth <= 0:
            return _telling(exact, GradientError(most, unused="the budget holds without"))
        if examples is None or any(op.effects for op in self.graph.ops):
            found, least = None, None
        else:
            found, least = self._rounded(most, budget, given, examples)
        if found is not None and least is not None and (exact is None or (found.plan.seconds or 0.0) <= worth):
            return _telling(found, GradientError(most, least, examples is not None and examples.are_drawn))
        why = "it has effects, or its arguments are not known" if least is None else why_none(most, least, found)
        if exact is None:
            assert refusal is not None, "there is no exact plan"
            refusal.add_note(f"With error={most:g}, no smaller form is used: {why}.")
            raise refusal
        return _telling(exact, GradientError(most, unused=why))

    def _rounded(
        self, most: float, budget: Limit, given: Traced, examples: Examples
    ) -> tuple[Fitted[Compiled] | None, float]:
        """The fastest plan for a budget with values in a smaller form, and its error; see `inexact.searched`."""

        def planned(values: tuple[int, ...]) -> Fitted[Compiled]:
            return replace(self, forms=tuple((v, FORM) for v in values))._settled(budget, given, True)

        def rounding(fitted: Fitted[Compiled]) -> Rounding:
            exact = fitted.measured.made.cut.storing({})
            with Stage("measure", f"{self.name}, the error of smaller forms"):
                return Rounding.of(exact.executables, examples.bound)

        graph = formed(read(self.program.to_cut, self.program.roles), True)
        return searched(most, may_wait(Problem.of(graph), FORM), planned, rounding)

    def _with(self, program: Joint) -> Traced:
        """The same trace of another form of the program."""
        return self if program is self.program else replace(self, program=program)

    def _wanted(self, budget: Limit, given: Traced | None = None, to_run: bool = True) -> Wanted[Compiled]:
        """The facts and functions that a search for a budget needs.

        A fraction is of the plain step of the trace `given`, by default this one.
        """
        plain, weighing = given or self, self._weighing
        is_compiled = to_run or not weighing.is_quick
        return Wanted(
            name=self.name,
            program=self.program,
            options=self.options,
            budget=budget,
            graph=self.graph,
            leaves=(*self.consts, *self.bound.leaves),
            way=way(self.options, weighing.executables, True) + ("" if is_compiled else ", weighed"),
            planner=lambda: self.planner,
            ways=weighing.ways if is_compiled else weighing.ways_to_tell,
            take=weighing.take,
            plain=lambda: plain._plain_weighed,
            forms=self.forms or (),
        )

    def pareto(self) -> Pareto:
        """The front of the budgets: plans that no other plan beats in both peak and time, by the model."""
        return self._pareto(None)

    def _pareto(self, chosen: Plan | None) -> Pareto:
        with Stage("weigh", self.name) as now:
            menu = self.planner.menu
            smallest = sorted(menu, key=lambda c: c.peak_bytes)[: 2 * self.planner.looks]
            front = ranked([*ranked(menu), *smallest], lambda c: c.predicted_bytes)
            candidate = None if chosen is None else self.planner.candidate(self.planner.priced(chosen))
            of_jax = self.as_jax.planner
            plain = None if (everything := of_jax.everything()) is None else of_jax.known(everything)
            now.ends(lambda: f"weighed {len(menu)} plans in {now}, {len(front)} on the front")
        points = tuple(map(self._point, front))
        common = self.planner.common_seconds
        return Pareto(self.name, points, candidate and self._point(candidate), plain and self._point(plain), common)

    def _point(self, c: Candidate) -> ParetoPoint:
        peak = self.program.fixed_bytes + math.ceil(c.predicted_bytes)
        return ParetoPoint(peak, c.step_seconds - c.preferred_seconds, replace(c.plan, peak_bytes=peak))


def _telling(fitted: Fitted[Compiled], error: GradientError) -> Fitted[Compiled]:
    """The result of a search with what was measured of its smaller forms."""
    return replace(fitted, plan=replace(fitted.plan, gradient_error=error))
