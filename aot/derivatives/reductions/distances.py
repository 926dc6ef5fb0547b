"""Distances and angles between vectors, with a choice where two vectors meet or one is zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, not_negative, one_axis, promoted, refused
from jointcut.aot.derivatives.reductions.norms import vector_norm


def cdist(x1: ArrayLike, x2: ArrayLike, p: float = 2.0) -> jax.Array:
    """The distances of order p between the rows of (..., n, d) and (..., m, d): (..., n, m). JAX has no such function.

    Slopes: as `vector_norm` of the differences (PyTorch's `_cdist_backward` and `_euclidean_dist_backward`), so 0 for
    two equal rows. For p = inf the largest differences share the slope evenly; PyTorch gives each the full slope.
    """
    rows, columns = promoted("cdist", x1=x1, x2=x2)
    order = not_negative("cdist", "p", p)
    for name, array in (("x1", rows), ("x2", columns)):
        _matrix("cdist", name, array)
    if rows.shape[-1] != columns.shape[-1]:
        what = f"have rows of {rows.shape[-1]} and {columns.shape[-1]} elements."
        raise refused("cdist: x1 and x2", what, "Pass rows of one length.")
    return _length(rows[..., :, None, :] - columns[..., None, :, :], order)


def pdist(x: ArrayLike, p: float = 2.0) -> jax.Array:
    """The distances of order p between the rows of (n, d), each pair once: `cdist(x, x)` above its diagonal.

    Slopes: as `cdist` (PyTorch's `_pdist_backward`). JAX has no such function.
    """
    rows = inexact("pdist", "x", x)
    order = not_negative("pdist", "p", p)
    if rows.ndim != 2:
        what = f"has shape {rows.shape}, which is no matrix of rows."
        raise refused("pdist: x", what, "Pass an array of shape (n, d), a batch by `jax.vmap`.")
    first, second = np.triu_indices(rows.shape[0], 1)
    return _length(rows[first] - rows[second], order)


def dist(x1: ArrayLike, x2: ArrayLike, p: float = 2.0) -> jax.Array:
    """The norm of order p of x1 - x2 over all axes (PyTorch's `dist`). Slopes: as `vector_norm`, 0 for x1 = x2."""
    first, second = promoted("dist", x1=x1, x2=x2)
    return vector_norm(first - second, ord=not_negative("dist", "p", p))


def pairwise_distance(
    x1: ArrayLike, x2: ArrayLike, p: float = 2.0, eps: float = 1e-6, axis: int = -1, keepdims: bool = False
) -> jax.Array:
    """The norm of order p of x1 - x2 + eps along the axis (PyTorch's `pairwise_distance`).

    Slopes: as `vector_norm`. With eps = 0 equal vectors have the slope 0.
    """
    first, second = promoted("pairwise_distance", x1=x1, x2=x2)
    difference = first - second + eps
    along = one_axis("pairwise_distance", axis, difference.ndim)
    return vector_norm(difference, along, keepdims, not_negative("pairwise_distance", "p", p))


def cosine_similarity(x1: ArrayLike, x2: ArrayLike, axis: int = 1, eps: float = 1e-8) -> jax.Array:
    """The sum of x1·x2 along the axis, over the norms of both, each at least eps (PyTorch's `cosine_similarity`).

    The slope of a norm below eps is 0, so a vector of zeros has the slope x2/(|x2|·eps): large, but finite. The same
    formula in plain JAX gives NaN there.
    """
    first, second = jnp.broadcast_arrays(*promoted("cosine_similarity", x1=x1, x2=x2))
    along = one_axis("cosine_similarity", axis, first.ndim)
    return jnp.sum(_unit(first, along, eps) * _unit(second, along, eps), axis=along)


def _unit(x: jax.Array, axis: int, eps: float) -> jax.Array:
    """Divide x by its norm, or by eps where the norm is smaller."""
    return x / jnp.maximum(vector_norm(x, axis, True), eps)


def _length(difference: jax.Array, p: float) -> jax.Array:
    """The norm along the last axis, also of no elements."""
    return vector_norm(difference, -1, ord=p) if difference.shape[-1] else jnp.sum(jnp.abs(difference), -1)


def _matrix(function: str, name: str, array: jax.Array) -> None:
    if array.ndim < 2:
        what = f"has {array.ndim} {'dimension' if array.ndim == 1 else 'dimensions'}, but rows and columns are needed."
        raise refused(f"{function}: {name}", what, "Pass an array of shape (..., n, d).")
