"""Cross entropy and negative log-likelihood of classes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, one_of, refused
from jointcut.aot.derivatives.elementwise.activations import log_softmax
from jointcut.aot.derivatives.losses.reduced import REDUCTIONS, labels_for, loud, mean, times_log


def cross_entropy(
    logits: ArrayLike,
    target: ArrayLike,
    weight: ArrayLike | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Cross entropy of softmax(logits) along the last axis against labels, or against probabilities of logits' shape.

    Formula: sum(q·(logsumexp(z) - z)), q the smoothed and weighted target; slope: sum(q)·softmax(z) - q, from the saved
    softmax. Source: PyTorch's `cross_entropy`: `log_softmax`, then `nll_loss` or a product with the probabilities. Mean
    divides by the weights of the labels that count, or by the number of rows for probabilities.

    - A logit of -inf has probability 0 and slope 0. If its q is 0 too, the product counts as 0. PyTorch and JAX give
      NaN there for probabilities and for smoothed labels.
    - All labels ignored: the mean is 0/0, NaN, as in PyTorch; the gradient is 0.
    - A label that is no class has the loss NaN; PyTorch raises.
    """
    z = inexact("cross_entropy", "logits", logits, real=True)
    _check(z, label_smoothing, "cross_entropy")
    target = jnp.asarray(target)
    if jnp.issubdtype(target.dtype, jnp.inexact):
        return _soft(z, target, _class_weights("cross_entropy", weight, z), reduction, label_smoothing)
    labels = labels_for("cross_entropy", target, z.shape[:-1])
    return _hard(
        "cross_entropy",
        log_softmax(z),
        labels,
        _class_weights("cross_entropy", weight, z),
        ignore_index,
        reduction,
        label_smoothing,
    )


def nll_loss(
    log_probs: ArrayLike,
    labels: ArrayLike,
    weight: ArrayLike | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> jax.Array:
    """Minus the log-probability of each label, from log-probabilities along the last axis.

    Its slope is minus the label's weight at the label, and 0 elsewhere. Source: PyTorch's `nll_loss_backward`. Rows
    with the label `ignore_index` count for nothing, whatever they hold. If all are ignored, the mean is NaN, as in
    PyTorch.
    """
    logp = inexact("nll_loss", "log_probs", log_probs, real=True)
    _check(logp, 0, "nll_loss")
    picked = labels_for("nll_loss", labels, logp.shape[:-1])
    return _hard("nll_loss", logp, picked, _class_weights("nll_loss", weight, logp), ignore_index, reduction, 0)


def _hard(
    function: str,
    logp: jax.Array,
    labels: jax.Array,
    weight: jax.Array,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> jax.Array:
    one_of(function, "reduction", reduction, REDUCTIONS)
    kept = labels != ignore_index
    index = jnp.where(kept, labels, 0)
    scale = jnp.where(kept, weight[index], 0)
    picked = jnp.take_along_axis(logp, index[..., None], -1)[..., 0]
    losses = jnp.where(kept, -scale * picked, 0)
    if smoothing:
        even = -times_log(weight, logp).sum(-1)
        losses = jnp.where(kept, (1 - smoothing) * losses + smoothing / logp.shape[-1] * even, 0)
    losses = loud(losses, labels, ignore_index, logp.shape[-1])
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else mean(losses.sum(), scale.sum())


def _soft(z: jax.Array, target: jax.Array, weight: jax.Array, reduction: str, smoothing: float) -> jax.Array:
    one_of("cross_entropy", "reduction", reduction, REDUCTIONS)
    if target.shape != z.shape:
        what = f"are probabilities of shape {target.shape}, but the logits have shape {z.shape}."
        cure = "Pass as many probabilities as logits, or integer labels."
        raise refused("cross_entropy: the targets", what, cure)
    q = (1 - smoothing) * target.astype(z.dtype) + smoothing / z.shape[-1]
    losses = -times_log(q * weight, log_softmax(z)).sum(-1)
    if reduction == "none":
        return losses
    rows = max(losses.size, 1)
    return losses.sum() if reduction == "sum" else losses.sum() / rows


def _class_weights(function: str, weight: ArrayLike | None, z: jax.Array) -> jax.Array:
    classes = z.shape[-1:]
    if weight is None:
        return jnp.ones(classes, z.dtype)
    array = jnp.asarray(weight).astype(z.dtype)
    if array.shape != classes:
        what = f"has shape {array.shape}, but there are {classes[0]} classes."
        raise refused(f"{function}: weight", what, "Pass one weight for each class.")
    return array


def _check(z: jax.Array, smoothing: float, function: str) -> None:
    if z.ndim < 1:
        what = "is a scalar, and has no axis of classes."
        raise refused(f"{function}: the first argument", what, "Pass an array, classes last.")
    if not 0 <= smoothing <= 1:
        what = f"is {smoothing}."
        raise refused(f"{function}: label_smoothing", what, "Pass a number from 0 to 1.")
