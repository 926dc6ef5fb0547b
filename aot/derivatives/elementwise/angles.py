"""Lengths and angles in the plane, of complex numbers too, and inverse functions of angles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, promoted
from jointcut.aot.derivatives.elementwise.powers import reciprocal, rsqrt
from jointcut.aot.derivatives.slopes import steep, unary, with_slopes


def hypot(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """sqrt(x1² + x2²). Slopes: x1/hypot and x2/hypot (PyTorch's `hypot`).

    At the origin both are 0, the middle of the subgradients. JAX gives 1/2 for both, PyTorch NaN. Where x1 = x2 JAX
    gives 0 in second order, which is wrong; here it is 1/(2·hypot), as in PyTorch.
    """
    return _hypot(*promoted("hypot", x1=x1, x2=x2))


def _part(tangent: jax.Array, x1: jax.Array, x2: jax.Array, part: jax.Array) -> jax.Array:
    return tangent * (part * _inverse_length(x1, x2))


def _inverse_length(x1: jax.Array, x2: jax.Array) -> jax.Array:
    """Return 1/hypot, and 0 at the origin."""
    origin = (x1 == 0) & (x2 == 0)
    return jnp.where(origin, 0, reciprocal(_hypot(jnp.where(origin, 1, x1), x2)))


_hypot = with_slopes(jnp.hypot, lambda t, _, x1, x2: _part(t, x1, x2, x1), lambda t, _, x1, x2: _part(t, x1, x2, x2))


def arctan2(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """The angle of the point (x2, x1). Slopes: x2/r² and -x1/r² with r² = x1² + x2² (PyTorch's `atan2_backward`).

    At the origin both slopes are 0, as in PyTorch; in second order PyTorch gives NaN. JAX gives NaN.
    """
    return _arctan2(*promoted("arctan2", x1=x1, x2=x2))


def _turn(tangent: jax.Array, x1: jax.Array, x2: jax.Array, part: jax.Array) -> jax.Array:
    inverse = _inverse_length(x1, x2)
    return tangent * (part * inverse * inverse)


_arctan2 = with_slopes(
    jnp.arctan2, lambda t, _, x1, x2: _turn(t, x1, x2, x2), lambda t, _, x1, x2: _turn(t, x1, x2, -x1)
)


def angle(z: ArrayLike) -> jax.Array:
    """The angle of a complex number, or 0 or pi for a real one. Slope: i·z/|z|² (PyTorch's `angle_backward`).

    At zero, and for real numbers, the slope is 0. JAX gives NaN at a zero, also at a real zero.
    """
    array = inexact("angle", "z", z)
    return _arctan2(array.imag, array.real) if jnp.iscomplexobj(array) else _flat_angle(array)


_flat_angle = unary(jnp.angle, jnp.zeros_like)


def abs(x: ArrayLike) -> jax.Array:
    """The absolute value. Slope: x/|x|, and 0 at zero (PyTorch's `abs`). JAX has 1 at a real zero."""
    return _abs(inexact("abs", "x", x))


_abs = with_slopes(jnp.abs, lambda tangent, _, x: (jnp.conj(_sign(x)) * tangent).real)


def sign(x: ArrayLike) -> jax.Array:
    """The sign, x/|x|, and 0 at zero (PyTorch's `sgn_backward`).

    The slope for a real number is 0. For a complex number, the tangent t becomes (t - sign²·conj(t)) / (2·|x|), and 0
    at zero. PyTorch gives NaN there in second order; JAX has 0 for all complex numbers, which is wrong.
    """
    return _sign(inexact("sign", "x", x))


def _sign_slope(tangent: jax.Array, result: jax.Array, x: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(x):
        return jnp.zeros_like(result)
    zero = x == 0
    length = _abs(jnp.where(zero, 1, x))
    across = tangent - _sign(x) ** 2 * jnp.conj(tangent)
    return jnp.where(zero, 0, across) * (0.5 * reciprocal(length)).astype(x.dtype)


_sign = with_slopes(jnp.sign, _sign_slope)


def sinc(x: ArrayLike) -> jax.Array:
    """The cardinal sine: sin(pi·x) over pi·x. Slope: (cos(pi·x) - s)/x, with s the result (PyTorch's `sinc_backward`).

    Near zero the slope is computed from its power series. At zero the slope is 0 and the second slope -pi²/3, where
    PyTorch gives NaN. The formulas of JAX and PyTorch lose digits: at 1e-8 their second slope is off by nearly half,
    and at 1e-160 JAX gives NaN.
    """
    return _sinc(inexact("sinc", "x", x))


def _sinc_slope(x: jax.Array) -> jax.Array:
    near = jnp.abs(x) < 0.3
    small, large = jnp.where(near, x, 0), jnp.where(near, 1, x)
    closed = (jnp.cos(jnp.pi * large) - jnp.sin(jnp.pi * large) / (jnp.pi * large)) / large
    return jnp.where(near, _sinc_series(small), closed)


def _sinc_series(x: jax.Array) -> jax.Array:
    """The slope's power series in x: the sum over k of (-1)^k · 2k · pi^(2k) · x^(2k-1) / (2k+1)!."""
    total, term = jnp.zeros_like(x), jnp.ones_like(x) / x.dtype.type(1)
    square = -((jnp.pi * x) ** 2)
    factor = 1.0
    for k in range(1, 12):
        factor /= 2 * k * (2 * k + 1)
        total = total - 2 * k * factor * term
        term = term * square
    return total * jnp.pi**2 * x


_sinc = unary(jnp.sinc, _sinc_slope)


def arcsin(x: ArrayLike) -> jax.Array:
    """The inverse sine. Slope: 1/sqrt(1-x²) (PyTorch's `asin`), infinite at -1 and 1; a zero cotangent gives zero."""
    return _arcsin(inexact("arcsin", "x", x))


_below_one = unary(lambda x: (1 - x) * (1 + x), lambda x: -2 * x)  # 1 - x², without cancellation near 1
_arcsin = steep(jnp.arcsin, lambda x: rsqrt(_below_one(x)))


def arccos(x: ArrayLike) -> jax.Array:
    """The inverse cosine. Slope: -1/sqrt(1-x²) (PyTorch's `acos`); as for `arcsin`, a zero cotangent gives zero."""
    return _arccos(inexact("arccos", "x", x))


_arccos = steep(jnp.arccos, lambda x: -rsqrt(_below_one(x)))


def arccosh(x: ArrayLike) -> jax.Array:
    """The inverse hyperbolic cosine. Slope: 1/sqrt(x²-1) (PyTorch's `acosh`); at 1 a zero cotangent gives zero.

    For complex numbers the slope is 1/(sqrt(x-1)·sqrt(x+1)); JAX's slope has the wrong sign where the real part is
    negative.
    """
    return _arccosh(inexact("arccosh", "x", x))


_above_one = unary(lambda x: (x - 1) * (x + 1), lambda x: 2 * x)


def _arccosh_slope(x: jax.Array) -> jax.Array:
    """Return 1/sqrt(x²-1), for complex numbers as a product of two inverse roots, since branches differ."""
    return rsqrt(x - 1) * rsqrt(x + 1) if jnp.iscomplexobj(x) else rsqrt(_above_one(x))


_arccosh = steep(jnp.arccosh, _arccosh_slope)


def arctanh(x: ArrayLike) -> jax.Array:
    """The inverse hyperbolic tangent. Slope: 1/(1-x²) (PyTorch's `atanh`), infinite at -1 and 1, as the function is."""
    return _arctanh(inexact("arctanh", "x", x))


_arctanh = steep(jnp.arctanh, lambda x: reciprocal(_below_one(x)))
