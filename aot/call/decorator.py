"""The decorator.

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

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jointcut.aot.call.function import Function
from jointcut.aot.hooks.saved_arrays import SavedArrays
from jointcut.aot.options import options as choosing
from jointcut.aot.options.conventions import Conventions
from jointcut.aot.options.limits import Budget
from jointcut.aot.options.options import Options
from jointcut.aot.options.policies import GivenPolicy
from jointcut.aot.options.target import Target
from jointcut.aot.options.tiles import GivenShapes, GivenTiles
from jointcut.partition.passes import HalfPass
from jointcut.partition.plans.plan import Plan
from jointcut.partition.prices.cost import CostModel
from jointcut.partition.split import Strategy
from jointcut.wrappers.boundary import bounded
from jointcut.wrappers.wrapper import CompilerWrapper, JointPass


@bounded
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
    compiler_options: Mapping[str, Any] | None = None,
    sizes: str | None = None,
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
        devices: how many devices share the batch in a `jax.jit` of yours, where it is not known how its arrays lie; the
            bytes of a budget are then for each one. By default those of the target.
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
        compiler_options: XLA's options for all programs of the function, by name, as in `jax.jit`; budgets weigh with
            them. As in JAX, a call inside a transformation is refused with them. An artefact does not hold them.
        sizes: `"dynamic"` lets calls with all sizes of an axis share one pair of halves, from its second size on.
            Arrays are padded to a bucket, for which the plan is made, and the function sees a name for the size, as in
            `jax.export`. Where it needs the number, each size has a program; `Function.sizes` says so. In a `jax.jit`
            of yours, in exports and in stages sizes are numbers. Options that see arrays of one size, such as `check`,
            `cache` and `saved_arrays`, are refused beside it.

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
    rest = check_offload, saved_arrays, spill, error, devices, target, tiles, shapes, compiler_options, sizes
    options = Options(argnums, *given, *more, *rest)
    return (lambda fun: Function(fun, options)) if fun is None else Function(fun, options)
