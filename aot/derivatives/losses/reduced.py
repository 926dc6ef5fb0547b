"""Reduce the losses of single elements, and check their arguments."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, one_of, refused
from jointcut.aot.derivatives.slopes import with_slopes

REDUCTIONS = ("mean", "none", "sum")


def reduced(function: str, losses: jax.Array, reduction: str) -> jax.Array:
    """Return the losses' mean or sum, or all of them; refuse another reduction."""
    one_of(function, "reduction", reduction, REDUCTIONS)
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def pair(function: str, prediction: ArrayLike, target: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return prediction and target as real arrays of one type that broadcast; a whole target becomes floating."""
    x = inexact(function, "prediction", prediction, real=True)
    target = jnp.asarray(target)
    y = target.astype(x.dtype) if not jnp.issubdtype(target.dtype, jnp.inexact) else target
    if jnp.iscomplexobj(y):
        what = f"has type {y.dtype}, but the function is defined for real numbers only."
        raise refused(f"{function}: target", what, "Pass its real part, or its absolute value.")
    dtype = jnp.result_type(x, y)
    one_shape(function, x.shape, y.shape)
    return x.astype(dtype), y.astype(dtype)


def one_shape(function: str, *shapes: Sequence[int]) -> None:
    """Refuse shapes that do not broadcast."""
    try:
        jnp.broadcast_shapes(*(tuple(shape) for shape in shapes))
    except ValueError:
        what = f"have the shapes {' and '.join(str(tuple(shape)) for shape in shapes)}, which do not broadcast."
        cure = "Pass arrays of one shape."
        raise refused(f"{function}: the inputs", what, cure) from None


def labels_for(function: str, labels: ArrayLike, shape: Sequence[int]) -> jax.Array:
    """Return labels as an array; refuse labels that are not integers, or not one for each place."""
    array = jnp.asarray(labels)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        what = f"have type {array.dtype}, but they name classes."
        raise refused(f"{function}: the labels", what, "Pass integers.")
    if array.shape != tuple(shape):
        what = f"have shape {array.shape}, but there are places of shape {tuple(shape)}."
        cure = "Pass one label for each place; the classes lie along the last axis."
        raise refused(f"{function}: the labels", what, cure)
    return array


def loud(losses: jax.Array, labels: jax.Array, ignore_index: int, classes: int) -> jax.Array:
    """Return the losses, with NaN where a label is no class: under `jit` no error can be raised for a value."""
    outside = (labels != ignore_index) & ((labels < 0) | (labels >= classes))
    return jnp.where(outside, jnp.nan, losses)


def positive(function: str, name: str, value: float) -> float:
    """Return `value`; refuse a number that is not above zero."""
    if not value > 0:
        what = f"is {value}, but it must be positive."
        raise refused(f"{function}: {name}", what, "Pass a number above zero.")
    return value


def clamped_below(x: jax.Array) -> jax.Array:
    """Return max(x, 0) with slope 1 at 0, as PyTorch's `clamp_min` has it; `jnp.maximum` has 1/2 there."""
    return jnp.where(x >= 0, x, 0)


def _safe(weight: jax.Array) -> jax.Array:
    return jnp.where(weight == 0, 1, weight)


#: Total / weight; 0/0 is NaN, and has the slope 0.
mean = with_slopes(
    lambda total, weight: total / weight,
    lambda dt, _, total, weight: dt / _safe(weight),
    lambda dw, _, total, weight: -dw * total / jnp.square(_safe(weight)),
)


def times_log(p: jax.Array, logq: jax.Array) -> jax.Array:
    """Return p * logq, and 0 where p is 0 and the log-probability logq is -inf."""
    impossible = (p == 0) & jnp.isneginf(logq)
    return p * jnp.where(impossible, 0, logq)
