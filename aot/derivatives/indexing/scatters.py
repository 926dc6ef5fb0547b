"""Read and write at indices, and combine the elements that come to one place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, one_axis, one_of, refused
from jointcut.aot.derivatives.indexing.products import grouped_product

REDUCTIONS = ("amax", "amin", "mean", "prod", "sum")


def take_along_axis(arr: ArrayLike, indices: ArrayLike, axis: int = -1) -> jax.Array:
    """The elements at the indices along an axis. Backwards, cotangents of the same element are added.

    Source: PyTorch's `gather_backward`. An index outside gives NaN, as in JAX, and no cotangent; PyTorch raises.
    """
    array, index = inexact("take_along_axis", "arr", arr), whole("take_along_axis", indices)
    return jnp.take_along_axis(array, index, one_axis("take_along_axis", axis, array.ndim))


def gather(x: ArrayLike, axis: int, index: ArrayLike) -> jax.Array:
    """PyTorch's `gather`: `take_along_axis` where the index may be shorter than the array along other axes."""
    array, indices = inexact("gather", "x", x), whole("gather", index)
    places = _places("gather", array, axis, indices)
    return array.reshape(-1)[places].reshape(indices.shape)


def index_select(x: ArrayLike, axis: int, index: ArrayLike) -> jax.Array:
    """The slices at the indices. Cotangents of one slice are added, as by PyTorch's `index_select_backward`."""
    array, indices = inexact("index_select", "x", x), whole("index_select", index)
    return jnp.take(array, indices, one_axis("index_select", axis, array.ndim))


def index_add(x: ArrayLike, axis: int, index: ArrayLike, source: ArrayLike, alpha: float = 1.0) -> jax.Array:
    """Return x, with alpha times the slices of `source` added at the indices; slices for one place are all added.

    It is linear. Source: PyTorch's `index_add`: the gradient for `source` is the cotangent, read at the indices.
    """
    array, indices = inexact("index_add", "x", x), whole("index_add", index)
    along = one_axis("index_add", axis, array.ndim)
    added = alpha * inexact("index_add", "source", source).astype(array.dtype)
    return jnp.moveaxis(jnp.moveaxis(array, along, 0).at[indices].add(jnp.moveaxis(added, along, 0)), 0, along)


def index_fill(x: ArrayLike, axis: int, index: ArrayLike, value: ArrayLike) -> jax.Array:
    """Return x, with a value in the slices at the indices. The value's gradient is the sum of their cotangents."""
    array, indices = inexact("index_fill", "x", x), whole("index_fill", index)
    along = one_axis("index_fill", axis, array.ndim)
    filled = jnp.zeros(array.shape[along], bool).at[indices].set(True)
    shape = [-1 if n == along else 1 for n in range(array.ndim)]
    return masked_fill(array, filled.reshape(shape), value)


def masked_fill(x: ArrayLike, mask: ArrayLike, value: ArrayLike) -> jax.Array:
    """Return x, with a value where the mask is true. The value's gradient is the sum of the cotangents there.

    Source: PyTorch's `masked_fill_backward`.
    """
    array = inexact("masked_fill", "x", x)
    return jnp.where(jnp.asarray(mask), jnp.asarray(value).astype(array.dtype), array)


def index_put(x: ArrayLike, indices: Sequence[ArrayLike], values: ArrayLike, accumulate: bool = False) -> jax.Array:
    """Return x, with values at the places that index arrays name, one array for each of the first axes.

    With `accumulate`, all values for a place are added, and each gets the cotangent of the place. Without it, one of
    these values stays, and only it gets the cotangent. PyTorch gives the cotangent to all of them, though the result
    does not depend on the others. Source: PyTorch's `index_put` and `index_backward`.
    """
    array = inexact("index_put", "x", x)
    places = tuple(whole("index_put", index) for index in indices)
    if not 1 <= len(places) <= array.ndim:
        what = f"has {len(places)} arrays, but x has {array.ndim} dimensions."
        raise refused("index_put: indices", what, "Pass one for each of the first axes.")
    given = inexact("index_put", "values", values).astype(array.dtype)
    return array.at[places].add(given) if accumulate else array.at[places].set(given)


def scatter(x: ArrayLike, axis: int, index: ArrayLike, src: ArrayLike) -> jax.Array:
    """Return x, with the elements of `src` written at the indices along an axis.

    Source: PyTorch's `scatter`. Where two elements are written to one place, the one that stays gets the cotangent;
    PyTorch gives it to both.
    """
    array, places, given = _scattered("scatter", x, axis, index, src)
    return array.reshape(-1).at[places].set(given).reshape(array.shape)


def scatter_add(x: ArrayLike, axis: int, index: ArrayLike, src: ArrayLike) -> jax.Array:
    """Return x, with the elements of `src` added at the indices along an axis; elements for one place are all added.

    It is linear. Source: PyTorch's `scatter_add`: the gradient for `src` is gathered at the indices.
    """
    array, places, given = _scattered("scatter_add", x, axis, index, src)
    return array.reshape(-1).at[places].add(given).reshape(array.shape)


def scatter_reduce(
    x: ArrayLike, axis: int, index: ArrayLike, src: ArrayLike, reduce: str, include_self: bool = True
) -> jax.Array:
    """Combine the elements of `src` for a place with its old value, by "sum", "prod", "mean", "amax" or "amin".

    Without `include_self`, the old value counts only where no element comes. Source: PyTorch's
    `scatter_reduce_backward`.

    - "amax", "amin": ties share the cotangent evenly, the old value included. PyTorch counts a tying old value also
      without `include_self`, though it does not take part.
    - "prod": the slope is the product of the other factors, also with zeros and in second order. PyTorch has no second
      order where two zeros meet.
    """
    one_of("scatter_reduce", "reduce", reduce, REDUCTIONS)
    array, places, given = _scattered("scatter_reduce", x, axis, index, src)
    flat = array.reshape(-1)
    hit = jnp.zeros(flat.shape, jnp.int32).at[places].add(1)
    counted = jnp.ones(flat.shape, bool) if include_self else hit == 0
    if reduce in ("sum", "mean"):
        total = jnp.where(counted, flat, 0).at[places].add(given)
        share = hit + counted.astype(jnp.int32)
        result = total if reduce == "sum" else total / share.astype(total.dtype)
    elif reduce == "prod":
        result = grouped_product(given, places, jnp.where(counted, flat, 1))
    else:
        result = _grouped_extreme(reduce == "amax", given, places, flat, counted)
    return result.reshape(array.shape)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _grouped_extreme(largest: bool, given: jax.Array, places: jax.Array, x: jax.Array, counted: jax.Array) -> jax.Array:
    start = jnp.where(counted, x, -jnp.inf if largest else jnp.inf)
    return start.at[places].max(given) if largest else start.at[places].min(given)


@_grouped_extreme.defjvp
def _extreme_rule(largest: bool, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (given, places, x, counted), (dgiven, _, dx, _) = primals, tangents
    result = _grouped_extreme(largest, given, places, x, counted)
    best, own = given == result[places], counted & (x == result)
    ties = own.astype(x.dtype).at[places].add(best.astype(x.dtype))
    total = jnp.where(own, dx, 0).at[places].add(jnp.where(best, dgiven, 0))
    return result, total / jnp.maximum(ties, 1)


def whole(function: str, index: ArrayLike) -> jax.Array:
    """Return indices as an array; refuse an array that does not hold integers."""
    array = jnp.asarray(index)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        what = f"has type {array.dtype}, but it names places."
        raise refused(f"{function}: index", what, "Pass integers.")
    return array


def _scattered(function: str, x: ArrayLike, axis: int, index: ArrayLike, src: ArrayLike) -> tuple[Any, Any, Any]:
    """Return x, the flat places to write to, and the elements to write there."""
    array, indices = inexact(function, "x", x), whole(function, index)
    given = inexact(function, "src", src).astype(array.dtype)
    places = _places(function, array, axis, indices)
    if given.ndim != indices.ndim or any(n > m for n, m in zip(indices.shape, given.shape, strict=True)):
        what = f"has shape {given.shape}, but index has {indices.shape}."
        raise refused(f"{function}: src", what, "Pass at least one element for each index.")
    return array, places, given[tuple(slice(n) for n in indices.shape)].reshape(-1)


def _places(function: str, x: jax.Array, axis: int, index: jax.Array) -> jax.Array:
    """Return the flat places in x that an index along one axis names."""
    along = one_axis(function, axis, x.ndim)
    fits = index.ndim == x.ndim and all(
        n == along or i <= m for n, (i, m) in enumerate(zip(index.shape, x.shape, strict=True))
    )
    if not fits:
        what = f"has shape {index.shape}, but x has {x.shape}."
        cure = "Pass as many axes, none longer than that of x but the one along which it counts."
        raise refused(f"{function}: index", what, cure)
    length = x.shape[along]
    grid = list(jnp.indices(index.shape, dtype=index.dtype, sparse=True))
    grid[along] = jnp.where(index < 0, index + length, index)
    flat = jnp.zeros((), index.dtype)
    for axis_length, place in zip(x.shape, grid, strict=True):
        flat = flat * axis_length + place
    return jnp.broadcast_to(flat, index.shape).reshape(-1)
