"""The largest, the smallest and the middle element over axes, where equal elements share evenly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import Axis, inexact, nonempty, some_axes
from jointcut.aot.derivatives.slopes import with_slopes


def amax(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """The largest element. Equal largest elements share the slope evenly, as in PyTorch (`amaxamin_jvp`) and JAX."""
    return _element("amax", a, axis, keepdims)


def amin(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """The smallest element. Equal smallest elements share the slope evenly, as in PyTorch (`amaxamin_jvp`) and JAX."""
    return _element("amin", a, axis, keepdims)


def aminmax(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest element, as `amin` and `amax` (PyTorch's `aminmax`)."""
    return _element("amin", a, axis, keepdims), _element("amax", a, axis, keepdims)


def median(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """The middle element, or the mean of the two in the middle, as in JAX; PyTorch takes the lower one.

    Elements equal to the middle element share its slope evenly (PyTorch's `evenly_distribute_backward`, which it uses
    for the median over all axes). JAX gives the whole slope to one element. If an element is NaN, the result is NaN,
    and the NaNs share the slope.
    """
    return _element("median", a, axis, keepdims)


def nanmedian(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """The median of the elements that are not NaN; see `median`. NaNs have the slope 0, unless all are NaN."""
    return _element("nanmedian", a, axis, keepdims)


def _element(function: str, a: ArrayLike, axis: Axis, keepdims: bool) -> jax.Array:
    array = inexact(function, "a", a, real=True)
    axes = some_axes(function, axis, array.ndim)
    nonempty(function, array, axes)
    return _ranked(function, axes, keepdims, array)


def _ranked_slope(
    tangent: jax.Array, _: jax.Array, function: str, axes: tuple[int, ...], keepdims: bool, x: jax.Array
) -> jax.Array:
    if function in ("amax", "amin"):
        return _share(tangent, x, _ranked(function, axes, True, x), axes, keepdims)
    low, high = (jax.lax.stop_gradient(value) for value in _middle_two(function, x, axes))
    return (_share(tangent, x, low, axes, keepdims) + _share(tangent, x, high, axes, keepdims)) / 2


_ranked = with_slopes(
    lambda function, axes, keepdims, x: getattr(jnp, function)(x, axis=axes, keepdims=keepdims),
    _ranked_slope,
    options=3,
)


def _share(tangent: jax.Array, x: jax.Array, value: jax.Array, axes: tuple[int, ...], keepdims: bool) -> jax.Array:
    """Return the mean of the tangents where x equals the value."""
    reached = (x == value) | (jnp.isnan(x) & jnp.isnan(value))
    count = jnp.sum(reached.astype(x.dtype), axis=axes, keepdims=True)
    return jnp.sum(jnp.where(reached, tangent / jnp.maximum(count, 1), 0), axis=axes, keepdims=keepdims)


def _middle_two(function: str, x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the two middle elements, with the reduced axes kept; for an odd number they are the same element."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    rows = jnp.transpose(x, (*kept, *axes)).reshape(*(x.shape[axis] for axis in kept), -1)
    missing = jnp.isnan(rows)
    count = jnp.sum(~missing, axis=-1, keepdims=True)
    if function == "median":
        count = jnp.where(missing.any(-1, keepdims=True), 0, count)
    places = [jnp.maximum(count - 1, 0) // 2, count // 2]
    ordered = jnp.sort(rows, axis=-1)
    found = [jnp.take_along_axis(ordered, place, axis=-1) for place in places]
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    low, high = (jnp.where(count == 0, jnp.nan, value).reshape(shape) for value in found)
    return low, high
