"""Prove that a loop writes an array row by row, so that its earlier states follow from the last one.

A loop that fills an array, one row in each step, would have the whole array in every checkpoint. Suppose the jaxpr
shows that each row is written at most once. Then the array before any step is known without a checkpoint: rows that
were written so far come from the last state, the others from the first (Equinox's `buffers` takes this for granted).

The proof has four conditions. The new array is the old one with one write, by `dynamic_update_slice` or a `scatter` of
one row. The position of that write is a counter of the carry plus a constant (see `counters`), and never negative. The
counter changes by at least as many rows as one write covers. And no write is moved to fit into the array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from jointcut.aot.loops.counters import FOREVER, Counters
from jointcut.aot.loops.parts import Parts
from jointcut.partition.program.jax.jaxprs import Atom, Equation
from jointcut.partition.program.sizes import is_symbolic


@dataclass(frozen=True)
class Buffer:
    """An array of the carry; every step writes some rows of it that no other step writes.

    Attributes:
        part: its place in the carry.
        axis: the axis of the rows.
        counter: the place in the carry of the counter.
        offset: the first row that a step writes, less the counter before the step.
        change: the number that a step adds to the counter.
        has_gaps: whether the change is larger than the rows of a step, so that rows between are not written.
    """

    part: int
    axis: int
    counter: int
    offset: int
    change: int
    has_gaps: bool = False

    def before(self, counter: Any, first: Any, last: Any) -> Any:
        """Return the array before the step that begins with this counter, from its first and its last state."""
        return lax.select(self._is_done(counter, first), last, first)

    def cleared(self, start: Any, trips: Any, cotangent: Any) -> Any:
        """Return the cotangent of the first state, from the last one's, if the steps read nothing of the array.

        The loop wrote rows in `trips` trips, from the counter `start` on, without gaps; they have no cotangent before.
        """
        moved = trips.astype(start.dtype) * abs(self.change)
        end = start + moved if self.change > 0 else start - moved
        is_written = self._is_done(end, cotangent) & ~self._is_done(start, cotangent)
        return lax.select(is_written, jnp.zeros_like(cotangent), cotangent)

    def _is_done(self, counter: Any, like: Any) -> Any:
        """Return which elements lie in rows that are written before the step that begins with this counter."""
        far = like.shape[self.axis] + abs(self.offset) + abs(self.change)  # beyond it all counters are alike
        counter = jnp.minimum(counter, min(far, jnp.iinfo(counter.dtype).max)).astype(jnp.int32)
        row = lax.broadcasted_iota(jnp.int32, like.shape, self.axis)
        return row < counter + self.offset if self.change > 0 else row >= counter + (self.offset - self.change)


def buffers(parts: Parts, counters: Counters) -> dict[int, Buffer]:
    """Return the arrays of a loop's carry that are written row by row, by their places."""
    if counters.body.consts:
        return {}
    found = (_buffer(part, aval.shape, parts.num_consts, counters) for part, aval in enumerate(parts.carry))
    return {buffer.part: buffer for buffer in found if buffer is not None}


def without_gaps(found: Mapping[int, Buffer]) -> set[int]:
    """Return the places of arrays whose cotangents may be cleared of all written rows at once (`Buffer.cleared`)."""
    return {part for part, buffer in found.items() if not buffer.has_gaps}


def _buffer(part: int, shape: tuple[Any, ...], num_consts: int, counters: Counters) -> Buffer | None:
    """Prove that an array of the carry is a buffer; None where that fails."""
    eqn = counters.body.maker(counters.body.outputs[part])
    if eqn is None or eqn.invars[0] is not counters.inputs[num_consts + part]:
        return None
    write = _slice_written(eqn) if eqn.primitive.name == "dynamic_update_slice" else _row_written(eqn)
    if write is None:
        return None
    axis, rows, place, is_moved = write
    size = shape[axis]
    if is_symbolic((size,)):
        return None
    for counter, offset in counters.places(place):
        is_inside = counter.least + offset >= 0 and (not is_moved or counter.most + offset <= size - rows)
        if is_inside and rows <= abs(counter.change) and size + abs(offset) + abs(counter.change) < FOREVER:
            return Buffer(part, axis, counter.part, offset, counter.change, rows < abs(counter.change))
    return None


def _slice_written(eqn: Equation) -> tuple[int, int, Atom, bool] | None:
    """Read a `dynamic_update_slice`: the axis, the number of rows, the first row, and that it is moved to fit."""
    old, new = (_type(v).shape for v in eqn.invars[:2])
    axes = [i for i, (n, m) in enumerate(zip(old, new, strict=True)) if n != m]
    return (axes[0], new[axes[0]], eqn.invars[2 + axes[0]], True) if len(axes) == 1 else None


def _row_written(eqn: Equation) -> tuple[int, int, Atom, bool] | None:
    """Read a `scatter` that sets one row, in the same way; most modes drop a row outside of the array."""
    if eqn.primitive.name != "scatter":
        return None
    shape, places, row = (_type(v).shape for v in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    axes = tuple(numbers.inserted_window_dims)
    is_one = places == (1,) and len(axes) == 1 and tuple(numbers.scatter_dims_to_operand_dims) == axes
    if not is_one or (*shape[: axes[0]], *shape[axes[0] + 1 :]) != row:
        return None
    return axes[0], 1, eqn.invars[1], eqn.params["mode"] == lax.GatherScatterMode.CLIP


def _type(atom: Atom) -> Any:
    return atom.aval
