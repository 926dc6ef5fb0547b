"""Hold one cut, and compile it: the plan and the two jaxprs, the executables and calls on the caller's trees."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from jointcut.aot.export.export import export, known_platforms, platforms_for
from jointcut.aot.export.pair import Pair, residuals_of
from jointcut.aot.options.target import refuse_to_run
from jointcut.aot.planning.budgets.attempts import Attempt
from jointcut.aot.planning.budgets.inexact import one
from jointcut.aot.planning.budgets.pareto import Pareto
from jointcut.aot.planning.front import pareto
from jointcut.aot.planning.weighing import Answer, storing
from jointcut.aot.report.gradient_error import CheckedForms, checked_forms
from jointcut.aot.report.report import Report
from jointcut.aot.run.bound import Binder
from jointcut.aot.run.compile import Cost, Memory, Timings
from jointcut.aot.run.jits import Jits
from jointcut.aot.run.pullback import Pullback
from jointcut.aot.run.runnable import names_of
from jointcut.aot.run.runner import Programs, Runner
from jointcut.aot.run.unchecked import Unchecked
from jointcut.aot.stages import debug
from jointcut.aot.stages.axes import Axes, axes_of
from jointcut.aot.stages.gather import gather, measured
from jointcut.aot.stages.gradient import Gradient, gradient
from jointcut.aot.stages.measured import Measured, device_bytes, fed, refuse_to_feed, timed
from jointcut.aot.stages.watched import watched
from jointcut.aot.trace.data import Trace
from jointcut.aot.trace.signature import described
from jointcut.partition.drawing.displays import graph_page
from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.errors import CallError, message
from jointcut.partition.figures import counted
from jointcut.partition.lower.emit import Residual
from jointcut.partition.lower.listing import Schedule
from jointcut.partition.prices.flops import jaxpr_flops
from jointcut.wrappers.arguments.tree import Bound, Statics
from jointcut.wrappers.boundary import BOUNDARY, bounded_class
from jointcut.wrappers.metadata.descriptors import Descriptors
from jointcut.wrappers.metadata.schemas import ViewAndMutationMeta
from jointcut.wrappers.metadata.signatures import GraphSignature


@bounded_class()
@dataclass(frozen=True, repr=False)
class Cut(Answer):
    """A traced function cut in two, ready to be compiled."""

    def __repr__(self) -> str:
        """`<Cut loss: 3 values saved, 49152 bytes>`."""
        return (
            f"<Cut {self.traced.name}: {counted(len(self.plan.values), 'value')} saved, {self.plan.bytes_saved} bytes>"
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the graph with its cut and the saved values, for notebooks."""
        data = graph_page(self.traced.name, repr(self), self.split.graph, self.plan)
        return {"text/plain": repr(self), "text/html": framed(page(data))}

    @property
    def traced(self) -> Trace:
        """The traced call."""
        return self.made.trace

    @property
    def schedule(self) -> Schedule:
        """The steps of both halves, in the order in which they run; `print` it."""
        return self.split.schedule

    @property
    def forward(self) -> Any:
        """The forward as a closed jaxpr: `(constants, arguments) -> (outputs, saved residuals)`."""
        return self.split.forward

    @property
    def backward(self) -> Any:
        """The backward as a closed jaxpr: `(residuals, cotangents) -> gradients`."""
        return self.split.backward

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """The origin of each leading input of the backward."""
        return self.split.halves.residuals

    @property
    def metadata(self) -> ViewAndMutationMeta:
        """`Traced.metadata` with the residuals that the backward may overwrite."""
        return replace(self.traced.metadata, bw_donated_idxs=self.made.donated)

    @property
    def signature(self) -> GraphSignature:
        """The names and positions of the halves' inputs and outputs."""
        return self.made.signature

    @cached_property
    def descriptors(self) -> Descriptors:
        """The arrays of the halves, one by one: inputs, outputs, residuals, cotangents and gradients; `print` it."""
        if not self.traced.program.is_train:
            return described(self.traced)
        kept = residuals_of(self.made, self.split.halves, self.traced.consts)
        return replace(described(self.traced), residuals=kept)

    @cached_property
    def gradient(self) -> Gradient:
        """The halves in the form of TorchScript's `Gradient`."""
        traced = self.traced
        wanted = [traced.bound.places[i] for i in traced.owners]
        return gradient(self.split, traced.consts, traced.program.carries, wanted)

    # ------------------------------------------------------------------------------------- what to do with it

    def pareto(self) -> Pareto:
        """Return the front of (peak bytes, seconds, plan), one point per budget, with this plan marked."""
        return pareto(self.request, self.plan)

    def axes(self, axis: str) -> Axes:
        """Say what stays independent along an axis of the arguments, and which ops mix its rows; `print` the result.

        `axis` is the path of an argument, `"args[1]"`, whose arrays have the rows along their first axis, as in
        `tiles`. Or it is the name of a size, by the option `shapes` or by `aot.largest`: all arguments with that size
        have the rows, each along the first axis of that size. Raises `TraceError` for an axis that no argument has.
        """
        return axes_of(self.traced, self.request.program, self.split.graph, axis, self.plan)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        platforms: str | Sequence[str] | None = None,
        order: int = 1,
        overwrite: bool = False,
    ) -> Path:
        """Write this cut as an artefact that others can run, and return its path; see `Function.export`."""
        platforms = known_platforms(platforms_for(platforms, self.traced.options.goal))
        return export(Pair.of(self.made, platforms), path, platforms, order, overwrite)

    def explain(self, *, measure: bool = True) -> Report:
        """Report the saved values and why, the recomputed ops, the cost, and the cost of less memory.

        With `measure`, the step and plain JAX's are compiled, memory is by XLA's figures, and smaller budgets are
        tried. Without, nothing is compiled and all figures are predicted.
        """
        front = self.pareto()
        return gather(self.request, self.plan, front, measured(self.request, self.made) if measure else None)

    def check_forms(self, *args: Any, **kwargs: Any) -> CheckedForms:
        """Measure the error that the smaller forms of saved values (see `aot.SAVE_AS`) cause in the gradient.

        Gradients are computed at these arguments, with each form alone, with all and with none. The cotangent is 1 for
        a scalar output, or ones for the arrays of another. The halves are compiled for each. Effects of the function
        happen each time. Raises `CallError` if the arguments do not fit.
        """
        stored = self.plan.stored

        def gradients(forms: frozenset[str]) -> Any:
            own = {v: form for v, form in stored.items() if form in forms}
            main, pullback = Compiled(self if own == stored else self.storing(own), 2).vjp(*args, **kwargs)
            return pullback(jax.tree.map(one, main[0] if self.traced.options.has_aux else main))

        return checked_forms(self.plan, self.storing({}).plan.bytes_saved, gradients)

    def storing(self, forms: Mapping[int, str]) -> Cut:
        """Return the same cut with other values in smaller forms."""
        made = storing(self.made, forms)
        return Cut(self.request, made.split, made)

    def compile(self, executables: int | None = None) -> Compiled:
        """Compile for the target, or for the default backend.

        `executables` is the number of programs of `value_and_grad`: 1 (the default for a scalar output) or 2. One
        program needs less memory, since it frees residuals early; two are a little faster (`make bench` shows both).
        For a plan that offloads the default is 2 on a CPU, where one program keeps all its arrays in one memory.

        For a GPU that is not here XLA times no kernels: `explain` compares such an account with a device's memory.
        """
        executables = self._count(executables)
        self.made.compile(executables)
        return Compiled(self, executables)

    def lower(self, executables: int | None = None) -> Lowered:
        """Lower to StableHLO, without compiling; `executables` is as for `compile`."""
        return Lowered(self, self._count(executables))

    def _count(self, executables: int | None) -> int:
        if isinstance(executables, bool) or executables not in (None, 1, 2):
            raise CallError(message("executables", f"is {executables!r}.", "Give 1, 2, or nothing."))
        return self.made.count(executables)

    # ---------------------------------------------------------------------------------------- how it is run

    @property
    def jits(self) -> Jits:
        """The programs of both halves, each jitted and compiled at most once."""
        return self.made.jits

    @property
    def executables(self) -> Runner:
        """The runner of programs that are compiled for the types of the signature."""
        return self.made.executables

    @property
    def bytes_spilled(self) -> int:
        """The bytes that wait in files, without the starts of segments; 0 unless the options spill."""
        return self.made.bytes_spilled

    def checked(self) -> Runner:
        """Return a runner of one call, half by half, that checks every result; see `aot.debug`."""
        programs = debug.Checked(self.traced, self.split, self.jits)
        return self.made.running(Programs(programs.run, programs.backward))


@dataclass(frozen=True)
class Lowered:
    """The programs of `value_and_grad` of one cut in StableHLO, not compiled.

    Attributes:
        cut: the cut that was lowered.
        executables: the number of programs: 1 for forward and backward together, or 2.
    """

    cut: Cut
    executables: int

    def __repr__(self) -> str:
        """`<Lowered loss: 1 program>`."""
        return f"<Lowered {self.cut.traced.name}: {counted(self.executables, 'program')}>"

    @property
    def programs(self) -> tuple[jax.stages.Lowered, ...]:
        """The programs, as JAX lowers them."""
        return tuple(map(self.cut.jits.lowered, names_of(self.executables)))

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the text of the programs, as `jax.stages.Lowered` does; two programs one below the other."""
        return "\n".join(program.as_text(dialect, debug_info=debug_info) for program in self.programs)

    def compile(self) -> Compiled:
        """Compile the programs; see `Cut.compile`."""
        return self.cut.compile(self.executables)


@bounded_class("value_and_grad")
@dataclass(frozen=True)
class Compiled:
    """The executables of one cut, their figures, and calls on the caller's trees.

    If the step is one program, the separate halves are compiled when first needed.

    Attributes:
        cut: the cut that was compiled.
        executables: the number of programs that `value_and_grad` runs: 1 for forward and backward together, or 2.
    """

    cut: Cut
    executables: int

    def __repr__(self) -> str:
        """`<Compiled loss: 1 executable, 512.3 ms>`."""
        programs = counted(self.executables, "executable")
        return f"<Compiled {self.cut.traced.name}: {programs}, {self.compile_ms:.1f} ms>"

    @property
    def compile_ms(self) -> float:
        """Wall time of compiling the programs of `value_and_grad`."""
        return self.cut.made.compile_ms(self.executables)

    @property
    def programs(self) -> tuple[Any, ...]:
        """The executables of `value_and_grad`."""
        return self.cut.made.programs(self.executables)

    @property
    def trail(self) -> tuple[Attempt, ...]:
        """The plans that were compiled in the search for the budget, in order; empty without a budget."""
        return () if self.cut.fitted is None else self.cut.fitted.trail

    @property
    def peak_bytes(self) -> int:
        """Peak of the step, arguments and results included, by XLA's figures."""
        return self.cut.made.peak_bytes(self.executables)

    @property
    def activation_bytes(self) -> int:
        """Memory of the step beyond arguments and results, by XLA's figures."""
        return self.cut.made.activation_bytes(self.executables)

    @property
    def timings(self) -> Timings:
        """Milliseconds of tracing, cutting, emitting and compiling."""
        split = self.cut.split
        return Timings(self.cut.traced.trace_ms, split.cut_ms, split.emit_ms, self.compile_ms)

    @cached_property
    def memory(self) -> Memory:
        """XLA's figures for both halves and for the step."""
        return self.cut.made.memory(self.executables)

    @cached_property
    def cost(self) -> Cost:
        """Floating-point operations of the two halves."""
        return Cost(jaxpr_flops(self.cut.forward), jaxpr_flops(self.cut.backward))

    @cached_property
    def _binder(self) -> Binder:
        bound = self.cut.traced.bound
        return Binder(Statics(frozenset(i for i, _ in bound.static_args), frozenset(k for k, _ in bound.static_kwargs)))

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Runner, Bound]:
        """Return the runner of a call, and the call; raises `CallError` if its arguments do not fit."""
        traced = self.cut.traced
        refuse_to_run(traced.name, traced.options.goal)
        signature, bound = self._binder(args, kwargs)
        signature.made.of("fits", lambda: self._fits(bound))
        if debug.is_on():
            debug.check_call(traced, bound)
            return self.cut.checked(), bound
        return self._runner, bound

    @cached_property
    def _runner(self) -> Runner:
        """The runner of the executables, with a look at their results if the options ask for that."""
        runner, traced = self.cut.executables, self.cut.traced
        if traced.options.check is None:
            return runner
        return watched(runner, lambda: self.cut.made, Unchecked(traced.name))

    def _fits(self, bound: Bound) -> bool:
        """Let the wrappers check a call, except the outermost, which flattens calls."""
        wrapped = self.cut.traced.wrapped
        return replace(wrapped, trail=wrapped.trail[1:]).post_compile(lambda bound: True)(bound)

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Like `jax.value_and_grad` of the function; raises `CallError` if the arguments do not fit."""
        if not debug.is_on() and (ran := self._binder.ran("step", args, kwargs)) is not None:
            return ran[0]
        with BOUNDARY:
            runner, bound = self._bound(args, kwargs)
            if debug.is_on():
                return runner.value_and_grad(bound)
            if self.executables == 2:
                return runner.value_and_grad_in_two(bound)
            if not any(self.cut.traced.options.donated):
                self._binder.keep("step", bound, runner.ready("step"))
            return runner.value_and_grad(bound)

    def measure(self, *args: Any, rounds: int = 5, feed: bool = False, **kwargs: Any) -> Measured:
        """Run the step, and return what it takes beside what the model predicted; `print` the result.

        The step runs once more than `rounds`, on copies of the arrays, so that none is given up. Its effects happen
        each time. With `feed` the time of the fastest run corrects the rates of this device, on which the seconds of
        later plans rest, and the result says so. Raises `CallError` if the arguments do not fit, or if there are no
        rates to correct.
        """
        front, name = self.cut.pareto(), self.cut.traced.name
        assert front.chosen is not None, "the front of a cut has its plan"
        if feed:
            refuse_to_feed(self.cut.traced.options)
        run_seconds = timed(self.value_and_grad, args, kwargs, rounds)
        predicted_bytes, seconds, _ = front.chosen
        known = jax.local_devices()[0].device_kind, predicted_bytes, self.peak_bytes, device_bytes()
        found = Measured(name, *known, front.common_seconds + seconds, run_seconds)
        return fed(self.cut.request.planner, found) if feed else found

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Pullback]:
        """Return the function's output and a pullback, from a cotangent of the output to the gradients in `argnums`.

        As in `jax.grad`, these are one tree, or a tuple if `argnums` is a tuple. (The pullback of `Function.vjp`
        returns one tree per positional argument, as in `jax.vjp`.)

        The backward reuses the residuals' memory for the gradients, so the pullback can be called only once;
        `pullback(cotangent, keep_residuals=True)` keeps them for another call.
        """
        runner, bound = self._bound(args, kwargs)
        main, aux, pullback = runner.vjp(bound, overwrites=not debug.is_on())
        return ((main, aux) if self.cut.traced.options.has_aux else main), pullback

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        """Run the forward half: the function's output (with `has_aux` a pair) and the flat residuals."""
        _, bound = self._bound(args, kwargs)
        bound = bound.copied()
        outputs, residuals = self.cut.executables.forward(bound)
        return self.cut.traced.call.result(outputs, bound), residuals

    def backward(self, residuals: Sequence[Any], *cotangents: Any) -> list[Any]:
        """Run the backward half on flat residuals, which it may overwrite, and cotangents.

        There is one cotangent per output that can carry one. Returns the flat gradients of the differentiated leaves.
        """
        refuse_to_run(self.cut.traced.name, self.cut.traced.options.goal)
        return list(self.cut.executables.programs.backward(residuals, cotangents, False))
