"""Powers and roots, with finite slopes where a power is smooth.

An infinite slope, such as the slope of a root at zero, stays infinite for a cotangent that is not zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, promoted
from jointcut.aot.derivatives.slopes import steep, times, unary, with_slopes


def power(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """x1 to the power of x2, elementwise. An exponent that is a Python number has no derivative.

    Slopes: x2·x1^(x2-1) for x1, x1^x2·log(x1) for x2 (PyTorch's `pow_backward_self` and `pow_backward_exponent`).

    - x1 = 0, x2 = 0: 0 for both, the limits along x2 = 0 and along x1 = 0, as in PyTorch. JAX gives NaN for x1. The
      second order is 0 too, where JAX and PyTorch give NaN.
    - x1 = 0, x2 > 0: 0 for x2, by continuity; for x1 it is 0, 1 or infinite as x2 is above, at or below 1.
    - x1 = 0, x2 = 1: the mixed second derivative is 1; the term with the logarithm of zero is left out.
    - x2 = 0, x1 not zero: the mixed second derivative is 1/x1, its limit; PyTorch and JAX give 0.
    - x1 < 0 and a whole x2: the slope for x2 does not exist, and is NaN, as in JAX and PyTorch.
    """
    if isinstance(x2, int | float) and not isinstance(x2, bool):
        return _power_of(x2, inexact("power", "x1", x1))
    if jnp.issubdtype(jnp.asarray(x2).dtype, jnp.integer):
        return _whole_power(inexact("power", "x1", x1), jnp.asarray(x2))
    return _power(*promoted("power", x1=x1, x2=x2))


def _slope_of(tangent: jax.Array, result: jax.Array, y: float, x: jax.Array) -> jax.Array:
    if y == 0:
        return jnp.zeros_like(result)
    return times(tangent, lambda x: y * _power_of(y - 1, x), x)


_power_of = with_slopes(lambda y, x: jnp.power(x, y), _slope_of, options=1)


def _whole_slope(tangent: jax.Array, result: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return times(tangent, lambda x, y: jnp.where(y == 0, 0, y.astype(x.dtype) * _whole_power(x, y - 1)), x, y)


_whole_power = with_slopes(jnp.power, _whole_slope, None)


def _for_base(x: jax.Array, y: jax.Array) -> jax.Array:
    flat = (x == 0) & (y == 0)
    return jnp.where(flat, 0, y * _power(jnp.where(flat, 1, x), y - 1))


def _for_exponent(x: jax.Array, y: jax.Array) -> jax.Array:
    flat = (x == 0) & (y.real >= 0) & (y.imag == 0)
    base = jnp.where(flat, 1, x)
    return jnp.where(flat, 0, _power(base, y) * _log(base))


_power = with_slopes(
    jnp.power, lambda t, _, x, y: times(t, _for_base, x, y), lambda t, _, x, y: times(t, _for_exponent, x, y)
)


_log = steep(jnp.log, lambda x: _reciprocal(x))


def float_power(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """x1 to the power of x2, where integers count as floats; for slopes and singular points see `power`."""
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

    At zero the slope is infinite, as in PyTorch and JAX. A zero cotangent gives zero there; PyTorch and JAX give NaN.
    """
    return _sqrt(inexact("sqrt", "x", x))


_sqrt = steep(jnp.sqrt, lambda x: 0.5 * _rsqrt(x))


def rsqrt(x: ArrayLike) -> jax.Array:
    """1/sqrt(x). Slope: -x^(-3/2)/2 (PyTorch's `rsqrt`), which is infinite at zero, as the function is."""
    return _rsqrt(inexact("rsqrt", "x", x))


_rsqrt = steep(jax.lax.rsqrt, lambda x: -0.5 * _power_of(-1.5, x))


def cbrt(x: ArrayLike) -> jax.Array:
    """The real cube root, also of negative numbers. Slope: x^(-2/3)/3; PyTorch has no such function.

    At zero the slope is infinite, as in JAX. A zero cotangent gives zero there; JAX gives NaN.
    """
    return _cbrt(inexact("cbrt", "x", x, real=True))


_cbrt = steep(jnp.cbrt, lambda x: _power_of(-2, _cbrt(x)) / 3)
