"""Sums, products, means, variances and log-sum-exp over axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import Axis, inexact, some_axes
from jointcut.aot.derivatives.slopes import with_slopes


def mean(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """The mean. Slope: 1/n (PyTorch's `mean_backward`). No point is singular; the derivative is JAX's own."""
    array = inexact("mean", "a", a)
    return jnp.mean(array, axis=some_axes("mean", axis, array.ndim), keepdims=keepdims)


def prod(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """The product. Slope: the product of all others (PyTorch's `prod_safe_zeros_backward`).

    It is right at any number of zeros, in every order. The derivative is JAX's own, which does not divide.
    """
    array = inexact("prod", "a", a)
    return jnp.prod(array, axis=some_axes("prod", axis, array.ndim), keepdims=keepdims)


def var(a: ArrayLike, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> jax.Array:
    """The variance, with n - ddof in place of n. Slope: 2·(a - mean)/(n - ddof) (PyTorch's `var_backward`).

    No point is singular. With n = ddof the value is NaN or infinite, and so is the slope.
    """
    array = inexact("var", "a", a)
    return _var(some_axes("var", axis, array.ndim), ddof, keepdims, array)


def _covariance(tangent: jax.Array, axes: tuple[int, ...], ddof: int, keepdims: bool, x: jax.Array) -> jax.Array:
    """Return the covariance of tangent and x: the sum of (x - mean)·tangent, divided by n - ddof."""
    centred = x - jnp.mean(x, axis=axes, keepdims=True)
    count = jnp.asarray(_count(x, axes) - ddof, x.real.dtype)
    return jnp.sum((jnp.conj(centred) * tangent).real, axis=axes, keepdims=keepdims) / count


def _count(x: jax.Array, axes: tuple[int, ...]) -> int:
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return count


_var = with_slopes(
    lambda axes, ddof, keepdims, x: jnp.var(x, axis=axes, ddof=ddof, keepdims=keepdims),
    lambda tangent, _, axes, ddof, keepdims, x: 2 * _covariance(tangent, axes, ddof, keepdims, x),
    options=3,
)


def std(a: ArrayLike, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> jax.Array:
    """The root of the variance. Slope: (a - mean)/((n - ddof)·std) (PyTorch's `std_backward`).

    Where all elements are equal, the slope is 0, as in PyTorch. JAX gives NaN.
    """
    array = inexact("std", "a", a)
    return _std(some_axes("std", axis, array.ndim), ddof, keepdims, array)


def _std_slope(
    tangent: jax.Array, _: jax.Array, axes: tuple[int, ...], ddof: int, keepdims: bool, x: jax.Array
) -> jax.Array:
    deviation = _std(axes, ddof, keepdims, x)
    zero = deviation == 0
    return jnp.where(zero, 0, _covariance(tangent, axes, ddof, keepdims, x)) / jnp.where(zero, 1, deviation)


_std = with_slopes(
    lambda axes, ddof, keepdims, x: jnp.std(x, axis=axes, ddof=ddof, keepdims=keepdims), _std_slope, options=3
)


def var_mean(a: ArrayLike, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> tuple[jax.Array, jax.Array]:
    """The variance and the mean (PyTorch's `var_mean_backward`), with the slopes of `var` and `mean`."""
    return var(a, axis, ddof=ddof, keepdims=keepdims), mean(a, axis, keepdims=keepdims)


def std_mean(a: ArrayLike, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False) -> tuple[jax.Array, jax.Array]:
    """The root of the variance and the mean (PyTorch's `std_mean_backward`), with the slopes of `std` and `mean`."""
    return std(a, axis, ddof=ddof, keepdims=keepdims), mean(a, axis, keepdims=keepdims)


def logsumexp(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """log(sum(exp(a))). Slope: exp(a - logsumexp), the softmax (PyTorch's `logsumexp_backward`).

    Where all elements are -inf, the value is -inf and the slope 0, so that a masked row contributes nothing. Elements
    of +inf share the slope evenly, and the others have the slope 0. JAX and PyTorch give NaN in both cases.
    """
    array = inexact("logsumexp", "a", a)
    return _logsumexp(some_axes("logsumexp", axis, array.ndim), keepdims, array)


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


_logsumexp = with_slopes(
    lambda axes, keepdims, x: jax.scipy.special.logsumexp(x, axis=axes, keepdims=keepdims), _logsumexp_slope, options=2
)
