"""Join numbers along padded axes: sums, products of matrices, sorts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.aot.stages.padding.extents import PaddedOp
from jointcut.partition.program.primitives import CUMULATIVE, REDUCTIONS
from jointcut.partition.program.sizes import is_symbolic


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, np.floating):
        return -np.inf
    return False if dtype == np.bool_ else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, np.floating):
        return np.inf
    return True if dtype == np.bool_ else jnp.iinfo(dtype).max


#: The number that changes nothing, by the last part of a primitive's name.
_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "sum": lambda _: 0,
    "prod": lambda _: 1,
    "max": _lowest,
    "min": _highest,
    "and": lambda dtype: True if dtype == np.bool_ else -1,
    "or": lambda _: 0,
    "xor": lambda _: 0,
    "logsumexp": lambda _: -np.inf,
}


def _neutral(op: PaddedOp, x: Any) -> Any:
    name = op.eqn.primitive.name.removeprefix("cum").removeprefix("arg").removeprefix("reduce_")
    return _NEUTRAL[name](x.dtype)


def _reduced(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    (x,) = values
    return op.plain([op.extents.filled(x, op.shapes[0], _neutral(op, x), op.eqn.params["axes"])])


def _cumulated(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    (x,) = values
    return op.plain([op.extents.filled(x, op.shapes[0], _neutral(op, x), [op.eqn.params["axis"]])])


def _multiplied(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    sums, _ = op.eqn.params["dimension_numbers"]
    pairs = zip(values, op.shapes, sums, strict=True)
    return op.plain([op.extents.filled(x, shape, 0, axes) for x, shape, axes in pairs])


def _convolved(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    dims = op.eqn.params["dimension_numbers"]
    places = (op.shapes[0], dims.lhs_spec), (op.shapes[1], dims.rhs_spec), (op.out, dims.out_spec)
    if any(is_symbolic([shape[axis] for axis in spec[2:]]) for shape, spec in places):
        raise op.refuse("slides over that axis")
    if is_symbolic([op.eqn.params["feature_group_count"], op.eqn.params["batch_group_count"]]):
        raise op.refuse("divides it into groups")
    return op.plain(op.filled(values))


def _windowed(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    windows = op.eqn.params["window_dimensions"]
    for shape in (*op.shapes, op.out):
        if any(is_symbolic([n]) and window != 1 for n, window in zip(shape, windows, strict=False)):
            raise op.refuse("slides windows over that axis")
    return op.plain(values)


def _sorted(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    """Sort; what is padded stays behind the true end, by a key before the others."""
    params = op.eqn.params
    mask = op.extents.valid(op.shapes[0], [params["dimension"]])
    if mask is None:
        return op.plain(values)
    ranks = jnp.logical_not(mask).astype(np.int32)
    ordered = lax.sort(
        [ranks, *values],
        dimension=params["dimension"],
        is_stable=params["is_stable"],
        num_keys=params["num_keys"] + 1,
    )
    return list(ordered[1:])


def _largest(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    (x,) = values
    if is_symbolic([op.eqn.params["k"]]):
        raise op.refuse("takes so many of the largest")
    axis = op.eqn.params.get("axis", -1) % x.ndim
    return op.plain([op.extents.filled(x, op.shapes[0], _lowest(x.dtype), [axis])])


#: For each primitive that joins numbers: its rule.
JOINING: dict[str, Callable[[PaddedOp, Sequence[Any]], list[Any]]] = {
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(CUMULATIVE, _cumulated),
    "dot_general": _multiplied,
    "conv_general_dilated": _convolved,
    "reduce_window_sum": _windowed,
    "reduce_window_max": _windowed,
    "reduce_window_min": _windowed,
    "select_and_scatter_add": _windowed,
    "select_and_gather_add": _windowed,
    "sort": _sorted,
    "top_k": _largest,
}
