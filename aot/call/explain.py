"""Report the residuals of any function, decorated or not, and whether it has a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jointcut.aot.call.decorator import function
from jointcut.aot.call.flow import Differentiability
from jointcut.aot.call.function import Function
from jointcut.aot.call.method import Method
from jointcut.aot.report.report import Report
from jointcut.partition.prices.cost import CostModel
from jointcut.wrappers.boundary import bounded


@bounded
def explain(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    cost: CostModel | None = None,
    **kwargs: Any,
) -> Report:
    """Report the residuals that `jax.vjp` keeps of a function, and those that jointcut would keep; nothing is run.

    Args:
        fun: the function. A function made by `aot.function` explains itself, with its own options.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`.
        argnums: the arguments that are differentiated, as in `jax.grad`.
        has_aux: whether it returns `(output, aux)`.
        static_argnums: positions of arguments that are Python values.
        cost: a model of the seconds that each op takes; by default a roofline of the device's measured rates.
        **kwargs: further arguments by name.

    Returns a report of plain JAX's plan, with XLA's own account of `jax.jit(jax.value_and_grad(fun))`. Raises
    `TraceError` for an argument that cannot be differentiated.
    """
    if isinstance(fun, Function | Method):
        return fun.explain(*args, **kwargs)
    chosen = {"argnums": argnums, "has_aux": has_aux, "static_argnums": static_argnums, "cost": cost}
    ours = function(fun, strategy="save_all", **chosen)
    return ours.explain(*args, **kwargs)


@bounded
def is_differentiable(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Differentiability:
    """Whether a gradient can flow through a function, and if not, which op stops it; nothing is run.

    TorchScript's query of this name asks whether each op has a derivative; this one asks JAX's own rules, and follows
    the gradient from the outputs to the arguments.

    Args:
        fun: the function. A function made by `aot.function` is asked with its own options.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`.
        argnums: the arguments that are differentiated, as in `jax.grad`.
        has_aux: whether it returns `(output, aux)`.
        static_argnums: positions of arguments that are Python values.
        **kwargs: further arguments by name.

    Returns an answer that is true or false, and prints the ops that stop the gradient with the user's lines. Raises
    `TraceError` where `argnums` names no argument, and any error that the function itself raises.

    >>> import jax.numpy as jnp
    >>> print(is_differentiable(lambda x: jnp.sum(x**2), jnp.ones(3)))
    <lambda> is differentiable.
    >>> bool(is_differentiable(jnp.argmax, jnp.ones(3)))
    False
    """
    if isinstance(fun, Function | Method):
        return fun.is_differentiable(*args, **kwargs)
    ours = function(fun, argnums=argnums, has_aux=has_aux, static_argnums=static_argnums)
    return ours.is_differentiable(*args, **kwargs)
