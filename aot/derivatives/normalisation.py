"""Normalisation from saved statistics, and dropout from its mask.

Each function saves two things for its backward: the normalised array, and the inverse deviation of each row. Types of
less than 32 bits are normalised in float32. Channels lie along the axis 1, as in PyTorch, unless `axis` says otherwise.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import Axis, inexact, not_negative, one_axis, refused, some_axes
from jointcut.aot.derivatives.reductions.norms import vector_norm

Maybe = ArrayLike | None


def layer_norm(x: ArrayLike, axis: Axis = -1, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5) -> jax.Array:
    """(x - mean) / sqrt(var + eps) over the axes, times weight, plus bias; both have the shape of these axes.

    Tangent of the normalised n, with r = 1 / sqrt(var + eps): r·(dx - mean(dx) - n·mean(n·dx)).
    Source: PyTorch's `layer_norm_double_backward` and `layer_norm_jvp`. A row of equal numbers gives zero, and the
    slope r·(dx - mean(dx)), finite for every eps above 0. JAX's rules give the same, and save more.
    """
    name = "layer_norm"
    array = inexact(name, "x", x, real=True)
    axes = some_axes(name, axis, array.ndim)
    return _scaled(name, _standard(name, array, axes, eps), axes, weight, bias)


def rms_norm(x: ArrayLike, axis: Axis = -1, weight: Maybe = None, eps: float | None = None) -> jax.Array:
    """Return x / sqrt(mean(x²) + eps) over the axes, times weight. The default eps is the machine epsilon of the type.

    Tangent of the normalised n, with r = 1 / sqrt(mean(x²) + eps): r·(dx - n·mean(n·dx)).
    Source: PyTorch's `rms_norm`. A row of zeros gives zero, and the slope r·dx, large but finite.
    """
    name = "rms_norm"
    array = inexact(name, "x", x, real=True)
    axes = some_axes(name, axis, array.ndim)
    least = float(jnp.finfo(array.dtype).eps) if eps is None else not_negative(name, "eps", eps)
    normal, _ = _unit(axes, least, _wide(array))
    return _scaled(name, normal.astype(array.dtype), axes, weight, None)


def batch_norm(
    x: ArrayLike,
    mean: Maybe = None,
    variance: Maybe = None,
    weight: Maybe = None,
    bias: Maybe = None,
    eps: float = 1e-5,
    axis: int = 1,
) -> jax.Array:
    """Normalise each channel over all other axes, by its own statistics or by the given mean and variance.

    Source: PyTorch's `batchnorm_double_backward` and `batch_norm_jvp`; see `layer_norm` for the tangent. Given
    statistics do not depend on x, and have derivatives of their own. A channel of equal numbers has the slope of
    `layer_norm`.
    """
    name = "batch_norm"
    array = inexact(name, "x", x, real=True)
    channel = one_axis(name, axis, array.ndim)
    others = tuple(n for n in range(array.ndim) if n != channel)
    if (mean is None) != (variance is None):
        what = "come without each other."
        raise refused(f"{name}: mean and variance", what, "Pass both, or none.")
    if mean is None:
        normal = _standard(name, array, others, eps)
    else:
        center = _along(name, "mean", mean, array, (channel,))
        spread = _along(name, "variance", variance, array, (channel,))
        normal = (array - center) * lax.rsqrt(spread + not_negative(name, "eps", eps))
    return _scaled(name, normal, (channel,), weight, bias)


def instance_norm(
    x: ArrayLike, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5, axis: int = 1
) -> jax.Array:
    """Normalise each channel of each example over the axes after the channel axis.

    Source: PyTorch's `instance_norm`, a batch norm of single examples. See `layer_norm` for the tangent.
    """
    name = "instance_norm"
    array = inexact(name, "x", x, real=True)
    channel = one_axis(name, axis, array.ndim)
    rest = tuple(n for n in range(1, array.ndim) if n != channel)
    return _scaled(name, _standard(name, array, rest, eps), (channel,), weight, bias)


def group_norm(
    x: ArrayLike, groups: int, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5, axis: int = 1
) -> jax.Array:
    """Normalise groups of neighbouring channels of each example, over the group's channels and all later axes.

    Source: PyTorch's `infinitely_differentiable_native_group_norm_backward` and `group_norm_jvp`; see `layer_norm`.
    """
    name = "group_norm"
    array = inexact(name, "x", x, real=True)
    channel = one_axis(name, axis, array.ndim)
    size = array.shape[channel]
    if groups < 1 or size % groups:
        what = f"is {groups}, which does not divide the {size} channels."
        raise refused(f"{name}: groups", what, "Pass a divisor of the number of channels.")
    split = array.reshape(*array.shape[:channel], groups, size // groups, *array.shape[channel + 1 :])
    rest = tuple(n for n in range(1, split.ndim) if n != channel)
    return _scaled(name, _standard(name, split, rest, eps).reshape(array.shape), (channel,), weight, bias)


def normalize(x: ArrayLike, ord: float = 2.0, axis: int = 1, eps: float = 1e-12) -> jax.Array:
    """Return x over its norm along the axis, or over eps where the norm is smaller.

    Source: PyTorch's `normalize`, made of `norm` and `clamp_min`. A vector of zeros gives zero, and the slope dx / eps,
    since the norm has the slope 0 there; JAX gives NaN.
    """
    array = inexact("normalize", "x", x)
    along = one_axis("normalize", axis, array.ndim)
    length = vector_norm(array, along, True, ord)
    return array / jnp.where(length >= eps, length, eps).astype(array.dtype)


def dropout(x: ArrayLike, mask: ArrayLike, rate: float) -> jax.Array:
    """Return x / (1 - rate) where the mask is true, and 0 elsewhere; all zero at rate 1.

    Only the mask is saved for the backward. Source: PyTorch's `native_dropout_double_backward`. At rate 1 the slope is
    0, where a division by 1 - rate would give NaN. Dropped elements may be infinite or NaN.
    """
    array, kept = inexact("dropout", "x", x), jnp.asarray(mask)
    if kept.dtype != bool:
        what = f"has type {kept.dtype}."
        raise refused("dropout: mask", what, "Pass booleans, such as `jax.random.bernoulli` draws.")
    if not 0 <= rate <= 1:
        raise refused("dropout: rate", f"is {rate}.", "Pass a number from 0 to 1.")
    return jnp.where(kept, array * (1 / (1 - rate) if rate < 1 else 0.0), 0)


# ---------------------------------------------------------------- the statistics, and their derivatives


def _standard(function: str, x: jax.Array, axes: tuple[int, ...], eps: float) -> jax.Array:
    normal, _ = _centred(axes, not_negative(function, "eps", eps), _wide(x))
    return normal.astype(x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _centred(axes: tuple[int, ...], eps: float, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    centred = x - x.mean(axes, keepdims=True)
    rate = lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + eps)
    return centred * rate, rate


@_centred.defjvp
def _centred_rule(axes: tuple[int, ...], eps: float, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    normal, rate = _centred(axes, eps, x)
    along = (normal * dx).mean(axes, keepdims=True)
    dnormal = rate * (dx - dx.mean(axes, keepdims=True) - normal * along)
    return (normal, rate), (dnormal, -jnp.square(rate) * along)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _unit(axes: tuple[int, ...], eps: float, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    rate = lax.rsqrt(jnp.square(x).mean(axes, keepdims=True) + eps)
    return x * rate, rate


@_unit.defjvp
def _unit_rule(axes: tuple[int, ...], eps: float, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    normal, rate = _unit(axes, eps, x)
    along = (normal * dx).mean(axes, keepdims=True)
    return (normal, rate), (rate * (dx - normal * along), -jnp.square(rate) * along)


def _scaled(function: str, x: jax.Array, axes: tuple[int, ...], weight: Maybe, bias: Maybe) -> jax.Array:
    if weight is not None:
        x = x * _along(function, "weight", weight, x, axes)
    return x if bias is None else x + _along(function, "bias", bias, x, axes)


def _along(function: str, name: str, value: Any, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return `value`, which has the shape of these axes of x, ready to broadcast against x."""
    array = jnp.asarray(value).astype(x.dtype)
    shape = tuple(x.shape[axis] for axis in axes)
    if array.shape != shape:
        what = f"has shape {array.shape}, but the axes {axes} have {shape}."
        raise refused(f"{function}: {name}", what, f"Pass {math.prod(shape)} numbers so shaped.")
    order = sorted(range(len(axes)), key=axes.__getitem__)
    whole = [x.shape[axis] if axis in axes else 1 for axis in range(x.ndim)]
    return array.transpose(order).reshape(whole)
