"""Sums, products, means, variances and log-sum-exp over axes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.checks import Axis, inexact, some_axes
from jointcut.aot.derivatives.slopes import slopes


def mean(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """The mean. Slope: 1/n (PyTorch's `mean_backward`). No point is singular; the derivative is JAX's own."""
    array = inexact("mean", "a", a)
    return jnp.mean(array, axis=some_axes("mean", axis, array.ndim), keepdims=keepdims)


def prod(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """The product. Slope: the product of all others (PyTorch's `prod_safe_zeros_backward`).

    It is right at any number of zeros, in every order. The derivative is JAX's own, which divides by nothing either.
    """
    array = inexact("prod", "a", a)
    return jnp.prod(array, axis=some_axes("prod", axis, array.ndim), keepdims=keepdims)


def var(a: ArrayLike, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> jax.Array:
    """The variance, with n - ddof for n. Slope: 2·(a - mean)/(n - ddof) (PyTorch's `var_backward`).

    No point is singular. With n = ddof the value is NaN or infinite, and so is the slope.
    """
    array = inexact("var", "a", a)
    return _var(some_axes("var", axis, array.ndim), ddof, keepdims, array)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _var(axes: tuple[int, ...], ddof: int, keepdims: bool, x: jax.Array) -> jax.Array:
    return jnp.var(x, axis=axes, ddof=ddof, keepdims=keepdims)


def _covariance(tangent: jax.Array, axes: tuple[int, ...], ddof: int, keepdims: bool, x: jax.Array) -> jax.Array:
    """How the tangent varies with x: the sum of (x - mean)·tangent over n - ddof."""
    centred = x - jnp.mean(x, axis=axes, keepdims=True)
    count = jnp.asarray(_count(x, axes) - ddof, x.real.dtype)
    return jnp.sum((jnp.conj(centred) * tangent).real, axis=axes, keepdims=keepdims) / count


def _count(x: jax.Array, axes: tuple[int, ...]) -> int:
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return count


slopes(_var, lambda tangent, _, axes, ddof, keepdims, x: 2 * _covariance(tangent, axes, ddof, keepdims, x))


def std(a: ArrayLike, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> jax.Array:
    """The root of the variance. Slope: (a - mean)/((n - ddof)·std) (PyTorch's `std_backward`).

    Where all elements are equal it is 0, as in PyTorch. JAX gives NaN.
    """
    array = inexact("std", "a", a)
    return _std(some_axes("std", axis, array.ndim), ddof, keepdims, array)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _std(axes: tuple[int, ...], ddof: int, keepdims: bool, x: jax.Array) -> jax.Array:
    return jnp.std(x, axis=axes, ddof=ddof, keepdims=keepdims)


def _std_slope(
    tangent: jax.Array, _: jax.Array, axes: tuple[int, ...], ddof: int, keepdims: bool, x: jax.Array
) -> jax.Array:
    deviation = _std(axes, ddof, keepdims, x)
    zero = deviation == 0
    return jnp.where(zero, 0, _covariance(tangent, axes, ddof, keepdims, x)) / jnp.where(zero, 1, deviation)


slopes(_std, _std_slope)


def logsumexp(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """log(sum(exp(a))). Slope: exp(a - logsumexp), the softmax (PyTorch's `logsumexp_backward`).

    Where all elements are -inf the value is -inf and the slope 0, so that a row that is masked out takes no part.
    Elements of +inf share the slope evenly, and others have none. JAX and PyTorch give NaN for both.
    """
    array = inexact("logsumexp", "a", a)
    return _logsumexp(some_axes("logsumexp", axis, array.ndim), keepdims, array)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _logsumexp(axes: tuple[int, ...], keepdims: bool, x: jax.Array) -> jax.Array:
    return jax.scipy.special.logsumexp(x, axis=axes, keepdims=keepdims)


def _logsumexp_slope(
    tangent: jax.Array, _: jax.Array, axes: tuple[int, ...], keepdims: bool, x: jax.Array
) -> jax.Array:
    total = _logsumexp(axes, True, x)
    known = jnp.isfinite(total) & (x.real > -jnp.inf)
    largest = x.real == jnp.inf
    other = jnp.where(largest, 1 / jnp.maximum(jnp.sum(largest, axis=axes, keepdims=True), 1).astype(x.dtype), 0)
    other = jnp.where(jnp.isnan(total), total, other)
    share = jnp.where(known, jnp.exp(jnp.where(known, x, 0) - jnp.where(known, total, 0)), other)
    return jnp.sum(share * tangent, axis=axes, keepdims=keepdims)


slopes(_logsumexp, _logsumexp_slope)
