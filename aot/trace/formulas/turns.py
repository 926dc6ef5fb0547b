"""Differentiate a function of a matrix that is made of its eigenvalues and vectors, where values are equal.

Such a function is l·diag(f(s))·r*, with the eigenvalues or singular values s of a matrix a, with l and r among its
vectors, and with a function f of one number. In the basis of the vectors its tangent has the quotients of differences
(f_j - f_i) / (s_j - s_i). Where values are equal, those are the slope of f (Daleckii and Krein; for singular values
Noferini, "A formula for the Fréchet derivative of a generalized matrix function", 2017). JAX divides zero by zero. Here
its tangents are taken with zero for such a quotient, and what that lacks is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.aot.derivatives.linalg.solves import adjoint

Array = jax.Array


@dataclass(frozen=True)
class Pair:
    """Which vectors a function of a matrix is made of: l·diag(f(s))·r*, or its transpose with `is_transposed`.

    `left` and `right` are "u" or "v", left or right singular vectors; those of `eigh` are both "u".
    """

    left: str
    right: str
    is_symmetric: bool
    is_transposed: bool


def function_of(pair: Pair, product: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """The product of two matrices of vectors, as a function of both, of the matrix, of s, u and v, and of f and f'.

    The slopes are right in first order. Where values are equal those of second order are NaN.
    """

    @jax.custom_jvp
    def value(first: Array, second: Array, a: Array, *basis: Array) -> Array:
        del a, basis
        return product(first, second)

    @value.defjvp
    def _(points: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
        first, second, _, s, u, v, f, slope = points
        _, tangent = jax.jvp(product, (first, second), tangents[:2])
        has_equal = jnp.any(_equal(s), axis=(-2, -1))[..., None, None]
        turned = _turned(pair, tangents[2], s, _once(u, has_equal), _once(v, has_equal), f, slope)
        turned = jnp.swapaxes(turned, -1, -2) if pair.is_transposed else turned
        return value(*points), tangent + turned.astype(tangent.dtype)

    return value


@jax.custom_jvp
def _once(x: Array, has_equal: Array) -> Array:
    """The same array, whose tangent is NaN where there are equal values."""
    del has_equal
    return x


@_once.defjvp
def _once_slope(points: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    x, has_equal = points
    return _once(x, has_equal), tangents[0] * jnp.where(has_equal, jnp.nan, 1).astype(x.dtype)


def _equal(s: Array) -> Array:
    """Which two values are equal."""
    return (s[..., :, None] == s[..., None, :]) & ~jnp.eye(s.shape[-1], dtype=bool)


def _turned(pair: Pair, da: Array, s: Array, u: Array, v: Array, f: Array, slope: Array) -> Array:
    """What JAX's tangent lacks."""
    if pair.left == "v":
        u, v, da = v, u, adjoint(da)
    p, is_equal = adjoint(u) @ da @ v, _equal(s)
    even, odd = (p + adjoint(p)) / 2, (p - adjoint(p)) / 2
    of_even = jnp.where(is_equal, slope[..., :, None], 0)
    if pair.is_symmetric:
        return u @ (of_even * p) @ adjoint(u)
    is_zero = s == 0
    if pair.left == pair.right:
        bad = jnp.any(is_equal & is_zero[..., :, None], axis=(-2, -1))
        if u.shape[-2] > u.shape[-1]:
            bad |= jnp.any(is_zero, axis=-1)
        return u @ (jnp.where(bad[..., None, None], jnp.nan, of_even) * even) @ adjoint(u)
    at_zero = jnp.where(f == 0, slope, jnp.nan)  # where f(0) is not 0, u and v have no common derivative
    total, sums = s[..., :, None] + s[..., None, :], f[..., :, None] + f[..., None, :]
    ratio = jnp.where(total == 0, at_zero[..., :, None], sums / jnp.where(total == 0, 1, total))
    moved = u @ (of_even * even + jnp.where(is_equal, ratio, 0) * odd) @ adjoint(v)
    outward = jnp.where(is_zero, at_zero, 0)
    if u.shape[-2] > u.shape[-1]:
        moved += (da @ v - u @ p) * outward[..., None, :] @ adjoint(v)
    if v.shape[-2] > v.shape[-1]:
        moved += u * outward[..., None, :] @ (adjoint(u) @ da - p @ adjoint(v))
    return moved
