"""Losses that are zero beyond a margin.

At the margin itself each loss has the subgradient of PyTorch's kernel: 1 if the kernel clamps, 0 if it counts only
violations. JAX's `maximum` has 1/2 in both cases.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, refused
from jointcut.aot.derivatives.losses.reduced import clamped_below, labels_for, one_shape, pair, reduced


def hinge_embedding_loss(
    prediction: ArrayLike, target: ArrayLike, margin: float = 1.0, reduction: str = "mean"
) -> jax.Array:
    """The prediction x where the target is 1, and max(0, margin - x) where it is -1.

    Source: PyTorch's `hinge_embedding_loss`, made of `clamp_min`: at x = margin the slope is -1. JAX gives -1/2.
    """
    x, y = pair("hinge_embedding_loss", prediction, target)
    far = jnp.where(y != 1, clamped_below(margin - x), 0)
    return reduced("hinge_embedding_loss", far + jnp.where(y != -1, x, 0), reduction)


def margin_ranking_loss(
    first: ArrayLike, second: ArrayLike, target: ArrayLike, margin: float = 0.0, reduction: str = "mean"
) -> jax.Array:
    """max(0, margin - y·(a - b)): 0 where `first` exceeds `second` by the margin, for y = 1; the other way for y = -1.

    Source: PyTorch's `margin_ranking_loss`, made of `clamp_min`: at the margin (a = b for margin 0) the slopes are -y
    and y. JAX gives half of them.
    """
    name = "margin_ranking_loss"
    a, y = pair(name, first, target)
    b, _ = pair(name, second, target)
    return reduced(name, clamped_below(-y * (a - b) + margin), reduction)


def multi_margin_loss(
    prediction: ArrayLike,
    labels: ArrayLike,
    p: int = 1,
    margin: float = 1.0,
    weight: ArrayLike | None = None,
    reduction: str = "mean",
) -> jax.Array:
    """Sum over the other classes of max(0, margin - x[label] + x[class])^p, over the number of classes.

    Source: PyTorch's `multi_margin_loss_backward`, which counts only violations: at the margin the slope is 0, where
    JAX gives 1/2 for p = 1. PyTorch has no second derivative. Here it is 0 for p = 1; for p = 2 it is the second
    derivative of the squares.
    """
    name = "multi_margin_loss"
    if p not in (1, 2):
        raise refused(f"{name}: p", f"is {p!r}.", "Pass 1 or 2.")
    x = inexact(name, "prediction", prediction, real=True)
    y = labels_for(name, labels, x.shape[:-1])
    over = margin - jnp.take_along_axis(x, y[..., None], -1) + x
    counted = (over > 0) & (jnp.arange(x.shape[-1]) != y[..., None])
    losses = jnp.where(counted, over if p == 1 else over * over, 0)
    if weight is not None:
        losses = losses * jnp.asarray(weight).astype(x.dtype)[y][..., None]
    return reduced(name, losses.sum(-1) / x.shape[-1], reduction)


def multilabel_margin_loss(prediction: ArrayLike, labels: ArrayLike, reduction: str = "mean") -> jax.Array:
    """Sum of max(0, 1 - x[label] + x[class]) over a row's labels and its other classes, over the number of classes.

    Each row of labels holds classes up to the first negative number. Source: PyTorch's
    `multilabel_margin_loss_backward`, which counts only violations: at the margin the slope is 0, where JAX gives 1/2.
    The second derivative is 0.
    """
    name = "multilabel_margin_loss"
    x = inexact(name, "prediction", prediction, real=True)
    y = labels_for(name, labels, x.shape)
    listed = jnp.cumsum(y < 0, -1) == 0
    index = jnp.where(listed, y, 0)
    targets = (jnp.where(listed, y, -1)[..., None] == jnp.arange(x.shape[-1])).any(-2)
    over = 1 - jnp.take_along_axis(x, index, -1)[..., :, None] + x[..., None, :]
    counted = (over > 0) & listed[..., :, None] & ~targets[..., None, :]
    return reduced(name, jnp.where(counted, over, 0).sum((-2, -1)) / x.shape[-1], reduction)


def triplet_margin_loss(
    anchor: ArrayLike,
    positive: ArrayLike,
    negative: ArrayLike,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> jax.Array:
    """max(0, |a - p + eps| - |a - n + eps| + margin), with p-norms along the last axis.

    With `swap`, the nearer of |a - n| and |p - n| counts. Source: PyTorch's `triplet_margin_loss`, made of `norm` and
    `clamp_min`. At the margin the slope is 1; where a difference is exactly -eps, its norm has the slope 0. At equal
    points the difference is `eps`, and the slope finite. JAX gives NaN for a norm of 0, and 1/2 at the margin.
    """
    name = "triplet_margin_loss"
    one_shape(name, jnp.shape(anchor), jnp.shape(positive), jnp.shape(negative))
    a, b, c = (inexact(name, word, x, real=True) for word, x in _named(anchor, positive, negative))
    near, far = _length(a - b + eps, p), _length(a - c + eps, p)
    if swap:
        other = _length(b - c + eps, p)
        far = jnp.where(far < other, far, jnp.where(far == other, (far + other) / 2, other))
    return reduced(name, clamped_below(margin + near - far), reduction)


def _named(anchor: ArrayLike, positive: ArrayLike, negative: ArrayLike) -> tuple[tuple[str, ArrayLike], ...]:
    return ("anchor", anchor), ("positive", positive), ("negative", negative)


def _length(x: jax.Array, p: float) -> jax.Array:
    zero = (x == 0).all(-1, keepdims=True)
    safe = jnp.where(zero, 1, x)
    powers = jnp.square(safe) if p == 2 else jnp.where(safe == 0, 0, jnp.abs(jnp.where(safe == 0, 1, safe)) ** p)
    return jnp.where(zero[..., 0], 0, powers.sum(-1) ** (1 / p))


def cosine_embedding_loss(
    first: ArrayLike, second: ArrayLike, target: ArrayLike, margin: float = 0.0, reduction: str = "mean"
) -> jax.Array:
    """1 - cos where the target is 1, and max(0, cos - margin) where it is -1, vectors along the last axis.

    cos = a·b / sqrt((|a|² + 1e-12)(|b|² + 1e-12)). Source: PyTorch's `cosine_embedding_loss`. At a zero vector the
    cosine is 0 and its slope b / (1e-6·|b|), finite by the 1e-12; at the margin the slope is 1, as for `clamp_min`.
    """
    name = "cosine_embedding_loss"
    one_shape(name, jnp.shape(first), jnp.shape(second))
    a, b = inexact(name, "first", first, real=True), inexact(name, "second", second, real=True)
    squares = ((a * a).sum(-1) + _LEAST) * ((b * b).sum(-1) + _LEAST)
    cosine = (a * b).sum(-1) / jnp.sqrt(squares)
    y = jnp.asarray(target)
    losses = jnp.where(y == 1, 1 - cosine, 0) + jnp.where(y == -1, clamped_below(cosine - margin), 0)
    return reduced(name, losses, reduction)


_LEAST = 9.999999960041972e-13  # PyTorch's addition to a squared length: 1e-12 in float32, whatever the type
