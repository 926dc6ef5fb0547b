"""Say when each buffer of a plan lives.

This is a replay, written out. It lists the steps of the forward, then the steps of the backward. Each buffer lives from
the step that writes it to the last step that reads it. An op that XLA computes inside its readers takes no step. The
steps of a loop's body are listed once, while the buffers around the loop are alive. So the most bytes at one step are
the peak of the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from jointcut.partition.lower.memory.levels import Level, Row, Stack, type_of
from jointcut.partition.lower.memory.replay import Rows
from jointcut.partition.program.graph import OPEN, Graph, Op
from jointcut.partition.program.jax.jaxprs import Equation
from jointcut.partition.program.places import Place, place_of
from jointcut.partition.program.roles import Side


@dataclass(frozen=True)
class Moment:
    """One step: the op that runs, in which half, where it comes from, and how often it runs."""

    op: str
    side: Side
    place: Place
    trips: int


@dataclass(frozen=True)
class Lifetime:
    """One buffer: its `bytes`, its type, the op that wrote it and where, and the first and last step of its life."""

    bytes: int
    type: str
    op: str
    place: Place
    first: int
    last: int


@dataclass(frozen=True)
class Lifetimes:
    """The steps of a program in order, and its buffers in the order they are written."""

    moments: tuple[Moment, ...]
    buffers: tuple[Lifetime, ...]

    @cached_property
    def boundary(self) -> int:
        """The first step of the backward, or the number of steps where there is none."""
        return next((i for i, m in enumerate(self.moments) if m.side is Side.BACKWARD), len(self.moments))

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Bytes alive at each step."""
        return self.bytes_of(self.buffers)

    def bytes_of(self, buffers: Sequence[Lifetime]) -> tuple[int, ...]:
        """Bytes that some of the buffers take at each step."""
        change = [0] * (len(self.moments) + 1)
        for b in buffers:
            change[b.first] += b.bytes
            change[b.last + 1] -= b.bytes
        return tuple(accumulate(change[:-1]))

    @property
    def peak(self) -> int:
        """The step with the most bytes, the first of several."""
        return max(range(len(self.totals)), key=self.totals.__getitem__, default=0)

    def peak_bytes(self, side: Side) -> int:
        """The most bytes alive at a step of one half."""
        return max((b for b, m in zip(self.totals, self.moments, strict=True) if m.side is side), default=0)

    def alive(self, step: int) -> tuple[Lifetime, ...]:
        """The buffers that are alive at a step, the largest first."""
        return tuple(sorted((b for b in self.buffers if b.first <= step <= b.last), key=lambda b: -b.bytes))


def lifetimes(rows: Rows, graph: Graph) -> Lifetimes:
    """Return the steps of both halves of a graph's schedule, and the buffers alive at each."""
    line = _Line(graph, [], [])
    line.write(rows.level, lambda i: Side.FORWARD if i < rows.forward else Side.BACKWARD, 1)
    return Lifetimes(tuple(line.moments), tuple(sorted(line.buffers, key=lambda b: (b.first, b.last))))


@dataclass
class _Line:
    graph: Graph
    moments: list[Moment]
    buffers: list[Lifetime]

    def write(self, level: Level, side_of: Callable[[int], Side], trips: int) -> None:
        """Append the steps and buffers of one level, with the steps of bodies in between."""
        counted = level.lives[1]
        spans = [
            self._step(row, any(counted[b] for b in row.makes), side_of(i), trips) for i, row in enumerate(level.rows)
        ]
        for i, ending in enumerate(level.ending):
            replaced = level.replaced(i) if i < len(spans) else []
            for b in ending:
                end = len(self.moments) - 1 if i >= len(spans) else spans[i][0] - 1 if b in replaced else spans[i][1]
                self._buffer(level, b, spans[level.made[b]][0], end)

    def _step(self, row: Row, is_written: bool, side: Side, trips: int) -> tuple[int, int]:
        """Append the steps of one row; return its first and last step, or the next and the last if it takes none."""
        first = len(self.moments)
        if row.inside is not None and row.inside.peak[0]:
            self.write(row.inside, lambda _: side, trips * row.trips)
        elif is_written:
            self.moments.append(Moment(row.name, side, _place(row.source), trips))
        return first, len(self.moments) - 1

    def _buffer(self, level: Level, b: int, first: int, last: int) -> None:
        """Append a buffer; a stack is named after the op in the loop's body that makes the stacked value."""
        row, held = level.rows[level.made[b]], level.types[b]
        maker = self.graph.maker_of(held.value.id) if isinstance(held, Stack) else None
        inside = maker if maker is not None and maker.name not in OPEN else None
        name, place = (row.name, _place(row.source)) if inside is None else (inside.name, _place(inside))
        self.buffers.append(Lifetime(level.sizes[b], type_of(held), name, place, first, last))


def _place(source: Op | Equation | None) -> Place:
    assert source is not None, "each row of a schedule has an op"
    return place_of(source.payload if isinstance(source, Op) else source)
