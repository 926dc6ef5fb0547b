"""Multiply tangents with slopes so that zero stays zero, and declare derivatives argument by argument.

A derivative is a linear map: it maps a zero tangent to zero, even where its slope is infinite or NaN. A product of
floats does not, since `0 * inf` is NaN. `times` is a product that maps zero to zero. Its transpose and its own
derivative are made of such products as well. So zero stays zero in second order, in all combinations of forward and
reverse mode.
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
    """Return tangent * slope(*points) elementwise, but zero where the tangent is zero, for any slope.

    A nonzero tangent gives an infinite product where the slope is infinite, and NaN where it is NaN, as outside of a
    function's domain. The same holds for the slope of the slope. The backward reads one saved array.
    """
    steepness, tangent = jnp.broadcast_arrays(_steepness(slope, *jnp.broadcast_arrays(*points)), tangent)
    return along(_GUARDED, 1, steepness.astype(tangent.dtype), tangent)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _steepness(slope: Callable[..., jax.Array], *points: jax.Array) -> jax.Array:
    """Return the slope; `times` multiplies its tangents with its own slopes."""
    return slope(*points)


def _bend(slope: Callable[..., jax.Array], place: int, *points: jax.Array) -> jax.Array:
    """Return the slope's own slope, along point `place`."""

    def along_point(point: jax.Array) -> jax.Array:
        return slope(*points[:place], point, *points[place + 1 :])

    return jax.jvp(along_point, (points[place],), (jnp.ones_like(points[place]),))[1]


def _steepness_moves(slope: Callable[..., jax.Array], points: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    result = _steepness(slope, *points)
    moves = ((i, tangent) for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero))
    parts = [times(tangent, partial(_bend, slope, i), *points).astype(result.dtype) for i, tangent in moves]
    return result, sum(parts, jnp.zeros_like(result))


_steepness.defjvp(_steepness_moves, symbolic_zeros=True)


def with_slopes(value: Callable[..., Any], *rules: Rule | None, options: int = 0) -> Callable[..., jax.Array]:
    """Make a function with a rule for each argument: `rule(tangent, result, *arguments)`, or None for no slope.

    The rule of an argument that is not differentiated is not called, and costs nothing. The first arguments, as many as
    `options`, are Python values and have no rules.
    """

    @partial(jax.custom_jvp, nondiff_argnums=tuple(range(options)))
    def function(*arguments: Any) -> jax.Array:
        return value(*arguments)

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
    return function


def unary(value: Callable[..., jax.Array], slope: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make a function of one array and of options: `value(x, *options)`, with the slope `slope(x, *options)`.

    The slope must be finite wherever the function is, and is differentiated for the second order.
    """
    return _with_slope(value, lambda tangent, options, x: tangent * slope(x, *options))


def steep(value: Callable[..., jax.Array], slope: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make a function like `unary`, with a slope that may be infinite or NaN: `times` multiplies with it."""
    return _with_slope(value, lambda tangent, options, x: times(tangent, lambda x: slope(x, *options), x))


def by_result(value: Callable[..., jax.Array], slope: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Make a function of one array with the slope `slope(value(x))`, computed from the result.

    Then the backward need not save x. The slope must be finite wherever the function is.
    """
    return with_slopes(value, lambda tangent, result, _: tangent * slope(result))


def _with_slope(value: Callable[..., jax.Array], rule: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def of(options: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return value(x, *options)

    function = with_slopes(of, lambda tangent, _, options, x: rule(tangent, options, x), options=1)
    return lambda x, *options: function(options, x)
