"""Say when each buffer of a plan lives.

The replay of `memory`, written out: a row of steps, forward then backward, and for each buffer the steps from the one
that writes it to the last one that reads it. What XLA computes within its readers takes no step. A loop's body stands
in the row once, between the buffers around it, so the most bytes at one step are the peak of the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from jointcut.partition import jaxprs
from jointcut.partition.emit import Halves
from jointcut.partition.graph import Graph
from jointcut.partition.jaxprs import Equation, Var
from jointcut.partition.memory import Sweep, sweep_of
from jointcut.partition.places import Place, place_of
from jointcut.partition.roles import Side


@dataclass(frozen=True)
class Moment:
    """One step of the row: what runs, in which half, where it comes from, and how often it runs."""

    op: str
    side: Side
    place: Place
    trips: int


@dataclass(frozen=True)
class Lifetime:
    """One buffer: its `bytes`, its type, what wrote it and where, and the first and the last step of its life."""

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


def lifetimes(halves: Halves, graph: Graph) -> Lifetimes:
    """Write out what the two halves of a graph's plan hold at each step."""
    sweep, count = sweep_of(halves, graph)
    row = _Row([], [])
    row.write(sweep, lambda i: Side.FORWARD if i < count else Side.BACKWARD, 1)
    return Lifetimes(tuple(row.moments), tuple(sorted(row.buffers, key=lambda b: (b.first, b.last))))


@dataclass
class _Row:
    moments: list[Moment]
    buffers: list[Lifetime]

    def write(self, sweep: Sweep, side_of: Callable[[int], Side], trips: int) -> None:
        """Append the steps of one level, those of bodies in between, and the buffers of the level."""
        spans = [self._step(sweep, i, side_of(i), trips) for i in range(len(sweep.eqns))]
        for i, ending in enumerate(sweep.ending()):
            replaced = sweep.replaced(i, ending) if i < len(spans) else []
            for v in ending:
                made = sweep.made[v]
                if sweep.has_buffer(v, made):
                    last = (
                        len(self.moments) - 1 if i >= len(spans) else spans[i][0] - 1 if v in replaced else spans[i][1]
                    )
                    self._buffer(sweep.eqns[made], v, spans[made][0], last)

    def _step(self, sweep: Sweep, i: int, side: Side, trips: int) -> tuple[int, int]:
        """Append what one equation runs; its first and last step, or the next one and the last where it takes none."""
        first, eqn = len(self.moments), sweep.eqns[i]
        if sweep.inside(i)[0] and (body := sweep.body(i)) is not None:
            self.write(body, lambda _: side, trips * eqn.params.get("length", 1))
        elif any(sweep.made.get(v) == i and v not in sweep.fused for v in eqn.outvars):
            self.moments.append(Moment(eqn.primitive.name, side, place_of(eqn), trips))
        return first, len(self.moments) - 1

    def _buffer(self, eqn: Equation, v: Var, first: int, last: int) -> None:
        size, type_, maker = jaxprs.aval_bytes(v.aval), v.aval.str_short(), _maker(eqn, v)
        self.buffers.append(Lifetime(size, type_, maker.primitive.name, place_of(maker), first, last))


def _maker(eqn: Equation, v: Var) -> Equation:
    """The equation that computes a result: of what a scan stacks the one in its body that makes a step's part."""
    if eqn.primitive.name != "scan":
        return eqn
    layout, place = jaxprs.scan_layout(eqn), eqn.outvars.index(v)
    part = layout.body.outvars[place]
    if place < layout.num_carry or isinstance(part, jaxprs.Literal):
        return eqn
    inner = next((e for e in reversed(layout.body.eqns) if part in e.outvars), None)
    return eqn if inner is None else _maker(inner, part)
