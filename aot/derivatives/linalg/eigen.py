"""Eigenvalues and eigenvectors, with equal eigenvalues too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jointcut.aot.derivatives.linalg.solves import adjoint, square_matrix


def eigh(a: ArrayLike) -> Any:
    """Eigenvalues w, ascending, and eigenvectors v of a Hermitian matrix, read as (a + a*)/2.

    Tangents, with m = v*·da·v: dw = diag(m), dv = v·(m_ij / (w_j - w_i)) off the diagonal.
    Source: PyTorch's `linalg_eig_jvp` and `linalg_eig_backward` for Hermitian matrices.

    Eigenvalues are equal if they differ by at most n·eps times the largest. The rotation of their vectors into each
    other counts as zero. That is right for eigenvalues, and for functions of the space that the vectors of equal values
    span. A function v·f(w)·v* of the matrix, such as its root, loses the slope of f between equal values, and its
    gradient is wrong. PyTorch and JAX divide by zero. A function of the vectors that weighs equal values differently
    has no derivative. In second order, equal eigenvalues are treated as if they stayed apart in the computed basis.
    """
    array = square_matrix("linalg.eigh", a)
    return _eigh((array + adjoint(array)) / 2)


def eigvalsh(a: ArrayLike) -> jax.Array:
    """Eigenvalues of a Hermitian matrix, ascending. Gradient: v·diag(g)·v*, finite for equal eigenvalues too.

    Source: PyTorch's `linalg_eigvalsh`. See `eigh` for the second order at equal eigenvalues.
    """
    array = square_matrix("linalg.eigvalsh", a)
    return _eigvalsh((array + adjoint(array)) / 2)


@jax.custom_jvp
def _eigh(a: jax.Array) -> Any:
    return jnp.linalg.eigh(a, symmetrize_input=False)


@_eigh.defjvp
def _eigh_rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (a,), (da,) = primals, tangents
    result = _eigh(a)
    w, v = result
    m = adjoint(v) @ da @ v
    dw = jnp.real(jnp.diagonal(m, axis1=-2, axis2=-1))
    return result, type(result)(dw, v @ (inverse_gaps(w).astype(v.dtype) * m))


@jax.custom_jvp
def _eigvalsh(a: jax.Array) -> jax.Array:
    return jnp.linalg.eigvalsh(a, symmetrize_input=False)


@_eigvalsh.defjvp
def _eigvalsh_rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (a,), (da,) = primals, tangents
    _, v = _eigh(a)
    m = adjoint(v) @ da @ v
    return _eigvalsh(a), jnp.real(jnp.diagonal(m, axis1=-2, axis2=-1))


def inverse_gaps(w: jax.Array) -> jax.Array:
    """Return 1 / (w_j - w_i), and 0 on the diagonal and where the two are equal to the last digits."""
    gaps = w[..., None, :] - w[..., :, None]
    least = w.shape[-1] * jnp.finfo(w.dtype).eps * jnp.abs(w).max(-1, initial=0)[..., None, None]
    equal = jnp.abs(lax.stop_gradient(gaps)) <= lax.stop_gradient(least)
    return jnp.where(equal, 0, 1 / jnp.where(equal, 1, gaps))


def eig(a: ArrayLike) -> Any:
    """Eigenvalues w and eigenvectors v, of length 1, of any square matrix; both are complex.

    Tangents, with m = inv(v)·da·v and x = m_ij / (w_j - w_i) off the diagonal: dw = diag(m) and
    dv = v·x - v·diag(real(v*·v·x)), which keeps the lengths. Source: PyTorch's `linalg_eig_jvp` and
    `linalg_eig_backward`. JAX has the first order, behind an option. A vector's phase is free: a function that depends
    on it has no derivative. Equal eigenvalues are treated as in `eigh`. A matrix without a full set of vectors has no
    derivative.
    """
    array = square_matrix("linalg.eig", a)
    return _eig(array)


def eigvals(a: ArrayLike) -> jax.Array:
    """Eigenvalues of any square matrix, complex. Source: PyTorch's `linalg_eigvals`. See `eig`."""
    return eig(a)[0]


@jax.custom_jvp
def _eig(a: jax.Array) -> Any:
    return jnp.linalg.eig(a)


@_eig.defjvp
def _eig_rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (a,), (da,) = primals, tangents
    result = _eig(a)
    w, v = result
    m = jnp.linalg.solve(v, da.astype(v.dtype) @ v)
    turned = v @ (inverse_gaps(w) * m)
    along = jnp.real((jnp.conj(v) * turned).sum(-2, keepdims=True)).astype(v.dtype)
    return result, type(result)(jnp.diagonal(m, axis1=-2, axis2=-1), turned - v * along)
