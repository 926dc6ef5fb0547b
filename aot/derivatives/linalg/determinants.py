"""Determinants, of singular matrices too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.linalg.solves import adjoint, square_matrix
from jointcut.aot.derivatives.slopes import with_slopes


def det(a: ArrayLike) -> jax.Array:
    """Determinant. Its gradient is the matrix of cofactors, a polynomial, which exists for singular matrices too.

    Tangent: trace(adj(a)·da), with adj(a) = det(u·vh)·v·diag(products of the other singular values)·u*; the tangent of
    adj likewise leaves out two singular values. Source: PyTorch's `linalg_det_backward`, which solves with LU factors
    and puts a small number in place of a zero pivot; its second order at a singular matrix is infinite, JAX's NaN. Here
    both orders are right for every matrix. The third order is wrong where singular values are equal or zero.
    """
    return _det(square_matrix("linalg.det", a))


def _cofactors(a: jax.Array) -> jax.Array:
    u, s, vh = jnp.linalg.svd(a)
    product, others = _products(s)
    one_left_out = jnp.where(others == 0, product / jnp.where(s == 0, 1, s), 0)
    return _sign(u, vh) * (adjoint(vh) * one_left_out[..., None, :].astype(a.dtype)) @ adjoint(u)


def _adjugate_tangent(da: jax.Array, _: jax.Array, a: jax.Array) -> jax.Array:
    u, s, vh = jnp.linalg.svd(a)
    m = adjoint(u) @ da @ adjoint(vh)
    two_left_out = _two_left_out(s).astype(a.dtype)
    diagonal = jnp.diagonal(m, axis1=-2, axis2=-1)
    eye = jnp.eye(s.shape[-1], dtype=a.dtype)
    inner = eye * (two_left_out @ diagonal[..., None]) - two_left_out * m
    return _sign(u, vh) * adjoint(vh) @ inner @ adjoint(u)


def _products(s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the product of the nonzero values, and for each value the number of zeros among the others."""
    zero = s == 0
    product = jnp.where(zero, 1, s).prod(-1, keepdims=True)
    return product, zero.sum(-1, keepdims=True) - zero


def _two_left_out(s: jax.Array) -> jax.Array:
    """Return the product of all values but two, for each pair; 0 on the diagonal."""
    product, _ = _products(s)
    zero = s == 0
    others = zero.sum(-1)[..., None, None] - zero[..., None, :] - zero[..., :, None].astype(int)
    safe = jnp.where(zero, 1, s)
    left = product[..., None] / safe[..., None, :] / safe[..., :, None]
    return jnp.where((others == 0) & ~jnp.eye(s.shape[-1], dtype=bool), left, 0)


def _sign(u: jax.Array, vh: jax.Array) -> jax.Array:
    return jnp.linalg.det(u @ vh)[..., None, None]


_adjugate = with_slopes(_cofactors, _adjugate_tangent)
_det = with_slopes(jnp.linalg.det, lambda da, _, a: (jnp.swapaxes(_adjugate(a), -1, -2) * da).sum((-2, -1)))


def slogdet(a: ArrayLike) -> Any:
    """Sign (a phase, if complex) and logarithm of the absolute value of the determinant.

    Tangents, with t = trace(inv(a)·da): real(t) for the logarithm, 1j·imag(t)·phase for a phase, zero for a sign.
    Source: PyTorch's `slogdet_backward` and `slogdet_jvp`. For a singular matrix the logarithm is -inf, and its slope
    is infinite in the limit. Here the slope is 0, so that a `where` around it has a gradient. PyTorch and JAX give NaN
    or infinity.
    """
    array = square_matrix("linalg.slogdet", a)
    return _slogdet(array)


@jax.custom_jvp
def _slogdet(a: jax.Array) -> Any:
    return jnp.linalg.slogdet(a)


@_slogdet.defjvp
def _slogdet_rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (a,), (da,) = primals, tangents
    result = _slogdet(a)
    sign, logarithm = result
    singular = jnp.isneginf(logarithm)[..., None, None]
    safe = jnp.where(singular, jnp.eye(a.shape[-1], dtype=a.dtype), a)
    inverse = jnp.where(singular, 0, jnp.linalg.inv(safe))
    trace = (jnp.swapaxes(inverse, -1, -2) * da).sum((-2, -1))
    phase = 1j * jnp.imag(trace) * sign if jnp.iscomplexobj(a) else jnp.zeros_like(sign)
    return result, type(result)(phase.astype(sign.dtype), jnp.real(trace).astype(logarithm.dtype))
