"""Pool windows of a fixed shape: by the largest, the mean, or a norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, refused
from jointcut.aot.derivatives.elementwise.powers import power

Sizes = int | Sequence[int]


def max_pool(
    x: ArrayLike,
    window: Sizes,
    strides: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> jax.Array:
    """The largest element of each window.

    Its slope is 1 at the first of the largest elements, in the order of the axes, and 0 elsewhere. Only the place of
    this element is saved. Source: PyTorch's `max_pool_double_backward`, and its kernels for ties. The second derivative
    is 0. JAX's pooling, `lax.reduce_window`, has no second derivative in reverse mode.
    """
    array = inexact("max_pool", "x", x, real=True)
    plan = _planned("max_pool", array, window, strides, padding, dilation, ceil_mode)
    places = lax.iota(jnp.int32, math.prod(plan.lengths)).reshape(plan.lengths)
    start = (jnp.asarray(-jnp.inf, array.dtype), jnp.asarray(jnp.iinfo(jnp.int32).max, jnp.int32))
    operands = (lax.stop_gradient(array), jnp.broadcast_to(places, array.shape))
    _, chosen = lax.reduce_window(
        operands, start, _larger, plan.window, plan.strides, plan.padding, window_dilation=plan.dilation
    )
    lead = array.shape[: array.ndim - len(plan.lengths)]
    flat = array.reshape(*lead, math.prod(plan.lengths))
    places = chosen.reshape(*lead, math.prod(chosen.shape[len(lead) :]))
    return jnp.take_along_axis(flat, places, -1).reshape(chosen.shape)


def _larger(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the larger of two elements and its place; NaN is the largest, and of equal elements the first wins."""
    (x, at_x), (y, at_y) = a, b
    first = (x > y) | ((x != x) & (y == y)) | (((x == y) | ((x != x) & (y != y))) & (at_x < at_y))
    return jnp.where(first, x, y), jnp.where(first, at_x, at_y)


def avg_pool(
    x: ArrayLike,
    window: Sizes,
    strides: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> jax.Array:
    """The mean of each window. It is linear: the slope is one over the number of elements that count.

    Padding counts with `count_include_pad`; `divisor_override` replaces the number. Source: PyTorch's
    `avg_pool2d_backward`.
    """
    array = inexact("avg_pool", "x", x)
    plan = _planned("avg_pool", array, window, strides, padding, 1, ceil_mode)
    total = _sums(array, plan)
    if divisor_override is not None:
        return total / divisor_override
    inside = _counts(plan, count_include_pad)
    return total / jnp.asarray(inside, total.dtype)


def lp_pool(x: ArrayLike, ord: float, window: Sizes, strides: Sizes | None = None) -> jax.Array:
    """(sum of x^ord over each window)^(1/ord). Slope: (x / result)^(ord - 1).

    Source: PyTorch's `lp_pool2d`, made of powers and a mean. A sum of zero has the slope 0, the middle of the
    subgradients, as in PyTorch; the same formula in plain JAX gives NaN.
    """
    array = inexact("lp_pool", "x", x, real=True)
    if not 0 < ord < math.inf:
        raise refused("lp_pool: ord", f"is {ord}.", "Pass a positive number; for inf, `max_pool`.")
    total = _sums(power(array, ord), _planned("lp_pool", array, window, strides, 0, 1, False))
    return jnp.where(total == 0, 0, power(jnp.where(total == 0, 1, total), 1 / ord))


# ---------------------------------------------------------------- where windows lie


class _Plan(NamedTuple):
    """Windows of all axes of an array, and the lengths and paddings of the pooled axes."""

    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    lengths: tuple[int, ...]
    given: tuple[int, ...]


def _planned(
    function: str,
    x: jax.Array,
    window: Sizes,
    strides: Sizes | None,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
) -> _Plan:
    sizes = (window,) if isinstance(window, int) else tuple(window)
    count = len(sizes)
    if not 1 <= count <= x.ndim:
        what = f"has {count} numbers, but the array has {x.ndim} dimensions."
        raise refused(f"{function}: window", what, "Pass one number for each axis to pool.")
    steps = sizes if strides is None else _each(function, "strides", strides, count, 1)
    pads = _each(function, "padding", padding, count, 0)
    holes = _each(function, "dilation", dilation, count, 1)
    _each(function, "window", sizes, count, 1)
    lengths = x.shape[x.ndim - count :]
    if any(2 * pad > size for pad, size in zip(pads, sizes, strict=True)):
        what = f"is {pads}, more than half of the window {sizes}."
        raise refused(f"{function}: padding", what, "Pad by half a window at most.")
    both = []
    for length, size, step, pad, hole in zip(lengths, sizes, steps, pads, holes, strict=True):
        room = length + 2 * pad - hole * (size - 1) - 1
        if room < 0:
            what = f"is {sizes}, too large for the axes of lengths {lengths}."
            raise refused(f"{function}: window", what, "Pass a smaller one, or pad.")
        outputs = (math.ceil(room / step) if ceil_mode else room // step) + 1
        outputs -= ceil_mode and (outputs - 1) * step >= length + pad
        both.append((pad, max(pad, (outputs - 1) * step + hole * (size - 1) + 1 - length - pad)))
    ones, none = (1,) * (x.ndim - count), ((0, 0),) * (x.ndim - count)
    return _Plan(ones + sizes, ones + steps, (*none, *both), ones + holes, lengths, pads)


def _each(function: str, name: str, value: Sizes, count: int, least: int) -> tuple[int, ...]:
    values = (value,) * count if isinstance(value, int) else tuple(value)
    if len(values) != count or any(one < least for one in values):
        what = f"is {values}, for {count} axes."
        cure = f"Pass {count} whole numbers of at least {least}."
        raise refused(f"{function}: {name}", what, cure)
    return values


def _sums(x: jax.Array, plan: _Plan) -> jax.Array:
    zero = np.zeros((), x.dtype)
    return lax.reduce_window(x, zero, lax.add, plan.window, plan.strides, plan.padding, None, plan.dilation)


def _counts(plan: _Plan, with_padding: bool) -> np.ndarray:
    """Count the elements that count in each window: the product of the counts along each axis."""
    counts = np.ones(())
    count = len(plan.lengths)
    axes = zip(
        plan.window[-count:], plan.strides[-count:], plan.padding[-count:], plan.lengths, plan.given, strict=True
    )
    for size, step, (low, high), length, pad in axes:
        counted = np.zeros(low + length + high)
        counted[: low + length + pad] = 1
        if not with_padding:
            counted[:low] = counted[low + length :] = 0
        starts = np.arange(0, len(counted) - size + 1, step)
        counts = counts[..., None] * np.array([counted[start : start + size].sum() for start in starts])
    return counts
