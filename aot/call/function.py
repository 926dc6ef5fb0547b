"""The object that the decorator returns: calls, gradients and stages of one function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jointcut.aot.cache.location import store_for
from jointcut.aot.call.adding import Stepping
from jointcut.aot.call.alone import alone
from jointcut.aot.call.cached import CachedCalls
from jointcut.aot.call.flow import Differentiability, differentiability
from jointcut.aot.call.method import bound_to, refusing_unbound, unwrapped
from jointcut.aot.call.under_transform import CallsInside
from jointcut.aot.call.updating import KEPT_UPDATES, Updating
from jointcut.aot.export.export import export, platforms_for, refuse_request
from jointcut.aot.hooks.closures import Still, values_now
from jointcut.aot.hooks.in_programs import called_later
from jointcut.aot.options import options as choosing
from jointcut.aot.options.limits import Budget
from jointcut.aot.options.options import Options
from jointcut.aot.options.target import refuse_to_run
from jointcut.aot.options.xla import refuse_inside
from jointcut.aot.report.report import Report
from jointcut.aot.run.bound import Binder, Signature
from jointcut.aot.run.flat import refuse_donated_objects
from jointcut.aot.run.runner import Runner
from jointcut.aot.run.unchecked import LaidOtherwise, Uncached, Unchecked, Unmeasured
from jointcut.aot.run.uncut import Uncut, has_symbolic_sizes, is_plain
from jointcut.aot.stages import debug, tracing
from jointcut.aot.stages.cut import Cut, Lowered
from jointcut.aot.stages.exportable import exportable
from jointcut.aot.stages.padding.sized import Sized
from jointcut.aot.stages.traced import Traced
from jointcut.aot.stages.watched import watched
from jointcut.partition.program.jax import runtime
from jointcut.wrappers.arguments.tree import Bound, Statics, bind
from jointcut.wrappers.boundary import BOUNDARY, bounded_class
from jointcut.wrappers.table import Table


@bounded_class("__call__", "value_and_grad", "value_and_update")
class Function:
    """A function whose gradient is cut into two programs.

    A call runs forward only, like `jax.jit` of the function. `value_and_grad`, `grad` and `vjp` work as in JAX, but the
    strategy chooses the residuals. It composes with `jax.grad`, `jax.jit`, `jax.vmap`, `jax.jvp` and `jax.lax.scan`.

    Attributes:
        sizes: with `sizes="dynamic"`, the programs that serve all sizes of an axis, and which sizes must be numbers.
    """

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        """Call `aot.function` instead."""
        self._function, self._kind = unwrapped(function)
        self._options = choosing.validated(self._function, options)
        statics = Statics.of(self._function, self._options.static_argnums, self._options.static_argnames)
        self._statics = replace(statics, refuse=refusing_unbound(self, self._function))
        choosing.disjoint(self._options, self._statics.argnums, self._statics.count)
        self._name = choosing.name_of(self._function)
        self._uncut, self._unmeasured = Uncut(self._name), Unmeasured(self._name)
        self._unchecked, self._uncached = Unchecked(self._name), Uncached(self._name)
        self.clear_cache()
        functools.update_wrapper(self, self._function, updated=())  # its attributes are not ours

    def __repr__(self) -> str:
        """`<aot.function loss: best>`."""
        name = getattr(self._function, "__qualname__", self._function)
        return f"<aot.function {name}: {choosing.way_of(self._options)}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a method: the instance (a pytree, like an Equinox module) or class becomes the first argument."""
        return bound_to(self, self._kind, instance, owner)

    # ------------------------------------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; no residuals are kept."""
        if not debug.is_on() and (ran := self._binder.ran("call", args, kwargs)) is not None:
            return ran[0]
        with BOUNDARY:
            signature, bound = self._binder(args, kwargs)
            if runtime.tracing():
                if is_plain():
                    return self._function(*args, **kwargs)
                self._warn_inside()
                ran = None if self.sizes is None else self.sizes.in_grad(bound, self._found)
                return self._inside(signature, bound) if ran is None else ran[0]
            return self._runner("call", (), signature, bound).result(bound)

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Like `jax.value_and_grad(function, argnums, has_aux)`.

        Raises `TraceError` (a `TypeError`) for an argument or result that cannot be differentiated.
        """
        if not debug.is_on() and (ran := self._binder.ran("step", args, kwargs)) is not None:
            return ran[0]
        with BOUNDARY:
            signature, bound = self._binder(args, kwargs)
            if runtime.tracing() and (is_plain() or has_symbolic_sizes(bound.leaves)):
                if not is_plain():
                    self._uncut.symbolic()
                    self._warn_inside()
                return jax.value_and_grad(self._function, self._options.argnums, self._options.has_aux)(*args, **kwargs)
            return self._runner("step", self._options.chosen, signature, bound).value_and_grad(bound)

    def grad(self, *args: Any, **kwargs: Any) -> Any:
        """Like `jax.grad(function, argnums, has_aux)`: the gradient, or `(gradient, aux)` with `has_aux`."""
        value, gradient = self.value_and_grad(*args, **kwargs)
        return (gradient, value[1]) if self._options.has_aux else gradient

    def accumulate_into(self, refs: Any) -> Callable[..., Any]:
        """Return a function of the same arguments that adds the gradients to references, and returns the value.

        `refs` are `jax.Ref`s in the tree of the gradient, as `grad` returns it, or None. Gradients are added after the
        step. Then `post_accumulate` hooks on arguments see the sum. Raises `CallError` first if trees or types differ.
        """
        steps = Stepping(self._function, self._options, self._statics, self.value_and_grad, lambda: self._without_hooks)
        return functools.partial(steps.accumulated, self._binder, refs)

    @functools.cached_property
    def _without_hooks(self) -> Callable[..., Any]:
        """The step without the `post_accumulate` hooks of arguments."""
        return Function(called_later(self._function), self._options).value_and_grad

    def vjp(self, *args: Any, **kwargs: Any) -> Any:
        """Like `jax.vjp`: the output and a pullback (and aux with `has_aux`).

        The pullback returns one tree per positional argument, and may be called more than once. Keyword arguments are
        not differentiated. Forward and backward run as two programs.
        """
        if runtime.tracing() and is_plain():
            return jax.vjp(functools.partial(self._function, **kwargs), *args, has_aux=self._options.has_aux)
        signature, bound = self._binder(args, kwargs)
        runner = self._runner("pair", None, signature, bound)
        main, aux, pullback = runner.vjp(bound, range(len(bound.spans)))
        return (main, pullback, aux) if self._options.has_aux else (main, pullback)

    def value_and_update(self, params: Any, state: Any, *args: Any, update: Any, sweeps: int = 1, **kwargs: Any) -> Any:
        """Return the value, and the parameters and state after one step of an optimiser that runs inside the backward.

        A parameter is updated as soon as its gradient is complete, in one program. If a `lax.scan` takes slices of it,
        and the update treats each slice alone, it is updated slice by slice, inside the scan of the backward. `params`
        and `state` are given up: their arrays must not be used after the call.

        Args:
            params: the first argument of the function, a pytree of floating-point arrays, differentiated alone.
            state: the state of the optimiser, a pytree of arrays.
            *args: the other arguments of the function.
            update: an Optax transformation, or a function `(gradients, state, params) -> (params, state)`. The new
                value of a parameter, and its part of the state, may depend only on its own gradient, and on the numbers
                that `sweeps` allows. Functions of the same code that read equal values share a program.
            sweeps: with 2, the update may also join a few numbers of each gradient, as a clip by the global norm does.
                The backward then runs twice: first for these numbers, then for the updates.
            **kwargs: further arguments of the function, by name.

        Returns `value, params, state`, or `(value, aux), params, state` with `has_aux`. Raises `TraceError` if the
        update joins gradients otherwise, with the equation, or if `argnums` is not 0.
        """
        latest, given = self._latest_update, (params, state, *args)
        if latest is not None and latest[0] is update and latest[1] == sweeps and latest[2].holds():
            ran = latest[3].ran(given, kwargs)
            if ran is not None:
                return ran
        with BOUNDARY:
            return self._updater(update, sweeps)(*given, **kwargs)

    def _updater(self, update: Any, sweeps: int) -> Updating:
        make = functools.partial(Updating, self._function, self._options, self._statics, update, sweeps, self.sizes)
        latest = self._latest_update
        is_again = latest is not None and latest[0] is update
        found = self._updating.of((values_now(update), sweeps), make)
        self._latest_update = update, sweeps, Still(update if is_again else None), found  # None: it may be made anew
        return found

    # ------------------------------------------------------------------------------------------ stages

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """Report saved values and why, recomputed ops, the cost, and the cost of less memory, for these arguments.

        Compiles the step and plain JAX's step, to read XLA's memory figures;
        `trace(...).partition().explain(measure=False)` does not. Raises as `trace` and `Traced.partition` do.
        """
        signature, bound = self._binder(args, kwargs)
        return self._cut(signature, self._options.chosen, bound).explain()

    def is_differentiable(self, *args: Any, **kwargs: Any) -> Differentiability:
        """Whether a gradient can flow to the arguments in `argnums`, or which op stops it (`aot.is_differentiable`)."""
        return differentiability(self._function, self._options, bind(args, kwargs, self._statics))

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace forward and backward for these arguments, arrays or `jax.ShapeDtypeStruct`, without computing.

        Raises `TraceError` for an argument that cannot be differentiated.
        """
        bound = bind(args, kwargs, self._statics)
        return tracing.trace(self._function, self._options, bound, self._options.chosen)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace, cut and lower for these arguments, without compiling: `trace(...).partition().lower()`.

        As in JAX, `lower(...).as_text()` is StableHLO, and `lower(...).compile()` the executables; they are those of
        `value_and_grad`.
        """
        signature, bound = self._binder(args, kwargs)
        return self._cut(signature, self._options.chosen, bound).lower()

    def clear_cache(self) -> None:
        """Forget all programs, as `clear_cache` of a jitted function: the next call traces, cuts and compiles again.

        Files in the folder of `cache` stay.
        """
        self._binder = Binder(self._statics, LaidOtherwise(self._name))
        self._updating: Table[Updating] = Table(KEPT_UPDATES)
        self._latest_update: tuple[Any, int, Still, Updating] | None = None
        self.sizes = None if self._options.sizes is None else Sized(self._function, self._options)
        self._inside = CallsInside(self._function, self._options, self._name, self._uncut, self._unmeasured)
        for name in ("_cached_calls", "_without_hooks"):
            self.__dict__.pop(name, None)

    def trace_update(self, params: Any, state: Any, *args: Any, update: Any, sweeps: int = 1, **kwargs: Any) -> Traced:
        """Trace a step of `value_and_update` for these arguments, arrays or `jax.ShapeDtypeStruct`, without computing.

        It is a step of `(params, state, *args)`. Where others have gradients it has the new parameters and state. So
        `value_and_grad` of `trace_update(...).partition().compile()` gives `value, (params, state)`. Plans, peaks and
        budgets are for the step with its update. Raises as `value_and_update`.
        """
        return self._updater(update, sweeps).trace(params, state, *args, **kwargs)

    def export(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        platforms: str | Sequence[str] | None = None,
        budget: Budget | None = None,
        order: int = 1,
        sizes: Mapping[str, int] | None = None,
        constraints: Sequence[str] = (),
        overwrite: bool = False,
        **kwargs: Any,
    ) -> Path:
        """Write forward, backward and the function alone to a folder that `aot.load`, or JAX alone, can run.

        Args:
            path: the folder to make; its README.md describes the content.
            *args: arguments, arrays or `jax.ShapeDtypeStruct`; the programs are for their shapes.
            platforms: the platforms to lower for, of "cpu", "cuda", "rocm" and "tpu"; by default the target's, or all.
            budget: replaces the function's own budget; measured on this machine.
            order: how often the artefact can be differentiated.
            sizes: a number for each symbolic size of the arguments (`aot.shapes("b, 128", "float32")`): the plan is
                made for these, `{"b": 8}`, and the programs run with any.
            constraints: conditions on symbolic sizes, as in `jax.export.symbolic_args_specs`: `("b >= 2",)`.
            overwrite: whether to replace an existing artefact.
            **kwargs: further arguments of the function, by name.

        Returns the folder. Raises `ArtefactError` if the function has effects or references among its arguments, or if
        the folder cannot be written; then nothing is left behind.
        """
        lowered_for = refuse_request(path, platforms_for(platforms, self._options.goal), order, overwrite)
        bound = replace(bind(args, kwargs, self._statics).abstract(), duplicates={})
        options = self._options if budget is None else choosing.with_budget(self._options, budget)
        pair = exportable(self._function, options, bound, sizes, constraints, lowered_for)
        return export(pair, path, lowered_for, order, overwrite)

    # ------------------------------------------------------------------------------------------------ programs

    def _runner(self, kind: str, positions: tuple[int, ...] | None, signature: Signature, bound: Bound) -> Runner:
        """Return the runner of a call; `kind` is `call`, `step` or `pair`, `positions` the differentiated arguments."""
        if runtime.tracing():
            self._warn_inside()
            return self._cut(signature, positions, bound).made.open
        refuse_to_run(self._name, self._options.goal)
        if debug.is_on():
            return self._cut(signature, positions, bound).checked()
        if (cached := self._cached_calls and self._cached_calls.find(kind, positions, bound)) is not None:
            return self._watched(kind, positions, signature, cached)
        runner = signature.made.of(kind, lambda: self._jitted(kind, positions, signature, bound))
        runner = self._watched(kind, positions, signature, runner)
        if self._cached_calls is None and not any(self._options.donated):
            self._binder.keep(kind, bound, runner.ready(kind))  # from the second call on
        return runner

    def _found(self, args: Any, kwargs: Any, positions: tuple[int, ...]) -> tuple[Runner, Bound]:
        """Return the runner of both halves for some differentiated arguments, and the call."""
        signature, bound = self._binder(args, kwargs)
        make = functools.partial(self._jitted, "pair", positions, signature, bound)
        runner = signature.made.of(("pair", positions), make, keeps=lambda x: not any(map(runtime.is_tracer, x.consts)))
        return runner, bound

    def _watched(self, kind: str, positions: tuple[int, ...] | None, signature: Signature, runner: Runner) -> Runner:
        """Return the runner, with a look at its results if the options ask for that."""
        if self._options.check is None:
            return runner
        cut = functools.partial(self._cut, signature, positions if kind != "call" else (), signature.bound)
        return signature.made.of(("watched", kind), lambda: watched(runner, lambda: cut().made, self._unchecked))

    def _warn_inside(self) -> None:
        refuse_inside(self._name, self._options.compiler_options)
        if self._options.check is not None:
            self._unchecked()
        if self._options.cache and self._options.budget is None:  # whose plan would be kept
            self._uncached()

    def _jitted(self, kind: str, positions: tuple[int, ...] | None, signature: Signature, bound: Bound) -> Runner:
        """Return a runner that compiles at its first call."""
        if kind != "pair":
            refuse_donated_objects(bound, self._options)
        if self.sizes is not None and (runner := self.sizes.runner(kind, positions, bound)) is not None:
            return runner
        if kind != "call":
            return self._cut(signature, positions, bound).made.jitted
        return alone(self._name, self._function, self._options, bound)

    @functools.cached_property
    def _cached_calls(self) -> CachedCalls | None:
        """The calls by programs in the cache, None without a cache."""
        store = store_for(self._options.cache)
        return store and CachedCalls(self._function, self._options, store, self._name)

    def _cut(self, signature: Signature, positions: tuple[int, ...] | None, bound: Bound) -> Cut:
        """Return the cut for one signature, made once unless the function closes over an outer trace."""
        signature.planned.is_made = True

        def make() -> Cut:
            traced = tracing.trace(self._function, self._options, bound, positions)
            if self._options.measures_error and runtime.tracing():
                self._unmeasured()
            if runtime.tracing():
                self._inside.warn_unshared(traced.program, traced.options)
            cut = traced.partition()
            self._uncut.closed(cut.split.graph, cut.plan)
            return cut

        return signature.made.of(("cut", positions), make, keeps=lambda cut: not cut.traced.program.has_traced_consts)
