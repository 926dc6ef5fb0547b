"""Sums, products, extremes and log-sum-exp of all elements so far along an axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, one_axis
from jointcut.aot.derivatives.slopes import with_slopes


def cumsum(a: ArrayLike, axis: int) -> jax.Array:
    """The sums so far. Slope: 1 for all elements so far (PyTorch's `cumsum_backward`). The derivative is JAX's own."""
    array = inexact("cumsum", "a", a)
    return jnp.cumsum(array, axis=one_axis("cumsum", axis, array.ndim))


def cumprod(a: ArrayLike, axis: int) -> jax.Array:
    """The products so far. Slope: the product of all others (PyTorch's `cumprod_backward`).

    It is right at any number of zeros, in every order. The derivative is JAX's own, which does not divide.
    """
    array = inexact("cumprod", "a", a)
    return jnp.cumprod(array, axis=one_axis("cumprod", axis, array.ndim))


def logcumsumexp(a: ArrayLike, axis: int) -> jax.Array:
    """log(cumsum(exp(a))), JAX's `lax.cumlogsumexp`. Slope: exp(a - result) (PyTorch's `logcumsumexp_backward`).

    The slope is a linear recurrence with factors of at most 1, so nothing overflows. Where all elements so far are
    -inf, the value is -inf and the slope 0. JAX and PyTorch give NaN there, except that JAX gives 1 for the first
    element.
    """
    array = inexact("logcumsumexp", "a", a)
    return _logcumsumexp(one_axis("logcumsumexp", axis, array.ndim), array)


def _logcumsumexp_slope(tangent: jax.Array, _: jax.Array, axis: int, x: jax.Array) -> jax.Array:
    """The recurrence d_j = exp(r_(j-1) - r_j)·d_(j-1) + exp(x_j - r_j)·t_j, with r the result and t the tangent."""
    so_far = _logcumsumexp(axis, x)
    first = jnp.full_like(jax.lax.slice_in_dim(x, 0, min(1, x.shape[axis]), axis=axis), -jnp.inf)
    before = jnp.concatenate([first, jax.lax.slice_in_dim(so_far, 0, max(0, x.shape[axis] - 1), axis=axis)], axis)
    kept, added = _ratio(before, so_far), _ratio(x, so_far)
    return jax.lax.associative_scan(_then, (kept, added * tangent), axis=axis)[1]


def _ratio(x: jax.Array, total: jax.Array) -> jax.Array:
    """Return exp(x - total), and 0 where x is -inf or the total is infinite."""
    known = (x.real > -jnp.inf) & jnp.isfinite(total)
    return jnp.where(known, jnp.exp(jnp.where(known, x, 0) - jnp.where(known, total, 0)), 0)


def _then(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Join two steps of the recurrence."""
    return first[0] * second[0], first[1] * second[0] + second[1]


_logcumsumexp = with_slopes(lambda axis, x: jax.lax.cumlogsumexp(x, axis=axis), _logcumsumexp_slope, options=1)


def cummax(a: ArrayLike, axis: int) -> jax.Array:
    """The largest element so far. Of equal elements the last has the slope 1 (PyTorch's `cummaxmin_backward`).

    JAX divides the slope among them, by its order of comparisons.
    """
    array = inexact("cummax", "a", a, real=True)
    return _extreme(False, one_axis("cummax", axis, array.ndim), array)


def cummin(a: ArrayLike, axis: int) -> jax.Array:
    """The smallest element so far. Of equal elements the last has the slope 1 (PyTorch's `cummaxmin_backward`).

    JAX divides the slope among them, by its order of comparisons.
    """
    array = inexact("cummin", "a", a, real=True)
    return _extreme(True, one_axis("cummin", axis, array.ndim), array)


def _extreme_slope(tangent: jax.Array, result: jax.Array, smallest: bool, axis: int, x: jax.Array) -> jax.Array:
    reached = (x == result) | jnp.isnan(x)
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    last = jax.lax.cummax(jnp.where(reached, places, 0), axis=axis)
    return jnp.take_along_axis(tangent, last, axis=axis)


_extreme = with_slopes(
    lambda smallest, axis, x: (jax.lax.cummin if smallest else jax.lax.cummax)(x, axis=axis), _extreme_slope, options=2
)
