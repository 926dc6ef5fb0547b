"""Cholesky, QR and LU factors, of matrices of any shape and rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import one_of
from jointcut.aot.derivatives.linalg.solves import adjoint, matrix, square_matrix
from jointcut.aot.derivatives.slopes import with_slopes


def cholesky(a: ArrayLike, *, upper: bool = False) -> jax.Array:
    """Cholesky factor l of a positive definite matrix, read as (a + a*)/2. Tangent: l·phi(inv(l)·da·inv(l)*).

    phi takes the lower triangle with half of the diagonal. Source: PyTorch's `cholesky_jvp` and `cholesky_backward`;
    the gradient is Hermitian. These are JAX's own rules. Where the matrix is not positive definite the value is NaN.
    """
    return jnp.linalg.cholesky(square_matrix("linalg.cholesky", a), upper=upper)


def cholesky_inverse(factor: ArrayLike, *, upper: bool = False) -> jax.Array:
    """Inverse x of the matrix l·l*, or of u*·u with `upper`, from its Cholesky factor. Tangent: -x·(dl·l* + l·dl*)·x.

    Source: PyTorch's `cholesky_inverse_backward` and `cholesky_inverse_jvp`. Only the triangle of the factor is read;
    the other has the gradient zero. JAX has this as `cho_solve` with the identity. A zero on the diagonal gives NaN.
    """
    array = square_matrix("linalg.cholesky_inverse", factor)
    return _cholesky_inverse(adjoint(jnp.triu(array)) if upper else jnp.tril(array))


def _inverse_of_product(lower: jax.Array) -> jax.Array:
    identity = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    half = lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)
    return adjoint(half) @ half


def _cholesky_inverse_tangent(d_lower: jax.Array, inverse: jax.Array, lower: jax.Array) -> jax.Array:
    moved = inverse @ (d_lower @ adjoint(lower)) @ inverse
    return -(moved + adjoint(moved))


_cholesky_inverse = with_slopes(_inverse_of_product, _cholesky_inverse_tangent)


# ---------------------------------------------------------------- QR


def qr(a: ArrayLike, mode: str = "reduced") -> Any:
    """Orthonormal q and upper triangular r with a = q·r; mode "reduced", "complete" or "r".

    Tangents, with c = da·inv(r) and x the skew matrix with the lower triangle of q*·c: dq = q·(x - q*·c) + c and
    dr = (q*·c - x)·r. Source: PyTorch's `linalg_qr_jvp` and `linalg_qr_backward`.

    - Wide matrices: the first columns fix q, and the rest of r is q*·a, as in JAX.
    - Complete: the added columns are any completion of the basis, so only functions of their whole space have a
      derivative. Here the added columns rotate only as far as the other columns force them. In JAX they rotate as its
      algorithm chooses them. PyTorch has no derivative here.
    - A column that depends on earlier columns makes a zero on the diagonal of r, and its column of q is arbitrary: the
      factors are not differentiable there. The part of this column counts as zero; PyTorch and JAX give NaN or
      infinity.
    """
    one_of("linalg.qr", "mode", mode, ("complete", "r", "reduced"))
    array = matrix("linalg.qr", "a", a)
    result = _qr(mode == "complete", array)
    return result.R if mode == "r" else result


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _qr(complete: bool, a: jax.Array) -> Any:
    return jnp.linalg.qr(a, "complete" if complete else "reduced")


@_qr.defjvp
def _qr_rule(complete: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (a,), (da,) = primals, tangents
    m, n = a.shape[-2:]
    k = min(m, n)
    result = _qr(complete, a)
    q, r = result
    q1, r1 = q[..., :, :k], r[..., :k, :k]
    c = divided(da[..., :, :k], r1)
    inner = adjoint(q1) @ c
    lower = jnp.tril(inner, -1)
    turn = lower - adjoint(lower)
    if jnp.iscomplexobj(a):
        turn = turn + _diagonal(1j * jnp.imag(jnp.diagonal(inner, axis1=-2, axis2=-1)))
    dq = q1 @ (turn - inner) + c
    dr = jnp.triu((inner - turn) @ r1)
    if n > k:
        rest = adjoint(dq) @ a[..., :, k:] + adjoint(q1) @ da[..., :, k:]
        dr = jnp.concatenate([dr, rest], -1)
    if q.shape[-1] > k:
        added = q[..., :, k:]
        dq = jnp.concatenate([dq, -q1 @ adjoint(adjoint(added) @ dq)], -1)
        dr = jnp.concatenate([dr, jnp.zeros((*dr.shape[:-2], m - k, n), dr.dtype)], -2)
    return result, type(result)(dq, dr)


def divided(a: jax.Array, r: jax.Array) -> jax.Array:
    """Return a·inv(r) for an upper triangular r. A column whose pivot is zero to the last digits counts as zero."""
    pivots = jnp.abs(jnp.diagonal(r, axis1=-2, axis2=-1))
    least = r.shape[-1] * jnp.finfo(r.dtype).eps * pivots.max(-1, keepdims=True, initial=0)
    gone = (pivots <= lax.stop_gradient(least))[..., None, :]
    safe = jnp.where(gone, jnp.eye(r.shape[-1], dtype=r.dtype), r)
    a, safe = _with_one_batch(jnp.where(gone, 0, a), safe)
    return lax.linalg.triangular_solve(safe, a, left_side=False, lower=False)


def _with_one_batch(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])


def _diagonal(values: jax.Array) -> jax.Array:
    return values[..., None] * jnp.eye(values.shape[-1], dtype=values.dtype)


# ---------------------------------------------------------------- LU


def lu(a: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Permutation p, unit lower triangular l and upper triangular u with a = p·l·u.

    Tangents, with g = inv(l)·p*·da and t the strictly lower triangle of g·inv(u): dl = l·t and du = g - t·u.
    Source: PyTorch's `plu_factor` formulas, `lu_factor_ex_jvp` and `lu_factor_ex_backward`, for all shapes.

    A singular square matrix with only the last pivot zero has smooth factors: t does not need this pivot, and the
    derivative is right. PyTorch and JAX multiply inv(u) with u, and give NaN. With an earlier zero pivot there is no
    derivative, and the pivot's column counts as zero.
    """
    return _lu(matrix("linalg.lu", "a", a))


@jax.custom_jvp
def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    p, lower, upper = jnp.vectorize(jax.scipy.linalg.lu, signature="(m,n)->(m,m),(m,k),(k,n)")(a)
    return p, lower, upper


@_lu.defjvp
def _lu_rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (a,), (da,) = primals, tangents
    p, lower, upper = _lu(a)
    k = min(a.shape[-2:])
    moved = adjoint(lax.stop_gradient(p)) @ da
    l1, u1 = lower[..., :k, :k], upper[..., :k, :k]
    g = _solved(l1, moved[..., :k, :k])
    t = jnp.tril(divided(g, u1), -1)
    dl, du = l1 @ t, jnp.triu(g - t @ u1)
    if a.shape[-1] > k:
        wide = _solved(l1, moved[..., :k, k:] - dl @ upper[..., :k, k:])
        du_all = jnp.concatenate([du, wide], -1)
    else:
        du_all = du
    if a.shape[-2] > k:
        dl = jnp.concatenate([dl, divided(moved[..., k:, :k] - lower[..., k:, :k] @ du, u1)], -2)
    return (p, lower, upper), (jnp.zeros_like(p), dl, du_all)


def _solved(lower: jax.Array, b: jax.Array) -> jax.Array:
    return lax.linalg.triangular_solve(lower, b, left_side=True, lower=True, unit_diagonal=True)
