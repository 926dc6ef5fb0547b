"""Move elements of padded arrays: slices, reshapes, gathers, scatters, concatenations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.aot.stages.padding.extents import PaddedOp
from jointcut.partition.program.primitives import DRAWN, SCATTERS, SUMS
from jointcut.partition.program.sizes import grows, is_symbolic, numbers

_CLIP, _FILL = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP


def _taken(x: Any, axis: int, start: Any, count: int, stride: int = 1) -> Any:
    """Return `count` elements along an axis from `start` on; those beyond the end repeat the last."""
    places = start + stride * jnp.arange(count, dtype=np.int32)
    return jnp.take(x, places, axis=axis, mode="clip")


def _sliced(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    params, (x,) = op.eqn.params, values
    starts, strides = params["start_indices"], params["strides"] or (1,) * x.ndim
    slices = list(zip(starts, op.padded, strides, strict=True))
    if not is_symbolic(starts):
        ends = [_reach(*each) for each in slices]
        if all(end <= size for end, size in zip(ends, x.shape, strict=True)):
            return [lax.slice(x, starts, ends, strides)]
    for axis, (start, count, stride) in enumerate(slices):
        x = _taken(x, axis, op.extents.of(start), count, stride)
    return [x]


def _reach(start: int, count: int, stride: int) -> int:
    """Return the end of a slice with `count` elements."""
    return start + stride * (count - 1) + 1 if count else start


def _reversed(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    (x,) = values
    for axis in op.eqn.params["dimensions"]:
        x = _taken(x, axis, op.extents.of(op.shapes[0][axis]) - 1, x.shape[axis], -1)
    return [x]


def _joined(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    """Put each operand behind the true end of the one before it, over what is padded there."""
    axis = op.eqn.params["dimension"]
    if not any(is_symbolic([shape[axis]]) for shape in op.shapes):
        return op.plain(values)
    out, end = lax.full(op.padded, 0, values[0].dtype), np.int32(0)
    for x, shape in zip(values, op.shapes, strict=True):
        out = lax.dynamic_update_slice_in_dim(out, x, end, axis)
        end = end + op.extents.of(shape[axis])
    return [out]


def _divided(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    (x,), axis, start, parts = values, op.eqn.params["axis"], 0, []
    for part, count in zip(op.eqn.params["sizes"], op.sized.params["sizes"], strict=True):
        parts.append(_taken(x, axis, op.extents.of(start), count))
        start = start + part
    return parts


def _surrounded(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    """Pad as the user asks: the number stands before the first element, between elements and behind the true end."""
    (x, number), shape = values, op.shapes[0]
    config = op.eqn.params["padding_config"]
    if any(is_symbolic(sides) for sides in config):
        raise op.refuse("pads by a size")
    out = lax.pad(op.extents.filled(x, shape, 0), number, config)
    for axis, (low, _, between) in enumerate(config):
        if is_symbolic([shape[axis]]):
            end = low + (op.extents.of(shape[axis]) - 1) * (between + 1)
            inside = lax.broadcasted_iota(np.int32, out.shape, axis) <= end
            out = lax.select(inside, out, lax.broadcast(number, out.shape))
    return [out]


def _reshaped(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    """Reshape; where padding would come between elements, find each element by its place among the true ones."""
    (x,), before, after = values, op.shapes[0], op.out
    if op.eqn.params.get("dimensions") is not None:
        raise op.refuse("reads the elements in another order")
    first = 0
    while first < min(len(before), len(after)) and before[first] == after[first]:
        first += 1
    last = 0
    while last < min(len(before), len(after)) - first and before[-1 - last] == after[-1 - last]:
        last += 1
    old, new = (tuple(shape[first : len(shape) - last]) for shape in (before, after))
    if _is_front(old) and _is_front(new):
        return [lax.reshape(x, op.padded)]
    sizes, padded = [[op.extents.of(n) for n in shape] for shape in (old, new)], op.padded[first : len(after) - last]
    place = sum(
        (lax.broadcasted_iota(np.int32, padded, i) * math.prod(sizes[1][i + 1 :]) for i in range(len(padded))),
        np.int32(0),
    )
    inside, held = np.int32(0), x.shape[first : len(before) - last]
    for i, size in enumerate(sizes[0]):
        rest = math.prod(sizes[0][i + 1 :])
        inside = inside + (place // jnp.maximum(rest, 1) % jnp.maximum(size, 1)) * math.prod(held[i + 1 :])
    around = x.shape[:first], x.shape[len(before) - last :]
    flat = lax.reshape(x, (*around[0], math.prod(held), *around[1]))
    taken = jnp.take(flat, inside.reshape(-1), axis=first, mode="clip")
    return [lax.reshape(taken, op.padded)]


def _is_front(shape: Sequence[Any]) -> bool:
    """Whether all padding stands behind all elements in memory: no axis but the first longer one is padded."""
    longer = [n for n in shape if is_symbolic([n]) or n != 1]
    return not is_symbolic(longer[1:])


# ------------------------------------------------------------------------------------------- places from arrays


def _slack(op: PaddedOp, size: Any, window: Any) -> Any:
    """Return the last place at which a window of an axis may start, truly."""
    if not grows(str(size - window)):
        raise op.refuse(f"takes a window of {window}")
    return op.extents.of(size - window)


def _started(op: PaddedOp, starts: Sequence[Any], windows: Sequence[Any]) -> list[Any]:
    """Return the starts of a window, moved inside the true sizes of the first operand as JAX does."""
    made = []
    for start, size, window in zip(starts, op.shapes[0], windows, strict=True):
        last = _slack(op, size, window) if is_symbolic([size, window]) else None
        made.append(start if last is None else jnp.clip(start, 0, jnp.asarray(last, start.dtype)))
    return made


def _window(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    x, *starts = values
    return [lax.dynamic_slice(x, _started(op, starts, op.eqn.params["slice_sizes"]), op.padded)]


def _written(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    """Write a window; what is padded of it leaves the array as it is."""
    x, new, *starts = values
    starts = _started(op, starts, op.shapes[1])
    mask = op.extents.valid(op.shapes[1])
    if mask is not None:
        new = lax.select(mask, new, lax.dynamic_slice(x, starts, new.shape))
    return [lax.dynamic_update_slice(x, new, starts)]


def _indices(op: PaddedOp, windows: Sequence[Any], axes: Sequence[int], indices: Any, mode: Any) -> Any:
    """Return indices that are outside of the padded array, or moved inside, where they are for the true sizes."""
    columns = []
    for i, axis in enumerate(axes):
        column, size, window = indices[..., i], op.shapes[0][axis], windows[axis]
        if is_symbolic([size, window]):
            last = jnp.asarray(_slack(op, size, window), column.dtype)
            if mode == _FILL:
                is_signed = jnp.issubdtype(column.dtype, np.signedinteger)
                outside = lax.full_like(column, -1) if is_signed else ~column * 0 - 1
                column = jnp.where(column > last, outside, column)
            else:
                column = jnp.clip(column, 0, last)
        columns.append(column)
    return jnp.stack(columns, axis=-1) if columns else indices


def _gathered(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    (x, indices), params = values, op.eqn.params
    dims = params["dimension_numbers"]
    mode = lax.GatherScatterMode.from_any(params["mode"])
    indices = _indices(op, params["slice_sizes"], dims.start_index_map, indices, mode)
    return op.plain([x, indices], indices_are_sorted=False, unique_indices=False)


def _scattered(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    """Scatter; padded updates get an index outside of the array, and padded parts of windows add zero."""
    (x, indices, updates), params, name = values, op.eqn.params, op.eqn.primitive.name
    dims, mode = params["dimension_numbers"], lax.GatherScatterMode.from_any(params["mode"])
    windows: list[Any] = [1] * x.ndim
    batched = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    free = [axis for axis in range(x.ndim) if axis not in batched]
    for axis, at in zip(free, dims.update_window_dims, strict=True):
        windows[axis] = op.shapes[2][at]
        partial = is_symbolic([windows[axis], op.shapes[0][axis]]) and windows[axis] != op.shapes[0][axis]
        if partial and name not in SUMS:
            raise op.refuse("writes part of an axis")
    indices = _indices(op, windows, dims.scatter_dims_to_operand_dims, indices, mode)
    rows = op.extents.valid(op.shapes[1], range(indices.ndim - 1))
    if rows is not None:
        if mode != _FILL:
            indices = _inside(indices, dims.scatter_dims_to_operand_dims, x.shape, numbers(windows, op.extents.bucket))
        indices = lax.select(rows, indices, lax.full_like(indices, -1))
        mode = _FILL
    if name in SUMS:
        updates = op.extents.filled(updates, op.shapes[2])
    return op.plain([x, indices, updates], mode=mode, indices_are_sorted=False, unique_indices=False)


def _inside(indices: Any, axes: Sequence[int], shape: Sequence[int], windows: Sequence[int]) -> Any:
    """Return indices that are clipped as XLA clips them."""
    last = np.array([shape[axis] - windows[axis] for axis in axes], indices.dtype)
    return jnp.clip(indices, 0, last)


def _drawn(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    """Draw random bits: with threefry's numbers by place, more rows leave the first ones as they are."""
    by_place = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if is_symbolic(op.out[1:]) or not by_place or "fry" not in str(values[0].dtype):
        raise op.refuse(f"draws random numbers of the shape [{','.join(map(str, op.out))}]")
    return op.plain(values)


#: For each primitive that moves elements: its rule.
MOVING: dict[str, Callable[[PaddedOp, Sequence[Any]], list[Any]]] = {
    "broadcast_in_dim": PaddedOp.plain,
    "expand_dims": PaddedOp.plain,
    "iota": PaddedOp.plain,
    "squeeze": PaddedOp.plain,
    "transpose": PaddedOp.plain,
    "slice": _sliced,
    "rev": _reversed,
    "concatenate": _joined,
    "split": _divided,
    "pad": _surrounded,
    "reshape": _reshaped,
    "dynamic_slice": _window,
    "dynamic_update_slice": _written,
    "gather": _gathered,
    **dict.fromkeys(SCATTERS, _scattered),
    DRAWN: _drawn,
}
