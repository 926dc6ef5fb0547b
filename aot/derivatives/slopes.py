"""Multiply tangents with slopes so that zero stays zero, and declare derivatives argument by argument.

A derivative is a linear map. It takes a zero tangent to zero, also where its slope is infinite or not a number; a
product of floats does not, since `0 * inf` is NaN. `times` is such a map. Its transpose is of the same kind, and so are
the products in its own derivative, so second order keeps zero too, in all combinations of forward and reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jointcut.partition.rewrite.product import Product, along

Rule = Callable[..., jax.Array]


_GUARDED = Product(lax.mul_p, (1,))


def times(tangent: jax.Array, slope: Callable[..., jax.Array], *points: jax.Array) -> jax.Array:
    """Return tangent * slope(*points) elementwise, but zero where the tangent is zero, whatever the slope.

    No number is made up: a tangent that is not zero is infinite where the slope is, and NaN where the slope is NaN, as
    those outside a function's domain. So it is for the slope of the slope. The backward keeps one array.
    """
    steepness, tangent = jnp.broadcast_arrays(_steepness(slope, *jnp.broadcast_arrays(*points)), tangent)
    return along(_GUARDED, 1, steepness.astype(tangent.dtype), tangent)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _steepness(slope: Callable[..., jax.Array], *points: jax.Array) -> jax.Array:
    """The slope, whose tangents are multiplied with its own slopes by `times`."""
    return slope(*points)


def _bend(slope: Callable[..., jax.Array], place: int, *points: jax.Array) -> jax.Array:
    """The slope's own slope, along the point at this place."""

    def along_point(point: jax.Array) -> jax.Array:
        return slope(*points[:place], point, *points[place + 1 :])

    return jax.jvp(along_point, (points[place],), (jnp.ones_like(points[place]),))[1]


def _steepness_moves(slope: Callable[..., jax.Array], points: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    result = _steepness(slope, *points)
    moves = ((i, tangent) for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero))
    parts = [times(tangent, partial(_bend, slope, i), *points).astype(result.dtype) for i, tangent in moves]
    return result, sum(parts, jnp.zeros_like(result))


_steepness.defjvp(_steepness_moves, symbolic_zeros=True)


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

    The slope must be finite wherever the function is, and is differentiated in its turn.
    """
    return _with_slope(value, lambda tangent, options, x: tangent * slope(x, *options))


def steep(value: Callable[..., jax.Array], slope: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make a function as `unary` does, whose slope may be infinite or NaN: `times` multiplies it."""
    return _with_slope(value, lambda tangent, options, x: times(tangent, lambda x: slope(x, *options), x))


def by_result(value: Callable[..., jax.Array], slope: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Make a function of one array, whose slope is made of the result: `slope(value(x))`.

    Then the backward need not keep x. The slope must be finite wherever the function is.
    """

    @jax.custom_jvp
    def function(x: jax.Array) -> jax.Array:
        return value(x)

    slopes(function, lambda tangent, result, _: tangent * slope(result))
    return function


def _with_slope(value: Callable[..., jax.Array], rule: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    @partial(jax.custom_jvp, nondiff_argnums=(0,))
    def function(options: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return value(x, *options)

    slopes(function, lambda tangent, _, options, x: rule(tangent, options, x))
    return lambda x, *options: function(options, x)
