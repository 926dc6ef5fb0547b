"""Bounds, choices between two values, quotients and remainders."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, promoted, refused
from jointcut.aot.derivatives.elementwise.powers import reciprocal
from jointcut.aot.derivatives.slopes import times, with_slopes


def clip(arr: ArrayLike, min: ArrayLike | None = None, max: ArrayLike | None = None) -> jax.Array:
    """The nearest number within the bounds. Slopes: 1 within for `arr`, 1 outside for the bound (`clamp_backward`).

    On a bound, `arr` has the slope 1 and the bound the slope 0, as in PyTorch; in JAX each has 1/2. Where min is above
    max, the result is max, and max has the slope 1. Where they are equal, the bound that `arr` passes has it, as in
    PyTorch's `clamp_jvp`; in its reverse min has 0.
    """
    if min is None and max is None:
        what = "are both None, and nothing bounds the array."
        raise refused("clip: min and max", what, "Pass at least one bound.")
    array = inexact("clip", "arr", arr, real=True)
    if min is None:
        array, high = promoted("clip", arr=array, max=_bound(max, array))
        return _at_most(array, high)
    if max is None:
        array, low = promoted("clip", arr=array, min=_bound(min, array))
        return _at_least(array, low)
    return _clip(*promoted("clip", arr=array, min=_bound(min, array), max=_bound(max, array)))


def _bound(bound: ArrayLike | None, array: jax.Array) -> ArrayLike:
    """Return the bound; convert whole numbers to the array's type."""
    assert bound is not None
    return jnp.asarray(bound, array.dtype) if jnp.issubdtype(jnp.asarray(bound).dtype, jnp.integer) else bound


_clip = with_slopes(
    jnp.clip,
    lambda t, _, x, low, high: jnp.where((x >= low) & (x <= high), t, 0),
    lambda t, _, x, low, high: jnp.where((x < low) & (low <= high), t, 0),
    lambda t, _, x, low, high: jnp.where(((x > high) & (low <= high)) | (low > high), t, 0),
)


_at_least = with_slopes(
    lambda x, low: jnp.clip(x, min=low),
    lambda t, _, x, low: jnp.where(x >= low, t, 0),
    lambda t, _, x, low: jnp.where(x < low, t, 0),
)


_at_most = with_slopes(
    lambda x, high: jnp.clip(x, max=high),
    lambda t, _, x, high: jnp.where(x <= high, t, 0),
    lambda t, _, x, high: jnp.where(x > high, t, 0),
)


def maximum(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The larger number. It has the slope 1; equal numbers have 1/2 each, as in JAX and PyTorch (`maximum`)."""
    return _maximum(*promoted("maximum", x1=x1, x2=x2))


def _shared(tangent: jax.Array, mine: jax.Array, other: jax.Array) -> jax.Array:
    """Return the tangent where mine is larger or mine alone is NaN, and half of it where both are equal."""
    half = jnp.where(mine == other, tangent / 2, 0)
    return jnp.where((mine > other) | (jnp.isnan(mine) & ~jnp.isnan(other)), tangent, half)


_maximum = with_slopes(jnp.maximum, lambda t, _, x1, x2: _shared(t, x1, x2), lambda t, _, x1, x2: _shared(t, x2, x1))


def minimum(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The smaller number. It has the slope 1; equal numbers have 1/2 each, as in JAX and PyTorch (`minimum`)."""
    return _minimum(*promoted("minimum", x1=x1, x2=x2))


_minimum = with_slopes(
    jnp.minimum, lambda t, _, x1, x2: _shared(t, -x1, -x2), lambda t, _, x1, x2: _shared(t, -x2, -x1)
)


def fmax(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The larger of two numbers, ignoring a NaN. Of equal numbers the first has the slope 1 (PyTorch's `fmax`)."""
    return _fmax(*promoted("fmax", x1=x1, x2=x2))


_fmax = with_slopes(
    jnp.fmax,
    lambda t, _, x1, x2: jnp.where((x1 >= x2) | jnp.isnan(x2), t, 0),
    lambda t, _, x1, x2: jnp.where((x1 >= x2) | jnp.isnan(x2), 0, t),
)


def fmin(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The smaller of two numbers, ignoring a NaN. Of equal numbers the first has the slope 1 (PyTorch's `fmin`)."""
    return _fmin(*promoted("fmin", x1=x1, x2=x2))


_fmin = with_slopes(
    jnp.fmin,
    lambda t, _, x1, x2: jnp.where((x1 <= x2) | jnp.isnan(x2), t, 0),
    lambda t, _, x1, x2: jnp.where((x1 <= x2) | jnp.isnan(x2), 0, t),
)


def nan_to_num(x: ArrayLike, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> jax.Array:
    """Replace NaN and infinities by numbers. Slope: 1 where x is finite, else 0 (PyTorch's `nan_to_num`)."""
    return _nan_to_num(nan, posinf, neginf, inexact("nan_to_num", "x", x))


_nan_to_num = with_slopes(
    lambda nan, posinf, neginf, x: jnp.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf),
    lambda t, result, nan, posinf, neginf, x: jnp.where(jnp.isfinite(x), t, 0),
    options=3,
)


def divide(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """x1 / x2. Slopes: 1/x2 and -x1/x2² (PyTorch's `div_tensor_self_backward` and `div_tensor_other_backward`).

    At x2 = 0 the function and its slopes are infinite or NaN. A zero cotangent gives zero there; JAX and PyTorch give
    NaN.
    """
    return _divide(*promoted("divide", x1=x1, x2=x2))


_divide = with_slopes(
    jnp.divide,
    lambda t, _, x1, x2: times(t, reciprocal, x2),
    lambda t, _, x1, x2: times(t, lambda x1, x2: -x1 * reciprocal(x2 * x2), x1, x2),
)


def fmod(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The remainder with the sign of x1. Slopes: 1 and -trunc(x1/x2), also at the jumps (PyTorch's `fmod`)."""
    return _fmod(*promoted("fmod", x1=x1, x2=x2))


_fmod = with_slopes(
    jnp.fmod, lambda t, _, x1, x2: t, lambda t, _, x1, x2: times(t, lambda x1, x2: -jnp.trunc(x1 / x2), x1, x2)
)


def remainder(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The remainder with the sign of x2. Slopes: 1 and -floor(x1/x2), also at the jumps (PyTorch's `remainder`)."""
    return _remainder(*promoted("remainder", x1=x1, x2=x2))


_remainder = with_slopes(
    jnp.remainder, lambda t, _, x1, x2: t, lambda t, _, x1, x2: times(t, lambda x1, x2: -jnp.floor(x1 / x2), x1, x2)
)


def copysign(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """|x1| with the sign of x2. Slope for x1: 1 or -1, but 0 at zero (PyTorch's `copysign_tensor_self_backward`).

    JAX has 1 or -1 at zero, PyTorch NaN in second order. There is no slope for x2.
    """
    return _copysign(*promoted("copysign", x1=x1, x2=x2))


_copysign = with_slopes(
    jnp.copysign, lambda t, result, x1, x2: t * jnp.sign(x1) * jnp.copysign(jnp.ones_like(x1), x2), None
)


def lerp(start: ArrayLike, end: ArrayLike, weight: ArrayLike) -> jax.Array:
    """The point start + weight·(end - start). Slopes: 1 - weight, weight, end - start (PyTorch's `lerp`)."""
    first, last, share = promoted("lerp", start=start, end=end, weight=weight)
    return jnp.where(share < 0.5, first + share * (last - first), last - (last - first) * (1 - share))
