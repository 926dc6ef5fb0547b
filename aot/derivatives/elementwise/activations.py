"""Smooth activations, also at the largest numbers, and activations over an axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import Axis, inexact, one_axis, refused, some_axes
from jointcut.aot.derivatives.slopes import by_result, unary, with_slopes


def sigmoid(x: ArrayLike) -> jax.Array:
    """1/(1 + exp(-x)). Slope: s·(1-s) with s the result (PyTorch's `sigmoid`). No point is singular."""
    return _sigmoid(inexact("sigmoid", "x", x))


_sigmoid = unary(jax.nn.sigmoid, lambda x: _sigmoid(x) * _sigmoid(-x))


def softplus(x: ArrayLike, beta: float = 1.0, threshold: float | None = None) -> jax.Array:
    """log(1 + exp(beta·x)) / beta. Slope: sigmoid(beta·x) = 1 - exp(-beta·y), with y the result, which alone is saved.

    No point is singular. Where beta·x is above a `threshold`, it is x itself, with slope 1. PyTorch's threshold is 20
    by default, and it is off by 2e-9 there.
    """
    array = inexact("softplus", "x", x)
    if beta == 0:
        raise refused("softplus: beta", "is 0, and the function is divided by it.", "Pass another number.")
    if threshold is None:
        return _softplus(array) if beta == 1 else _softplus(beta * array) / beta
    linear = beta * array > threshold
    return jnp.where(linear, array, _softplus(jnp.where(linear, 0, beta * array)) / beta)


_softplus = by_result(jax.nn.softplus, lambda y: -jnp.expm1(-y))


def log_sigmoid(x: ArrayLike) -> jax.Array:
    """log(sigmoid(x)). Slope: sigmoid(-x) = 1 - exp(y), with y the result. Only y is saved for the backward."""
    return _log_sigmoid(inexact("log_sigmoid", "x", x))


_log_sigmoid = by_result(jax.nn.log_sigmoid, lambda y: -jnp.expm1(y))


def silu(x: ArrayLike) -> jax.Array:
    """Swish, x·sigmoid(x). Slope: s·(1 + x·(1-s)) (PyTorch's `infinitely_differentiable_silu_backward`)."""
    return _silu(inexact("silu", "x", x))


_silu = unary(jax.nn.silu, lambda x: _sigmoid(x) * (1 + x * _sigmoid(-x)))


def mish(x: ArrayLike) -> jax.Array:
    """The product x·tanh(softplus(x)). Slope: t + x·s·(1-t²), with s = sigmoid(x) and t = tanh(softplus(x)).

    The slope is PyTorch's `infinitely_differentiable_mish_backward`, which gives NaN in second order if exp(x)
    overflows.
    """
    return _mish(inexact("mish", "x", x))


def _mish_slope(x: jax.Array) -> jax.Array:
    near = jnp.where(x > 40, 0, x)  # above it the slope is 1 to the last bit
    gate = jnp.tanh(_softplus(near))
    return jnp.where(x > 40, 1, gate + near * _sigmoid(near) * (1 - gate * gate))


_mish = unary(jax.nn.mish, _mish_slope)


def gelu(x: ArrayLike, approximate: bool = True) -> jax.Array:
    """The product x·Phi(x), with the normal distribution function Phi, or its approximation by tanh as in JAX.

    Slope: Phi(x) + x·phi(x) (PyTorch's `gelu_backward`). Beyond |x| = 40 the slope is 0 or 1 to the last bit, and no
    power is computed. So it stays finite where x³ overflows; there JAX and PyTorch give NaN for the approximation. For
    the exact function PyTorch gives NaN in second order.
    """
    return _gelu(inexact("gelu", "x", x, real=True), approximate)


_C = 0.044715  # of the approximation: tanh(sqrt(2/pi)·(x + 0.044715·x³))


def _gelu_slope(x: jax.Array, approximate: bool) -> jax.Array:
    far = jnp.abs(x) > 40
    near = jnp.where(far, 0, x)
    if approximate:
        root = jnp.sqrt(2 / jnp.pi).astype(x.dtype)
        bend = jnp.tanh(root * (near + _C * near * near * near))
        inner = root * (1 + 3 * _C * near * near)
        slope = 0.5 * (1 + bend) + 0.5 * near * (1 - bend * bend) * inner
    else:
        slope = jax.scipy.special.ndtr(near) + near * jnp.exp(-near * near / 2) / jnp.sqrt(2 * jnp.pi).astype(x.dtype)
    return jnp.where(far, (x > 0).astype(x.dtype), slope)


_gelu = unary(lambda x, approximate: jax.nn.gelu(x, approximate), _gelu_slope)


def soft_sign(x: ArrayLike) -> jax.Array:
    """The quotient x/(1 + |x|). Slope: 1/(1 + |x|)² (PyTorch's `softsign`). At zero the second is 0; JAX has -2."""
    return _soft_sign(inexact("soft_sign", "x", x, real=True))


def _soft_sign_slope(x: jax.Array) -> jax.Array:
    share = 1 / (1 + jnp.where(x == 0, 0, jnp.abs(x)))
    return share * share


_soft_sign = unary(jax.nn.soft_sign, _soft_sign_slope)


def tanhshrink(x: ArrayLike) -> jax.Array:
    """The difference x - tanh(x). Slope: tanh(x)² (PyTorch's `tanhshrink`). JAX has no such function."""
    return _tanhshrink(inexact("tanhshrink", "x", x))


_tanhshrink = unary(lambda x: x - jnp.tanh(x), lambda x: jnp.square(jnp.tanh(x)))


def glu(x: ArrayLike, axis: int = -1) -> jax.Array:
    """The product a·sigmoid(b), with a and b the halves of x along the axis.

    Slopes: sigmoid(b), and a·s·(1-s) with s = sigmoid(b) (PyTorch's `glu_double_backward` for the second).
    """
    array = inexact("glu", "x", x)
    along = one_axis("glu", axis, array.ndim)
    if array.shape[along] % 2:
        what = f"has {array.shape[along]} elements along the axis {along}, which cannot be halved."
        raise refused("glu: x", what, "Pass an even number of elements.")
    first, second = jnp.split(array, 2, axis=along)
    return first * _sigmoid(second)


def softmax(x: ArrayLike, axis: Axis = -1) -> jax.Array:
    """exp(x) over its sum along the axes. Slope: s·(t - sum(s·t)) with s the result (PyTorch's `softmax_backward`).

    The slope needs only the result. Elements of -inf have the slope 0. Where all elements are -inf, or one is inf, the
    result is NaN, as in JAX and PyTorch. The slope is 0 there, so that a masked row contributes nothing.
    """
    array = inexact("softmax", "x", x, real=True)
    return _softmax(some_axes("softmax", axis, array.ndim), array)


def _softmax_slope(tangent: jax.Array, result: jax.Array, axes: tuple[int, ...], x: jax.Array) -> jax.Array:
    share = _share(result, axes, x)
    return share * (tangent - jnp.sum(share * tangent, axis=axes, keepdims=True))


def _share(softmax: jax.Array, axes: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Return the softmax of x, with 0 where all elements are -inf or one is inf; there the softmax is NaN."""
    largest = jnp.max(x, axis=axes, keepdims=True, initial=-jnp.inf)
    return jnp.where(jnp.isinf(largest), 0, softmax)


_softmax = with_slopes(lambda axes, x: jax.nn.softmax(x, axis=axes), _softmax_slope, options=1)


def softmin(x: ArrayLike, axis: Axis = -1) -> jax.Array:
    """softmax(-x) (PyTorch's `softmin`); JAX has no such function."""
    return softmax(-inexact("softmin", "x", x, real=True), axis)


def log_softmax(x: ArrayLike, axis: Axis = -1) -> jax.Array:
    """The logarithm of `softmax`, x - logsumexp(x). Slope: t - sum(s·t) for a tangent t, with s = exp(result).

    The slope is PyTorch's `log_softmax_backward`, which saves only the result. An element of -inf has the result -inf,
    and does not change the slopes of the others.
    """
    array = inexact("log_softmax", "x", x, real=True)
    return _log_softmax(some_axes("log_softmax", axis, array.ndim), array)


def _log_softmax_slope(tangent: jax.Array, result: jax.Array, axes: tuple[int, ...], x: jax.Array) -> jax.Array:
    share = _share(jnp.exp(result), axes, x)
    return tangent - jnp.sum(share * tangent, axis=axes, keepdims=True)


_log_softmax = with_slopes(lambda axes, x: jax.nn.log_softmax(x, axis=axes), _log_softmax_slope, options=1)
