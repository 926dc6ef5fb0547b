"""Compare a gradient with differences of its function.

A function of many arrays is moved along a random direction, each number by a share of its array's own size, up and down
by the same step. What it changes by must be what its gradient says, `sum(gradient * move)`, apart from two errors: the
third derivative's, which goes away with the square of the step, and rounding, which comes. So the shortest steps are
taken at which rounding cannot hide as much as is allowed. A part of the gradient that is wrong may show little in one
direction; it hardly hides in three. Everything is summed in 64 bits, and moves are measured after they were rounded to
the arrays' own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

#: How much of the function's change along a direction the gradient may miss.
ALLOWED = 0.01
_STEPS = tuple(4.0**-k for k in range(7, 0, -1))
_USED = 2  # steps, the shortest that say something; one must agree, since rounding may be worse than it is taken to be
_DIRECTIONS = 3
_ROUNDINGS = 16  # of a result, that its change may hold

#: From arrays to the function's value and the sum of the magnitudes that it is the sum of.
Weighted = Callable[[Sequence[np.ndarray]], tuple[float, float]]


def missed(
    function: Weighted, points: Sequence[np.ndarray], gradients: Sequence[np.ndarray], eps: float
) -> float | None:
    """How much of the function's change the gradient misses, as a share of it, along the worst of three directions.

    `eps` is the relative rounding of the function's values. None where rounding may hide too much of the change along a
    direction at all steps, or at all but the longest.
    """
    found = [_along(function, points, gradients, eps, np.random.default_rng(seed)) for seed in range(_DIRECTIONS)]
    return None if None in found else max(share for share in found if share is not None)


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
        change, said = high - low, sum(float(np.sum(part)) for part in parts)
        scale = max(abs(change), math.hypot(*(float(np.linalg.norm(part)) for part in parts)))
        if math.isfinite(scale) and _ROUNDINGS * eps * size <= ALLOWED * scale:
            shares.append(abs(change - said) / scale if scale else 0.0)
        if len(shares) == _USED:
            return min(shares)
    return None


def _direction(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Random numbers as large as those of an array, or around 1 if all are zero."""
    size = float(np.sqrt(np.mean(np.abs(wide(x)) ** 2))) if x.size else 0.0
    found = random.standard_normal(x.shape)
    if np.iscomplexobj(x):
        found = found + 1j * random.standard_normal(x.shape)
    return (size or 1.0) * found


def wide(x: np.ndarray) -> np.ndarray:
    """The same numbers in 64 bits for each real number."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
