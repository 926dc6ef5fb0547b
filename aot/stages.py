"""Keep one frozen record for each stage a function passes through.

`Traced` (the joint program), `Cut` (the plan and its two jaxprs) and `Compiled` (the executables and their figures)
extend JAX's own `Traced`, `Lowered`, `Compiled`: `f.trace(*args).partition().compile()`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jointcut.aot import compile as compiling
from jointcut.aot.compile import Cost, Memory, ProgramMemory
from jointcut.aot.joint import Joint
from jointcut.aot.options import Options
from jointcut.partition import jaxprs
from jointcut.partition.emit import Residual
from jointcut.partition.errors import CallError, TraceError, message
from jointcut.partition.graph import Graph
from jointcut.partition.loops import read
from jointcut.partition.plan import Plan
from jointcut.partition.roles import Role
from jointcut.partition.split import Split, Strategy, split
from jointcut.wrappers.convention import Convention
from jointcut.wrappers.stack import Wrapped
from jointcut.wrappers.tree import Bound, struct


@dataclass(frozen=True)
class Timings:
    """Milliseconds of wall time that each stage took; None where it has not run."""

    trace_ms: float
    cut_ms: float | None = None
    emit_ms: float | None = None
    compile_ms: float | None = None


@dataclass(frozen=True)
class Traced:
    """A function traced for one signature into a joint forward and backward program.

    `joint` is the closed jaxpr `(constants, arguments, cotangents) -> (outputs, gradients)`, `convention` says which
    flat position is which. `wanted` are the flat argument positions that are differentiated, `wrapped` what the
    wrappers made of the function.
    """

    name: str
    options: Options
    bound: Bound
    wrapped: Wrapped
    program: Joint
    wanted: tuple[int, ...]
    trace_ms: float

    @property
    def convention(self) -> Convention:
        """What each flat argument means to the caller."""
        return self.wrapped.target.convention

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
        """Shapes and dtypes of the flat arguments."""
        return tuple(slot.struct for slot in self.convention.inputs)

    def partition(self, strategy: Strategy | None = None) -> Cut:
        """Choose what the forward saves for the backward, and write the two jaxprs.

        `strategy` is `"min_cut"`, `"save_all"` or a function from the `Graph` to a `Plan`; by default that of the
        function's options. Raises `StrategyError` or `PlanError`.
        """
        start = time.perf_counter()
        graph = self.graph
        read_ms = 1e3 * (time.perf_counter() - start)
        with jaxprs.paused_collection():
            made = split(self.program.closed, self.program.roles, strategy or self.options.strategy, graph=graph)
        return Cut(self, replace(made, cut_ms=made.cut_ms + read_ms))

    def flat(self, bound: Bound) -> list[Any]:
        """The flat inputs of the programs for one call."""
        return [*self.consts, *bound.leaves]

    def results(self, outputs: Sequence[Any]) -> tuple[Any, Any]:
        """The function's output and its aux (None without `has_aux`) in the caller's trees."""
        count = len(outputs) - self.program.results.num_aux
        main = jax.tree.unflatten(self.program.results.out_tree, outputs[:count])
        aux = None
        if self.program.results.aux_tree is not None:
            aux = jax.tree.unflatten(self.program.results.aux_tree, outputs[count:])
        return main, aux

    def gradients(self, flat: Sequence[Any], positions: Sequence[int], bound: Bound) -> tuple[Any, ...]:
        """One tree per position of `positions`; a leaf that carries no derivative gets a `float0` zero."""
        by_leaf = dict(zip(self.wanted, flat, strict=True))
        out = []
        fixed = {i for i, _ in bound.static_args}
        for place in positions:
            if place in fixed:
                out.append(None)
                continue
            leaves = [by_leaf[i] if i in by_leaf else _float0(bound.leaves[i]) for i in bound.spans[place]]
            out.append(jax.tree.unflatten(bound.argument_tree(place), leaves))
        return tuple(out)

    @property
    def is_scalar(self) -> bool:
        """Whether the function returns one real number (and aux), so that `value_and_grad` is defined."""
        main = self.program.results.avals[: len(self.program.results.avals) - self.program.results.num_aux]
        bare = self.program.results.out_tree == jax.tree.structure(0)
        return bare and main[0].shape == () and jaxprs.is_real(main[0].dtype)

    def one(self) -> Any:
        """The cotangent of a scalar output; raises `TraceError` where the output is none."""
        outs = self.program.results.avals[: len(self.program.results.avals) - self.program.results.num_aux]
        if not self.is_scalar:
            shown = ", ".join(a.str_short() for a in outs) or "nothing"
            cure = (
                "Reduce it to one real number (jnp.mean, jnp.sum), return extras as aux with has_aux=True, or use vjp."
            )
            raise TraceError(message(self.name, f"returned {shown}: value_and_grad needs a real scalar.", cure))
        return jaxprs.typed(1, outs[0])


def _float0(leaf: Any) -> np.ndarray:
    return np.zeros(np.shape(leaf), jax.dtypes.float0)


@dataclass(frozen=True)
class Cut:
    """A traced function cut in two."""

    traced: Traced
    split: Split

    @property
    def plan(self) -> Plan:
        """What is saved, what is recomputed, and why."""
        return self.split.plan

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
        """Where each leading input of the backward comes from."""
        return self.split.halves.residuals

    def compile(self, executables: int | None = None) -> Compiled:
        """Compile for the default backend.

        `executables` says how `value_and_grad` runs: 1 (the default where the output is a scalar) or 2. One program
        holds less memory, since it frees residuals as it goes; two are a little faster (`make bench` shows both).
        """
        if isinstance(executables, bool) or executables not in (None, 1, 2):
            raise CallError(message("executables", f"is {executables!r}.", "Give 1, 2, or nothing."))
        start = time.perf_counter()
        made = Compiled(self, executables or (1 if self.traced.is_scalar else 2))
        _ = made.programs
        return made.timed(1e3 * (time.perf_counter() - start))


@dataclass(frozen=True)
class Compiled:
    """The executables of one cut, their figures, and calls in the caller's own trees.

    `executables` tells how `value_and_grad` runs: 1 where forward and backward are one program, 2 where they are two.
    The halves of a one-program step are compiled when they are first asked for.
    """

    cut: Cut
    executables: int
    compile_ms: float = 0.0
    _made: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def timed(self, compile_ms: float) -> Compiled:
        """The same programs with the time that compiling took."""
        return Compiled(self.cut, self.executables, compile_ms, self._made)

    @property
    def programs(self) -> tuple[Any, ...]:
        """The executables that `value_and_grad` runs."""
        return (self._step,) if self.executables == 1 else (self._forward, self._backward)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @property
    def _step(self) -> Any:
        """The one program, in the caller's own trees: JAX's call path flattens them and checks every leaf."""
        return self._once("step", self._compiled_step)

    def _compiled_step(self) -> Any:
        made, traced = self.cut.split, self.cut.traced
        one = traced.one()

        def step(consts: Sequence[Any], arguments: Any) -> Any:
            flat = [*consts, *jax.tree.leaves(arguments)]
            outputs, gradients = compiling.run_step(made, compiling.halves_for(made, True), flat, [one])
            return value_and_gradients(traced, outputs, gradients, traced.bound)

        structs = (list(map(struct, traced.consts)), traced.bound.arguments)
        return compiling.compiled(step, structs, traced.options.keep_unused)

    @property
    def _forward(self) -> Any:
        closed = compiling.halves_for(self.cut.split, True).forward
        keep = self.cut.traced.options.keep_unused
        run = _runner(closed)
        return self._once("forward", lambda: compiling.compiled(run, self._structs(), keep))

    @property
    def _backward(self) -> Any:
        made = self.cut.split
        closed = compiling.halves_for(made, True).backward
        structs = self._residual_structs(closed)
        gone = compiling.donated(made.halves)
        return self._once("backward", lambda: compiling.compiled(_runner(closed), structs, True, gone))

    def _residual_structs(self, closed: Any) -> list[Any]:
        """What the backward is lowered for: residuals lie where the forward leaves them."""
        count = len(self.cut.traced.program.results.avals)
        left, given = list(self._forward.output_shardings), self._structs()
        structs = [s.update(sharding=None) for s in jaxprs.input_structs(closed)]
        for i, r in enumerate(self.cut.residuals):
            places = {"input": [getattr(s, "sharding", None) for s in given], "output": left, "saved": left[count:]}
            where = places[r.kind][r.index]
            if where is not None and len(where.device_set) > 1:
                structs[i] = structs[i].update(sharding=where)
        return structs

    def _structs(self) -> list[Any]:
        traced = self.cut.traced
        return [*map(struct, traced.consts), *traced.bound.leaves]

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
        saved = self.cut.plan.bytes_saved
        step = ProgramMemory.of(self._step) if self.executables == 1 else None
        return Memory(ProgramMemory.of(self._forward), ProgramMemory.of(self._backward), step, saved, beside)

    @cached_property
    def cost(self) -> Cost:
        """Floating-point operations of the two halves."""
        return Cost(compiling.flops(self.cut.forward), compiling.flops(self.cut.backward))

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.value_and_grad` of the function; raises `CallError` where the arguments do not fit."""
        traced = self.cut.traced
        if self.executables == 2 or traced.bound.statics:
            return traced.wrapped.post_compile(self._run_value_and_grad)(*args, **kwargs)
        try:  # JAX compares the arguments with those the program was made for, in no time
            return self._step(list(traced.consts), (args, kwargs))
        except (TypeError, ValueError) as error:
            return traced.wrapped.post_compile(functools.partial(_reraised, error))(*args, **kwargs)

    def _run_value_and_grad(self, bound: Bound) -> Any:
        traced = self.cut.traced
        if self.executables == 1:
            return self._step(list(traced.consts), bound.arguments)
        outputs, residuals = self._run_forward(traced.flat(bound))
        gradients = self._backward(*residuals, traced.one())
        return value_and_gradients(traced, outputs, gradients, bound)

    def _run_forward(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = self._forward(*flat)
        count = len(self.cut.traced.program.results.avals)
        places = {"input": flat, "output": results[:count], "saved": results[count:]}
        return results[:count], [places[r.kind][r.index] for r in self.cut.residuals]

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., Any]]:
        """The function's output and a pullback: cotangent of the output in, trees of the arguments in `argnums` out.

        The pullback may be called once: the backward reuses the residuals' memory.
        """
        return self.cut.traced.wrapped.post_compile(self._run_vjp)(*args, **kwargs)

    def _run_vjp(self, bound: Bound) -> tuple[Any, Callable[..., Any]]:
        traced = self.cut.traced
        main, residuals = self._run_forward_in_trees(bound)

        def pullback(cotangent: Any) -> Any:
            flat = self.backward(residuals, *jax.tree.leaves(cotangent))
            trees = traced.gradients(flat, traced.options.chosen, bound)
            return trees[0] if isinstance(traced.options.argnums, int) else trees

        return main, pullback

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        """Run the forward half: the function's output (with `has_aux` a pair) and the flat residuals."""
        return self.cut.traced.wrapped.post_compile(self._run_forward_in_trees)(*args, **kwargs)

    def _run_forward_in_trees(self, bound: Bound) -> tuple[Any, list[Any]]:
        traced = self.cut.traced
        outputs, residuals = self._run_forward(traced.flat(bound))
        main, aux = traced.results(outputs)
        return ((main, aux) if traced.options.has_aux else main), residuals

    def backward(self, residuals: Sequence[Any], *cotangents: Any) -> list[Any]:
        """Run the backward half on flat residuals, which it may overwrite, and one cotangent per output that can
        carry one; returns the flat gradients of the differentiated leaves.
        """
        return self._backward(*residuals, *cotangents)


def value_and_gradients(traced: Traced, outputs: Sequence[Any], gradients: Sequence[Any], bound: Bound) -> Any:
    """Results in the form of `jax.value_and_grad`: `value, grads`, or `(value, aux), grads` with `has_aux`."""
    main, aux = traced.results(outputs)
    trees = traced.gradients(gradients, traced.options.chosen, bound)
    value = (main, aux) if traced.options.has_aux else main
    return value, trees[0] if isinstance(traced.options.argnums, int) else trees


def _reraised(error: Exception, bound: Bound) -> Any:
    """Raise an error of JAX's over arguments in which the guards found no fault."""
    del bound
    raise error


def _runner(closed: Any) -> Callable[..., list[Any]]:
    return lambda *flat: jaxprs.evaluate(closed, *flat)
