"""The decorator, and the object it returns.

>>> import jax.numpy as jnp
>>> from jointcut import aot
>>> @aot.function
... def loss(w, x):
...     return jnp.sum(jnp.tanh(x * w))
>>> value, grad = loss.value_and_grad(2.0, jnp.ones(3))
>>> round(float(grad), 4)
0.212
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jointcut.aot.cache.location import store_for
from jointcut.aot.call.adding import accumulated
from jointcut.aot.call.alone import alone
from jointcut.aot.call.cached import CachedCalls
from jointcut.aot.call.flow import Differentiability, differentiability
from jointcut.aot.call.method import bound_to, refusing_unbound, unwrapped
from jointcut.aot.call.under_transform import CallsInside
from jointcut.aot.call.updating import KEPT_UPDATES, Updating
from jointcut.aot.export.export import export, platforms_for, refuse_request
from jointcut.aot.hooks.saved_arrays import SavedArrays
from jointcut.aot.options import options as choosing
from jointcut.aot.options.conventions import Conventions
from jointcut.aot.options.limits import Budget
from jointcut.aot.options.options import Options
from jointcut.aot.options.policies import GivenPolicy
from jointcut.aot.options.target import Target, refuse_to_run
from jointcut.aot.options.tiles import GivenShapes, GivenTiles
from jointcut.aot.report.report import Report
from jointcut.aot.run.bound import Binder, Signature
from jointcut.aot.run.flat import refuse_donated_objects
from jointcut.aot.run.runner import Runner
from jointcut.aot.run.unchecked import Uncached, Unchecked, Unmeasured
from jointcut.aot.run.uncut import Uncut, has_symbolic_sizes
from jointcut.aot.stages import debug, tracing
from jointcut.aot.stages.cut import Cut
from jointcut.aot.stages.exportable import exportable
from jointcut.aot.stages.traced import Traced
from jointcut.aot.stages.watched import watched
from jointcut.partition.passes import HalfPass
from jointcut.partition.plans.plan import Plan
from jointcut.partition.prices.cost import CostModel
from jointcut.partition.program.jax import runtime
from jointcut.partition.split import Strategy
from jointcut.wrappers.arguments.tree import Bound, Statics, bind
from jointcut.wrappers.table import Table
from jointcut.wrappers.wrapper import CompilerWrapper, JointPass


class Function:
    """A function whose gradient is cut into two programs.

    A call runs forward only, like `jax.jit` of the function. `value_and_grad`, `grad` and `vjp` work as in JAX, but the
    strategy chooses the residuals. It composes with `jax.grad`, `jax.jit`, `jax.vmap`, `jax.jvp` and `jax.lax.scan`.
    """

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        """Call `aot.function` instead."""
        self._function, self._kind = unwrapped(function)
        self._options = choosing.validated(self._function, options)
        statics = Statics.of(self._function, self._options.static_argnums, self._options.static_argnames)
        self._statics = replace(statics, refuse=refusing_unbound(self, self._function))
        choosing.disjoint(self._options, self._statics.argnums, self._statics.count)
        self._name = choosing.name_of(self._function)
        self._binder = Binder(self._statics)
        self._uncut, self._unmeasured = Uncut(self._name), Unmeasured(self._name)
        self._unchecked, self._uncached = Unchecked(self._name), Uncached(self._name)
        self._updating: Table[Updating] = Table(KEPT_UPDATES)
        self._inside = CallsInside(self._function, self._options, self._name, self._uncut, self._unmeasured)
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
        signature, bound = self._binder(args, kwargs)
        if runtime.tracing():
            self._warn_inside()
            return self._inside(signature, bound)
        return self._runner("call", (), signature, bound).result(bound)

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Like `jax.value_and_grad(function, argnums, has_aux)`.

        Raises `TraceError` (a `TypeError`) for an argument or result that cannot be differentiated.
        """
        if not debug.is_on() and (ran := self._binder.ran("step", args, kwargs)) is not None:
            return ran[0]
        signature, bound = self._binder(args, kwargs)
        if runtime.tracing() and has_symbolic_sizes(bound.leaves):
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
        step; a `post_accumulate` hook sees the gradient of its call. Raises `CallError` first if trees or types differ.
        """
        return functools.partial(accumulated, self.value_and_grad, self._options, self._statics, refs)

    def vjp(self, *args: Any, **kwargs: Any) -> Any:
        """Like `jax.vjp`: the output and a pullback (and aux with `has_aux`).

        The pullback returns one tree per positional argument, and may be called more than once. Keyword arguments are
        not differentiated. Forward and backward run as two programs.
        """
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
                that `sweeps` allows. Pass the same object at each step.
            sweeps: with 2, the update may also join a few numbers of each gradient, as a clip by the global norm does.
                The backward then runs twice: first for these numbers, then for the updates.
            **kwargs: further arguments of the function, by name.

        Returns `value, params, state`, or `(value, aux), params, state` with `has_aux`. Raises `TraceError` if the
        update joins gradients otherwise, with the equation, or if `argnums` is not 0.
        """
        return self._updater(update, sweeps)(params, state, *args, **kwargs)

    def _updater(self, update: Any, sweeps: int) -> Updating:
        make = functools.partial(Updating, self._function, self._options, self._statics, update, sweeps)
        return self._updating.of((id(update), sweeps), make)

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

    def _watched(self, kind: str, positions: tuple[int, ...] | None, signature: Signature, runner: Runner) -> Runner:
        """Return the runner, with a look at its results if the options ask for that."""
        if self._options.check is None:
            return runner
        cut = functools.partial(self._cut, signature, positions if kind != "call" else (), signature.bound)
        return signature.made.of(("watched", kind), lambda: watched(runner, lambda: cut().made, self._unchecked))

    def _warn_inside(self) -> None:
        if self._options.check is not None:
            self._unchecked()
        if self._options.cache and self._options.budget is None:  # whose plan would be kept
            self._uncached()

    def _jitted(self, kind: str, positions: tuple[int, ...] | None, signature: Signature, bound: Bound) -> Runner:
        """Return a runner that compiles at its first call."""
        if kind != "pair":
            refuse_donated_objects(bound, self._options)
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

        def make() -> Cut:
            traced = tracing.trace(self._function, self._options, bound, positions)
            if choosing.is_measured(self._options) and runtime.tracing():
                self._unmeasured()
            cut = traced.partition()
            self._uncut.closed(cut.split.graph, cut.plan)
            return cut

        return signature.made.of(("cut", positions), make, keeps=lambda cut: not cut.traced.program.has_traced_consts)


def function(
    fun: Callable[..., Any] | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    strategy: Strategy = choosing.DEFAULT,
    keep_unused: bool = False,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    sparse_gradients: str | Sequence[str] = (),
    budget: Budget | None = None,
    cost: CostModel | None = None,
    plan: Plan | str | None = None,
    cache: str | os.PathLike[str] | bool | None = None,
    filter: Any = None,
    wrappers: Sequence[CompilerWrapper | JointPass | HalfPass] = (),
    derivatives: str | Conventions = "jax",
    check: str | None = None,
    policy: GivenPolicy | None = None,
    offload: bool = False,
    check_offload: bool = True,
    saved_arrays: SavedArrays | None = None,
    spill: str | os.PathLike[str] | None = None,
    error: float | None = None,
    devices: int | None = None,
    target: str | Target | None = None,
    tiles: GivenTiles = True,
    shapes: GivenShapes = (),
) -> Any:
    """Cut a function's gradient into two programs: a bare decorator, a decorator with options, or a call.

    Args:
        fun: the function; its arguments and results are pytrees of arrays.
        argnums: the positional arguments that `value_and_grad` and `grad` differentiate.
        has_aux: whether the function returns `(output, aux)`.
        static_argnums: positions of arguments that are Python values, as in `jax.jit`.
        static_argnames: their names.
        strategy: `"min_cut"` (least bytes saved, no product computed twice), `"best"` (the default: on a CPU a plan of
            clearly less memory and no more time, if one is known, else `"min_cut"`), `"save_all"` (the residuals of
            plain JAX), or a function from a `partition.Graph` to a `partition.Plan`.
        keep_unused: whether compiled programs keep arguments that nothing reads.
        donate_argnums: positions of arguments whose buffers a call gives up, as in `jax.jit`; `vjp` does not donate.
        donate_argnames: their names.
        sparse_gradients: paths of tables read by rows, `args[0]['t']`, with gradients `jax.experimental.sparse.BCOO`.
        budget: the memory that a step may take, instead of a strategy. A float from 0.0 to 1.0 is a fraction of the
            activation bytes of `jax.jit(jax.value_and_grad(fun))`, without parameters, batch and gradients; 0.0 is the
            least found. An int or a text with a unit (`"1.5GiB"`) is peak bytes of the whole step on one device,
            `"device"` the free bytes of the device. The fastest plan within the budget, by XLA's figures, is used. In
            `jax.grad` of `jax.vmap` it is for the whole batch, in `jax.vmap` of `jax.grad` for one example.
        devices: how many devices share the batch in a `jax.jit` of yours; the bytes of a budget are then for each one.
        target: the device that the step is planned for, such as `"h100"`, which need not be here; see `aot.target`.
        cost: a `CostModel` of the seconds that each op takes; the default is a roofline of the device's measured rates.
        plan: a plan made before for the same program, or its text, instead of a strategy.
        cache: the folder that keeps compiled programs for other processes, `~/.cache/jointcut/programs` with True. The
            default is the environment variable `JOINTCUT_CACHE_DIR`, if set. Beyond `JOINTCUT_CACHE_SIZE` ("10GiB"),
            the least recently used programs are removed. Inside a transformation it keeps plans of budgets alone.
        filter: which arrays of the arguments in `argnums` are differentiated: a predicate on arrays
            (`equinox.is_inexact_array`), a class that holds them (`nnx.Param`), or a tree of booleans that is a prefix
            of the argument (a tuple of trees if `argnums` is a tuple). Other arrays have the gradient None.
        wrappers: your own steps of the compilation, outermost first, for every way of calling. One with `pre_compile`
            and `post_compile` (`jointcut.wrappers.CompilerWrapper`) wraps the function of flat arrays, one with
            `before_cut` (`JointPass`) rewrites the joint program, one with `pre_lower` (`partition.HalfPass`) a half.
        derivatives: which derivative is taken where a function has none, or several: `"jax"`; `"finite"`, which has a
            finite one where JAX gives NaN; `"pytorch"`, which also follows PyTorch where both are finite and differ; or
            `aot.conventions(...)`, which lists all cases. With `"finite"` gradients that were finite keep their bits,
            except where XLA fuses differently. Derivatives of gradients are finite likewise.
        check: `"nonfinite"`: after each call a second small program looks whether value and gradients are finite. If
            not, the call is replayed with the same arrays, none of which may be donated, and it raises
            `NonFiniteError`, with the op, its line and its cure (see `aot.first_nonfinite`). What is exported or inside
            a transformation is not checked (`UncheckedWarning`). With effects only a NaN is an error: none is replayed.
        policy: demands and wishes for single values at every budget: a dict from keys to `aot.MUST_SAVE`,
            `MUST_RECOMPUTE`, `MUST_OFFLOAD` or the PREFER of each, `aot.SAVE_AS(dtype)` or a tuple of both kinds,
            `aot.budget(bytes)`, or one of `jax.checkpoint_policies`. A key is a `checkpoint_name`, a scope or part of
            one (`"encoder/block_*"`), a primitive (`"dot_general"`), or a function of an op and a value of the `Graph`.
            A PREFER is a price, and plans list the PREFERs that they overrule.
        offload: whether a budget may offload values that no policy names (see `Roofline.host_bytes_per_s`).
        check_offload: whether a small step is checked before the first offload on a kind of device (openxla/xla 46231).
        saved_arrays: `aot.saved_arrays(pack, unpack)`: two functions that every residual passes through between forward
            and backward. They are traced into the halves where JAX can trace them.
        spill: a folder for files. Computed residuals wait there instead of in memory, in loops step by step, until the
            backward reads them. The files are removed when the backward is done, after a crash by the next call that
            spills there. The halves run as two programs, for which a call waits. No transformation may differentiate.
        error: the relative error that the gradient may have under a budget, such as 1e-2. Residuals may then wait
            in bfloat16 (see `aot.SAVE_AS`) where that spares a hundredth of the step's time. The error is measured at
            the arguments of the first call or of `trace`, at random ones if these are shapes, and no plan with a larger
            one is used. Inside a transformation nothing can be measured: residuals keep their dtype, with a warning.
        tiles: where no choice of residuals holds a budget, rows that do not meet run in blocks, by default also where a
            GPU's or TPU's model finds it smaller, not slower. False prevents it, `{"args[1]": 4}` or `{"b": 4}` asks.
        shapes: names for sizes of arguments, as `aot.shapes` writes them: `{"args[1]": "b, ..."}`. `tiles` reads them.

    Raises:
        BudgetError: the budget is invalid, or, at a call, no plan holds it.
        PlanError: two of strategy, budget and plan are given.
        PolicyError: the policy is no policy, or, at a call, names nothing or contradicts itself or a rule.
        TraceError: `fun` is not callable, a position is not an integer, or a wrapper lacks its methods.
        SpillError: at a call, the folder of `spill` is full or cannot be written.
        StrategyError: the strategy is unknown.
        TargetError: the target is unknown, or lacks a compiler, or the step is to run and the device is not here.
    """
    given = has_aux, static_argnums, static_argnames, strategy, keep_unused, donate_argnums, donate_argnames
    more = sparse_gradients, budget, cost, plan, cache, filter, wrappers, derivatives, check, policy, offload
    options = Options(argnums, *given, *more, check_offload, saved_arrays, spill, error, devices, target, tiles, shapes)
    return (lambda fun: Function(fun, options)) if fun is None else Function(fun, options)
