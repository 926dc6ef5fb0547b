"""Products with a sparse matrix, and products at some places alone.

A sparse matrix is given by its values and their places, `indices[values, 2]` of row and column, as in
`jax.experimental.sparse.BCOO`. Gradients for values are computed only at these places: no dense matrix is made.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, refused
from jointcut.aot.derivatives.indexing.scatters import whole
from jointcut.aot.derivatives.linalg.solves import matrix


def sparse_mask(x: ArrayLike, indices: ArrayLike) -> jax.Array:
    """The elements of an array at places `indices[values, ndim]`. Backwards, cotangents of one place are added.

    Source: PyTorch's `sparse_mask_backward`.
    """
    array, places = inexact("sparse_mask", "x", x), whole("sparse_mask", indices)
    if places.ndim != 2 or places.shape[1] != array.ndim:
        what = f"has shape {places.shape}, but x has {array.ndim} dimensions."
        raise refused("sparse_mask: indices", what, "Pass one row of places for each value.")
    return array[tuple(places.T)]


def sampled_addmm(
    values: ArrayLike, indices: ArrayLike, a: ArrayLike, b: ArrayLike, beta: float = 1.0, alpha: float = 1.0
) -> jax.Array:
    """beta·values + alpha·(a·b at the places of the values). Only the rows and columns of those places are multiplied.

    Tangents for a and b are sparse products. Source: PyTorch's `sparse_sampled_addmm_backward`. With beta 0 the values
    do not count, even if they are infinite or NaN.
    """
    name = "sampled_addmm"
    given, places = inexact(name, "values", values), _two(name, indices)
    left, right = matrix(name, "a", a), matrix(name, "b", b)
    sampled = (left[places[:, 0]] * right.T[places[:, 1]]).sum(-1)
    scaled = alpha * sampled.astype(given.dtype)
    return scaled if beta == 0 else beta * given + scaled


def sparse_mm(values: ArrayLike, indices: ArrayLike, b: ArrayLike, rows: int) -> jax.Array:
    """The product of a sparse matrix with `rows` rows and a dense matrix. Values of one place are added.

    The gradient for the values is the product of cotangent and `b` at their places. The gradient for `b` is a sparse
    product. Source: PyTorch's `mm_mat1_sparse_backward`.
    """
    given, places = inexact("sparse_mm", "values", values), _two("sparse_mm", indices)
    right = matrix("sparse_mm", "b", b)
    product = given[:, None] * right[places[:, 1]].astype(given.dtype)
    return jnp.zeros((rows, right.shape[1]), product.dtype).at[places[:, 0]].add(product)


def sparse_sparse_mm(
    values: ArrayLike, indices: ArrayLike, b_values: ArrayLike, b_indices: ArrayLike, shape: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """The product of two sparse matrices: the values and places of one of this shape, one for each pair of values.

    A pair whose values do not meet has the place `shape`, outside of the matrix, as in a `BCOO` with padding; values
    of one place add up. The gradients need no dense matrix. Source: PyTorch's `sparse_sparse_matmul_backward`. In a
    function of `aot.function` or `aot.tape`, `a @ b` of two `BCOO` has a gradient too. In plain JAX it has none.
    """
    name = "sparse_sparse_mm"
    left, places = inexact(name, "values", values), _two(name, indices)
    right, others = inexact(name, "b_values", b_values), _two(f"{name}: b", b_indices)
    meet = places[:, 1, None] == others[None, :, 0]
    product = jnp.where(meet, left[:, None], 0) * jnp.where(meet, right[None, :], 0)
    at = jnp.stack(jnp.broadcast_arrays(places[:, 0, None], others[None, :, 1]), -1)
    outside = jnp.asarray(shape, at.dtype)
    return product.ravel(), jnp.where(meet[..., None], at, outside).reshape(-1, 2)


def _two(function: str, indices: ArrayLike) -> jax.Array:
    places = whole(function, indices)
    if places.ndim != 2 or places.shape[1] != 2:
        what = f"has shape {places.shape}."
        raise refused(f"{function}: indices", what, "Pass row and column of each value.")
    return places
