"""Eigenvalues and singular values that may be equal, with JAX's derivatives elsewhere.

JAX divides by differences of values. Its own rule is taken as a jaxpr, in which what is divided by exactly zero is
zero. So all that was finite keeps its bits, and the common turn of vectors with equal values counts as zero, as in
`aot.derivatives.linalg`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jointcut.aot.derivatives import linalg
from jointcut.partition.program import jaxprs
from jointcut.partition.rewrite import simplify


def with_equal_values(eqn: Any) -> Callable[[jax.Array], Any]:
    """The `eigh` or `svd` of an equation, as a function of the matrix."""
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
        results, changes = _without_zero_divisors(function, a, da)
        if has_vectors:
            changes = [sum(pair) for pair in zip(changes, _against(results, da), strict=True)]
        return results, changes

    return value


def _against(results: Any, da: jax.Array) -> list[jax.Array]:
    """What JAX's tangents lack: how vectors u and v of equal singular values turn against each other."""
    s, u, vh = results
    p = _adjoint(u) @ da @ _adjoint(vh)
    total = s[..., None, :] + s[..., :, None]
    is_equal = (s[..., None, :] == s[..., :, None]) & (total != 0) & ~jnp.eye(s.shape[-1], dtype=bool)
    skew = (p - _adjoint(p)) / 2
    turn = jnp.where(is_equal, skew / jnp.where(is_equal, total, 1).astype(p.dtype), 0)
    return [jnp.zeros_like(s), u @ turn, turn @ vh]


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _without_zero_divisors(function: Callable[..., Any], a: jax.Array, da: jax.Array) -> tuple[Any, Any]:
    """JAX's results and tangents of a function, in which a quotient with exactly zero below is zero."""

    def both(a: jax.Array, da: jax.Array) -> Any:
        return jax.jvp(function, (a,), (da,))

    closed = jax.make_jaxpr(both)(a, da)
    for name in ("eigh", "svd", "div", "integer_pow"):
        closed = simplify.replaced(closed, name, _mended)
    flat = jaxprs.evaluate(closed, a, da)
    return flat[: len(flat) // 2], flat[len(flat) // 2 :]


def _mended(eqn: Any, _: str) -> Any:
    """An equation of JAX's rule; the decomposition in it has this rule again, for higher orders."""
    if eqn.primitive.name in ("eigh", "svd"):
        return simplify.instead(eqn, with_equal_values(eqn))
    if eqn.primitive.name == "integer_pow":
        exponent = eqn.params["y"]
        return eqn if exponent >= 0 else simplify.instead(eqn, functools.partial(_power, exponent))
    return simplify.instead(eqn, _quotient)


def _power(exponent: int, x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 0, lax.integer_pow(jnp.where(x == 0, 1, x), exponent))


def _quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(y == 0, 0, lax.div(x, jnp.where(y == 0, 1, y)))
