"""Run a compiled cut in the caller's own trees, and tell what XLA says of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from jointcut.aot import checked
from jointcut.aot import compile as compiling
from jointcut.aot.backward import CompiledPullback
from jointcut.aot.compile import Cost, Memory, ProgramMemory, Timings
from jointcut.aot.cut import CutCall
from jointcut.aot.fit import Attempt
from jointcut.aot.traced import unfinished
from jointcut.partition import jaxprs, verify
from jointcut.partition.figures import counted
from jointcut.partition.flops import jaxpr_flops
from jointcut.partition.roles import Role
from jointcut.wrappers import alias
from jointcut.wrappers.table import Table
from jointcut.wrappers.tree import Bound, struct


@dataclass(frozen=True)
class Compiled:
    """The executables of one cut, their figures, and calls in the caller's own trees.

    The halves of a one-program step are compiled when they are first asked for.

    Attributes:
        cut: what was compiled.
        executables: how `value_and_grad` runs: 1 where forward and backward are one program, 2 where they are two.
        compile_ms: wall time of compiling what `value_and_grad` runs.
    """

    cut: CutCall
    executables: int
    compile_ms: float = 0.0
    _made: Table[Any] = field(default_factory=Table, repr=False, compare=False)

    def __repr__(self) -> str:
        """`<Compiled loss: 1 executable, 512.3 ms>`."""
        programs = counted(self.executables, "executable")
        return f"<Compiled {self.cut.traced.name}: {programs}, {self.compile_ms:.1f} ms>"

    def timed(self, compile_ms: float) -> Compiled:
        """The same programs with the time that compiling took."""
        return Compiled(self.cut, self.executables, compile_ms, self._made)

    @property
    def is_made(self) -> bool:
        """Whether anything was compiled so far."""
        return bool(self._made)

    @property
    def programs(self) -> tuple[Any, ...]:
        """The executables that `value_and_grad` runs."""
        return (self._step,) if self.executables == 1 else (self._forward, self._backward)

    @property
    def _step(self) -> Any:
        """The one program, in the caller's own trees: JAX's call path flattens them and checks every leaf."""
        return self._made.of("step", self._compiled_step)

    def _compiled_step(self) -> Any:
        made, traced = self.cut.split, self.cut.traced
        ones = traced.ones()

        def step(consts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            bound = replace(traced.bound, leaves=tuple(jax.tree.leaves((args, kwargs))))
            outputs, gradients = verify.run(made.halves, made.graph, [*consts, *bound.unique], ones)
            if not self._in_trees:
                return alias.replaced(outputs, traced.handed_back), gradients
            return unfinished(traced, traced.value_and_gradients(outputs, gradients, bound))

        args, kwargs = traced.bound.arguments
        positions, names = traced.options.donated
        program = jax.jit(
            step,
            keep_unused=traced.options.keep_unused,
            donate_argnums=tuple(1 + i for i, n in enumerate(traced.bound.dynamic) if n in positions),
            donate_argnames=tuple(name for name in names if name in kwargs),
        )
        lowered = program.lower(list(map(struct, traced.consts)), *args, **kwargs)
        return lowered.compile()

    @property
    def _in_trees(self) -> bool:
        """Whether the one program takes and gives the caller's own trees: so where they hold arrays alone."""
        return not self.cut.traced.bound.holds_more

    @property
    def _forward(self) -> Any:
        closed = self.cut.split.forward
        keep = self.cut.traced.options.keep_unused
        out = self.cut.traced.handed_back

        def run(*flat: Any) -> list[Any]:
            return [x for i, x in enumerate(jaxprs.evaluate(closed, *flat)) if i not in out]

        return self._made.of("forward", lambda: compiling.compiled(run, self._structs(), keep))

    @property
    def _backward(self) -> Any:
        return self._backward_that(overwrite=True)

    def _backward_that(self, overwrite: bool) -> Any:
        name = "backward" if overwrite else "keeping backward"
        return self._made.of(name, lambda: self._compiled_backward(overwrite))

    def _compiled_backward(self, overwrite: bool) -> Any:
        made = self.cut.split
        closed = made.backward
        gone = compiling.donated(made.halves) if overwrite else ()
        return compiling.compiled(_runner(closed), self._residual_structs(closed), True, gone)

    def _residual_structs(self, closed: Any) -> list[Any]:
        """What the backward is lowered for: residuals lie where the forward leaves them."""
        traced, given = self.cut.traced, self._structs()
        structs = [s if jaxprs.is_reference(s) else s.update(sharding=None) for s in jaxprs.input_structs(closed)]
        if traced.program.uses_references:  # JAX counts references among the results whose places it tells
            references = {i: r.index for i, r in enumerate(self.cut.residuals) if jaxprs.is_reference(structs[i])}
            return [given[references[i]] if i in references else s for i, s in enumerate(structs)]
        left = self._with_handed_back(
            list(self._forward.output_shardings), [getattr(s, "sharding", None) for s in given]
        )
        count = len(traced.program.results.avals)
        for i, r in enumerate(self.cut.residuals):
            places = {"input": [getattr(s, "sharding", None) for s in given], "output": left, "saved": left[count:]}
            where = places[r.kind][r.index]
            if where is not None and len(where.device_set) > 1:
                structs[i] = structs[i].update(sharding=where)
        return structs

    def _structs(self) -> list[Any]:
        traced = self.cut.traced
        return [*map(struct, traced.consts), *traced.bound.unique]

    def _with_handed_back(self, results: list[Any], flat: Sequence[Any]) -> list[Any]:
        """The forward's results, with what stays out of the program in its place."""
        traced = self.cut.traced
        start = len(traced.consts)
        return alias.inserted(results, traced.handed_back, [flat[start + p] for p in traced.bound.places])

    @property
    def trail(self) -> tuple[Attempt, ...]:
        """The plans that were compiled on the way to the budget, in order; none without a budget."""
        return () if self.cut.fitted is None else self.cut.fitted.trail

    @property
    def peak_bytes(self) -> int:
        """The most that the step holds at once, arguments and results included, by XLA's account."""
        return ProgramMemory.of(self._step).peak_bytes if self.executables == 1 else self.memory.peak_bytes

    @property
    def activation_bytes(self) -> int:
        """What the step needs beyond arguments and results, by XLA's account."""
        return ProgramMemory.of(self._step).temp_bytes if self.executables == 1 else self.memory.activation_bytes

    @property
    def timings(self) -> Timings:
        """Milliseconds that tracing, cutting, emitting and compiling took."""
        made = self.cut.split
        return Timings(self.cut.traced.trace_ms, made.cut_ms, made.emit_ms, self.compile_ms)

    @cached_property
    def memory(self) -> Memory:
        """XLA's figures for both halves and for the step."""
        graph, halves = self.cut.split.graph, self.cut.split.halves
        taken = {r.value for r in halves.residuals}
        held = {*graph.role_inputs(Role.PRIMAL), *graph.role_outputs(Role.OUTPUT)} - taken - {None}
        beside = sum(graph.values[v].saved_bytes for v in held if v is not None)
        saved = self.cut.split.residual_bytes
        step = ProgramMemory.of(self._step) if self.executables == 1 else None
        return Memory(ProgramMemory.of(self._forward), ProgramMemory.of(self._backward), step, saved, beside)

    @cached_property
    def cost(self) -> Cost:
        """Floating-point operations of the two halves."""
        return Cost(jaxpr_flops(self.cut.forward), jaxpr_flops(self.cut.backward))

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.value_and_grad` of the function; raises `CallError` where the arguments do not fit."""
        traced = self.cut.traced
        if checked.is_on():
            return traced.wrapped.post_compile(lambda bound: self._checked(bound).value_and_grad())(*args, **kwargs)
        if self.executables == 2 or not self._in_trees or traced.bound.statics or traced.bound.duplicates:
            return traced.wrapped.post_compile(self._run_value_and_grad)(*args, **kwargs)
        try:  # JAX compares the arguments with those the program was made for, in no time
            result = self._step(list(traced.consts), *args, **kwargs)
        except (TypeError, ValueError) as error:
            return traced.wrapped.post_compile(functools.partial(self._again, error))(*args, **kwargs)
        if type(result) is alias.Unfinished:
            return alias.finished(result.result, jax.tree.leaves((args, kwargs)))
        return result

    def _checked(self, bound: Bound) -> checked.Checked:
        """One call in debug mode."""
        checked.check_call(self.cut.traced, bound)
        return self.cut.looked_at(bound)

    def _again(self, error: Exception, bound: Bound) -> Any:
        """Run with the arrays of objects that gave them; raise an error of JAX's where there are none."""
        if not bound.has_objects:
            raise error
        return self._run_value_and_grad(bound)

    def _run_value_and_grad(self, bound: Bound) -> Any:
        traced = self.cut.traced
        if self.executables == 1:
            args, kwargs = bound.arguments
            result = self._step(list(traced.consts), *args, **kwargs)
            if self._in_trees:
                return result
            outputs, gradients = result
            return traced.value_and_gradients(alias.finished(outputs, bound.leaves), gradients, bound)
        outputs, residuals = self._run_forward(traced.flat(bound))
        gradients = self._backward(*residuals, *traced.ones())
        return traced.value_and_gradients(outputs, gradients, bound)

    def _run_forward(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = list(map(alias.as_array, self._with_handed_back(list(self._forward(*flat)), flat)))
        count = len(self.cut.traced.program.results.avals)
        places = {"input": flat, "output": results[:count], "saved": results[count:]}
        return results[:count], [places[r.kind][r.index] for r in self.cut.residuals]

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., Any]]:
        """The function's output and a pullback: cotangent of the output in, gradients of the arguments in.

        They come as `jax.grad` gives them: one tree, or a tuple where
        `argnums` is a tuple. The pullback of the function itself gives one tree per positional argument, as `jax.vjp`.

        The backward turns the residuals' memory into the gradients, so that the pullback may be called once;
        `pullback(cotangent, keep_residuals=True)` leaves them for another call.
        """
        return self.cut.traced.wrapped.post_compile(self._run_vjp)(*args, **kwargs)

    def _run_vjp(self, bound: Bound) -> tuple[Any, Callable[..., Any]]:
        if checked.is_on():
            return self._checked(bound).vjp_in_argnums()
        main, residuals = self._run_forward_in_trees(bound)
        return main, CompiledPullback(self, residuals, bound)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        """Run the forward half: the function's output (with `has_aux` a pair) and the flat residuals."""
        return self.cut.traced.wrapped.post_compile(self._run_forward_in_trees)(*args, **kwargs)

    def _run_forward_in_trees(self, bound: Bound) -> tuple[Any, list[Any]]:
        traced = self.cut.traced
        outputs, residuals = self._run_forward(traced.flat(bound.copied()))
        main, aux = traced.results(outputs, bound)
        return ((main, aux) if traced.options.has_aux else main), residuals

    def backward(self, residuals: Sequence[Any], *cotangents: Any) -> list[Any]:
        """Run the backward half on flat residuals, which it may overwrite, and one cotangent per output that can
        carry one; returns the flat gradients of the differentiated leaves.
        """
        return self._backward(*residuals, *cotangents)


def _runner(closed: Any) -> Callable[..., list[Any]]:
    return lambda *flat: jaxprs.evaluate(closed, *flat)
