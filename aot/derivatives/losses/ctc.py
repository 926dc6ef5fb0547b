"""Sum the likelihood of a label sequence over all its alignments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, one_of, refused
from jointcut.aot.derivatives.losses.reduced import REDUCTIONS

_NEVER = -1e30  # in place of log(0), with finite derivatives


def ctc_loss(
    log_probs: ArrayLike,
    labels: ArrayLike,
    input_lengths: ArrayLike,
    label_lengths: ArrayLike,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> jax.Array:
    """Connectionist temporal classification: minus the log-likelihood of labels, summed over alignments with blanks.

    Shapes: `log_probs[time, batch, classes]`, `labels[batch, places]`, and lengths of both for each of the batch. Mean
    divides each loss by the number of its labels. Slope: minus the share of the likelihood that passes through each
    class at each time. Source: PyTorch's `ctc_loss_backward`, which adds exp(log_probs) to it. PyTorch's loss is meant
    to follow a `log_softmax`; there both gradients are equal. PyTorch has no second derivative.

    Where the labels do not fit the time, the loss is infinite, or 0 with `zero_infinity`. The gradient is 0 in both
    cases; PyTorch gives NaN for the infinite loss. A log-probability of -inf is an impossible class, and has slope 0.
    """
    logp, targets, times, places = _checked(log_probs, labels, input_lengths, label_lengths, blank)
    one_of("ctc_loss", "reduction", reduction, REDUCTIONS)
    logp = jnp.where(logp > _NEVER, logp, _NEVER)
    losses = -jax.vmap(_likelihood, (1, 0, 0, 0, None))(logp, targets, times, places, blank)
    infeasible = losses >= -_NEVER / 2
    losses = jnp.where(infeasible, 0 if zero_infinity else jnp.inf, jnp.where(infeasible, 0, losses))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else (losses / jnp.maximum(places, 1)).mean()


def _likelihood(logp: jax.Array, labels: jax.Array, time: jax.Array, places: jax.Array, blank: int) -> jax.Array:
    """Return the log-likelihood of one sequence: the sum over paths, computed step by step in time."""
    states = 2 * labels.size + 1
    states_at = jnp.arange(states)
    extended = jnp.full(states, blank, labels.dtype).at[1::2].set(labels)
    two_before = jnp.concatenate([jnp.full(2, blank, labels.dtype), extended])[:states]
    may_skip = (states_at % 2 == 1) & (extended != two_before) & (states_at > 1)
    start = jnp.where(states_at < 2, logp[0, extended], _NEVER)
    start = jnp.where((states_at == 1) & (places == 0), _NEVER, start)

    def step(alpha: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        scores, at = now
        one = jnp.concatenate([jnp.full(1, _NEVER, alpha.dtype), alpha])[:states]
        two = jnp.where(may_skip, jnp.concatenate([jnp.full(2, _NEVER, alpha.dtype), alpha])[:states], _NEVER)
        new = _log_sum(jnp.stack([alpha, one, two]), 0) + scores[extended]
        return jnp.where(at < time, jnp.maximum(new, _NEVER), alpha), None

    alpha, _ = lax.scan(step, start, (logp[1:], jnp.arange(1, logp.shape[0])))
    ends = (states_at == 2 * places) | (states_at == 2 * places - 1)
    return _log_sum(jnp.where(ends, alpha, _NEVER), 0)


def _log_sum(x: jax.Array, axis: int) -> jax.Array:
    """Return the logarithm of the sum of exponentials of finite numbers."""
    top = lax.stop_gradient(x.max(axis, keepdims=True))
    return jnp.log(jnp.exp(x - top).sum(axis)) + top.squeeze(axis)


def _checked(
    log_probs: ArrayLike, labels: ArrayLike, input_lengths: ArrayLike, label_lengths: ArrayLike, blank: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    logp = inexact("ctc_loss", "log_probs", log_probs, real=True)
    whole = [jnp.asarray(x) for x in (labels, input_lengths, label_lengths)]
    targets, times, places = whole
    batch = logp.shape[1:2]
    if logp.ndim != 3 or targets.ndim != 2 or targets.shape[:1] != batch or {times.shape, places.shape} != {batch}:
        what = f"have the shapes {logp.shape}, {targets.shape}, {times.shape} and {places.shape}."
        cure = (
            "Pass log_probs[time, batch, classes], labels[batch, places], and a length of each for each of the batch."
        )
        raise refused("ctc_loss: the inputs", what, cure)
    if not all(jnp.issubdtype(x.dtype, jnp.integer) for x in whole):
        what = f"have the types {', '.join(str(x.dtype) for x in whole)}."
        raise refused("ctc_loss: labels and lengths", what, "Pass integers.")
    if not 0 <= blank < logp.shape[2]:
        what = f"is {blank}, but there are {logp.shape[2]} classes."
        raise refused("ctc_loss: blank", what, "Pass one of the classes.")
    return logp, targets, times, places
