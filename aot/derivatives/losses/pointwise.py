"""Losses of one element each: squares, distances, likelihoods, and cross entropies of two classes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, not_negative
from jointcut.aot.derivatives.elementwise.angles import abs
from jointcut.aot.derivatives.losses.reduced import pair, positive, reduced, times_log
from jointcut.aot.derivatives.slopes import with_slopes


def mse_loss(prediction: ArrayLike, target: ArrayLike, reduction: str = "mean") -> jax.Array:
    """Squared difference. Its slope is twice the difference; nothing about it is singular.

    Source: PyTorch's `mse_loss_backward` and `mse_loss_double_backward`. JAX gives the same.
    """
    x, y = pair("mse_loss", prediction, target)
    return reduced("mse_loss", jnp.square(x - y), reduction)


def l1_loss(prediction: ArrayLike, target: ArrayLike, reduction: str = "mean") -> jax.Array:
    """Absolute difference. Its slope is the sign of the difference, and 0 where prediction and target are equal.

    Source: PyTorch's `l1_loss`, which is the `abs` of a difference. JAX gives 1 where they are equal.
    """
    x, y = pair("l1_loss", prediction, target)
    return reduced("l1_loss", abs(x - y), reduction)


def huber_loss(prediction: ArrayLike, target: ArrayLike, reduction: str = "mean", delta: float = 1.0) -> jax.Array:
    """Half the square of a difference below `delta`, and a line of slope `delta` beyond it.

    Source: PyTorch's `huber_loss_backward` and `huber_loss_double_backward`. The slope is continuous; the second
    derivative jumps from 1 to 0 at `delta`, and is 0 there. JAX gives the same for this form.
    """
    positive("huber_loss", "delta", delta)
    x, y = pair("huber_loss", prediction, target)
    distance = jnp.abs(x - y)
    losses = jnp.where(distance < delta, 0.5 * jnp.square(x - y), delta * (distance - 0.5 * delta))
    return reduced("huber_loss", losses, reduction)


def smooth_l1_loss(prediction: ArrayLike, target: ArrayLike, reduction: str = "mean", beta: float = 1.0) -> jax.Array:
    """The Huber loss over `beta`: its slope far away is 1. For `beta` 0 it is the absolute difference.

    Source: PyTorch's `smooth_l1_loss_backward` and `smooth_l1_loss_double_backward`. The second derivative at `beta` is
    0, as in PyTorch. With `beta` 0, a division by it would give NaN; `l1_loss` is used instead, as in PyTorch.
    """
    not_negative("smooth_l1_loss", "beta", beta)
    x, y = pair("smooth_l1_loss", prediction, target)
    if beta == 0:
        return reduced("smooth_l1_loss", abs(x - y), reduction)
    distance = jnp.abs(x - y)
    losses = jnp.where(distance < beta, 0.5 * jnp.square(x - y) / beta, distance - 0.5 * beta)
    return reduced("smooth_l1_loss", losses, reduction)


# ---------------------------------------------------------------- two classes


_FLOOR = -100.0  # PyTorch's bound for a logarithm in a cross entropy
_LEAST = 9.999999960041972e-13  # PyTorch's bound for p * (1 - p): 1e-12 in float32, whatever the type
_EPS = 1e-12  # PyTorch's addition in the second derivative


def binary_cross_entropy(
    prediction: ArrayLike, target: ArrayLike, weight: ArrayLike | None = None, reduction: str = "mean"
) -> jax.Array:
    """-(y·log(p) + (1-y)·log(1-p)) of probabilities p, each logarithm bounded below by -100.

    Slopes: (p-y) / max(p(1-p), 1e-12) for p, and log(1-p) - log(p) with the same bounds for y.
    Source: PyTorch's `binary_cross_entropy_backward`, `..._double_backward` and `..._target_backward`.

    - p = 0 and y = 0, or p = 1 and y = 1: the loss is 0 and the slope for p is 0, as in PyTorch. JAX gives NaN.
    - p = 0 and y = 1: the loss is 100 and the slope -1e12, as in PyTorch; JAX gives infinity.
    - At p = 0 the slope for y is 100, as the loss is bounded, and the second slope 0. In PyTorch and JAX both are
      infinite.
    """
    p, y = pair("binary_cross_entropy", prediction, target)
    losses = _two_classes(*jnp.broadcast_arrays(p, y))
    return reduced("binary_cross_entropy", _weighted("binary_cross_entropy", losses, weight), reduction)


def _two_classes_curvature(p: jax.Array, y: jax.Array) -> jax.Array:
    return (p * p - 2 * p * y + y) / (jnp.square(p + _EPS) * jnp.square(1 - p + _EPS))


def _bounded_log(p: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.log(p), _FLOOR)


def _bounded_log1m(p: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.log1p(-p), _FLOOR)


def _is_bounded(p: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.log(p), jnp.log1p(-p)) <= _FLOOR


_two_classes = with_slopes(
    lambda p, y: -(y * _bounded_log(p) + (1 - y) * _bounded_log1m(p)),
    lambda tangent, _, p, y: tangent * _two_classes_slope(p, y),
    lambda tangent, _, p, y: tangent * _odds(p),
)
_two_classes_slope = with_slopes(
    lambda p, y: (p - y) / jnp.maximum(p * (1 - p), _LEAST),
    lambda tangent, _, p, y: tangent * _two_classes_curvature(p, y),
    lambda tangent, _, p, y: -tangent / jnp.maximum(p * (1 - p), _LEAST),
)
_odds = with_slopes(
    lambda p: _bounded_log1m(p) - _bounded_log(p),
    lambda tangent, _, p: jnp.where(_is_bounded(p), 0, -tangent / jnp.where(_is_bounded(p), 1, p * (1 - p))),
)


def binary_cross_entropy_with_logits(
    prediction: ArrayLike,
    target: ArrayLike,
    weight: ArrayLike | None = None,
    reduction: str = "mean",
    pos_weight: ArrayLike | None = None,
) -> jax.Array:
    """Binary cross entropy of sigmoid(x), from x: (1-y)·x + (1 + (w-1)·y)·softplus(-x), with w the `pos_weight`.

    Slopes: (1 + (w-1)·y)·sigmoid(x) - w·y for x, log_sigmoid(-x) - w·log_sigmoid(x) for y.
    Source: PyTorch's `binary_cross_entropy_with_logits_backward` and `..._target_backward`. No input is singular: large
    x keep the slope's last digits, and at x = 0 it is 1/2 - y. JAX's own rules give the same for this form.
    """
    name = "binary_cross_entropy_with_logits"
    x, y = pair(name, prediction, target)
    scale = 1 if pos_weight is None else 1 + (_real(name, "pos_weight", pos_weight, x) - 1) * y
    losses = (1 - y) * x + scale * softplus(-x)
    return reduced(name, _weighted(name, losses, weight), reduction)


#: log(1 + exp(x)), with the slope sigmoid(x).
softplus = with_slopes(
    lambda x: jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x))), lambda tangent, _, x: tangent * jax.nn.sigmoid(x)
)


def soft_margin_loss(prediction: ArrayLike, target: ArrayLike, reduction: str = "mean") -> jax.Array:
    """log(1 + exp(-y·x)), for targets of 1 and -1.

    Slope: -y·sigmoid(-y·x). Source: PyTorch's `soft_margin_loss_backward` and `soft_margin_loss_double_backward`.
    Where exp(-y·x) overflows PyTorch's value is infinite and its gradient NaN; here the value is -y·x and the slope -y.
    """
    x, y = pair("soft_margin_loss", prediction, target)
    return reduced("soft_margin_loss", softplus(-y * x), reduction)


def multilabel_soft_margin_loss(
    prediction: ArrayLike, target: ArrayLike, weight: ArrayLike | None = None, reduction: str = "mean"
) -> jax.Array:
    """Binary cross entropy of sigmoid(x), averaged over the classes, which lie along the last axis.

    Slope: sigmoid(x) - y. Source: PyTorch's `multilabel_soft_margin_loss`, a sum of log-sigmoids. Nothing is singular.
    """
    name = "multilabel_soft_margin_loss"
    x, y = pair(name, prediction, target)
    losses = _weighted(name, (1 - y) * x + softplus(-x), weight)
    return reduced(name, losses.mean(-1), reduction)


# ---------------------------------------------------------------- likelihoods


def kl_div(prediction: ArrayLike, target: ArrayLike, reduction: str = "mean", log_target: bool = False) -> jax.Array:
    """y·(log(y) - x) of log-probabilities x and probabilities y, or of y's logarithms with `log_target`.

    Slopes: -y for x and log(y) + 1 - x for y. Source: PyTorch's `kl_div`, made of `xlogy`.

    - y = 0: the loss is 0, and the slope for x is 0. The slope for y is -infinity in the limit; here it is -x, since
      log(y) + 1 is counted as 0 where `xlogy` is 0. PyTorch and JAX give NaN.
    - With `log_target`, y = -inf (probability 0): loss and slopes are 0; PyTorch and JAX give NaN.
    """
    x, y = pair("kl_div", prediction, target)
    if log_target:
        possible = y > -jnp.inf
        losses = jnp.where(possible, jnp.exp(y) * (jnp.where(possible, y, 0) - x), 0)
    else:
        possible = y > 0
        safe = jnp.where(possible, y, 1)
        losses = jnp.where(possible, safe * jnp.log(safe), 0 * y) - times_log(y, x)
    return reduced("kl_div", losses, reduction)


def poisson_nll_loss(
    prediction: ArrayLike,
    target: ArrayLike,
    reduction: str = "mean",
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
) -> jax.Array:
    """exp(x) - y·x with `log_input`, otherwise x - y·log(x + eps): the negative log-likelihood of counts y.

    With `full`, Stirling's y·log(y) - y + log(2πy)/2 is added where y > 1. Slopes: exp(x) - y, or 1 - y/(x + eps).
    Source: PyTorch's `poisson_nll_loss`. At y = 0 with `full` the slope for y is -x (or -log(x + eps)), since
    Stirling's terms are not added there; PyTorch gives NaN, from a logarithm that it masks too late.
    """
    x, y = pair("poisson_nll_loss", prediction, target)
    losses = jnp.exp(x) - y * x if log_input else x - y * jnp.log(x + eps)
    if full:
        many = y > 1
        safe = jnp.where(many, y, 1)
        losses = losses + jnp.where(many, safe * jnp.log(safe) - safe + 0.5 * jnp.log(2 * math.pi * safe), 0)
    return reduced("poisson_nll_loss", losses, reduction)


def gaussian_nll_loss(
    prediction: ArrayLike,
    target: ArrayLike,
    variance: ArrayLike,
    reduction: str = "mean",
    full: bool = False,
    eps: float = 1e-6,
) -> jax.Array:
    """(log(v) + (x-y)²/v)/2 with v = max(variance, eps): the negative log-likelihood of a normal.

    With `full`, log(2π)/2 is added. Source: PyTorch's `gaussian_nll_loss`, where the bound `eps` has slope 1 on both
    sides: a variance of 0 has the gradient (1/eps - (x-y)²/eps²)/2, so that it can grow. JAX's `maximum` gives 0 there.
    """
    name = "gaussian_nll_loss"
    positive(name, "eps", eps)
    x, y = pair(name, prediction, target)
    v = _bounded_variance(_real(name, "variance", variance, x), eps)
    losses = 0.5 * (jnp.log(v) + jnp.square(x - y) / v)
    return reduced(name, losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


_bounded_variance = with_slopes(jnp.maximum, lambda tangent, _, variance, eps: tangent, None)


def _weighted(function: str, losses: jax.Array, weight: ArrayLike | None) -> jax.Array:
    return losses if weight is None else losses * _real(function, "weight", weight, losses)


def _real(function: str, name: str, value: ArrayLike, like: jax.Array) -> jax.Array:
    """Return `value` as a real array of the type of another; whole numbers are taken too."""
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        array = inexact(function, name, array, real=True)
    return lax.convert_element_type(array, like.dtype)
