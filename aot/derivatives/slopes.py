"""Multiply tangents with slopes so that zero stays zero, and declare derivatives argument by argument.

A derivative is a linear map. It takes a zero tangent to zero, also where its slope is infinite or not a number; a
product of floats does not, since `0 * inf` is NaN. `times` writes the slope as a product of finite factors instead. A
tangent that is not zero still becomes infinite or NaN by them, and JAX can transpose them as any product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

Rule = Callable[..., jax.Array]


def times(tangent: jax.Array, slope: jax.Array) -> jax.Array:
    """Return tangent * slope, but zero where the tangent is zero, whatever the slope.

    The factors of an infinite slope are the largest finite number, twice, on both sides of its sign, and those of a NaN
    have a zero in place of the sign: whichever is multiplied first, forward or transposed, infinity times zero is NaN.
    A finite slope is multiplied with ones, which changes no bit.
    """
    slope = jnp.asarray(slope)
    one = jnp.ones((), slope.real.dtype)
    finite = jnp.isfinite(slope)
    fixed = jax.lax.stop_gradient(slope)
    sign = jnp.where(jnp.isinf(fixed), jnp.sign(fixed.real), 0).astype(slope.dtype)
    outer = jnp.where(finite, one, jnp.finfo(slope.dtype).max)
    return tangent * outer * outer * jnp.where(finite, slope, sign) * outer * outer + _next(tangent, slope, finite)


def _next(tangent: jax.Array, slope: jax.Array, finite: jax.Array) -> jax.Array:
    """Zero, with the derivative of tangent * slope where the slope is infinite: such a slope has a slope of its own."""
    return jnp.where(finite, 0, tangent) * _nothing(slope)


@jax.custom_jvp
def _nothing(slope: jax.Array) -> jax.Array:
    """Zero, with the derivative of the identity."""
    return jnp.zeros_like(slope)


_nothing.defjvp(lambda primals, tangents: (jnp.zeros_like(primals[0]), tangents[0]))


def slopes(function: Any, *rules: Rule | None) -> None:
    """Give a `jax.custom_jvp` function a rule for each argument: `rule(tangent, result, *arguments)`, or None.

    What is not differentiated costs nothing: its rule is not called. Arguments in `nondiff_argnums` come first, and
    have no rule of their own.
    """

    def jvp(*given: Any) -> tuple[jax.Array, jax.Array]:
        *static, primals, tangents = given
        arguments = (*static, *primals)
        result = function(*arguments)
        parts = [
            rule(tangent, result, *arguments)
            for rule, tangent in zip(rules, tangents, strict=True)
            if rule is not None and not isinstance(tangent, SymbolicZero)
        ]
        total = sum(parts[1:], parts[0]) if parts else jnp.zeros_like(result)
        return result, jnp.broadcast_to(total, result.shape).astype(result.dtype)

    function.defjvp(jvp, symbolic_zeros=True)


def unary(value: Callable[..., jax.Array], slope: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make a function of one array and of options: `value(x, *options)`, with the slope `slope(x, *options)`.

    The slope is differentiated in its turn, so it must be made of functions whose slopes are finite or taken by
    `times`.
    """

    @partial(jax.custom_jvp, nondiff_argnums=(0,))
    def function(options: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return value(x, *options)

    slopes(function, lambda tangent, _, options, x: times(tangent, slope(x, *options)))
    return lambda x, *options: function(options, x)
