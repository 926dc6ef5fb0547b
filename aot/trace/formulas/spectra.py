"""Decompositions of matrices that may be singular, with JAX's derivatives elsewhere.

JAX divides by differences of values. Its own rule is taken as a jaxpr, in which a quotient by exactly zero is zero. So
all finite results keep their bits, and the common turn of vectors with equal values counts as zero, as in
`aot.derivatives.linalg`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.aot.derivatives import linalg
from jointcut.aot.derivatives.linalg.solves import adjoint
from jointcut.partition.program.jax import jaxprs, runtime
from jointcut.partition.program.primitives import DECOMPOSING
from jointcut.partition.rewrite import simplify


def with_equal_values(eqn: Any, turns: bool = True) -> Callable[[jax.Array], Any]:
    """Return the `eigh` or `svd` of an equation, as a function of the matrix.

    `turns` says whether left and right vectors of equal singular values turn against each other.
    """
    primitive, params = eqn.primitive, eqn.params

    def function(a: jax.Array) -> Any:
        return primitive.bind(a, **params)

    @jax.custom_jvp
    def value(a: jax.Array) -> Any:
        return function(a)

    @value.defjvp
    def _(points: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
        (a,), (da,) = points, tangents
        has_vectors = primitive.name == "svd" and params["compute_uv"]
        if has_vectors and params["full_matrices"] and a.shape[-2] != a.shape[-1]:
            (u, s, vh), (du, ds, dvh) = jax.jvp(linalg.svd, (a,), (da,))
            return [s, u, vh], [ds, du, dvh]
        results, changes = _without_zero_divisors(function, points, tangents)
        if has_vectors and turns:
            changes = [sum(pair) for pair in zip(changes, _against(results, da), strict=True)]
        return results, changes

    return value


def values_alone(eqn: Any) -> Callable[[jax.Array], Any]:
    """Return the `svd` of an equation whose vectors nothing reads: those have the slope 0."""

    @jax.custom_jvp
    def value(a: jax.Array) -> Any:
        return eqn.primitive.bind(a, **eqn.params)

    @value.defjvp
    def _(points: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
        (a,), (da,) = points, tangents
        s, u, vh = value(a)
        count = s.shape[-1]
        turned = da @ adjoint(vh[..., :count, :])
        return [s, u, vh], [jnp.sum(jnp.conj(u[..., :count]) * turned, -2).real, jnp.zeros_like(u), jnp.zeros_like(vh)]

    return value


def is_least_squares(eqn: Any) -> bool:
    """Whether a call of JAX's solves least squares for one matrix: its results are solution, rest, rank and values."""
    if len(eqn.outvars) != 4 or getattr(eqn.invars[0].aval, "ndim", 0) != 2:
        return False
    a, (x, _, rank, s) = eqn.invars[0].aval, (v.aval for v in eqn.outvars)
    fits = x.shape[:1] == a.shape[1:] and rank.shape == () and s.shape == (min(a.shape),)
    return fits and jnp.issubdtype(rank.dtype, np.integer) and "svd" in jaxprs.inner_primitives(eqn)


def least_squares(eqn: Any) -> Callable[..., Any]:
    """Return the `lstsq` of an equation, as a function of a, b and, if given, the bound of small singular values.

    The derivative is taken from `aot.derivatives.linalg.lstsq`, with the rank that JAX found, in three cases: singular
    values are equal, they count as zero, or nothing is left over.
    """
    body = eqn.params["jaxpr"]

    @jax.custom_jvp
    def value(*operands: jax.Array) -> Any:
        return runtime.evaluate(body, *operands)

    @value.defjvp
    def _(points: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        (a, b, *bound), (da, db, *_) = points, tangents

        def smooth(a: jax.Array, b: jax.Array) -> Any:
            x, left, _, s = runtime.evaluate(body, a, b, *bound)
            return x, left, s

        results = value(*points)
        x, left, rank, s = results
        _, (dx, d_left, ds) = _without_zero_divisors(smooth, (a, b), (da, db))
        inverse = _pseudo_inverse(a, *bound)
        rest, change = b - a @ x, db - da @ x
        along = adjoint(inverse) @ (adjoint(da) @ rest)
        across = adjoint(da) @ (adjoint(inverse) @ x)
        moved = inverse @ (change + along) + across - inverse @ (a @ across)
        is_singular = (rank < min(a.shape)) | jnp.any(s[1:] == s[:-1])
        squares = 2 * jnp.sum(jnp.real(jnp.conj(rest) * change), 0).reshape(left.shape)
        dx = jnp.where(is_singular, moved, dx)
        d_left = jnp.where(is_singular | (left == 0), squares, d_left).astype(left.dtype)
        return results, [dx, d_left, np.zeros(rank.shape, jax.dtypes.float0), ds]

    return value


@jax.custom_jvp
def _pseudo_inverse(a: jax.Array, *bound: Any) -> jax.Array:
    """Return the pseudo-inverse, whose rank does not change (Golub and Pereyra, SIAM J. Numer. Anal. 10, 1973)."""
    return jnp.linalg.lstsq(a, jnp.eye(a.shape[0], dtype=a.dtype), *bound)[0]


@_pseudo_inverse.defjvp
def _pseudo_inverse_slope(points: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    a, da, p = points[0], adjoint(tangents[0]), _pseudo_inverse(*points)
    left_over = p @ (adjoint(p) @ (da - (da @ a) @ p))
    return p, left_over + ((da - p @ (a @ da)) @ adjoint(p)) @ p - p @ (adjoint(da) @ p)


def _against(results: Any, da: jax.Array) -> list[jax.Array]:
    """Return the part that JAX's tangents lack: how vectors u, v of equal singular values turn against each other."""
    s, u, vh = results
    p = adjoint(u) @ da @ adjoint(vh)
    total = s[..., None, :] + s[..., :, None]
    is_equal = (s[..., None, :] == s[..., :, None]) & (total != 0) & ~jnp.eye(s.shape[-1], dtype=bool)
    skew = (p - adjoint(p)) / 2
    turn = jnp.where(is_equal, skew / jnp.where(is_equal, total, 1).astype(p.dtype), 0)
    return [jnp.zeros_like(s), u @ turn, turn @ vh]


def _without_zero_divisors(function: Callable[..., Any], points: Any, tangents: Any) -> tuple[Any, Any]:
    """Return JAX's results and tangents of a function, in which a quotient with exactly zero below is zero."""

    def both(points: Any, tangents: Any) -> Any:
        return jax.jvp(function, points, tangents)

    closed = jax.make_jaxpr(both)(points, tangents)
    for name in ("eigh", "svd", "div", "integer_pow"):
        closed = simplify.replaced(closed, name, _mended)
    flat = runtime.evaluate(closed, *points, *tangents)
    return flat[: len(flat) // 2], flat[len(flat) // 2 :]


def _mended(eqn: Any, _: str) -> Any:
    """Return an equation of JAX's rule; a decomposition in it has this rule again, for higher orders."""
    if eqn.primitive.name in DECOMPOSING:
        return simplify.instead(eqn, with_equal_values(eqn))
    if eqn.primitive.name == "integer_pow":
        exponent = eqn.params["y"]
        return eqn if exponent >= 0 else simplify.instead(eqn, functools.partial(_power, exponent))
    return simplify.instead(eqn, _quotient)


def _power(exponent: int, x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 0, lax.integer_pow(jnp.where(x == 0, 1, x), exponent))


def _quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(y == 0, 0, lax.div(x, jnp.where(y == 0, 1, y)))
