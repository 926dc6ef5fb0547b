"""Multiply tangents with slopes so that zero stays zero, and declare derivatives argument by argument.

A derivative is a linear map. It takes a zero tangent to zero, also where its slope is infinite or not a number; a
product of floats does not, since `0 * inf` is NaN. `times` writes such a slope as a product of large finite factors, by
which a tangent that is not zero still becomes infinite, and which JAX transposes as any product. The slope of the slope
is treated in the same way, so second order keeps zero too, in all combinations of forward and reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

Rule = Callable[..., jax.Array]


def times(tangent: jax.Array, slope: Callable[..., jax.Array], *points: jax.Array) -> jax.Array:
    """Return tangent * slope(*points) elementwise, but zero where the tangent is zero, whatever the slope.

    An infinite slope is the product of three large numbers, by which a tangent above 1e-12 becomes infinite. A slope
    that is NaN, as those outside a function's domain, counts as positive infinity. A finite slope is multiplied as it
    is. The backward keeps one array and two masks.
    """
    points = tuple(jnp.broadcast_arrays(*points))
    steepness = _calm(slope, *points)
    finite, fixed = jnp.isfinite(steepness), jax.lax.stop_gradient(steepness)
    small, large, more = _factors(steepness.dtype)
    sign = jnp.where(jnp.isnan(fixed), 1, jnp.sign(fixed.real)).astype(steepness.dtype)
    edge = ~finite | _may_bend(fixed)
    scaled = jnp.where(finite, jnp.where(edge, steepness / small, steepness), sign * large)
    product = jnp.where(edge, tangent * small, tangent) * (scaled + _wild(slope, *points))
    return jnp.where(finite, product, product * more)


def _may_bend(slope: jax.Array) -> jax.Array:
    """Where the slope of a finite slope may be infinite: where it is 0, as that of x^1.5 at 0.

    Numbers of 16 bits with 5 for the exponent have no room for the factors, and are left out.
    """
    return (slope == 0) & (jnp.finfo(slope.dtype).maxexp > 16)


def _factors(dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Powers of two: for the tangent, for the slope, and for the product of both where that is to be infinite."""
    largest = jnp.finfo(dtype).maxexp
    small, large, more = largest // 9, largest - largest // 9 + 1, largest // 3
    return (
        jnp.asarray(2.0**small, dtype),
        jnp.asarray(2.0 ** min(large, largest - 1), dtype),
        jnp.asarray(2.0**more, dtype),
    )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _calm(slope: Callable[..., jax.Array], *points: jax.Array) -> jax.Array:
    """The slope, with its own slope where that is finite."""
    return slope(*points)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _wild(slope: Callable[..., jax.Array], *points: jax.Array) -> jax.Array:
    """Zero, with a large slope where the slope's own slope is infinite, whose product with the factors is infinite."""
    return jnp.zeros_like(slope(*points))


def _calm_slope(tangent: jax.Array, bend: jax.Array) -> jax.Array:
    finite = jnp.isfinite(bend)
    return jnp.where(finite, tangent, 0) * jnp.where(finite, bend, 0)


def _wild_slope(tangent: jax.Array, bend: jax.Array) -> jax.Array:
    infinite = jnp.isinf(bend)
    sign = jnp.where(infinite, jnp.sign(jax.lax.stop_gradient(bend).real), 0).astype(bend.dtype)
    return jnp.where(infinite, tangent, 0) * (_factors(bend.dtype)[1] * sign)


def _bend(slope: Callable[..., jax.Array], points: tuple[jax.Array, ...], place: int) -> jax.Array:
    """The slope's own slope, along the point at this place."""

    def along(point: jax.Array) -> jax.Array:
        return slope(*points[:place], point, *points[place + 1 :])

    return jax.jvp(along, (points[place],), (jnp.ones_like(points[place]),))[1]


def _by_bends(function: Any, part: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    """Differentiate a function of a slope by the slope's own slope for each point, whose tangents are of its shape."""

    def jvp(slope: Callable[..., jax.Array], points: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        result = function(slope, *points)
        total = jnp.zeros_like(result)
        for place, tangent in enumerate(tangents):
            if not isinstance(tangent, SymbolicZero):
                total = total + part(tangent, _bend(slope, points, place)).astype(result.dtype)
        return result, total

    function.defjvp(jvp, symbolic_zeros=True)


_by_bends(_calm, _calm_slope)
_by_bends(_wild, _wild_slope)


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
