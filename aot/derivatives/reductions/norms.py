"""Norms of vectors, for every order, with a choice where they have a corner."""

from __future__ import annotations

import math
from numbers import Real

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import Axis, inexact, nonempty, one_axis, refused, some_axes
from jointcut.aot.derivatives.elementwise.angles import abs as absolute
from jointcut.aot.derivatives.elementwise.angles import sign
from jointcut.aot.derivatives.elementwise.powers import power
from jointcut.aot.derivatives.slopes import with_slopes


def vector_norm(x: ArrayLike, axis: Axis = None, keepdims: bool = False, ord: float = 2) -> jax.Array:
    """The norm of order `ord` over the axes (None: all axes): (sum of |x|^ord)^(1/ord), or max or min of |x|.

    Slope: sign(x)·(|x|/norm)^(ord-1) (PyTorch's `linalg_vector_norm_backward` and `norm_backward`).

    - A norm of 0 has the slope 0, the middle of the subgradients, also in second order. JAX gives NaN for ord = 2.
    - An element that is 0 has the slope 0. JAX gives 1 for order 1, and NaN for other orders below 2.
    - ord = inf or -inf: the elements where |x| equals the norm share the slope evenly.
    - ord = 0 counts the nonzero elements, and has the slope 0.
    """
    array = inexact("vector_norm", "x", x)
    axes = some_axes("vector_norm", axis, array.ndim)
    order = _order("vector_norm", ord)
    if math.isinf(order) or order < 0:
        nonempty("vector_norm", array, axes)
    return _norm(order, axes, keepdims, array)


def norm(x: ArrayLike, ord: float | str | None = None, axis: Axis = None, keepdims: bool = False) -> jax.Array:
    """The norm of vectors, like `jax.numpy.linalg.norm`; see `vector_norm` for orders, slopes and corners.

    Without an order it is the root of the sum of squares, over any axes. With one axis, or for a vector, it is a vector
    norm. An order with two axes gives a matrix norm: `ord="fro"`, or 1, -1, inf and -inf, the largest or smallest sum
    of absolute values of a column or row.
    """
    array = inexact("norm", "x", x)
    axes = some_axes("norm", axis, array.ndim)
    if ord is None or (ord == "fro" and len(axes) == 2):
        return _norm(2.0, axes, keepdims, array)
    if len(axes) == 1:
        return vector_norm(array, axes[0], keepdims, _order("norm", ord))
    if len(axes) != 2 or ord not in (1, -1, math.inf, -math.inf):
        what = f"is {ord!r}, which is no norm over the axes {axes} here."
        cure = "Vectors take any number; matrices 'fro', 1, -1, inf and -inf, and others in `derivatives.linalg`."
        raise refused("norm: ord", what, cure)
    along, across = axes if ord in (1, -1) else axes[::-1]
    sums = jnp.sum(absolute(array), axis=along, keepdims=True)
    outcome = vector_norm(sums, across, True, math.copysign(math.inf, ord))
    return outcome if keepdims else jnp.squeeze(outcome, axes)


def _order(function: str, ord: object) -> float:
    """Return the order as a float; refuse an order that is not a number."""
    if isinstance(ord, Real) and not math.isnan(ord):
        return float(ord)
    cure = "Pass a number, which may be inf or -inf."
    raise refused(f"{function}: ord", f"is {ord!r}, which is no order of a vector norm.", cure)


def _norm_slope(
    tangent: jax.Array, result: jax.Array, order: float, axes: tuple[int, ...], keepdims: bool, x: jax.Array
) -> jax.Array:
    if order == 0:
        return jnp.zeros_like(result)
    length = _norm(order, axes, True, x)
    zero = length == 0
    length = jnp.where(zero, 1, length)
    if order == 2:
        along = (jnp.conj(x / length.astype(x.dtype)) * tangent).real
    else:
        along = _along(order, axes, x, length) * (jnp.conj(sign(x)) * tangent).real
    return jnp.sum(jnp.where(zero, 0, along), axis=axes, keepdims=keepdims)


def _along(order: float, axes: tuple[int, ...], x: jax.Array, length: jax.Array) -> jax.Array:
    """Return the slope for |x|: (|x|/norm)^(order-1), or an even share among the largest or smallest elements."""
    size = absolute(x)
    if math.isinf(order):
        reached = ((size == length) | jnp.isnan(size)).astype(length.dtype)
        return reached / jnp.maximum(jnp.sum(reached, axis=axes, keepdims=True), 1)
    if order == 1:
        return jnp.ones_like(size)
    ratio = size / length
    if order > 2:
        return power(ratio, order - 1)
    zero = ratio == 0
    return jnp.where(zero, 0, power(jnp.where(zero, 1, ratio), order - 1))


_norm = with_slopes(
    lambda order, axes, keepdims, x: jnp.linalg.vector_norm(x, axis=axes, keepdims=keepdims, ord=order),
    _norm_slope,
    options=3,
)


def renorm(x: ArrayLike, p: float, axis: int, maxnorm: float) -> jax.Array:
    """Scale each slice along `axis` down to the norm `maxnorm` of order p where it is larger (PyTorch's `renorm`).

    A scaled slice has the slope of x·maxnorm/(norm + 1e-7), any other slice the slope 1 (`renorm_backward`). JAX has no
    such function.
    """
    array = inexact("renorm", "x", x)
    kept = one_axis("renorm", axis, array.ndim)
    if not p > 0:
        raise refused("renorm: p", f"is {p}, but it must be positive.", "Pass for example 2.")
    if not maxnorm >= 0:
        what = f"is {maxnorm}, but it must not be negative."
        raise refused("renorm: maxnorm", what, "Pass zero or a positive number.")
    axes = tuple(other for other in range(array.ndim) if other != kept)
    length = _norm(float(p), axes, True, array)
    large = length > maxnorm
    return array * jnp.where(large, maxnorm / (jnp.where(large, length, 1) + 1e-7), 1).astype(array.dtype)
