"""Arrange a level: its rows as XLA:CPU runs them, with the buffers that it keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jointcut.partition.lower.memory import Level, Row
from jointcut.partition.lower.xla import copies, library
from jointcut.partition.lower.xla.fusion import fused
from jointcut.partition.lower.xla.instructions import POOLING, ROUNDS, Program, Type
from jointcut.partition.lower.xla.reading import read
from jointcut.partition.lower.xla.sequence import Sequence as Order
from jointcut.partition.lower.xla.users import Users
from jointcut.partition.program.primitives import CALLS, UPDATING


@dataclass
class Arranged(Level):
    """A level whose rows stand in the order in which they run, and whose buffers all count.

    `spans` are for each buffer the row that writes it and the last one that reads it. `over` are for each row the
    buffers that end there and that its result is written over, or that are free before most of the row runs. `origins`
    are for each row the one of the level that it comes from. `behind` is the row that waits for the forward, if any.
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    over: list[list[int]] = field(default_factory=list)
    origins: list[Row | None] = field(default_factory=list)
    behind: int | None = None

    @cached_property
    def made(self) -> list[int]:
        """For each buffer the row that writes it."""
        return [first for first, _ in self.spans]

    @cached_property
    def lives(self) -> tuple[list[int], list[bool]]:
        """For each buffer the last row that reads it; and that it counts."""
        return [last for _, last in self.spans], [True] * len(self.spans)

    def replaced(self, i: int) -> list[int]:
        """The buffers that end with a row and that its results overwrite."""
        return self.over[i]


class Arranger:
    """Arrange levels; `bodies` are those that many levels hold, and are arranged once."""

    def __init__(self, bodies: Sequence[Level]) -> None:
        """Note the bodies, and those in them."""
        self.bodies = list(bodies)
        self.known: dict[int, Arranged | None] = {}
        for level in self.bodies:
            self.known[id(level)] = None
            self.bodies += [row.inside for row in level.rows if row.inside is not None]

    def arranged(self, level: Level) -> Arranged:
        """The level as XLA:CPU runs it."""
        if (known := self.known.get(id(level))) is not None:
            return known
        made = self._arranged(level)
        if id(level) in self.known:
            self.known[id(level)] = made
        return made

    def _arranged(self, level: Level) -> Arranged:
        program = read(level)
        users = Users(program, *copies.users_of(program))
        order = Order(program, fused(program, users, library.kernels(program, users)), users)
        made = Arranged()
        lives = sorted(order.lives, key=lambda life: life.first)
        makes: list[list[int]] = [[] for _ in order.steps]
        ending: list[list[int]] = [[] for _ in range(len(order.steps) + 1)]
        for n, first, last in lives:
            b = made.buffer(program.types[n].bytes, program.shown.get(n, program.types[n]))
            made.spans.append((first, last))
            makes[first].append(b)
            ending[last].append(b)
        for i, n in enumerate(order.steps):
            made.rows.append(self._row(program, n, makes[i]))
            dying = {b: lives[b].instruction for b in ending[i] if made.spans[b][0] < i}
            made.over.append(_over(order, n, bool(makes[i]), dying))
        made.origins = [program.rows[n] for n in order.steps]
        made.behind = None if program.middle is None else order.places[program.middle]
        return made

    def _row(self, program: Program, n: int, makes: Sequence[int]) -> Row:
        """The row of an instruction."""
        row, name = program.rows[n], program.names[n]
        if row is None:
            return Row(name, (), tuple(makes), None, None, None)
        if n in program.shown:
            return Row(row.name, (), tuple(makes), None, None, row.source)
        inside = None
        if name == POOLING:
            inside = _taking(_windows(program, n), row)
        elif name == ROUNDS:
            inside = _taking(2 * program.types[program.reads[n][0]].bytes, row)  # a copy of both counters
        elif name == row.name and row.inside is not None and name not in CALLS | UPDATING:
            inside = self.arranged(row.inside)
        return Row(name, (), tuple(makes), None, inside, row.source, row.trips)


def _over(order: Order, n: int, makes: bool, dying: dict[int, int]) -> list[int]:
    """The buffers that an instruction's result is written over, or that are free before most of it runs."""
    program = order.program
    if program.names[n] == POOLING:
        gradient, operand = (program.buffer(v) for v in program.reads[n])
        return [b for b, v in dying.items() if v == gradient or (v == operand and _is_padded(program, n))]
    return next(([b] for b, v in dying.items() if makes and order.is_over(n, v)), [])


def _taking(total: int, row: Row) -> Arranged:
    """A level that takes so many bytes."""
    made = Arranged(spans=[(0, 0)], over=[[]])
    b = made.buffer(total, Type((total // 4,), "float32", total))
    made.rows.append(Row(row.name, (), (b,), None, None, row.source))
    return made


def _windows(program: Program, n: int) -> int:
    """Bytes that the gradient of a maximum pooling takes besides its result: it looks where the maxima are.

    There are the places along each axis, all as large as the operand, zeros to begin with, the padded operand, a copy
    of the gradient, and the maximum of each window with its place along each axis.
    """
    shape = program.types[n].shape
    padding = program.params(n)["padding"]
    window = program.types[program.reads[n][0]].bytes
    whole = 4 * math.prod(length + low + high for length, (low, high) in zip(shape, padding, strict=True))
    total = len(shape) * whole + (len(shape) + 2) * window
    if _is_padded(program, n):
        total += 2 * whole - program.types[n].bytes
    return total


def _is_padded(program: Program, n: int) -> bool:
    return any(low or high for low, high in program.params(n)["padding"])
