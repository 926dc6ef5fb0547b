"""Prove that a loop writes an array row by row, so that its earlier states follow from the last one.

A loop that fills an array, one row in each step, would have the whole array in every checkpoint. Where the jaxpr shows
that each row is written at most once, the array before any step is known without a checkpoint: the rows written so far
are those of the last state, the others those of the first (Equinox's `buffers` takes this for granted).

The proof needs: the new array is the old one with one write, by `dynamic_update_slice` or a `scatter` of one row; the
place of that write is a counter of the carry plus a constant; the counter changes by a constant, at least as far as the
write reaches; and no write is moved or wraps around, for which its first value, and sometimes the predicate, are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.aot.loops.parts import Parts
from jointcut.partition.program import jaxprs
from jointcut.partition.program.jaxprs import Atom, Equation, Literal
from jointcut.partition.rewrite import simplify

_SAME_NUMBER = ("broadcast_in_dim", "copy", "reshape", "squeeze")
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


@dataclass(frozen=True)
class Buffer:
    """An array of the carry of which every step writes some rows that no other step writes.

    Attributes:
        part: its place in the carry.
        axis: the axis of the rows.
        counter: the place in the carry of the counter.
        offset: the first row that a step writes, less the counter before the step.
        change: what a step adds to the counter.
    """

    part: int
    axis: int
    counter: int
    offset: int
    change: int

    def before(self, counter: Any, first: Any, last: Any) -> Any:
        """The array before the step that begins with this counter, from its first and its last state."""
        return lax.select(self._is_done(counter, first), last, first)

    def cleared(self, counter: Any, start: Any, cotangent: Any) -> Any:
        """The cotangent of the first state, from that of the last one, if the steps read nothing of the array.

        The loop wrote the rows from the counter `start` on up to `counter`, and they have no cotangent before.
        """
        is_written = self._is_done(counter, cotangent) & ~self._is_done(start, cotangent)
        return lax.select(is_written, jnp.zeros_like(cotangent), cotangent)

    def _is_done(self, counter: Any, like: Any) -> Any:
        """Which elements lie in rows that are written before the step that begins with this counter."""
        row = lax.broadcasted_iota(counter.dtype, like.shape, self.axis)
        return row < counter + self.offset if self.change > 0 else row >= counter + (self.offset - self.change)


def buffers(parts: Parts, known: Mapping[int, int]) -> dict[int, Buffer]:
    """The arrays of a loop's carry that are written row by row, by their places.

    `known` are the values of constants and first values that are known, by their places among the inputs of the loop.
    """
    jaxpr, consts = jaxprs.opened(simplify.inlined(parts.quiet))
    body = _Body(parts, known, {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}, jaxpr.invars, jaxpr.outvars)
    return {} if consts else {b.part: b for p in range(len(parts.carry)) if (b := body.buffer(p)) is not None}


@dataclass(frozen=True)
class _Sum:
    """A number in the body: an input plus `offset`. No index wraps if input plus `least_offset` is at least 0."""

    input: int
    offset: int
    least_offset: int


@dataclass(frozen=True)
class _Body:
    """The body of a loop, while it is read; `makers` are its equations by their results."""

    parts: Parts
    known: Mapping[int, int]
    makers: Mapping[Any, Equation]
    inputs: Sequence[Any]
    outputs: Sequence[Atom]

    def buffer(self, part: int) -> Buffer | None:
        """The proof for one array of the carry, None where there is none."""
        count = self.parts.num_consts
        eqn = self.makers.get(self.outputs[part]) if not isinstance(self.outputs[part], Literal) else None
        if eqn is None or eqn.invars[0] is not self.inputs[count + part]:
            return None
        write = _slice_written(eqn) if eqn.primitive.name == "dynamic_update_slice" else _row_written(eqn)
        if write is None:
            return None
        axis, rows, place, is_moved = write
        at = self.sum_of(place)
        counter = -1 if at is None else at.input - count
        change = self.sum_of(self.outputs[counter]) if counter >= 0 else None
        if at is None or change is None or change.input != at.input or abs(change.offset) < rows:
            return None
        rises, size = change.offset > 0, self.parts.carry[part].shape[axis]
        least = self.known.get(at.input) if rises else self.least(counter)
        is_inside = least is not None and least + at.least_offset >= 0
        if rises and is_moved:
            is_inside &= self.ends_below(counter, size - rows - at.offset + 1)
        return Buffer(part, axis, counter, at.offset, change.offset) if is_inside else None

    def sum_of(self, atom: Atom) -> _Sum | None:
        """A number as an input of the body plus a constant, None where it is no such sum."""
        offset, outer = 0, 0
        while not isinstance(atom, Literal):
            eqn = self.makers.get(atom)
            if eqn is None:
                return _Sum(self.inputs.index(atom), offset, offset - max(outer, 0))
            name, operands = eqn.primitive.name, list(eqn.invars)
            if name == "add" and isinstance(operands[0], Literal):
                operands.reverse()
            if name in ("add", "sub") and (number := self.number(operands[1])) is not None:
                offset += number if name == "add" else -number
            elif name == "select_n" and self.is_negative(operands[0], operands[1]):
                operands, outer = operands[1:], max(outer, offset)  # negative indices count from the end of the array
            elif not _is_same_number(eqn):
                return None
            atom = operands[0]
        return None

    def is_negative(self, predicate: Atom, atom: Atom) -> bool:
        """Whether a predicate is `atom < 0`."""
        eqn = None if isinstance(predicate, Literal) else self.makers.get(predicate)
        return (
            eqn is not None and eqn.primitive.name == "lt" and eqn.invars[0] is atom and number_in(eqn.invars[1]) == 0
        )

    def number(self, atom: Atom) -> int | None:
        """A number that is written in the program, or known of a constant of the loop."""
        if isinstance(atom, Literal):
            return number_in(atom)
        place = self.inputs.index(atom) if atom in self.inputs else len(self.inputs)
        return self.known.get(place) if place < self.parts.num_consts else None

    def ends_below(self, counter: int, bound: int) -> bool:
        """Whether the predicate keeps the counter below a bound in each step."""
        return any(n + (name == "le") <= bound for name, n in self.limits(counter) if name in ("lt", "le"))

    def least(self, counter: int) -> int | None:
        """The least value that the predicate lets the counter have, None where it does not say."""
        return max((n + (name == "gt") for name, n in self.limits(counter) if name in ("gt", "ge")), default=None)

    def limits(self, counter: int) -> list[tuple[str, int]]:
        """The comparisons of the counter with numbers that the predicate makes, of which all must hold."""
        jaxpr, _ = jaxprs.opened(simplify.inlined(self.parts.cond))
        makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        known = {jaxpr.invars[i]: n for i, n in self.known.items() if i < self.parts.num_consts}
        variable, limits, work = jaxpr.invars[self.parts.num_consts + counter], [], list(jaxpr.outvars)
        while work:
            atom = _same_number(work.pop(), makers)
            eqn = None if isinstance(atom, Literal) else makers.get(atom)
            if eqn is None:
                continue
            name = eqn.primitive.name
            if name == "and":
                work += eqn.invars
            elif name in _SWAPPED:
                one, other = (_same_number(v, makers) for v in eqn.invars)
                if other is variable:
                    name, one, other = _SWAPPED[name], other, one
                number = number_in(other) if isinstance(other, Literal) else known.get(other)
                limits += [(name, number)] if one is variable and number is not None else []
        return limits


def _slice_written(eqn: Equation) -> tuple[int, int, Atom, bool] | None:
    """Of a `dynamic_update_slice`: the axis, the rows, the place of the first, and that the slice is moved to fit."""
    old, new = (_type(v).shape for v in eqn.invars[:2])
    axes = [i for i, (n, m) in enumerate(zip(old, new, strict=True)) if n != m]
    return (axes[0], new[axes[0]], eqn.invars[2 + axes[0]], True) if len(axes) == 1 else None


def _row_written(eqn: Equation) -> tuple[int, int, Atom, bool] | None:
    """The same of a `scatter` that sets one row; by most modes a row outside of the array is dropped, not moved."""
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


def _is_same_number(eqn: Equation) -> bool:
    """Whether an equation only gives a number another form: another shape, or another dtype that holds as much."""
    if eqn.primitive.name != "convert_element_type":
        return eqn.primitive.name in _SAME_NUMBER
    old, new = (_type(v).dtype for v in (eqn.invars[0], eqn.outvars[0]))
    is_wider = np.issubdtype(old, np.integer) and np.issubdtype(new, np.integer) and new.itemsize >= old.itemsize
    return is_wider or old == new


def _same_number(atom: Atom, makers: Mapping[Any, Equation]) -> Atom:
    """The atom that another is only another form of."""
    while not isinstance(atom, Literal) and (eqn := makers.get(atom)) is not None:
        if not _is_same_number(eqn):
            break
        atom = eqn.invars[0]
    return atom


def number_in(literal: Any) -> int | None:
    """The number of an integer literal, None of anything else."""
    if not isinstance(literal, Literal) or not np.issubdtype(np.asarray(literal.val).dtype, np.integer):
        return None
    return int(literal.val)


def known_numbers(values: Sequence[Any]) -> dict[int, int]:
    """The integers among some values that are no tracers, by their places."""
    plain = ((i, x) for i, x in enumerate(values) if not jaxprs.is_tracer(x) and jaxprs.is_plain(jax.typeof(x)))
    return {i: int(x) for i, x in plain if np.shape(x) == () and np.issubdtype(jax.typeof(x).dtype, np.integer)}
