"""Compare a gradient with differences of its function.

The inputs of a function are moved along a random direction, up and down by the same step, each number by a share of its
array's size. The function must change by `sum(gradient * move)`, except for two errors: that of the third derivative,
which shrinks with the square of the step, and that of rounding, which grows as the step shrinks. So the shortest steps
are used at which rounding cannot exceed the allowed error. A wrong part of the gradient may show little along one
direction, so three are used. Sums have 64 bits, and moves are measured after rounding to the dtypes of the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

#: The error allowed in the gradient, as a share of the function's change along a direction.
ALLOWED = 0.01
_STEPS = tuple(4.0**-k for k in range(7, 0, -1))
_USED = 2  # shortest usable steps, of which one must agree, since rounding errors may exceed their estimate
_DIRECTIONS = 3
_ROUNDINGS = 16  # estimated rounding errors in a change, each of the relative size `eps`

#: From arrays to the function's value, which is a sum, and to the sum of the magnitudes of its terms.
Weighted = Callable[[Sequence[np.ndarray]], tuple[float, float]]


def missed(
    function: Weighted, points: Sequence[np.ndarray], gradients: Sequence[np.ndarray], eps: float
) -> float | None:
    """The error of the gradient as a share of the function's change, along the worst of three directions.

    `eps` is the relative rounding error of the function's values. None where rounding may hide too much of the change
    along a direction, at all steps or all but the longest.
    """
    shares = [_along(function, points, gradients, eps, np.random.default_rng(seed)) for seed in range(_DIRECTIONS)]
    return None if None in shares else max(share for share in shares if share is not None)


def _along(
    function: Weighted,
    points: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray],
    eps: float,
    random: np.random.Generator,
) -> float | None:
    direction, shares = [_direction(x, random) for x in points], []
    for step in _STEPS:
        up, down = (
            [(wide(x) + s * v).astype(x.dtype) for x, v in zip(points, direction, strict=True)] for s in (step, -step)
        )
        (high, size), (low, _) = function(up), function(down)
        moves = (wide(a) - wide(b) for a, b in zip(up, down, strict=True))
        parts = [np.real(wide(g) * move) for g, move in zip(gradients, moves, strict=True)]
        change, expected = high - low, sum(float(np.sum(part)) for part in parts)
        scale = max(abs(change), math.hypot(*(float(np.linalg.norm(part)) for part in parts)))
        if math.isfinite(scale) and _ROUNDINGS * eps * size <= ALLOWED * scale:
            shares.append(abs(change - expected) / scale if scale else 0.0)
        if len(shares) == _USED:
            return min(shares)
    return None


def _direction(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Random numbers of the size of those of an array, or of size 1 if all are zero."""
    size = float(np.sqrt(np.mean(np.abs(wide(x)) ** 2))) if x.size else 0.0
    numbers = random.standard_normal(x.shape)
    if np.iscomplexobj(x):
        numbers = numbers + 1j * random.standard_normal(x.shape)
    return (size or 1.0) * numbers


def wide(x: np.ndarray) -> np.ndarray:
    """The array as float64 or complex128."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
