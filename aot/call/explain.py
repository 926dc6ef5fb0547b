"""Report what any function keeps for its backward, what its devices exchange, and whether it has a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from jointcut.aot.call.decorator import function
from jointcut.aot.call.doctor.subject import Subject
from jointcut.aot.call.flow import Differentiability
from jointcut.aot.call.function import Function
from jointcut.aot.call.method import Method
from jointcut.aot.options.target import GivenTarget
from jointcut.aot.options.target import target as target_named
from jointcut.aot.report.compare.collectives import Collectives
from jointcut.aot.report.compare.exchanges import exchanges
from jointcut.aot.report.report import Report
from jointcut.aot.run.compile import compiled
from jointcut.aot.run.uncut import plainly
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
def collectives(step: Callable[..., Any], *args: Any, target: GivenTarget | None = None, **kwargs: Any) -> Collectives:
    """Say what the devices of a step exchange, and what they would exchange with plain JAX; nothing is run.

    In a `jax.jit` of yours, on automatic axes, XLA lays out the values, and the plan does not know where they lie. So
    the step is compiled twice, as it is and with each `aot.function` in it as plain JAX, and what both run is compared.
    The updates of `value_and_update` and loops of jointcut stay as they are.

    Args:
        step: a function made by `jax.jit`, or one to be jitted; of an `aot.function` its value and gradient are meant.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct` with shardings.
        target: the devices to compile for, as in `aot.target`; by default those on which the arguments lie.
        **kwargs: further arguments by name.

    Returns what is exchanged, by kind and by line of yours: what is more than with plain JAX and why, and which arrays
    XLA gathers whole although each device keeps a part. `print` it.
    """
    if isinstance(step, Function | Method):
        return collectives(step.value_and_grad, *args, target=target, **kwargs)
    goal = None if target is None else target_named(target)
    programs = []
    for around in (nullcontext(), plainly()):
        with around:
            subject = Subject.of(step, args, kwargs, goal)
            programs.append([compiled(subject.traced.lower(), goal)])
    return Collectives(*map(exchanges, programs))


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
