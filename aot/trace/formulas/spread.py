"""Differentiate a function of a symmetric matrix where eigenvalues are equal, by divided differences.

With a = v·diag(s)·v* the function is v·diag(f(s))·v*. In the basis of v its tangent along e is f[s_i, s_j]·e_ij
(Daleckii and Krein; Higham, "Functions of Matrices", 2008, theorem 3.11). At equal numbers the divided difference is
f'. A function is given by the numbers f(s) and f'(s) at the eigenvalues. In second order derivatives are NaN where
values are equal: they would follow the vectors, which have none.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jointcut.aot.derivatives.linalg.solves import adjoint
from jointcut.partition.program.jax import own_primitives

Array = jax.Array


def function_of_symmetric(is_transposed: bool, product: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """Return the product of two matrices of vectors, as a function of both, of the matrix, of s and v, and of f and f'.

    Where no eigenvalues are equal the derivative is JAX's derivative of the product.
    """

    @jax.custom_jvp
    def value(first: Array, second: Array, a: Array, *basis: Array) -> Array:
        del a, basis
        return product(first, second)

    @value.defjvp
    def _(points: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
        first, second, _, s, v, f, slope = points
        _, plain = jax.jvp(product, (first, second), tangents[:2])
        v_once, spread = once(v, s), s[..., :, None] - s[..., None, :]
        rise = f[..., :, None] - f[..., None, :]
        ratio = jnp.where(spread == 0, slope[..., :, None], rise / jnp.where(spread == 0, 1, spread))
        inner = ratio * (adjoint(v_once) @ tangents[2] @ v_once)
        turned = (v_once @ inner + v_once * tangents[5][..., None, :]) @ adjoint(v_once)
        turned = jnp.swapaxes(turned, -1, -2) if is_transposed else turned
        has_equal = jnp.any(equal(s), axis=(-2, -1))[..., None, None]
        return value(*points), jnp.where(has_equal, turned.astype(plain.dtype), plain)

    return value


@jax.custom_jvp
def once(v: Array, s: Array) -> Array:
    """Return the same vectors, whose tangent is NaN where there are equal values."""
    del s
    return v


@once.defjvp
def _once_slope(points: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    v, s = points
    has_equal = jnp.any(equal(s), axis=(-2, -1))[..., None, None]
    return once(v, s), _unknown_p.bind(has_equal, tangents[0], rules=_UNKNOWN, num_residuals=1)[0]


# No product: a guard would take NaN times a tangent of zero as zero. At equal values the tangent is zero, and wrong.
_unknown_p = own_primitives.linear_primitive("unknown")
_UNKNOWN = own_primitives.LinearRules(
    lambda unknown, moved: [moved[0]],
    lambda unknown, moved: [jnp.where(unknown[0], jnp.nan, moved[0])],
    lambda unknown, cotangents: [
        None if (c := cotangents[0]) is None else jnp.where(unknown[0] & (c != 0), jnp.nan, c)
    ],
)


def equal(s: Array) -> Array:
    """Return which pairs of values are equal."""
    return (s[..., :, None] == s[..., None, :]) & ~jnp.eye(s.shape[-1], dtype=bool)
