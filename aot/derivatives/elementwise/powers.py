"""Powers and roots, with finite slopes where a power is smooth.

A slope that is infinite by nature, as of a root at zero, stays infinite, for a cotangent that is not zero.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.checks import inexact, promoted
from jointcut.aot.derivatives.slopes import slopes, steep, times, unary


def power(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """x1 to the power of x2, elementwise. An exponent that is a number of Python's has no derivative.

    Slopes: x2·x1^(x2-1) for x1, x1^x2·log(x1) for x2 (PyTorch's `pow_backward_self` and `pow_backward_exponent`).

    - x1 = 0, x2 = 0: 0 for both, the limits along x2 = 0 and along x1 = 0, as in PyTorch. JAX gives NaN for x1. In
      second order 0 likewise, where both give NaN.
    - x1 = 0, x2 > 0: 0 for x2, by continuity; for x1 it is 0, 1 or infinite as x2 is above, at or below 1.
    - x1 = 0, x2 = 1: the mixed second derivative is 1, without the logarithm of zero that stands beside it.
    - x2 = 0, x1 not zero: the mixed second derivative is 1/x1, its limit; PyTorch and JAX give 0.
    - x1 < 0 and a whole x2: the slope for x2 does not exist, and is NaN, as in JAX and PyTorch.
    """
    if isinstance(x2, int | float) and not isinstance(x2, bool):
        return _power_of(x2, inexact("power", "x1", x1))
    if jnp.issubdtype(jnp.asarray(x2).dtype, jnp.integer):
        return _whole_power(inexact("power", "x1", x1), jnp.asarray(x2))
    return _power(*promoted("power", x1=x1, x2=x2))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _power_of(y: float, x: jax.Array) -> jax.Array:
    return jnp.power(x, y)


def _slope_of(tangent: jax.Array, result: jax.Array, y: float, x: jax.Array) -> jax.Array:
    if y == 0:
        return jnp.zeros_like(result)
    return times(tangent, lambda x: y * _power_of(y - 1, x), x)


slopes(_power_of, _slope_of)


@jax.custom_jvp
def _whole_power(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.power(x, y)


def _whole_slope(tangent: jax.Array, result: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return times(tangent, lambda x, y: jnp.where(y == 0, 0, y.astype(x.dtype) * _whole_power(x, y - 1)), x, y)


slopes(_whole_power, _whole_slope, None)


@jax.custom_jvp
def _power(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.power(x, y)


def _for_base(x: jax.Array, y: jax.Array) -> jax.Array:
    flat = (x == 0) & (y == 0)
    return jnp.where(flat, 0, y * _power(jnp.where(flat, 1, x), y - 1))


def _for_exponent(x: jax.Array, y: jax.Array) -> jax.Array:
    flat = (x == 0) & (y.real >= 0) & (y.imag == 0)
    base = jnp.where(flat, 1, x)
    return jnp.where(flat, 0, _power(base, y) * _log(base))


slopes(_power, lambda t, _, x, y: times(t, _for_base, x, y), lambda t, _, x, y: times(t, _for_exponent, x, y))


_log = steep(jnp.log, lambda x: _reciprocal(x))


def float_power(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """x1 to the power of x2, where integers count as floats. Slopes and singular points are those of `power`."""
    if isinstance(x2, int | float) and not isinstance(x2, bool):
        return _power_of(float(x2), inexact("float_power", "x1", x1))
    if jnp.issubdtype(jnp.asarray(x2).dtype, jnp.integer):
        x2 = jnp.asarray(x2).astype(jnp.asarray(x1).dtype)
    return _power(*promoted("float_power", x1=x1, x2=x2))


def reciprocal(x: ArrayLike) -> jax.Array:
    """1/x. Slope: -1/x² (PyTorch's `reciprocal`), which is infinite at zero, as the function is."""
    return _reciprocal(inexact("reciprocal", "x", x))


_reciprocal = steep(jnp.reciprocal, lambda x: -_power_of(-2, x))


def square(x: ArrayLike) -> jax.Array:
    """x². Slope: 2x (PyTorch's `pow_backward`); no point is singular."""
    return _square(inexact("square", "x", x))


_square = unary(jnp.square, lambda x: 2 * x)


def sqrt(x: ArrayLike) -> jax.Array:
    """The square root. Slope: 1/(2·sqrt(x)) (PyTorch's `sqrt`).

    At zero the slope is infinite, as in PyTorch and JAX; but a cotangent that is zero gives zero, and theirs NaN.
    """
    return _sqrt(inexact("sqrt", "x", x))


_sqrt = steep(jnp.sqrt, lambda x: 0.5 * _rsqrt(x))


def rsqrt(x: ArrayLike) -> jax.Array:
    """1/sqrt(x). Slope: -x^(-3/2)/2 (PyTorch's `rsqrt`), which is infinite at zero, as the function is."""
    return _rsqrt(inexact("rsqrt", "x", x))


_rsqrt = steep(jax.lax.rsqrt, lambda x: -0.5 * _power_of(-1.5, x))


def cbrt(x: ArrayLike) -> jax.Array:
    """The real cube root, also of negative numbers. Slope: x^(-2/3)/3; PyTorch has no such function.

    At zero the slope is infinite, as in JAX; but a cotangent that is zero gives zero, and JAX's NaN.
    """
    return _cbrt(inexact("cbrt", "x", x, real=True))


_cbrt = steep(jnp.cbrt, lambda x: _power_of(-2, _cbrt(x)) / 3)
