"""Activations with corners, where each follows PyTorch's choice of a subgradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, not_negative, promoted
from jointcut.aot.derivatives.slopes import unary, with_slopes


def relu(x: ArrayLike) -> jax.Array:
    """max(x, 0). Slope: 1 above zero, else 0, at zero too (PyTorch's `threshold_backward`), as in JAX."""
    return _relu(inexact("relu", "x", x, real=True))


_relu = unary(jax.nn.relu, lambda x: (x > 0).astype(x.dtype))


def relu6(x: ArrayLike) -> jax.Array:
    """Clip to 0 and 6. Slope: 1 between, else 0, on the bounds too (PyTorch's `hardtanh_backward`), as in JAX."""
    return _relu6(inexact("relu6", "x", x, real=True))


_relu6 = unary(jax.nn.relu6, lambda x: ((x > 0) & (x < 6)).astype(x.dtype))


def hard_tanh(x: ArrayLike) -> jax.Array:
    """Clip to -1 and 1. Slope: 1 between, else 0, on the bounds too (PyTorch's `hardtanh_backward`). JAX: 1 there."""
    return _hard_tanh(inexact("hard_tanh", "x", x, real=True))


_hard_tanh = unary(jax.nn.hard_tanh, lambda x: ((x > -1) & (x < 1)).astype(x.dtype))


def hard_sigmoid(x: ArrayLike) -> jax.Array:
    """relu6(x + 3)/6. Slope: 1/6 between -3 and 3, else 0, on the bounds too (PyTorch's `hardsigmoid`), as in JAX."""
    return _hard_sigmoid(inexact("hard_sigmoid", "x", x, real=True))


_hard_sigmoid = unary(jax.nn.hard_sigmoid, lambda x: jnp.where((x > -3) & (x < 3), 1 / 6, 0).astype(x.dtype))


def hard_swish(x: ArrayLike) -> jax.Array:
    """The product x·hard_sigmoid(x). Slope: x/3 + 1/2 between -3 and 3, 0 below, 1 above (PyTorch's `hardswish`).

    At -3 it is 0 and at 3 it is 1, as in JAX.
    """
    return _hard_swish(inexact("hard_swish", "x", x, real=True))


def _hard_swish_slope(x: jax.Array) -> jax.Array:
    return jnp.where(x <= -3, 0, jnp.where(x < 3, x / 3 + 0.5, 1))


_hard_swish = unary(jax.nn.hard_swish, _hard_swish_slope)


def hardshrink(x: ArrayLike, lambd: float = 0.5) -> jax.Array:
    """Keep x where |x| > lambd, else 0. Slope: 1 there, else 0, on the bounds too (PyTorch's `hardshrink`)."""
    return _hardshrink(inexact("hardshrink", "x", x, real=True), not_negative("hardshrink", "lambd", lambd))


_hardshrink = unary(
    lambda x, lambd: jnp.where(jnp.abs(x) > lambd, x, 0), lambda x, lambd: (jnp.abs(x) > lambd).astype(x.dtype)
)


def softshrink(x: ArrayLike, lambd: float = 0.5) -> jax.Array:
    """Bring x nearer to zero by lambd where |x| > lambd, else 0. Slope: as `hardshrink` (PyTorch's `softshrink`).

    JAX has no such function.
    """
    return _softshrink(inexact("softshrink", "x", x, real=True), not_negative("softshrink", "lambd", lambd))


_softshrink = unary(
    lambda x, lambd: jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, 0)),
    lambda x, lambd: (jnp.abs(x) > lambd).astype(x.dtype),
)


def threshold(x: ArrayLike, threshold: float, value: float) -> jax.Array:
    """Keep x above the threshold, else give the value. Slope: 1 or 0, at the threshold 0 (`threshold_backward`)."""
    return _threshold(inexact("threshold", "x", x, real=True), threshold, value)


_threshold = unary(
    lambda x, threshold, value: jnp.where(x > threshold, x, value),
    lambda x, threshold, value: (x > threshold).astype(x.dtype),
)


def leaky_relu(x: ArrayLike, negative_slope: float = 1e-2) -> jax.Array:
    """Return x, or x·negative_slope below zero. At zero the slope is negative_slope (`leaky_relu_backward`). JAX: 1."""
    return _leaky_relu(inexact("leaky_relu", "x", x, real=True), negative_slope)


_leaky_relu = unary(
    lambda x, negative_slope: jax.nn.leaky_relu(x, negative_slope),
    lambda x, negative_slope: jnp.where(x > 0, 1, negative_slope).astype(x.dtype),
)


def prelu(x: ArrayLike, weight: ArrayLike) -> jax.Array:
    """Return x, or x·weight where it is not positive. JAX has no such function.

    The slope for x is 1 above zero, else the weight, also at zero. The slope for the weight is x below zero, else 0
    (PyTorch's `_prelu_kernel_backward`). At zero the slopes of second order are 0. The weight broadcasts as JAX's
    arrays do: a weight for channels has the shape (c, 1, 1).
    """
    return _prelu(*promoted("prelu", x=x, weight=weight))


_prelu = with_slopes(
    lambda x, weight: jnp.where(x > 0, x, weight * x),
    lambda t, _, x, weight: t * jnp.where(x > 0, 1, jnp.where(x < 0, weight, jax.lax.stop_gradient(weight))),
    lambda t, _, x, weight: t * jnp.where(x >= 0, 0, x),
)


def elu(x: ArrayLike, alpha: float = 1.0) -> jax.Array:
    """Return x, or alpha·(exp(x) - 1) where it is not positive. Slope: 1, or alpha·exp(x) (`elu_backward`).

    At zero the slopes are alpha and, of second order, 0, as in PyTorch. JAX has alpha for both.
    """
    return _elu(inexact("elu", "x", x, real=True), alpha)


def _exponential(x: jax.Array, alpha: float, scale: float = 1.0, rate: float = 1.0) -> jax.Array:
    """Return scale above zero, else scale·alpha·rate·exp(rate·x). At zero the second slope is 0, as in PyTorch."""
    below = jnp.exp(rate * jnp.where(x >= 0, 0, x)) * (alpha * rate)
    return scale * jnp.where(x > 0, 1, below)


_elu = unary(lambda x, alpha: jax.nn.elu(x, alpha), _exponential)


def celu(x: ArrayLike, alpha: float = 1.0) -> jax.Array:
    """Return x, or alpha·(exp(x/alpha) - 1) where it is not positive. Slope: 1, or exp(x/alpha) (PyTorch's `celu`).

    At zero the slopes are 1 and, of second order, 0, as in PyTorch. JAX has 1/(2·alpha) for the second.
    """
    return _celu(inexact("celu", "x", x, real=True), alpha)


_celu = unary(lambda x, alpha: jax.nn.celu(x, alpha), lambda x, alpha: _exponential(x, alpha, 1.0, 1 / alpha))


def selu(x: ArrayLike) -> jax.Array:
    """1.0507·elu(x, 1.6733), which keeps mean and variance. At zero the slopes are 1.7581 and 0 (PyTorch's `selu`)."""
    return _selu(inexact("selu", "x", x, real=True))


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
_selu = unary(jax.nn.selu, lambda x: _exponential(x, _SELU_ALPHA, _SELU_SCALE))
