"""Bounds, choices between two values, quotients and remainders."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.checks import inexact, promoted
from jointcut.aot.derivatives.elementwise.powers import reciprocal
from jointcut.aot.derivatives.slopes import slopes, times
from jointcut.partition.errors import CallError, message


def clip(arr: ArrayLike, min: ArrayLike | None = None, max: ArrayLike | None = None) -> jax.Array:
    """The nearest number within the bounds. Slopes: 1 within for `arr`, 1 outside for the bound (`clamp_backward`).

    On a bound `arr` has the slope 1 and the bound 0, as in PyTorch. JAX shares evenly, 1/2 each. Where min is above max
    the result is max, and so is the slope.
    """
    if min is None and max is None:
        what = "are both None, and nothing bounds the array."
        raise CallError(message("derivatives.clip: min and max", what, "Pass at least one bound."))
    array = inexact("clip", "arr", arr, real=True)
    if min is None:
        array, high = promoted("clip", arr=array, max=_bound(max, array))
        return _at_most(array, high)
    if max is None:
        array, low = promoted("clip", arr=array, min=_bound(min, array))
        return _at_least(array, low)
    return _clip(*promoted("clip", arr=array, min=_bound(min, array), max=_bound(max, array)))


def _bound(bound: ArrayLike | None, array: jax.Array) -> ArrayLike:
    """The bound as it is, but whole numbers as numbers of the array's type."""
    assert bound is not None
    return jnp.asarray(bound, array.dtype) if jnp.issubdtype(jnp.asarray(bound).dtype, jnp.integer) else bound


@jax.custom_jvp
def _clip(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    return jnp.clip(x, low, high)


slopes(
    _clip,
    lambda t, _, x, low, high: jnp.where((x >= low) & (x <= high), t, 0),
    lambda t, _, x, low, high: jnp.where((x < low) & (low <= high), t, 0),
    lambda t, _, x, low, high: jnp.where(((x > high) & (low <= high)) | (low > high), t, 0),
)


@jax.custom_jvp
def _at_least(x: jax.Array, low: jax.Array) -> jax.Array:
    return jnp.clip(x, min=low)


slopes(_at_least, lambda t, _, x, low: jnp.where(x >= low, t, 0), lambda t, _, x, low: jnp.where(x < low, t, 0))


@jax.custom_jvp
def _at_most(x: jax.Array, high: jax.Array) -> jax.Array:
    return jnp.clip(x, max=high)


slopes(_at_most, lambda t, _, x, high: jnp.where(x <= high, t, 0), lambda t, _, x, high: jnp.where(x > high, t, 0))


def maximum(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The larger of two. The larger one has the slope 1, equal ones 1/2 each, as in PyTorch (`maximum`) and JAX."""
    return _maximum(*promoted("maximum", x1=x1, x2=x2))


@jax.custom_jvp
def _maximum(x1: jax.Array, x2: jax.Array) -> jax.Array:
    return jnp.maximum(x1, x2)


def _shared(tangent: jax.Array, mine: jax.Array, other: jax.Array) -> jax.Array:
    """The tangent where mine is larger, half of it where they are equal; all of it where mine alone is NaN."""
    half = jnp.where(mine == other, tangent / 2, 0)
    return jnp.where((mine > other) | (jnp.isnan(mine) & ~jnp.isnan(other)), tangent, half)


slopes(_maximum, lambda t, _, x1, x2: _shared(t, x1, x2), lambda t, _, x1, x2: _shared(t, x2, x1))


def minimum(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The smaller of two. The smaller one has the slope 1, equal ones 1/2 each, as in PyTorch (`minimum`) and JAX."""
    return _minimum(*promoted("minimum", x1=x1, x2=x2))


@jax.custom_jvp
def _minimum(x1: jax.Array, x2: jax.Array) -> jax.Array:
    return jnp.minimum(x1, x2)


slopes(_minimum, lambda t, _, x1, x2: _shared(t, -x1, -x2), lambda t, _, x1, x2: _shared(t, -x2, -x1))


def fmax(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The larger of two, or the one that is not NaN. Of equal ones the first has the slope 1 (PyTorch's `fmax`)."""
    return _fmax(*promoted("fmax", x1=x1, x2=x2))


@jax.custom_jvp
def _fmax(x1: jax.Array, x2: jax.Array) -> jax.Array:
    return jnp.fmax(x1, x2)


slopes(
    _fmax,
    lambda t, _, x1, x2: jnp.where((x1 >= x2) | jnp.isnan(x2), t, 0),
    lambda t, _, x1, x2: jnp.where((x1 >= x2) | jnp.isnan(x2), 0, t),
)


def fmin(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The smaller of two, or the one that is not NaN. Of equal ones the first has the slope 1 (PyTorch's `fmin`)."""
    return _fmin(*promoted("fmin", x1=x1, x2=x2))


@jax.custom_jvp
def _fmin(x1: jax.Array, x2: jax.Array) -> jax.Array:
    return jnp.fmin(x1, x2)


slopes(
    _fmin,
    lambda t, _, x1, x2: jnp.where((x1 <= x2) | jnp.isnan(x2), t, 0),
    lambda t, _, x1, x2: jnp.where((x1 <= x2) | jnp.isnan(x2), 0, t),
)


def nan_to_num(x: ArrayLike, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> jax.Array:
    """Put numbers in place of NaN and infinities. Slope: 1 where x is finite, else 0 (PyTorch's `nan_to_num`)."""
    return _nan_to_num(nan, posinf, neginf, inexact("nan_to_num", "x", x))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _nan_to_num(nan: float, posinf: float | None, neginf: float | None, x: jax.Array) -> jax.Array:
    return jnp.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf)


slopes(_nan_to_num, lambda t, result, nan, posinf, neginf, x: jnp.where(jnp.isfinite(x), t, 0))


def divide(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """x1 / x2. Slopes: 1/x2 and -x1/x2² (PyTorch's `div_tensor_self_backward` and `div_tensor_other_backward`).

    At x2 = 0 function and slopes are infinite or NaN; a cotangent that is zero gives zero there, where JAX and PyTorch
    give NaN.
    """
    return _divide(*promoted("divide", x1=x1, x2=x2))


@jax.custom_jvp
def _divide(x1: jax.Array, x2: jax.Array) -> jax.Array:
    return jnp.divide(x1, x2)


slopes(
    _divide,
    lambda t, _, x1, x2: times(t, reciprocal, x2),
    lambda t, _, x1, x2: times(t, lambda x1, x2: -x1 * reciprocal(x2 * x2), x1, x2),
)


def fmod(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The remainder with the sign of x1. Slopes: 1 and -trunc(x1/x2), also at the jumps (PyTorch's `fmod`)."""
    return _fmod(*promoted("fmod", x1=x1, x2=x2))


@jax.custom_jvp
def _fmod(x1: jax.Array, x2: jax.Array) -> jax.Array:
    return jnp.fmod(x1, x2)


slopes(_fmod, lambda t, _, x1, x2: t, lambda t, _, x1, x2: times(t, lambda x1, x2: -jnp.trunc(x1 / x2), x1, x2))


def remainder(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The remainder with the sign of x2. Slopes: 1 and -floor(x1/x2), also at the jumps (PyTorch's `remainder`)."""
    return _remainder(*promoted("remainder", x1=x1, x2=x2))


@jax.custom_jvp
def _remainder(x1: jax.Array, x2: jax.Array) -> jax.Array:
    return jnp.remainder(x1, x2)


slopes(_remainder, lambda t, _, x1, x2: t, lambda t, _, x1, x2: times(t, lambda x1, x2: -jnp.floor(x1 / x2), x1, x2))


def copysign(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """|x1| with the sign of x2. Slope for x1: 1 or -1, but 0 at zero (PyTorch's `copysign_tensor_self_backward`).

    JAX has 1 or -1 at zero, PyTorch NaN in second order. There is no slope for x2.
    """
    return _copysign(*promoted("copysign", x1=x1, x2=x2))


@jax.custom_jvp
def _copysign(x1: jax.Array, x2: jax.Array) -> jax.Array:
    return jnp.copysign(x1, x2)


slopes(_copysign, lambda t, result, x1, x2: t * jnp.sign(x1) * jnp.copysign(jnp.ones_like(x1), x2), None)


def lerp(start: ArrayLike, end: ArrayLike, weight: ArrayLike) -> jax.Array:
    """A point between: start + weight·(end - start). Slopes: 1 - weight, weight, end - start (PyTorch's `lerp`)."""
    first, last, share = promoted("lerp", start=start, end=end, weight=weight)
    return jnp.where(share < 0.5, first + share * (last - first), last - (last - first) * (1 - share))
