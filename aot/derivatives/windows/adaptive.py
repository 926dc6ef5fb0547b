"""Pool to a given size, by windows that share the axis evenly.

Window i of n covers the places from floor(i·length / n) to ceil((i + 1)·length / n), as in PyTorch; neighbours may
overlap by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, refused

Sizes = int | Sequence[int]


def adaptive_avg_pool(x: ArrayLike, size: Sizes) -> jax.Array:
    """The mean of each window. It is linear, and the same as PyTorch's `adaptive_avg_pool2d_backward`."""
    array = inexact("adaptive_avg_pool", "x", x)
    for axis, wanted in sized("adaptive_avg_pool", array, size):
        spans = _spans(array.shape[axis], wanted)
        weights = np.zeros((wanted, array.shape[axis]))
        for row, (start, stop) in enumerate(spans):
            weights[row, start:stop] = 1 / (stop - start)
        array = along(array, axis, weights)
    return array


def adaptive_max_pool(x: ArrayLike, size: Sizes) -> jax.Array:
    """The largest element of each window. The first of equal largest elements has the slope 1, in the order of axes.

    Source: PyTorch's `adaptive_max_pool2d_backward`. The second derivative is 0.
    """
    array = inexact("adaptive_max_pool", "x", x, real=True)
    for axis, wanted in reversed(sized("adaptive_max_pool", array, size)):
        spans = _spans(array.shape[axis], wanted)
        longest = max(stop - start for start, stop in spans)
        table = np.array([[min(start + n, stop - 1) for n in range(longest)] for start, stop in spans])
        windows = jnp.moveaxis(array, axis, -1)[..., table]
        best = jnp.argmax(lax.stop_gradient(windows), -1, keepdims=True)
        array = jnp.moveaxis(jnp.take_along_axis(windows, best, -1)[..., 0], -1, axis)
    return array


def sized(function: str, x: jax.Array, size: Sizes) -> list[tuple[int, int]]:
    """Return the last axes, one for each size, and their new lengths; refuse more sizes than there are axes."""
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if not 1 <= len(sizes) <= x.ndim or min(sizes) < 1:
        what = f"is {sizes}, but the array has {x.ndim} dimensions."
        cure = "Pass a positive whole number for each axis to resize, the last ones."
        raise refused(f"{function}: size", what, cure)
    if 0 in x.shape[x.ndim - len(sizes) :]:
        what = f"has shape {x.shape}, with an empty axis to resize."
        raise refused(f"{function}: the array", what, "Pass at least one element along each.")
    return list(zip(range(x.ndim - len(sizes), x.ndim), sizes, strict=True))


def along(x: jax.Array, axis: int, weights: np.ndarray) -> jax.Array:
    """Multiply a matrix with one axis of an array, in full precision."""
    matrix = jnp.asarray(weights, x.dtype)
    product = lax.dot_general(x, matrix, (((axis,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return jnp.moveaxis(product, -1, axis)


def _spans(length: int, count: int) -> list[tuple[int, int]]:
    return [(n * length // count, -(-(n + 1) * length // count)) for n in range(count)]
