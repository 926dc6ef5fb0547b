"""Keep one frozen record for each stage a function passes through.

`Traced` (the joint program), `Cut` (the plan and its two jaxprs) and `Compiled` (the executables and their figures)
extend JAX's own `Traced`, `Lowered`, `Compiled`: `f.trace(*args).partition().compile()`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jointcut.aot.compiled import Compiled
from jointcut.aot.cut import CutCall
from jointcut.aot.export import PLATFORMS, export, known_platforms
from jointcut.aot.fit import CALIBRATION, Weighed, planner_for
from jointcut.aot.limits import Budget, Limit, limit
from jointcut.aot.notes import Held
from jointcut.aot.options import wanted_plan
from jointcut.aot.pair import Pair
from jointcut.aot.pareto import Pareto, ParetoPoint
from jointcut.aot.progress import Stage
from jointcut.aot.report.gather import Measured, gather
from jointcut.aot.report.report import Report
from jointcut.aot.searches import Wanted, settled, summary, way
from jointcut.aot.traced import TracedCall
from jointcut.partition import jaxprs
from jointcut.partition.budget import Candidate, Planner, ranked
from jointcut.partition.errors import CallError, message
from jointcut.partition.figures import counted
from jointcut.partition.plan import Plan
from jointcut.partition.split import Strategy, split


@dataclass(frozen=True)
class Traced(TracedCall):
    """A function traced for one signature into a joint forward and backward program, ready to be cut.

    Of PyTorch's stage records it answers to `AOTState` and `AOTGraphCapture`, as `Cut` does to what its partitioner
    returns. They hold jaxprs, which have no JSON form: `metadata`, `signature` and `options` have.
    """

    def __repr__(self) -> str:
        """`<Traced loss: 7 inputs, 1 output, 143 equations>`."""
        inner, _ = jaxprs.opened(self.joint)
        inputs, outputs = len(self.bound.leaves), self.program.results.num_returned
        return (
            f"<Traced {self.name}: {counted(inputs, 'input')}, {counted(outputs, 'output')}, "
            f"{counted(len(inner.eqns), 'equation')}>"
        )

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
            graph = self.graph
            read_ms = 1e3 * now.seconds
            made = split(self.program.closed, self.program.roles, strategy, graph=graph)
            now.ends(lambda: f"cut by {made.plan.strategy} in {now}, {summary(made.plan)}")
        return Cut(self, replace(made, cut_ms=made.cut_ms + read_ms))

    @cached_property
    def planner(self) -> Planner:
        """The plans of this program, priced by the cost model of the options, or by what the device was measured to do.

        Raises `PlanError` where that model gives a price that is none.
        """
        return planner_for(self.graph, self.options)

    @cached_property
    def _weighed(self) -> dict[Any, Weighed[Compiled]]:
        """The plans that were compiled, for other budgets."""
        return {}

    def _within(self, budget: Limit) -> Cut:
        """The cut whose compiled step holds a budget."""
        start = time.perf_counter()
        found = settled(self._wanted(budget))
        made = found.measured.made.cut.split
        return Cut(self, replace(made, plan=found.plan, cut_ms=1e3 * (time.perf_counter() - start)), found)

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
                made = Compiled(self._cut(lambda graph: plan), executables, held.compile_ms)
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


@dataclass(frozen=True, repr=False)
class Cut(CutCall):
    """A traced function cut in two, ready to be compiled."""

    traced: Traced

    def pareto(self) -> Pareto:
        """What each budget would cost, with this plan marked: its front of (peak bytes, seconds, plan)."""
        return self.traced._pareto(self.plan)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        platforms: str | Sequence[str] = PLATFORMS,
        order: int = 1,
        overwrite: bool = False,
    ) -> Path:
        """Write this cut as an artefact that others can run, and return where it is; see `Function.export`."""
        platforms = known_platforms(platforms)
        return export(Pair.of(self, platforms), path, platforms, order, overwrite)

    def explain(self, *, measure: bool = True) -> Report:
        """What is saved and why, what is computed again, what both cost, and what less memory would.

        With `measure` the step is compiled, and plain JAX's beside it, and the memory is XLA's own account; smaller
        budgets are tried, and told where they hold. Without, nothing is compiled and all of it is predicted.
        """
        traced = self.traced
        front = self.pareto()
        measured = None
        if measure:
            run = None if self.plan.strategy == "save_all" else self.compile()
            with Stage("compile", f"{traced.name}, plain JAX"):
                plain = traced.plain_program()
            measured = Measured.of(run, plain)
        return gather(self, traced.planner, front, traced._point, lambda b: traced.partition(budget=b), measured)

    def compile(self, executables: int | None = None) -> Compiled:
        """Compile for the default backend.

        `executables` says how `value_and_grad` runs: 1 (the default where the output is a scalar) or 2. One program
        holds less memory, since it frees residuals as it goes; two are a little faster (`make bench` shows both).
        """
        if isinstance(executables, bool) or executables not in (None, 1, 2):
            raise CallError(message("executables", f"is {executables!r}.", "Give 1, 2, or nothing."))
        executables = executables or (1 if self.traced.is_scalar else 2)
        made = Compiled(self, executables)
        if self.fitted is not None and self.fitted.measured.made.executables == executables:
            made = replace(self.fitted.measured.made, cut=self)
            if made.is_made:
                return made
        with Stage("compile", self.traced.name) as now:
            _ = made.programs
        return made.timed(1e3 * now.seconds)
