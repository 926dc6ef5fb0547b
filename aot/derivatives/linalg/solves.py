"""Inverses, linear systems, least squares, powers, the exponential and the square root."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, refused, square
from jointcut.aot.derivatives.slopes import with_slopes


def adjoint(a: jax.Array) -> jax.Array:
    """Return the conjugate transpose of the last two axes."""
    return jnp.conj(jnp.swapaxes(a, -1, -2))


def matrix(function: str, name: str, value: ArrayLike) -> jax.Array:
    """Return `value` as an array; refuse it unless it is a matrix or a batch of matrices."""
    array = inexact(function, name, value)
    if array.ndim < 2:
        what = f"has shape {array.shape}, which is no matrix."
        raise refused(f"{function}: {name}", what, "Pass an array of shape (..., m, n).")
    return array


def square_matrix(function: str, value: ArrayLike) -> jax.Array:
    """Return `value` as an array; refuse it unless it is a square matrix or a batch of square matrices."""
    array = inexact(function, "a", value)
    square(function, "a", array)
    return array


def inv(a: ArrayLike) -> jax.Array:
    """Inverse of a square matrix. Tangent: -inv·da·inv, from the result.

    Source: PyTorch's `linalg_inv_ex` in its derivatives table. A singular matrix has no inverse, and no derivative.
    """
    return _inv(square_matrix("linalg.inv", a))


_inv = with_slopes(jnp.linalg.inv, lambda da, inverse, a: -(inverse @ da @ inverse))


def pinv(a: ArrayLike, rtol: float | None = None) -> jax.Array:
    """Pseudo-inverse p. Tangent: -p·da·p + p·p*·da*·(1 - a·p) + (1 - p·a)·da*·p*·p, from the result.

    Source: PyTorch's `pinv_backward` and `pinv_jvp`. The tangent is right where the rank does not change. A change that
    raises the rank has no derivative; the formula treats it as if the rank stayed. So at the zero matrix the gradient
    is zero, as in PyTorch.
    """
    return _pinv(rtol, matrix("linalg.pinv", "a", a))


def _pinv_tangent(da: jax.Array, p: jax.Array, rtol: float | None, a: jax.Array) -> jax.Array:
    ph, dah = adjoint(p), adjoint(da)
    wide = dah - dah @ (a @ p)
    tall = dah - (p @ a) @ dah
    return -(p @ da @ p) + p @ (ph @ wide) + (tall @ ph) @ p


_pinv = with_slopes(lambda rtol, a: jnp.linalg.pinv(a, rtol=rtol), _pinv_tangent, options=1)


def solve(a: ArrayLike, b: ArrayLike) -> jax.Array:
    """Solution x of a·x = b for a square matrix. Tangent: the solution for db - da·x, with the same factors.

    Source: PyTorch's `linalg_solve_jvp` and `linalg_solve_backward`. These are JAX's own rules. A singular matrix has
    no solution and no derivative.
    """
    return jnp.linalg.solve(square_matrix("linalg.solve", a), inexact("linalg.solve", "b", b))


def solve_triangular(
    a: ArrayLike, b: ArrayLike, trans: int | str = 0, lower: bool = False, unit_diagonal: bool = False
) -> jax.Array:
    """Solution x of a·x = b for a triangular matrix; the other triangle has the gradient zero.

    Source: PyTorch's `linalg_solve_triangular_backward`. These are JAX's own rules.
    """
    matrix_, right = square_matrix("linalg.solve_triangular", a), inexact("linalg.solve_triangular", "b", b)
    return jax.scipy.linalg.solve_triangular(matrix_, right, trans=trans, lower=lower, unit_diagonal=unit_diagonal)


def lstsq(a: ArrayLike, b: ArrayLike, rcond: float | None = None) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The shortest least-squares solution x of a·x = b, with the residual squares, the rank and the singular values.

    Tangent of x, with p the pseudo-inverse: p·(db - da·x) + p·p*·da*·(b - a·x) + (1 - p·a)·da*·p*·x. Source: PyTorch's
    `linalg_lstsq_backward`, which uses its `pinv`. JAX differentiates a singular value decomposition, and gives NaN for
    equal singular values and for matrices without full rank. Here only x and the residual squares have a derivative.
    """
    left, right = matrix("linalg.lstsq", "a", a), inexact("linalg.lstsq", "b", b)
    if left.ndim != 2 or right.ndim not in (1, 2) or left.shape[0] != right.shape[0]:
        what = f"have the shapes {left.shape} and {right.shape}."
        raise refused("linalg.lstsq: a and b", what, "Pass a[m, n], and b[m] or b[m, k].")
    x, left_over, rank, values = _lstsq(rcond, left, right)
    return x, left_over, rank, values


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _lstsq(rcond: float | None, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    return jnp.linalg.lstsq(a, b, rcond=rcond)


@_lstsq.defjvp
def _lstsq_rule(rcond: float | None, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (a, b), (da, db) = primals, tangents
    x, left_over, rank, values = _lstsq(rcond, a, b)
    p = _pinv(rcond, a)
    ph, dah = adjoint(p), adjoint(da)
    rest = b - a @ x
    change = db - da @ x
    dx = p @ change + p @ (ph @ (dah @ rest)) + _off_range(p, a, dah @ (ph @ x))
    left = 2 * jnp.real(jnp.conj(rest) * change).sum(0).reshape(left_over.shape)
    no_rank = np.zeros(rank.shape, jax.dtypes.float0)
    return (x, left_over, rank, values), (dx, left.astype(left_over.dtype), no_rank, jnp.zeros_like(values))


def _off_range(p: jax.Array, a: jax.Array, x: jax.Array) -> jax.Array:
    return x - p @ (a @ x)


def matrix_power(a: ArrayLike, n: int) -> jax.Array:
    """A to the whole power n, by repeated squaring; a negative power is a power of the inverse.

    Source: PyTorch's `matrix_power`, which is made of products too. The power 0 is the identity, and has the gradient
    zero. These are JAX's own rules. Only negative powers of a singular matrix have no derivative.
    """
    array = square_matrix("linalg.matrix_power", a)
    try:
        power = operator.index(n)
    except TypeError:
        what = f"is {n!r}, which is no whole number."
        raise refused("linalg.matrix_power: n", what, "Pass an int.") from None
    if power < 0:
        return jnp.linalg.matrix_power(_inv(array), -power)
    return jnp.linalg.matrix_power(array, power)


def expm(a: ArrayLike) -> jax.Array:
    """Exponential of a square matrix, by scaling and squaring. Nothing about it is singular.

    Source: PyTorch's `linalg_matrix_exp_differential`. JAX differentiates the steps of the same method.
    """
    return jax.scipy.linalg.expm(square_matrix("linalg.expm", a))


def sqrtm(a: ArrayLike) -> jax.Array:
    """Square root x of a square matrix, complex: x·x = a. Tangent: the solution of x·dx + dx·x = da.

    Source: the derivative of x·x = a (Higham, "Functions of Matrices", 2008, section 6.1); PyTorch has no such
    function. JAX computes the value by Schur's factors, on CPU alone. It has no derivative, and raises
    `NotImplementedError`. Where two eigenvalues of x add up to zero, as in a singular matrix, the slope is infinite.
    There a zero cotangent gives zero; any other cotangent gives NaN or meaningless numbers.
    """
    return jnp.vectorize(_sqrtm, signature="(n,n)->(n,n)")(square_matrix("linalg.sqrtm", a))


def _sqrtm_tangent(da: jax.Array, x: jax.Array, a: jax.Array) -> jax.Array:
    del a

    def both(y: jax.Array) -> jax.Array:
        return x @ y + y @ x

    def solution(x: jax.Array, c: jax.Array) -> jax.Array:
        y = jax.scipy.linalg.solve_sylvester(x, x, c)
        return jnp.where(jnp.all(c == 0), 0, y)

    solve_, back = (lambda _, c: solution(x, c)), (lambda _, c: solution(x.T, c))
    return jax.lax.custom_linear_solve(both, da.astype(x.dtype), solve_, back)


_sqrtm = with_slopes(jax.scipy.linalg.sqrtm, _sqrtm_tangent)
