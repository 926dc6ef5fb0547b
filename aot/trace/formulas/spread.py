"""Differentiate a function of a symmetric matrix twice where eigenvalues are equal, by divided differences.

With a = v·diag(s)·v* the function is v·diag(f(s))·v*. In the basis of v its tangent along e is f[s_i, s_j]·e_ij, and
its second derivative along e and g is the sum over k of f[s_i, s_k, s_j]·(e_ik·g_kj + g_ik·e_kj) (Daleckii and Krein;
Higham, "Functions of Matrices", 2008, theorems 3.11 and 3.12). At equal numbers the divided differences are f' and
f''/2.

A function is given by its numbers at the eigenvalues, and those of f' and f''. All is linear in these three. Both maps
that make first tangents are primitives, so that their transposes, which make gradients, have derivatives of their own,
too: those of JAX would follow the vectors, which have none. In third order derivatives are NaN where values are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.aot.derivatives.linalg.solves import adjoint
from jointcut.partition.program import jaxprs

Array = jax.Array


def function_of_symmetric(is_transposed: bool, product: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """The product of two matrices of vectors, as a function of both, of the matrix, of s and v, and of f, f' and f''.

    Where no eigenvalues are equal the derivative is that of the product, which is JAX's.
    """

    @jax.custom_jvp
    def value(first: Array, second: Array, a: Array, *basis: Array) -> Array:
        del a, basis
        return product(first, second)

    @value.defjvp
    def _(points: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
        (first, second, a, s, v, *_), basis = points, points[2:]
        _, plain = jax.jvp(product, (first, second), tangents[:2])
        turned = _along(basis, tangents[2]) + _with_numbers((a, s, v), tangents[5:])
        turned = jnp.swapaxes(turned, -1, -2) if is_transposed else turned
        has_equal = jnp.any(equal(s), axis=(-2, -1))[..., None, None]
        return value(*points), jnp.where(has_equal, turned.astype(plain.dtype), plain)

    return value


# ------------------------------------------------------------------------------------------- linear in the numbers


@jax.custom_jvp
def of_matrix(a: Array, s: Array, v: Array, *numbers: Array) -> Array:
    """The function."""
    del a, s
    return (v * numbers[0][..., None, :]) @ adjoint(v)


@of_matrix.defjvp
def _of_matrix_slope(points: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    return of_matrix(*points), _along(points, tangents[0]) + _with_numbers(points[:3], tangents[3:])


@jax.custom_jvp
def _gathered(cotangent: Array, a: Array, s: Array, v: Array) -> tuple[Array, Array, Array]:
    """The cotangents of the numbers, given that of the function."""
    del a
    of_values = jnp.einsum("...ji,...jk,...ki->...i", v, cotangent, v.conj()).real
    return of_values, jnp.zeros_like(s), jnp.zeros_like(s)


@_gathered.defjvp
def _gathered_slope(points: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Any, Any]:
    (cotangent, a, s, _), v_once = points, once(points[3], points[2])

    def turned(*numbers: Array) -> Array:
        return _within(v_once, _first(s, *numbers) * (adjoint(v_once) @ tangents[1] @ v_once))

    _, pull = jax.vjp(turned, s, s, s)
    pairs = zip(pull(cotangent), _gathered(tangents[0], a, s, v_once), strict=True)
    return _gathered(*points), tuple(one + other for one, other in pairs)


def _with_numbers(basis: Sequence[Array], numbers: Sequence[Array]) -> Array:
    """The function, as a linear map of the numbers."""
    return _spread_p.bind(*basis, *numbers, rules=_SPREAD, num_residuals=3)[0]


_spread_p = jaxprs.linear_primitive("function_of_symmetric")
_SPREAD = jaxprs.LinearRules(
    lambda basis, numbers: [basis[0]],
    lambda basis, numbers: [of_matrix(*basis, *numbers)],
    lambda basis, cotangents: [None] * 3 if cotangents[0] is None else list(_gathered(cotangents[0], *basis)),
)


# --------------------------------------------------------------------------------------------- linear in a direction


@jax.custom_jvp
def _turned(e: Array, a: Array, s: Array, v: Array, *numbers: Array) -> Array:
    """The derivative along e."""
    del a
    return _within(v, _first(s, *numbers) * (adjoint(v) @ e @ v))


@_turned.defjvp
def _turned_slope(points: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    e, a, s, v, *numbers = points
    v_once = once(v, s)
    moved = _along(points[1:], tangents[0]) + _turned(e, a, s, v_once, *tangents[4:])
    return _turned(*points), moved + _turned_twice(e, tangents[1], s, v_once, *numbers)


def _turned_twice(e: Array, g: Array, s: Array, v: Array, *numbers: Array) -> Array:
    """The second derivative along e and g."""
    e, g, differences = adjoint(v) @ e @ v, adjoint(v) @ g @ v, _second(s, *numbers)
    both = jnp.einsum("...ikj,...ik,...kj->...ij", differences, e, g)
    return _within(v, both + jnp.einsum("...ikj,...ik,...kj->...ij", differences, g, e))


def _within(v: Array, inner: Array) -> Array:
    """A matrix that is given in the basis v."""
    return v @ inner @ adjoint(v)


def _along(basis: Sequence[Array], e: Array) -> Array:
    """The derivative along e, as a linear map of e."""
    return _turned_p.bind(*basis, e, rules=_TURNED, num_residuals=len(basis))[0]


def _back(basis: Sequence[Array], cotangent: Array) -> Array:
    return jnp.swapaxes(_along(basis, jnp.swapaxes(cotangent, -1, -2)), -1, -2)


_turned_p = jaxprs.linear_primitive("slope_of_symmetric")
_TURNED = jaxprs.LinearRules(
    lambda basis, moved: [moved[0]],
    lambda basis, moved: [_turned(moved[0], *basis)],
    lambda basis, cotangents: [None if cotangents[0] is None else _back(basis, cotangents[0])],
)


@jax.custom_jvp
def once(v: Array, s: Array) -> Array:
    """The same vectors, whose tangent is NaN where there are equal values."""
    del s
    return v


@once.defjvp
def _once_slope(points: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    v, s = points
    has_equal = jnp.any(equal(s), axis=(-2, -1))[..., None, None]
    return once(v, s), _unknown_p.bind(has_equal, tangents[0], rules=_UNKNOWN, num_residuals=1)[0]


# No product, since a guard would take NaN times a tangent of zero as zero: at equal values JAX's is, and wrongly.
_unknown_p = jaxprs.linear_primitive("unknown")
_UNKNOWN = jaxprs.LinearRules(
    lambda unknown, moved: [moved[0]],
    lambda unknown, moved: [jnp.where(unknown[0], jnp.nan, moved[0])],
    lambda unknown, cotangents: [
        None if (c := cotangents[0]) is None else jnp.where(unknown[0] & (c != 0), jnp.nan, c)
    ],
)


def _first(s: Array, f: Array, slope: Array, bend: Array) -> Array:
    """The differences f[s_i, s_j]."""
    del bend
    return _quotient(f[..., :, None] - f[..., None, :], s[..., :, None] - s[..., None, :], slope[..., :, None])


def _second(s: Array, f: Array, slope: Array, bend: Array) -> Array:
    """The differences f[s_i, s_k, s_j], with the axes i, k and j."""
    first = _first(s, f, slope, bend)
    of_ends = _quotient(
        slope[..., :, None] - first, s[..., :, None] - s[..., None, :], bend[..., :, None] / 2
    )  # f[s_i, s_k, s_i]
    rise = first[..., :, :, None] - first[..., None, :, :]
    return _quotient(rise, s[..., :, None, None] - s[..., None, None, :], of_ends[..., :, :, None])


def _quotient(rise: Array, run: Array, limit: Array) -> Array:
    """The quotient; the limit where the divisor is zero."""
    return jnp.where(run == 0, limit, rise / jnp.where(run == 0, 1, run))


def equal(s: Array) -> Array:
    """Which two values are equal."""
    return (s[..., :, None] == s[..., None, :]) & ~jnp.eye(s.shape[-1], dtype=bool)
