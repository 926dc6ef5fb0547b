"""Multiply tangents with slopes so that zero stays zero, and declare derivatives argument by argument.

A derivative is a linear map. It takes a zero tangent to zero, also where its slope is infinite or not a number; a
product of floats does not, since `0 * inf` is NaN. `times` writes the slope as a product of finite factors instead. A
tangent that is not zero still becomes infinite or NaN by them, and JAX can transpose them as any product. The slope of
the slope is treated in the same way, so second order keeps zero too, in all combinations of forward and reverse mode.
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

    The factors of an infinite slope are the largest finite number, twice, on both sides of its sign, and those of a NaN
    have a zero in place of the sign: whichever is multiplied first, forward or transposed, infinity times zero is NaN.
    A finite slope is multiplied with ones, which changes no bit.
    """
    points = tuple(jnp.broadcast_arrays(*points))
    steepness = _calm(slope, *points)
    finite = jnp.isfinite(steepness)
    fixed = jax.lax.stop_gradient(steepness)
    sign = jnp.where(jnp.isinf(fixed), jnp.sign(fixed.real), 0).astype(steepness.dtype)
    outer = jnp.where(finite, 1, jnp.finfo(steepness.dtype).max).astype(steepness.dtype)
    straight = tangent * outer * outer * jnp.where(finite, steepness, sign) * outer * outer
    edge = ~finite | (fixed == 0)  # an infinite bend is where the slope is infinite, or is 0 as that of x^1.5 at 0
    return straight + jnp.where(edge, tangent, 0) * _large(steepness.dtype) * _wild(slope, *points)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _calm(slope: Callable[..., jax.Array], *points: jax.Array) -> jax.Array:
    """The slope, with its own slope where that is finite."""
    return slope(*points)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _wild(slope: Callable[..., jax.Array], *points: jax.Array) -> jax.Array:
    """Zero, with a large slope where the slope's own slope is infinite, whose product with `_large` is infinite."""
    return jnp.zeros_like(slope(*points))


def _calm_slope(tangent: jax.Array, bend: jax.Array) -> jax.Array:
    finite = jnp.isfinite(bend)
    return jnp.where(finite, tangent, 0) * jnp.where(finite, bend, 0)


def _wild_slope(tangent: jax.Array, bend: jax.Array) -> jax.Array:
    infinite = jnp.isinf(bend)
    sign = jnp.where(infinite, jnp.sign(jax.lax.stop_gradient(bend).real), 0).astype(bend.dtype)
    return jnp.where(infinite, tangent, 0) * _large(bend.dtype) * sign


def _large(dtype: jnp.dtype) -> jax.Array:
    """A number whose square is infinite, and that leaves room for tangents."""
    return jnp.asarray(2.0 ** int(0.6 * jnp.finfo(dtype).maxexp), dtype)


def _by_bends(function: Any, part: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    """Differentiate a function of a slope by the slope's own slope for each point, whose tangents are of its shape."""

    def jvp(slope: Callable[..., jax.Array], points: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        result = function(slope, *points)
        total = jnp.zeros_like(result)
        for place, tangent in enumerate(tangents):
            if not isinstance(tangent, SymbolicZero):
                along = lambda point, place=place: slope(*points[:place], point, *points[place + 1 :])  # noqa: E731
                bend = jax.jvp(along, (points[place],), (jnp.ones_like(points[place]),))[1]
                total = total + part(tangent, bend).astype(result.dtype)
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


def _with_slope(value: Callable[..., jax.Array], rule: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    @partial(jax.custom_jvp, nondiff_argnums=(0,))
    def function(options: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return value(x, *options)

    slopes(function, lambda tangent, _, options, x: rule(tangent, options, x))
    return lambda x, *options: function(options, x)
