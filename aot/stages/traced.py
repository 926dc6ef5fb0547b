"""Hold one traced call, for all later stages.

`Traced`, `Cut` and `Compiled` correspond to JAX's stages `Traced`, `Lowered`, `Compiled`:
`f.trace(*args).partition().compile()`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.options.limits import Budget
from jointcut.aot.options.options import check_error
from jointcut.aot.options.policies import GivenPolicy, read_policy
from jointcut.aot.planning.budgets.pareto import Pareto
from jointcut.aot.planning.front import pareto
from jointcut.aot.planning.request import Request
from jointcut.aot.planning.together import answered
from jointcut.aot.run.compile import ProgramMemory, compiled
from jointcut.aot.stages.axes import Axes, axes_of
from jointcut.aot.stages.cut import Cut
from jointcut.aot.stages.measured import MeasuredPlans, evenly
from jointcut.aot.trace.data import Trace
from jointcut.partition.drawing.displays import graph_page
from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.errors import CallError, TraceError, message
from jointcut.partition.figures import counted
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.sizes import is_symbolic
from jointcut.partition.search.budget import Planner
from jointcut.partition.split import Strategy
from jointcut.wrappers.boundary import bounded_class


@bounded_class()
@dataclass(frozen=True, repr=False)
class Traced(Trace):
    """A function traced for one signature into a joint forward and backward program, ready to be cut.

    It corresponds to PyTorch's `AOTState` and `AOTGraphCapture`, and `Cut` to the result of its partitioner. They hold
    jaxprs, which have no JSON form; `metadata`, `signature` and `options` have one.
    """

    def __repr__(self) -> str:
        """`<Traced loss: 7 inputs, 1 output, 143 equations>`."""
        inner, _ = jaxprs.opened(self.joint)
        inputs, outputs = len(self.bound.leaves), self.program.results.num_returned
        return (
            f"<Traced {self.name}: {counted(inputs, 'input')}, {counted(outputs, 'output')}, "
            f"{counted(len(inner.eqns), 'equation')}>"
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the joint program as a graph, for notebooks."""
        return {"text/plain": repr(self), "text/html": framed(page(graph_page(self.name, repr(self), self.graph)))}

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
        the policy of the options. Raises `StrategyError`, `PlanError`, or `BudgetError` with the smallest peak found,
        and `TraceError` for an argument with symbolic sizes.
        """
        for path, leaf in zip(self.bound.paths(), self.bound.leaves, strict=True):
            if is_symbolic(getattr(leaf, "shape", ())):
                cure = "Trace with numbers, or export for all sizes: aot.function(...).export(path, ..., sizes={...})."
                raise TraceError(message(path, "has sizes that are names, and a plan needs numbers.", cure))
        if policy is not None:
            rules = read_policy(policy)
            options = replace(self.options, policy=rules)
            check_error(options)
            return replace(self, options=options).partition(strategy, budget=budget, plan=plan)
        return Cut(**vars(answered(self.request, strategy, budget, plan)))

    def pareto(self) -> Pareto:
        """Return the front of the budgets: plans that no other plan beats in both peak and time, by the model."""
        return pareto(self.request)

    def measure(self, *args: Any, plans: int = 3, rounds: int = 5, **kwargs: Any) -> MeasuredPlans:
        """Compile and run several plans, and return what each takes beside its prediction; `print` the result.

        These are the plan of the options, one that keeps what plain JAX keeps, and at most `plans` of the front, from
        the fastest to the least. Each runs on copies of the arrays, `rounds` times and once more. Raises `CallError` if
        the arguments do not fit, or for a number of rounds or plans that is no whole number from 1 on.
        """
        if isinstance(plans, bool) or not isinstance(plans, int) or plans < 1:
            raise CallError(message("plans", f"is {plans!r}.", "Give a whole number from 1 on, such as 3."))
        front = self.pareto().points
        cuts = {"chosen": self.partition(), "as plain JAX": self.partition("save_all")}
        for position in evenly(len(front), plans):
            cuts[f"front, {position + 1} of {len(front)}"] = self.partition(plan=front[position].plan)
        steps = tuple(cut.compile().measure(*args, rounds=rounds, **kwargs) for cut in cuts.values())
        return MeasuredPlans(tuple(cuts), tuple(cut.plan.bytes_saved for cut in cuts.values()), steps)

    def axes(self, axis: str) -> Axes:
        """Say what stays independent along an axis of the arguments, and which ops mix its rows, as `Cut.axes` does.

        `axis` may be the name of a size of `aot.shapes`, or of the option `shapes`.
        """
        return axes_of(self, self.program, self.program.graph, axis)

    # -------------------------------------------------------------------------------------------- the input of planning

    @cached_property
    def request(self) -> Request:
        """The request for a plan of this call."""
        return Request.of(self)

    @property
    def graph(self) -> Graph:
        """The joint program as ops and values, the bodies of its loops joined, with the cheaper forms of values."""
        return self.request.graph

    @property
    def problem(self) -> Problem:
        """The planning problem of the joint program for its target, under the options' policy."""
        return self.request.problem

    @property
    def planner(self) -> Planner:
        """The plans of this program, priced by the options' cost model, or by the device's measured rates.

        Raises `PlanError` if the model returns an invalid price.
        """
        return self.request.planner

    @property
    def plain_memory(self) -> ProgramMemory:
        """XLA's memory figures for `jax.jit(jax.value_and_grad(f))`, which is compiled only to read them."""
        return self.request.plain_weighed.result()

    @cached_property
    def plain_program(self) -> jax.stages.Compiled:
        """`jax.jit(jax.value_and_grad(f))`, compiled from the joint program uncut."""
        return compiled(self.plain_lowered, self.options.goal)
