"""Resize by the nearest element, by lines, or by cubic curves.

Every method is linear in the array: it multiplies a matrix with each axis, and the backward multiplies the transposed
matrix. Nothing is singular. Libraries differ in the places and the curves; these are PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, one_of, refused
from jointcut.aot.derivatives.windows.adaptive import adaptive_avg_pool, along, sized

METHODS = ("area", "cubic", "linear", "nearest", "nearest-exact")
_CUBIC = -0.75  # PyTorch's slope of the cubic kernel at 1; `jax.image.resize` has -0.5


def interpolate(
    x: ArrayLike, size: int | Sequence[int], method: str = "nearest", align_corners: bool = False
) -> jax.Array:
    """Resize the last axes to `size`, by "nearest", "nearest-exact", "linear", "cubic" or "area".

    "linear" over two axes is PyTorch's "bilinear", over three its "trilinear"; "cubic" over two its "bicubic". With
    `align_corners`, the first and last places of both arrays coincide. Source: PyTorch's `upsample_*_backward`.
    """
    one_of("interpolate", "method", method, METHODS)
    array = inexact("interpolate", "x", x)
    if align_corners and method not in ("linear", "cubic"):
        what = f"is true, but {method!r} has no corners to align."
        raise refused("interpolate: align_corners", what, "Leave it out, or take another method.")
    if method == "area":
        return adaptive_avg_pool(array, size)
    for axis, wanted in sized("interpolate", array, size):
        length = array.shape[axis]
        if method in ("nearest", "nearest-exact"):
            array = jnp.take(array, _nearest(length, wanted, method), axis)
        else:
            places = _places(length, wanted, align_corners, method)
            array = along(array, axis, _lines(length, places) if method == "linear" else _curves(length, places))
    return array


def _nearest(length: int, wanted: int, method: str) -> np.ndarray:
    shift = 0.5 if method == "nearest-exact" else 0.0
    return np.minimum(np.floor((np.arange(wanted) + shift) * (length / wanted)).astype(int), length - 1)


def _places(length: int, wanted: int, align_corners: bool, method: str) -> np.ndarray:
    """Return the places of the new elements along the old axis."""
    if align_corners:
        return np.arange(wanted) * ((length - 1) / (wanted - 1) if wanted > 1 else 0.0)
    places = (np.arange(wanted) + 0.5) * (length / wanted) - 0.5
    return np.maximum(places, 0) if method == "linear" else places


def _lines(length: int, places: np.ndarray) -> np.ndarray:
    low = np.minimum(np.floor(places).astype(int), length - 1)
    part = places - low
    weights = np.zeros((len(places), length))
    np.add.at(weights, (np.arange(len(places)), low), 1 - part)
    np.add.at(weights, (np.arange(len(places)), np.minimum(low + 1, length - 1)), part)
    return weights


def _curves(length: int, places: np.ndarray) -> np.ndarray:
    weights = np.zeros((len(places), length))
    for row, place in enumerate(places):
        low = math.floor(place)
        for offset in range(-1, 3):
            column = min(max(low + offset, 0), length - 1)
            weights[row, column] += _kernel(abs(place - low - offset))
    return weights


def _kernel(distance: float) -> float:
    """The cubic kernel at a distance of at most 2."""
    if distance <= 1:
        return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1
    return _CUBIC * (((distance - 5) * distance + 8) * distance - 4)
