"""Answer a request for a plan, wherever the program is called.

A request has the program, the options, and the trace of the call. Without a trace the program is a part of one of the
user's, as under `jax.grad` in a `jax.jit`. Under a mesh, too, a budget is for such a part. The answer is a cut: by a
strategy, by a plan that was made before, or by a search for a budget.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.options.limits import Budget, Limit, limit
from jointcut.aot.options.options import DEFAULT, Options, wanted_plan, with_budget
from jointcut.aot.options.policies import has_forms
from jointcut.aot.options.target import backend_for, with_excess_logged
from jointcut.aot.planning.asked import in_asked_blocks, named_shapes
from jointcut.aot.planning.budgets.attempts import Fitted, summary
from jointcut.aot.planning.budgets.fit import planner_for
from jointcut.aot.planning.budgets.inexact import FORM, WORTH, Examples, Rounding, searched, telling, why_none
from jointcut.aot.planning.budgets.searches import Lookup, Wanted, room_within, settled, settled_by_default
from jointcut.aot.planning.budgets.tiling import Priced, Tilings, data_of
from jointcut.aot.planning.budgets.unasked import unasked
from jointcut.aot.planning.offloading import on_devices, problem_for
from jointcut.aot.planning.weighing import Answer, Weighing, storing
from jointcut.aot.progress.progress import Stage
from jointcut.aot.run.compile import ProgramMemory
from jointcut.aot.run.runnable import Runnable
from jointcut.aot.run.spilled import refuse_spill
from jointcut.aot.trace.data import Trace
from jointcut.aot.trace.joint import Joint
from jointcut.partition.errors import BudgetError, PlanError
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.saved import GradientError
from jointcut.partition.program.graph import ONCE, Graph
from jointcut.partition.program.jax import meshes, runtime
from jointcut.partition.program.roles import Tile
from jointcut.partition.search.best import best
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.forms.before import outermost
from jointcut.partition.search.forms.choose import formed
from jointcut.partition.search.forms.exact import may_wait
from jointcut.partition.split import Split, Strategy, halved


@dataclass(frozen=True)
class Request:
    """A joint program that is to be cut, under some options.

    Attributes:
        name: the function's name.
        program, options: the program that is cut, and the options of the function.
        trace: the trace of the call; None inside a transformation of the user's.
        forms: values that a bound on the error lets wait in a smaller form, beside the values that the policy names; an
            empty tuple if a plan brings its own, None if there are no such values.
        unmoved: the request of which this is the `moved` one; None for any other.
    """

    name: str
    program: Joint
    options: Options
    trace: Trace | None = None
    forms: tuple[tuple[int, str], ...] | None = None
    unmoved: Request | None = None

    @classmethod
    def of(cls, trace: Trace) -> Request:
        """Return the request of a call of its own."""
        return cls(trace.name, trace.program, trace.options, trace)

    # ------------------------------------------------------------------------------------ the program

    @cached_property
    def graph(self) -> Graph:
        """The joint program as ops and values, the bodies of its loops joined, with the cheaper forms of values.

        Forms that are slower by the options' cost model are left out, unless the options have a budget.
        """
        if self.unmoved is not None:
            return outermost(self.unmoved.graph)
        graph = self.program.graph
        has_smaller, model = self.forms is not None or has_forms(self.options.policy), self.options.cost_of_forms
        return graph if self.program.is_as_jax else formed(graph, has_smaller, model)

    @property
    def differentiated(self) -> Sequence[int]:
        """The inputs of the program that are differentiated, counted from the last one (-1)."""
        if self.trace is None:
            return self.program.differentiated
        places, count = self.trace.bound.places, len(self.trace.bound.unique)  # an array passed twice is one input
        return sorted({places[i] - count for i in self.program.differentiated})

    @cached_property
    def problem(self) -> Problem:
        """The planning problem of the program for its target, under the options' policy."""
        problem = problem_for(self.graph, self.options, self.differentiated, self.forms)
        return on_devices(problem, self.options.goal, self.program)

    @cached_property
    def planner(self) -> Planner:
        """The plans of this program, priced by the options' cost model, or by the device's measured rates.

        Raises `PlanError` if the model returns an invalid price.
        """
        return planner_for(self.problem, self.options)

    @cached_property
    def weighing(self) -> Weighing:
        """The plans that were cut, weighed and compiled so far."""
        return Weighing(self.program, self.options, self.trace, lambda plan: self._by(lambda graph: plan))

    @cached_property
    def plain_weighed(self) -> Future[ProgramMemory]:
        """Return plain JAX's step, which is weighed on a thread of its own."""
        return self.weighing.plain()

    @cached_property
    def as_jax(self) -> Request:
        """The request with conditionals as JAX wrote them and no other forms: plain JAX keeps its residuals."""
        is_same = not self.graph.forms and all(op.name not in ONCE for op in self.graph.ops)
        return self if is_same else self._with(replace(self.program, is_as_jax=True))

    @cached_property
    def opened(self) -> Request:
        """The request with its conditionals open, as everything but plain JAX's own plan has them."""
        return self._with(replace(self.program, is_as_jax=False)) if self.program.is_as_jax else self

    @cached_property
    def for_budgets(self) -> Request:
        """The request with the lossless forms that were left out as slower, if any: they take fewer bytes."""
        if self.options.cost_of_forms is None:
            return self
        other = self.under(with_budget(self.options, 1.0))
        return self if other.graph.forms == self.graph.forms else other

    @cached_property
    def moved(self) -> Request:
        """The request whose outermost loops run back from one stack where a step's carry is the one before, moved."""
        is_usual = self.unmoved is None and self.forms is None and not self.program.is_as_jax
        other = replace(self, unmoved=self)
        return other if is_usual and other.graph is not self.graph else self

    @cached_property
    def alone(self) -> Request:
        """The request without the arguments of the call."""
        if self.trace is None or self.trace.examples is None:
            return self
        return replace(self, trace=replace(self.trace, examples=None), unmoved=None)

    def _with(self, program: Joint) -> Request:
        """Return the request for another form of the program."""
        if program is self.program:
            return self
        trace = self.trace and replace(self.trace, program=program)
        return replace(self, program=program, trace=trace, unmoved=None)

    def under(self, options: Options) -> Request:
        """Return the request under other options."""
        return replace(self, options=options, trace=self.trace and replace(self.trace, options=options), unmoved=None)

    # -------------------------------------------------------------------------------------- the answer

    def answered(
        self, strategy: Strategy | None = None, budget: Budget | None = None, plan: Plan | str | None = None
    ) -> Answer:
        """Return the cut by a strategy, within a budget or by a plan; by default as the options say.

        Raises `StrategyError`, `PlanError`, or `BudgetError` with the smallest peak found; `CallError` for a function
        that spills, inside a transformation.
        """
        if self.unmoved is not None:
            return self.unmoved.answered(strategy, budget, plan)
        if self.trace is None and self.options.spill is not None:
            refuse_spill(self.name)
        how = wanted_plan(self.options, strategy, budget, plan)
        if (request := self._in_blocks(how.tiles)) is not self:
            return request.answered(strategy, budget, plan)
        if how.budget is None:
            forms = () if how.keeps_forms else self.forms
            answer = (self.alone if forms == self.forms else replace(self.alone, forms=forms))._chosen(how.strategy)
            answer = self._in_unasked_blocks(answer) if how.strategy == DEFAULT else answer
            if self.options.error is None or how.keeps_forms:
                return answer
            unused = GradientError(self.options.error, unused="there is no budget for which it could be")
            return replace(answer, split=replace(answer.split, plan=replace(answer.plan, gradient_error=unused)))
        if self.trace is not None and meshes.manual_mesh() is not None:
            inside = replace(self, trace=None, options=with_budget(self.options, how.budget)).answered()
            return self.alone._with(inside.request.program)._answer(inside.split)
        if self.for_budgets is not self:
            return self.for_budgets.answered(budget=how.budget)
        bytes_limit = limit(how.budget)
        if self.trace is None:
            return self.within(bytes_limit)
        bytes_limit = with_excess_logged(self.options.goal, bytes_limit)
        if self.options.error is None or not self.program.is_train or runtime.tracing():
            return self.within(bytes_limit)
        alone, examples = self.alone, Examples.of(self.trace.examples, self.trace.bound)
        return alone.within(bytes_limit, search=lambda request: request._inexact(bytes_limit, alone, examples))

    def _in_blocks(self, tiles: tuple[Tile, ...]) -> Request:
        """Return the request with the rows in blocks that a plan has, or that the options ask for."""
        if self.program.roles.tiles or not self.program.is_train:
            return self
        asking = {} if tiles or isinstance(self.options.tiles, bool) else dict(self.options.tiles)
        named = named_shapes(self.program, dict(self.options.shapes)) if asking or self.trace is not None else {}
        if not asking:
            return self.in_tiles(tiles)
        return self._with(in_asked_blocks(self.program, asking, named, backend_for(self.options.goal)))

    @cached_property
    def in_asked_blocks(self) -> Request:
        """The request with the rows in blocks that the options ask for."""
        return self._in_blocks(())

    def in_tiles(self, tiles: tuple[Tile, ...]) -> Request:
        """Return the request with rows in blocks; raises `PlanError` where the program has no such rows."""
        backend = backend_for(self.options.goal)
        return self._with(functools.reduce(lambda made, tile: made.with_tile(tile, backend), tiles, self.program))

    def _chosen(self, strategy: Strategy) -> Answer:
        """Return the cut by a strategy or a plan, of this program or of the `moved` one if it keeps less there."""
        if (moved := self.moved) is self or strategy == "save_all":
            return self._by(strategy)
        answers, is_ours = list[Answer](), isinstance(strategy, str) or getattr(strategy, "func", None) is best
        for request in (self, moved):
            with suppress(PlanError):  # a plan is for one of both programs
                answers += [request._by(strategy)] if is_ours or not answers else []
        return min(answers, key=lambda a: a.plan.bytes_saved + a.plan.bytes_spared) if answers else self._by(strategy)

    def _by(self, strategy: Strategy) -> Answer:
        if strategy == "save_all" and self.as_jax is not self and self.options.policy is None:
            return self.as_jax._by(strategy)
        if self.trace is None:
            return self._answer(halved(self.problem, strategy, self.options.passes))
        with Stage("cut", self.name) as now, runtime.paused_collection():
            problem = self.problem
            read_ms = 1e3 * now.seconds
            split = halved(problem, strategy, self.options.passes)
            now.ends(lambda: f"cut by {split.plan.strategy} in {now}, {summary(split.plan)}")
        return self._answer(replace(split, cut_ms=split.cut_ms + read_ms))

    def _answer(self, split: Split) -> Answer:
        return Answer(self, split, None if self.trace is None else Runnable(self.trace, split))

    def within(
        self, budget: Limit, to_run: bool = True, search: Callable[[Request], Fitted[Any]] | None = None
    ) -> Answer:
        """Return the cut whose compiled step holds a budget; unless it is `to_run`, weighing is enough."""
        start = time.perf_counter()
        search = search or (lambda request: request._settled(budget, self, to_run))
        fitted = self._tiled(budget, search, to_run) if budget.fraction != 0.0 and self._may_tile() else search(self)
        found, cut_ms = fitted.measured.made, 1e3 * (time.perf_counter() - start)
        return found.chosen(fitted, cut_ms)

    def _tiled(self, budget: Limit, search: Callable[[Request], Fitted[Any]], to_run: bool) -> Fitted[Any]:
        """Return the plan for a budget, of the program or of one with rows in blocks."""
        wanted = self.wanted(budget, self, to_run)
        lookup = Lookup.of(wanted)
        known, name = lookup.place.tiles, lookup.key[0]
        if name in known:
            with suppress(BudgetError):
                return search(self.in_tiles(known[name]))
        try:
            return search(self)
        except BudgetError as refusal:
            room = room_within(wanted, lookup)(None)
            ways = (lambda form: self._with(form).planner), (lambda form: search(self._with(form)))
            form, data = Priced(self.program, self.planner), data_of(self.program, self.differentiated)
            program, fitted = Tilings(form, data, room, refusal, *ways).found()
            known[name] = program.roles.tiles
            return fitted

    def _in_unasked_blocks(self, answer: Answer) -> Answer:
        """Return an answer, or one with rows in blocks if the model of the device finds that smaller and no slower."""
        if self.program.roles.tiles or self.options.tiles is not True or not self._may_tile() or self.program.layout:
            return answer
        given = self.name, self.program, answer.split.problem, answer.plan
        with runtime.paused_collection():
            data = data_of(self.program, self.differentiated)
            found = unasked(*given, lambda tile: self.in_tiles((tile,)).problem, data)
        if found is None:
            return answer
        tile, plan = found
        return answer.request.in_tiles((tile,))._by(lambda graph: plan)

    def _may_tile(self) -> bool:
        """Whether rows may run in blocks."""
        return self.options.tiles is not False and self.is_tileable

    @property
    def is_tileable(self) -> bool:
        """Whether rows could run in blocks: those that lie on several devices if it is known on which."""
        if not self.program.is_train or self.program.unreduced:
            return False
        if (mesh := meshes.manual_mesh()) is not None:
            return set(mesh.manual_axes) == set(mesh.axis_names)
        if self.program.layout is not None:
            return self.program.layout.is_known
        if self.trace is None:
            return jax.device_count() == 1
        placed = (getattr(leaf, "sharding", None) for leaf in (*self.trace.consts, *self.trace.bound.leaves))
        return all(sharding is None or len(sharding.device_set) == 1 for sharding in placed)

    def _settled(self, budget: Limit, given: Request, to_run: bool) -> Fitted[Any]:
        """Return the plan for a budget, of this program or the `moved` one, and let go of programs weighed for it."""
        requests = [self] if self.moved is self else [self.moved, self]
        wanted = [request.wanted(budget, given, to_run) for request in requests]
        try:
            if budget.fraction == 0.0:
                return min(map(settled, wanted), key=lambda fitted: fitted.measured.peak_bytes)
            return (settled_by_default(wanted[0]) if self.moved is not self else None) or _fastest(wanted)
        finally:
            for request in requests:
                request.weighing.forget()

    def wanted(self, budget: Limit, given: Request | None = None, to_run: bool = True) -> Wanted[Any]:
        """Return the facts and functions that a search for a budget needs.

        A fraction is of the plain step of the request `given`, by default this one.
        """
        return Wanted(
            name=self.name,
            program=self.program,
            options=self.options,
            budget=budget,
            graph=self.graph,
            leaves=() if self.trace is None else (*self.trace.consts, *self.trace.bound.leaves),
            way=self.weighing.way(to_run),
            planner=lambda: self.planner,
            ways=self.weighing.ways(to_run),
            take=functools.partial(self.weighing.take, to_run=to_run),
            plain=lambda: (given or self).plain_weighed,
            forms=self.forms or (),
            is_moved=self.unmoved is not None,
        )

    # -------------------------------------------------------------------------------- a bound on the error

    def _inexact(self, budget: Limit, given: Request, examples: Examples | None) -> Fitted[Any]:
        """Return the plan for a budget, with values in smaller forms where that is faster and the error permits it."""
        most, exact, refusal = self.options.error or 0.0, None, None
        try:
            exact = self._settled(budget, given, True)
        except BudgetError as error:
            refusal = error
        worth = 0.0 if exact is None else (exact.plan.seconds or 0.0) - WORTH * self.planner.common_seconds
        if exact is not None and worth <= 0:
            return telling(exact, GradientError(most, unused="the budget holds without"))
        if examples is None or any(op.effects for op in self.graph.ops):
            found, least = None, None
        else:
            found, least = self._rounded(most, budget, given, examples)
        if found is not None and least is not None and (exact is None or (found.plan.seconds or 0.0) <= worth):
            return telling(found, GradientError(most, least, examples is not None and examples.are_drawn))
        why = "it has effects, or its arguments are not known" if least is None else why_none(most, least, found)
        if exact is None:
            assert refusal is not None, "there is no exact plan"
            refusal.add_note(f"With error={most:g}, no smaller form is used: {why}.")
            raise refusal
        return telling(exact, GradientError(most, unused=why))

    def _rounded(
        self, most: float, budget: Limit, given: Request, examples: Examples
    ) -> tuple[Fitted[Any] | None, float]:
        """Return the fastest plan for a budget with values in a smaller form, and its error; see `inexact.searched`."""

        def planned(values: tuple[int, ...]) -> Fitted[Any]:
            return replace(self, forms=tuple((v, FORM) for v in values))._settled(budget, given, True)

        def rounding(fitted: Fitted[Any]) -> Rounding:
            exact = storing(fitted.measured.made.made, {})
            with Stage("measure", f"{self.name}, the error of smaller forms"):
                return Rounding.of(exact.executables, examples.bound)

        graph = formed(self.program.graph, True)
        return searched(most, may_wait(Problem.of(graph), FORM), planned, rounding)


def _fastest(wanted: Sequence[Wanted[Any]]) -> Fitted[Any]:
    """Return the fastest plan that is found for forms of a program. Raises `BudgetError` with the smallest peak."""
    found, refused = list[Fitted[Any]](), list[BudgetError]()
    for each in wanted:
        try:
            found.append(settled(each))
        except BudgetError as error:
            refused.append(error)
        if found and not found[-1].plan.seconds:  # no other is faster
            break
    if not found:
        raise min(refused, key=lambda error: error.least_bytes or 0)
    return min(found, key=lambda fitted: fitted.plan.seconds or 0.0)
