"""Differentiate a function of a matrix that is made of its singular values and vectors, where values are equal.

Such a function is l·diag(f(s))·r*, with the singular values s of a matrix a, with l and r among its vectors, and with a
function f of one number. In the basis of the vectors its tangent has the quotients of differences (f_j - f_i) / (s_j -
s_i). Where values are equal, those are the slope of f (Noferini, "A formula for the Fréchet derivative of a generalized
matrix function", 2017). There JAX divides zero by zero. Here JAX's tangents are taken with zero for such a quotient,
and the missing part is added. In second order derivatives are NaN where values are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jointcut.aot.derivatives.linalg.solves import adjoint
from jointcut.aot.trace.formulas.spread import equal, once

Array = jax.Array


@dataclass(frozen=True)
class SingularPair:
    """The singular vectors in a function of a matrix: left ones "u" or right ones "v".

    The function is l·diag(f(s))·r*, or its transpose with `is_transposed`.
    """

    left: str
    right: str
    is_transposed: bool


def function_of(pair: SingularPair, product: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """Return the product of two matrices of vectors, as a function of both, of the matrix, of s, u, v, f and f'."""

    @jax.custom_jvp
    def value(first: Array, second: Array, a: Array, *basis: Array) -> Array:
        del a, basis
        return product(first, second)

    @value.defjvp
    def _(points: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
        first, second, _, s, u, v, f, slope = points
        _, tangent = jax.jvp(product, (first, second), tangents[:2])
        turned = _turned(pair, tangents[2], s, once(u, s), once(v, s), f, slope)
        turned = jnp.swapaxes(turned, -1, -2) if pair.is_transposed else turned
        return value(*points), tangent + turned.astype(tangent.dtype)

    return value


def _turned(pair: SingularPair, da: Array, s: Array, u: Array, v: Array, f: Array, slope: Array) -> Array:
    """Return the part that JAX's tangent lacks."""
    if pair.left == "v":
        u, v, da = v, u, adjoint(da)
    p, is_equal = adjoint(u) @ da @ v, equal(s)
    even, odd = (p + adjoint(p)) / 2, (p - adjoint(p)) / 2
    of_even = jnp.where(is_equal, slope[..., :, None], 0)
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
