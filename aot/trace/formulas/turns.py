"""Differentiate a function of a matrix that is made of its singular values and vectors, where values are equal.

Such a function is l·diag(f(s))·r*, with the singular values s of a matrix a, with l and r among its vectors, and with a
function f of one number. In the basis of the vectors its tangent has the quotients of differences (f_j - f_i) / (s_j -
s_i). Where values are equal, those are the slope of f (Noferini, "A formula for the Fréchet derivative of a generalized
matrix function", 2017). JAX divides zero by zero. Here its tangents are taken with zero for such a quotient, and what
that lacks is added.

Second derivatives are those of the same function made of a symmetric matrix, which `spread` differentiates twice. For a
square matrix that is [[0, a], [a*, 0]], whose eigenvalues are s and -s (Jordan and Wielandt), and f goes on below zero,
odd or even. For one that is tall u·diag(f(s))·v* is a·h(a*·a) with h(t) = f(√t) / √t. That squares the condition of a,
and divides by the values, so it is taken where the smallest is no less than a thousandth of the largest. (The first
would need a basis of all that stands across, as large as the longer side squared.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jointcut.aot.derivatives.linalg.solves import adjoint
from jointcut.aot.trace.formulas.spread import equal, of_matrix, once

Array = jax.Array

_LEAST = 1e-3  # of the largest value, where second derivatives of tall and wide matrices are known


@dataclass(frozen=True)
class Pair:
    """Which singular vectors a function of a matrix is made of, left ones "u" or right ones "v".

    It is l·diag(f(s))·r*, or the transpose of that with `is_transposed`.
    """

    left: str
    right: str
    is_transposed: bool


def function_of(pair: Pair, product: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """The product of two matrices of vectors, as a function of both, of the matrix, of s, u, v, f, f' and f''.

    Slopes of second order are NaN where values are equal and the function has none: of a square matrix, where a value
    is zero and f does not go on smoothly below; of any other, where a value is zero or small beside the largest.
    """

    @jax.custom_jvp
    def value(first: Array, second: Array, a: Array, *basis: Array) -> Array:
        del a, basis
        return product(first, second)

    @value.defjvp
    def _(points: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
        first, second, a, s, u, v, f, slope, bend = points
        _, tangent = jax.jvp(product, (first, second), tangents[:2])
        turned = _turned(pair, tangents[2], s, once(u, s), once(v, s), f, slope)
        symmetric = _of_square if a.shape[-2] == a.shape[-1] else _of_tall
        _, moved = jax.jvp(partial(symmetric, pair, s, u, v), (a, f, slope, bend), (tangents[2], *tangents[6:]))
        if pair.is_transposed:
            turned, moved = jnp.swapaxes(turned, -1, -2), jnp.swapaxes(moved, -1, -2)
        total = tangent + turned.astype(tangent.dtype)
        return value(*points), jnp.where(_is_known(a, s), moved.astype(tangent.dtype), total)

    return value


def _is_known(a: Array, s: Array) -> Array:
    """For each matrix whether derivatives are those of a symmetric matrix.

    They are at equal values; of a tall or wide matrix, where none is small.
    """
    known = jnp.any(equal(s), axis=(-2, -1))
    if a.shape[-2] != a.shape[-1]:
        known &= jnp.all(s > _LEAST * s[..., :1], axis=-1)
    return known[..., None, None]


def _of_square(pair: Pair, s: Array, u: Array, v: Array, a: Array, f: Array, slope: Array, bend: Array) -> Array:
    """The function of a square matrix, made of the symmetric matrix [[0, a], [a*, 0]]."""
    size, s = a.shape[-1], jax.lax.stop_gradient(s)
    is_zero, is_odd = s == 0, pair.left != pair.right
    if is_odd:
        slope = jnp.where(is_zero & (f != 0), jnp.nan, slope)
        bend = jnp.where(is_zero & (bend != 0), jnp.nan, bend)
    else:
        slope = jnp.where(is_zero & (slope != 0), jnp.nan, slope)
    signs = (-1, 1, -1) if is_odd else (1, -1, 1)
    numbers = (jnp.concatenate([x, sign * x], -1) for x, sign in zip((f, slope, bend), signs, strict=True))
    nothing, half = jnp.zeros_like(a), jnp.sqrt(jnp.asarray(0.5, s.dtype))
    both = jnp.block([[nothing, a], [adjoint(a), nothing]])
    made = of_matrix(both, jnp.concatenate([s, -s], -1), jnp.block([[u, u], [v, -v]]) * half, *numbers)
    rows, columns = (slice(0, size) if side == "u" else slice(size, None) for side in (pair.left, pair.right))
    return made[..., rows, columns]


def _of_tall(pair: Pair, s: Array, u: Array, v: Array, a: Array, *numbers: Array) -> Array:
    """The function, for values that are not zero, made of one of the symmetric matrix a*·a, or of a·a* if a is wide."""
    side, basis, x = ("v", v, a) if a.shape[-2] >= a.shape[-1] else ("u", u, adjoint(a))
    s = jax.lax.stop_gradient(s)
    power = (pair.left != side) + (pair.right != side)
    made = of_matrix(adjoint(x) @ x, s * s, basis, *_of_squares(power, jnp.where(s == 0, 1, s), *numbers))
    made = x @ made if pair.left != side else made
    return made @ adjoint(x) if pair.right != side else made


def _of_squares(power: int, s: Array, f: Array, slope: Array, bend: Array) -> tuple[Array, Array, Array]:
    """The numbers of h(t) = f(√t) / √t^power, and of h' and h'', at t = s²."""
    q, n = s**-power, power
    first = q * (slope - n * f / s)
    second = q * (bend - 2 * n * slope / s + n * (n + 1) * f / s**2)
    return q * f, first / (2 * s), (second - first / s) / (4 * s**2)


def _turned(pair: Pair, da: Array, s: Array, u: Array, v: Array, f: Array, slope: Array) -> Array:
    """What JAX's tangent lacks."""
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
