"""Functions of JAX's whose slopes at singular points are chosen.

At every other point the derivative is JAX's own, to the last bit, in first order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jointcut.aot.derivatives.reductions import cumulative

Array = jax.Array
Function = Callable[..., Any]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def root_of_squares(exponent: float | None, total: Array) -> Array:
    """Return a root of a sum of squares, whose slope is 0 where the sum is; without `exponent` the square root.

    Where the sum is infinite it has no slope: a zero would hide other values there.
    """
    return lax.sqrt(total) if exponent is None else lax.pow(total, jnp.asarray(exponent, total.dtype))


@root_of_squares.defjvp
def _root_slope(exponent: float | None, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (total,), (tangent,) = primals, tangents
    root, is_zero = root_of_squares(exponent, total), total == 0
    if exponent is None:
        slope = 0.5 / jnp.where(is_zero, 1, root)
    else:
        power = jnp.asarray(exponent, total.dtype)
        slope = power * lax.pow(jnp.where(is_zero, 1, total), power - 1)
    return root, tangent * jnp.where(is_zero, 0, jnp.where(jnp.isinf(total), jnp.nan, slope))


@jax.custom_jvp
def hypot(x1: Array, x2: Array) -> Array:
    """Return the length of the vector (x1, x2), whose slopes are 0 at the origin."""
    return jnp.hypot(x1, x2)


@hypot.defjvp
def _hypot_slope(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    length = hypot(*primals)
    is_zero = length == 0
    safe = jnp.where(is_zero, 1, length)
    parts = (t * jnp.where(is_zero, 0, x / safe) for x, t in zip(primals, tangents, strict=True))
    return length, sum(parts, jnp.zeros_like(length))


@jax.custom_jvp
def turned(y: Array, x: Array) -> Array:
    """Return the angle of the point (x, y), whose slopes are 0 at the origin."""
    return lax.atan2(y, x)


@turned.defjvp
def _turned_slope(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (y, x), (dy, dx) = primals, tangents
    length = lax.square(y) + lax.square(x)
    is_zero = length == 0
    length = jnp.where(is_zero, 1, length)
    of_y, of_x = (jnp.where(is_zero, 0, part / length) for part in (x, -y))
    return turned(y, x), dy * of_y + dx * of_x


# --------------------------------------------------------------------------------------- JAX's, but for some points


def mended(function: Function, is_singular: Function, calm: tuple[float, ...], slope: Function) -> Function:
    """Return the function with JAX's derivative, except where `is_singular(*points)`.

    There the derivative is `slope(points, *tangents)`, and JAX's derivative is taken at the points `calm` instead.
    """

    @jax.custom_jvp
    def value(*points: Array) -> Array:
        return function(*points)

    def jvp(points: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
        moved = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        singular = is_singular(*points)
        away = [jnp.where(singular, number, point) for number, point in zip(calm, points, strict=True)]

        def along(*some: Array) -> Array:
            given = dict(zip(moved, some, strict=True))
            return function(*(given.get(i, point) for i, point in enumerate(away)))

        tangent = jax.jvp(along, [away[i] for i in moved], [tangents[i] for i in moved])[1]
        full = (0 if isinstance(t, SymbolicZero) else t for t in tangents)
        return value(*points), jnp.where(singular, slope(points, *full), tangent)

    value.defjvp(jvp, symbolic_zeros=True)
    return value


def zero(points: tuple[Array, ...], *tangents: Any) -> Any:
    """Return a slope of zero."""
    del points, tangents
    return 0


# The logarithm of an infinite sum has no slope, like a root above: here it is not known which sums are infinite.
log_of_exponentials = mended(
    lax.log,
    lambda total: (total == 0) | (total == jnp.inf),
    (1.0,),
    lambda points, tangent: tangent * jnp.where(points[0] == 0, 0, jnp.nan),
)
xlogy = mended(jax.scipy.special.xlogy, lambda x, y: (x == 0) & (y <= 0), (1.0, 1.0), zero)
xlog1py = mended(jax.scipy.special.xlog1py, lambda x, y: (x == 0) & (y <= -1), (1.0, 0.0), zero)
logaddexp = mended(jnp.logaddexp, lambda x1, x2: (x1 == -jnp.inf) & (x2 == -jnp.inf), (0.0, 0.0), zero)
logaddexp2 = mended(jnp.logaddexp2, lambda x1, x2: (x1 == -jnp.inf) & (x2 == -jnp.inf), (0.0, 0.0), zero)
flat_abs = mended(lax.abs, lambda x: x == 0, (1.0,), zero)

# The slope for x of the incomplete gamma function is x^(a-1)·exp(-x)/gamma(a), that of the beta function
# x^(a-1)·(1-x)^(b-1)/beta(a, b): 1, and b or a, where a power of zero has the exponent 0.
igamma = mended(lax.igamma, lambda a, x: (a == 1) & (x == 0), (1.0, 1.0), lambda _, da, dx: dx)
igammac = mended(lax.igammac, lambda a, x: (a == 1) & (x == 0), (1.0, 1.0), lambda _, da, dx: -dx)
betainc = mended(
    lax.betainc,
    lambda a, b, x: ((a == 1) & (x == 0)) | ((b == 1) & (x == 1)),
    (1.0, 1.0, 0.5),
    lambda points, da, db, dx: jnp.where(points[2] == 0, points[1], points[0]) * dx,
)

#: The functions whose slope is infinite at 1; the arcs of circles also at -1.
ARCS = {"acos": lax.acos, "asin": lax.asin, "acosh": lax.acosh}


def arc(name: str, ends: tuple[float, ...]) -> Function:
    """Return an arc, whose slope is 0 at the given ends of its operand.

    The arc cosine of cos(x) is the distance of x to the next multiple of 2·pi: its slope jumps between -1 and 1.
    """

    def is_end(x: Array) -> Array:
        return functools.reduce(lax.bitwise_or, (x == end for end in ends))

    return mended(ARCS[name], is_end, (2.0 if name == "acosh" else 0.0,), zero)


#: The cube root of a square is steep on both sides of zero.
cube_root_of_squares = mended(lax.cbrt, lambda total: total == 0, (1.0,), zero)


def cube_root(exponent: int) -> Function:
    """The cube root of x to this exponent, 3 or more, as a function of the power and of x."""
    slope = (lambda _, d_power, dx: dx) if exponent == 3 else zero
    return mended(lambda power, x: lax.cbrt(power), lambda power, x: power == 0, (1.0, 1.0), slope)


# ----------------------------------------------------------------------------------------------- bounds and ties


def bounded(name: str, at_bound: str) -> Function:
    """Return `max` or `min` of x and a bound, with the slope "one" or "zero" for x where the two are equal."""
    primitive = lax.max if name == "max" else lax.min
    inside = {("max", "one"): lax.ge, ("max", "zero"): lax.gt, ("min", "one"): lax.le, ("min", "zero"): lax.lt}

    @jax.custom_jvp
    def value(x: Array, bound: Array) -> Array:
        return primitive(x, bound)

    @value.defjvp
    def _(points: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
        (x, bound), (dx, d_bound) = points, tangents
        return value(x, bound), jnp.where(inside[name, at_bound](x, bound), dx, d_bound)

    return value


@jax.custom_jvp
def clamped(low: Array, x: Array, high: Array) -> Array:
    """Return `lax.clamp` with the slope 1 on a bound."""
    return lax.clamp(low, x, high)


@clamped.defjvp
def _clamped_slope(points: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    (low, x, high), (d_low, dx, d_high) = points, tangents
    outside = jnp.where(x < low, d_low, d_high)
    return clamped(low, x, high), jnp.where((x >= low) & (x <= high), dx, outside)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def first_along(name: str, axes: tuple[int, ...], x: Array) -> Array:
    """Return the largest or the smallest element over axes; the first of equal ones has all the slope."""
    return (lax.reduce_max if name == "reduce_max" else lax.reduce_min)(x, axes)


@first_along.defjvp
def _first_slope(
    name: str, axes: tuple[int, ...], primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    order, shape = (*kept, *axes), [x.shape[axis] for axis in kept]
    rows, moved = (a.transpose(order).reshape(*shape, -1) for a in (x, tangent))
    place = (jnp.argmax if name == "reduce_max" else jnp.argmin)(lax.stop_gradient(rows), axis=-1, keepdims=True)
    return first_along(name, axes, x), jnp.take_along_axis(moved, place, axis=-1)[..., 0]


def last_so_far(name: str, axis: int, reverse: bool) -> Function:
    """Return `lax.cummax` or `lax.cummin`, where the last of equal elements so far has all the slope."""
    function = cumulative.cummax if name == "cummax" else cumulative.cummin

    def value(x: Array) -> Array:
        return lax.rev(function(lax.rev(x, (axis,)), axis), (axis,)) if reverse else function(x, axis)

    return value


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def shared_in_order(axis: int, x: Array) -> Array:
    """Return elements sorted along an axis; equal ones share their slopes evenly."""
    return lax.sort(x, dimension=axis)


@shared_in_order.defjvp
def _shared_slope(axis: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    order = jnp.argsort(lax.stop_gradient(x), axis=axis)
    ordered, moved = (jnp.take_along_axis(a, order, axis=axis) for a in (lax.stop_gradient(x), tangent))
    rows, moves = (jnp.moveaxis(a, axis, -1).reshape(-1, x.shape[axis]) for a in (ordered, moved))
    shared = jax.vmap(_mean_of_equal)(rows, moves)
    shape = [size for place, size in enumerate(x.shape) if place != axis]
    return shared_in_order(axis, x), jnp.moveaxis(shared.reshape(*shape, x.shape[axis]), -1, axis)


def _mean_of_equal(ordered: Array, moved: Array) -> Array:
    """Return, for each element of a sorted row, the mean of `moved` over the elements equal to it."""
    count = ordered.shape[0]
    groups = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])[:count])
    sizes = jax.ops.segment_sum(jnp.ones(count, moved.dtype), groups, count)
    return (jax.ops.segment_sum(moved, groups, count) / jnp.maximum(sizes, 1))[groups]
