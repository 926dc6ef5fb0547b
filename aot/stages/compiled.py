"""Run a compiled cut on the caller's trees, and report XLA's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jointcut.aot.choices.target import refuse_to_run
from jointcut.aot.fitting.attempts import Attempt
from jointcut.aot.run.bound import Binder
from jointcut.aot.run.compile import Cost, Memory, ProgramMemory, Timings
from jointcut.aot.run.pullback import Pullback
from jointcut.aot.run.runner import Runner
from jointcut.aot.run.unchecked import Unchecked
from jointcut.aot.stages import debug
from jointcut.aot.stages.watched import watched
from jointcut.partition.figures import counted
from jointcut.partition.prices.flops import jaxpr_flops
from jointcut.partition.program.roles import Role
from jointcut.wrappers.arguments.tree import Bound, Statics

if TYPE_CHECKING:
    import jointcut.aot.stages.cut


@dataclass(frozen=True)
class Compiled:
    """The executables of one cut, their figures, and calls on the caller's trees.

    If the step is one program, the separate halves are compiled when first needed.

    Attributes:
        cut: the cut that was compiled.
        executables: the number of programs that `value_and_grad` runs: 1 for forward and backward together, or 2.
    """

    cut: jointcut.aot.stages.cut.Cut
    executables: int

    def __repr__(self) -> str:
        """`<Compiled loss: 1 executable, 512.3 ms>`."""
        programs = counted(self.executables, "executable")
        return f"<Compiled {self.cut.traced.name}: {programs}, {self.compile_ms:.1f} ms>"

    @property
    def compile_ms(self) -> float:
        """Wall time of compiling the programs of `value_and_grad`."""
        return sum(self.cut.jits.compile_ms.get(name, 0.0) for name in names_of(self.executables))

    @property
    def programs(self) -> tuple[Any, ...]:
        """The executables of `value_and_grad`."""
        return tuple(map(self.cut.jits.compiled, names_of(self.executables)))

    @property
    def trail(self) -> tuple[Attempt, ...]:
        """The plans that were compiled in the search for the budget, in order; empty without a budget."""
        return () if self.cut.fitted is None else self.cut.fitted.trail

    @property
    def peak_bytes(self) -> int:
        """Peak of the step, arguments and results included, by XLA's figures."""
        return self._memory_of("step").peak_bytes if self.executables == 1 else self.memory.peak_bytes

    @property
    def activation_bytes(self) -> int:
        """Memory of the step beyond arguments and results, by XLA's figures."""
        return self._memory_of("step").temp_bytes if self.executables == 1 else self.memory.activation_bytes

    @property
    def timings(self) -> Timings:
        """Milliseconds of tracing, cutting, emitting and compiling."""
        split = self.cut.split
        return Timings(self.cut.traced.trace_ms, split.cut_ms, split.emit_ms, self.compile_ms)

    @cached_property
    def memory(self) -> Memory:
        """XLA's figures for both halves and for the step."""
        graph, halves = self.cut.split.graph, self.cut.split.halves
        residuals = {r.value for r in halves.residuals if r.kind != "saved"}  # what hooks make of an input is no input
        outside = {*graph.role_inputs(Role.PRIMAL), *graph.role_outputs(Role.OUTPUT)} - residuals - {None}
        beside = sum(graph.values[v].saved_bytes for v in outside if v is not None)
        saved = self.cut.split.residual_bytes
        step = self._memory_of("step") if self.executables == 1 else None
        forward, backward = map(self._memory_of, ("forward", "backward"))
        return Memory(forward, backward, step, saved, beside, halves.host_bytes)

    def _memory_of(self, program: str) -> ProgramMemory:
        size = self.cut.split.halves.host_bytes
        on_host = {"forward": (0, size), "backward": (size, 0)}.get(program, (0, 0))
        return ProgramMemory.of(self.cut.jits.compiled(program), on_host)

    @cached_property
    def cost(self) -> Cost:
        """Floating-point operations of the two halves."""
        return Cost(jaxpr_flops(self.cut.forward), jaxpr_flops(self.cut.backward))

    @cached_property
    def _binder(self) -> Binder:
        bound = self.cut.traced.bound
        return Binder(Statics(frozenset(i for i, _ in bound.static_args), frozenset(k for k, _ in bound.static_kwargs)))

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Runner, Bound]:
        """The runner of a call, and the call; raises `CallError` if its arguments do not fit."""
        traced = self.cut.traced
        refuse_to_run(traced.name, traced.options.goal)
        signature, bound = self._binder(args, kwargs)
        signature.made.of("fits", lambda: self._fits(bound))
        if debug.is_on():
            debug.check_call(self.cut.traced, bound)
            return self.cut.checked(), bound
        return self._runner, bound

    @cached_property
    def _runner(self) -> Runner:
        """The runner of the executables, with a look at their results if the options ask for that."""
        runner, traced = self.cut.executables, self.cut.traced
        if traced.options.check is None:
            return runner
        return watched(runner, lambda: self.cut, Unchecked(traced.name))

    def _fits(self, bound: Bound) -> bool:
        """Let the wrappers check a call, except the outermost, which flattens calls."""
        wrapped = self.cut.traced.wrapped
        return replace(wrapped, trail=wrapped.trail[1:]).post_compile(lambda bound: True)(bound)

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Like `jax.value_and_grad` of the function; raises `CallError` if the arguments do not fit."""
        if not debug.is_on() and (ran := self._binder.ran("step", args, kwargs)) is not None:
            return ran[0]
        runner, bound = self._bound(args, kwargs)
        if debug.is_on():
            return runner.value_and_grad(bound)
        if self.executables == 2:
            return runner.value_and_grad_in_two(bound)
        if not any(self.cut.traced.options.donated):
            self._binder.keep("step", bound, runner.ready("step"))
        return runner.value_and_grad(bound)

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Pullback]:
        """The function's output and a pullback, from a cotangent of the output to the gradients in `argnums`.

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


def names_of(executables: int) -> tuple[str, ...]:
    """The names of the programs of `value_and_grad`."""
    return ("step",) if executables == 1 else ("forward", "backward")
