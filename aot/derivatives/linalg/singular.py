"""Singular values and vectors, with equal and zero values too, and the norms made of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import refused
from jointcut.aot.derivatives.elementwise.angles import abs
from jointcut.aot.derivatives.linalg.solves import adjoint, matrix
from jointcut.aot.derivatives.reductions.norms import vector_norm
from jointcut.aot.derivatives.reductions.ranks import amax, amin


def svd(a: ArrayLike, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    """Singular value decomposition a = u·diag(s)·vh, with s descending; s alone without `compute_uv`.

    Tangents, with p = u*·da·v split into a Hermitian part y and a skew part k: ds = real(diag(p)). u and v rotate by
    y_ij / (s_j - s_i) plus and minus k_ij / (s_j + s_i); beyond the square, by u2*·da·v / s. Source: PyTorch's
    `svd_jvp` and `svd_backward`; here sums and differences of s divide separate terms.

    - Equal values: the common rotation counts as zero; the rotation of u against v is right. So the polar factor u·vh
      of a matrix has its derivative, also at the identity. PyTorch and JAX give NaN.
    - Zero values: a term divided by one counts as zero. PyTorch and JAX give NaN or infinity.
    - Full matrices: the added columns rotate only as far as the others force them. JAX has no derivative here, and
      PyTorch ignores the added columns.
    """
    array = matrix("linalg.svd", "a", a)
    if not compute_uv:
        return svdvals(array)
    return _svd(full_matrices, array)


def svdvals(a: ArrayLike) -> jax.Array:
    """Singular values, descending. Gradient: u·diag(g)·vh, finite for equal and for zero values.

    Source: PyTorch's `linalg_svdvals`. At a zero value the gradient uses the computed vectors, and is one of many
    subgradients, as in PyTorch. See `svd` for the second order.
    """
    return _svdvals(matrix("linalg.svdvals", "x", a))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _svd(full: bool, a: jax.Array) -> Any:
    return jnp.linalg.svd(a, full_matrices=full)


@_svd.defjvp
def _svd_rule(full: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (a,), (da,) = primals, tangents
    result = _svd(full, a)
    u, s, vh = result
    k = s.shape[-1]
    v = adjoint(vh)
    u1, v1 = u[..., :, :k], v[..., :, :k]
    p = adjoint(u1) @ da @ v1
    ds = jnp.real(jnp.diagonal(p, axis1=-2, axis2=-1))
    least = max(a.shape[-2:]) * jnp.finfo(s.dtype).eps * s.max(-1, initial=0)[..., None]
    apart = _inverse(s[..., None, :] - s[..., :, None], least[..., None]).astype(a.dtype) * (p + adjoint(p)) / 2
    against = _inverse(s[..., None, :] + s[..., :, None], least[..., None]).astype(a.dtype) * (p - adjoint(p)) / 2
    scale = _inverse(s, least)[..., None, :].astype(a.dtype)
    du = _turned(u, k, apart + against, (da @ v1 - u1 @ p) * scale)
    dv = _turned(v, k, apart - against, (adjoint(da) @ u1 - v1 @ adjoint(p)) * scale)
    return result, type(result)(du, ds, adjoint(dv))


def _turned(u: jax.Array, k: int, turn: jax.Array, outward: jax.Array) -> jax.Array:
    """Return the tangent of vectors that rotate into each other and outward; added columns rotate back equally."""
    u1, added = u[..., :, :k], u[..., :, k:]
    if u.shape[-2] == k:
        return u1 @ turn
    first = u1 @ turn + outward
    if added.shape[-1] == 0:
        return first
    return jnp.concatenate([first, -u1 @ adjoint(adjoint(added) @ outward)], -1)


def _inverse(x: jax.Array, least: jax.Array) -> jax.Array:
    """Return 1 / x, and 0 where x is zero to the last digits."""
    gone = jnp.abs(lax.stop_gradient(x)) <= lax.stop_gradient(least)
    return jnp.where(gone, 0, 1 / jnp.where(gone, 1, x))


@jax.custom_jvp
def _svdvals(a: jax.Array) -> jax.Array:
    return jnp.linalg.svd(a, compute_uv=False)


@_svdvals.defjvp
def _svdvals_rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (a,), (da,) = primals, tangents
    u, _, vh = _svd(False, a)
    return _svdvals(a), jnp.real((jnp.conj(u) * (da @ adjoint(vh))).sum(-2))


# ---------------------------------------------------------------- norms


_ORDERS = ("fro", "nuc", 1, -1, 2, -2, jnp.inf, -jnp.inf)


def matrix_norm(x: ArrayLike, *, keepdims: bool = False, ord: str | float = "fro") -> jax.Array:
    """Norm of a matrix: "fro", "nuc", or 1, 2, inf and their negatives.

    Source: PyTorch's `linalg_matrix_norm`: a vector norm, sums, and singular values.

    - The zero matrix: "fro" has the gradient 0, where JAX gives NaN. The gradient of "nuc", 2 and -2 is a subgradient,
      from the computed singular vectors. 1 and inf have 0, since |x| has the slope 0 at 0, where JAX gives 1.
    - Ties of the largest or smallest row, column or singular value share the gradient evenly.
    """
    array = matrix("linalg.matrix_norm", "x", x)
    if ord not in _ORDERS:
        cure = "Pass 'fro', 'nuc', 1, -1, 2, -2, jnp.inf or -jnp.inf."
        raise refused("linalg.matrix_norm: ord", f"is {ord!r}.", cure)
    if ord == "fro":
        norm = vector_norm(array, axis=(-2, -1))
    elif ord == "nuc":
        norm = _svdvals(array).sum(-1)
    elif ord in (2, -2):
        norm = (amax if ord > 0 else amin)(_svdvals(array), axis=-1)
    else:
        norm = (amax if ord > 0 else amin)(abs(array).sum(-2 if ord in (1, -1) else -1), axis=-1)
    return norm[..., None, None] if keepdims else norm
