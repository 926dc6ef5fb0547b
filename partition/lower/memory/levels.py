"""Count the bytes alive at every step of a program.

A buffer lives from the row that writes it to the last one that reads it. A result that XLA fuses into its readers has
no buffer, and its operands live until those readers run. A reshape or a barrier is another name for the same buffer. An
elementwise result overwrites an operand of its size that nothing reads later. The body of a loop adds its own peak
once. Arguments, outputs and gradients lie in buffers of their own and are not counted, as in XLA's
`temp_size_in_bytes`. This is a model: the compiler reorders, copies and reuses as it likes, and its own account decides
whether a budget holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate, chain, zip_longest
from typing import Any, NamedTuple

from jointcut.partition.bodies.kinds import inside
from jointcut.partition.figures import human_bytes
from jointcut.partition.program.graph import Op, Value
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.jax.jaxprs import Equation, Literal, Var
from jointcut.partition.program.places import line_of
from jointcut.partition.program.primitives import (
    BARRIER,
    CALLS,
    DEAR,
    DRAWN,
    ELEMENTWISE,
    LOOPS,
    MOVEMENT,
    PACKING,
    REDUCTIONS,
    RENAMING,
    UPDATING,
)

#: Primitives that XLA fuses into their readers, and the readers into which it fuses them.
FUSED_AWAY = (ELEMENTWISE | MOVEMENT | CALLS) - RENAMING
READS_FUSED = FUSED_AWAY | REDUCTIONS | {"dynamic_update_slice"}
_FUSES_OR_PACKS = READS_FUSED | PACKING

#: To XLA the bits of a threefry key are a long elementwise chain: it runs again for a later reader, and keeps nothing.
_RUN_AGAIN = DRAWN

#: Primitives that may overwrite an operand that nothing reads later.
_IN_PLACE = ELEMENTWISE | CALLS | UPDATING | LOOPS

#: Primitives that take too long to be computed once for each reader.
_DEAR = DEAR | CALLS

#: Primitives without a body; for most equations this saves a search through the parameters.
_BODILESS = (ELEMENTWISE | MOVEMENT | REDUCTIONS | RENAMING | PACKING) - CALLS


@dataclass(frozen=True)
class Buffer:
    """One array that is alive at the peak: its `bytes`, type, the op that wrote it and the user's line."""

    bytes: int
    type: str
    op: str
    source: str

    def __str__(self) -> str:
        """`8.39 MB float32[16,128,1024] dot_general at model.py:40`."""
        where = f" at {self.source}" if self.source else ""
        return f"{human_bytes(self.bytes)} {self.type} {self.op}{where}"


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of a value: an axis for each of some loops, then the value's own axes."""

    value: Value
    lengths: tuple[int, ...]


def type_of(held: Any) -> str:
    """The type of a value, a stack or an abstract value of JAX, such as `float32[8,16]`."""
    if not isinstance(held, Value | Stack):
        shape = getattr(held, "shape", None)  # without shardings, which texts of JAX's types have
        return held.str_short() if shape is None else f"{held.dtype}[{','.join(map(str, shape))}]"
    value, lengths = (held.value, held.lengths) if isinstance(held, Stack) else (held, ())
    return f"{value.dtype}[{','.join(map(str, (*lengths, *value.shape)))}]"


class Row(NamedTuple):
    """One op of a level, with numbers of buffers.

    If there is a level `inside` the op, the op runs it `trips` times. `into` is the buffer of its first operand, None
    for a literal. A loop's carries start in the buffers `starts`. `source` is the op or equation of the row, if known.
    """

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    into: int | None
    inside: Level | None
    source: Op | Equation | None
    trips: int = 1
    starts: tuple[int, ...] = ()


@dataclass
class Level:
    """The rows of one level of a program, in order, and its buffers: their sizes, and a value, stack or type of each.

    `free` buffers belong to somebody else and are not counted. `ends` are not counted either, and are kept until the
    end. `host` buffers lie in host memory and count only for its peak. In the body of a loop, `carried` buffers are
    kept until the body's end, `found` buffers are the carried ones as a step finds them, and `stacks` buffers go into a
    stack at once. `written` buffers lie in memory for their readers. Nothing may be added once a figure has been asked
    for.
    """

    rows: list[Row] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)
    free: set[int] = field(default_factory=set)
    host: set[int] = field(default_factory=set)
    ends: set[int] = field(default_factory=set)
    carried: set[int] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    stacks: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def copied(self) -> Level:
        """The same rows and buffers, to which more may be added."""
        return Level(*(copy(getattr(self, part.name)) for part in fields(self)))

    def buffer(self, size: int, held: Any) -> int:
        """A new buffer."""
        self.sizes.append(size)
        self.types.append(held)
        return len(self.sizes) - 1

    def given(self, size: int, held: Any) -> int:
        """A new buffer that belongs to somebody else."""
        number = self.buffer(size, held)
        self.free.add(number)
        return number

    # ---------------------------------------------------------------------------------------------- who reads what

    @cached_property
    def made(self) -> list[int]:
        """The row that writes each buffer, by buffer; -1 for a given buffer."""
        made = [-1] * len(self.sizes)
        for i, row in enumerate(self.rows):
            for b in row.makes:
                made[b] = i
        return made

    @cached_property
    def lives(self) -> tuple[list[int], list[bool]]:
        """The last row that reads each buffer, directly or through fused rows, or -1; and whether the buffer counts."""
        rows, made = self.rows, self.made
        last, fused = self._last_reads()
        free = self.free | self.ends | self.host
        for i, row in enumerate(rows):  # a step writes into what it carries
            if not self.carried.isdisjoint(row.makes):
                free.update(self._overwriting(row, [b for b in self.found if last[b] == i]))
        ending = set(self.ends)
        for i in range(len(rows) - 1, -1, -1):  # the operand of an in-place update lies where its result lies
            row = rows[i]
            if row.name in UPDATING and row.makes[0] in free and row.into is not None and last[row.into] == i:
                free.add(row.into)
            if row.name in LOOPS or row.name in ELEMENTWISE:
                ending.update(self._begun(row, i, ending, last))
        free |= ending
        counted = [made[b] >= 0 and end >= 0 and b not in free and not fused[b] for b, end in enumerate(last)]
        return last, counted

    def _overwriting(self, row: Row, dying: Sequence[int]) -> Iterator[int]:
        """The results of a row that lie where a step finds carried buffers which nothing reads later."""
        into = row.starts if row.name in LOOPS else (row.into,) if row.name in UPDATING else row.reads
        free = [b for b in dying if b in into and row.name in _IN_PLACE]
        return (out for out, _ in self._fitting([out for out in row.makes if out in self.carried], free))

    def _begun(self, row: Row, i: int, ending: set[int], last: Sequence[int]) -> Iterator[int]:
        """The operands that lie where results of a row lie that are results of the whole.

        A loop's carry from the start lies where its end lies. An elementwise op writes over the end of a loop.
        """
        is_loop = row.name in LOOPS
        dying = [b for b in (row.starts if is_loop else row.reads) if last[b] == i and self.made[b] >= 0]
        if not is_loop:
            dying = [b for b in dying if self.rows[self.made[b]].name in LOOPS and not self._is_stack(b, row)]
        outs = [out for out in row.makes if out in ending and not self._is_stack(out, row)]
        return (b for _, b in self._fitting(outs, dying))

    def _fitting(self, outs: Iterable[int], dying: list[int]) -> Iterator[tuple[int, int]]:
        """The results that can lie where dying buffers lie, each with a buffer of its size, which is taken away."""
        for out in outs:
            fitting = next((b for b in dying if self.sizes[b] == self.sizes[out]), None)
            if fitting is not None:
                dying.remove(fitting)
                yield out, fitting

    def _is_stack(self, b: int, row: Row) -> bool:
        """Whether a buffer has a part for each trip of a loop, so that the loop does not carry it."""
        held = self.types[b]
        shape = held.shape if isinstance(held, Value) else getattr(held, "shape", ())
        return isinstance(held, Stack) or (row.name in LOOPS and tuple(shape[:1]) == (row.trips,))

    def _last_reads(self) -> tuple[list[int], list[bool]]:
        rows, made = self.rows, self.made
        readers = Counter(chain.from_iterable(row.reads for row in rows))
        readers.update(self.stacks)
        # The buffers read by products, and the buffers read by other ops that fuse nothing.
        by_products = set[int]().union(*(row.reads for row in rows if row.name in PACKING))
        by_others = set[int]().union(*(row.reads for row in rows if row.name not in _FUSES_OR_PACKS))
        last, fused = [-1] * len(self.sizes), [False] * len(self.sizes)
        bits = {b for row in rows if row.name == _RUN_AGAIN for b in row.makes}
        for b in self.stacks:
            last[b] = max(made[b], 0)
        for b in self.ends | self.carried:
            last[b] = len(rows)
        for i in range(len(rows) - 1, -1, -1):
            row, when = rows[i], i
            if row.name in FUSED_AWAY and len(row.makes) == 1:
                out = row.makes[0]
                # A product transposes an operand by itself.
                in_memory = out in by_others or (out in by_products and row.name != "transpose")
                if not in_memory and self._is_fused(row, out, readers[out]):
                    fused[out] = True
                    when = max(last[out], i)
            for b in row.reads:
                end = i if b in bits else when
                if last[b] < end:
                    last[b] = end
        return last, fused

    def _is_fused(self, row: Row, out: int, readers: int) -> bool:
        """Whether XLA computes a result inside each reader, so that it has no buffer, if all readers can be fused."""
        if out in self.written or out in self.carried or out in self.ends:
            return False
        if row.name not in _DEAR:
            return True
        holds_arrays = row.name in CALLS and row.inside is not None and row.inside.peak[0] > 0
        return readers <= 1 and not holds_arrays

    # ----------------------------------------------------------------------------------------------------- figures

    @cached_property
    def peak(self) -> tuple[int, int]:
        """The most bytes alive at once, and the row at which they are."""
        ending, (_, counted), sizes = self.ending, self.lives, self.sizes
        now = most = at = 0
        for i, row in enumerate(self.rows):
            for b in row.makes:
                if counted[b]:
                    now += sizes[b]
            top = now if row.inside is None else now + row.inside.peak[0]
            if top > most:
                top -= sum(sizes[b] for b in self.replaced(i))
                if top > most:
                    most, at = top, i
            for b in ending[i]:
                now -= sizes[b]
        return most, at

    @cached_property
    def host_peak(self) -> int:
        """The most bytes alive at once in host memory; a step's bytes in a loop lie in the stack around it."""
        change = [0] * (len(self.rows) + 2)
        for b in self.host - self.free:
            change[max(self.made[b], 0)] += self.sizes[b]
            change[max(self.lives[0][b], self.made[b], 0) + 1] -= self.sizes[b]
        return max(accumulate(change))

    @cached_property
    def ending(self) -> list[list[int]]:
        """The buffers that nothing reads after each row; the last entry is the end."""
        ending: list[list[int]] = [[] for _ in range(len(self.rows) + 1)]
        last, counted = self.lives
        for b, is_counted in enumerate(counted):
            if is_counted:
                ending[max(last[b], self.made[b])].append(b)
        return ending

    def replaced(self, i: int) -> list[int]:
        """The buffers that end with a row and are overwritten by its results."""
        if self.rows[i].name not in _IN_PLACE:
            return []
        counted = self.lives[1]
        dying = [b for b in self.ending[i] if self.made[b] < i]
        return [b for _, b in self._fitting(filter(counted.__getitem__, self.rows[i].makes), dying)]

    def own(self, at: int) -> tuple[str, int, str]:
        """The op of a row, the bytes that it reads and makes, and its line; for a body, those at its own peak."""
        row = self.rows[at]
        if row.inside is not None and row.inside.rows and row.inside.peak[0]:
            return row.inside.own(row.inside.peak[1])
        counted = self.lives[1]
        own_bytes = sum(self.sizes[b] for b in dict.fromkeys((*row.reads, *row.makes)) if counted[b])
        return (row.name, own_bytes, _op_and_line(row)[1])

    def alive(self, at: int) -> list[Buffer]:
        """The buffers that are alive while a row runs, those inside it included."""
        if not self.rows:
            return []
        last, counted = self.lives
        mine = [
            Buffer(self.sizes[b], type_of(self.types[b]), *_op_and_line(self.rows[self.made[b]]))
            for b in range(len(self.sizes))
            if counted[b] and self.made[b] <= at <= last[b]
        ]
        inside = self.rows[at].inside
        return mine if inside is None else mine + inside.alive(inside.peak[1])


def _op_and_line(row: Row) -> tuple[str, str]:
    """The name of a row's op, and the user's line that it comes from."""
    source = row.source
    return row.name, "" if source is None else source.source if isinstance(source, Op) else line_of(source)


# ------------------------------------------------------------------------------------------------ closed programs


def body_of(eqn: Equation) -> Level | None:
    """The body of an equation, the one with the highest peak if there are several; None if there is none."""
    if eqn.primitive.name in _BODILESS:
        return None
    if (nested := inside(eqn)) is not None:
        names = Names()
        names.give([*nested.program.constvars, *nested.program.invars])
        names.run(nested.program.eqns)
        handed, stacked = [carry.following for carry in nested.carries], [end for end, _ in nested.stacks]
        names.level.carried.update(b for b in map(names.read, handed) if b is not None)
        names.level.found.update(names.env[carry.variable] for carry in nested.carries)
        names.level.stacks.update(b for b in map(names.read, stacked) if b is not None)
        return names.level
    return max(map(_level_of, jaxprs.inner_jaxprs(eqn)), key=lambda level: level.peak[0], default=None)


def _level_of(jaxpr: Any) -> Level:
    names = Names()
    names.give([*jaxpr.constvars, *jaxpr.invars])
    names.run(jaxpr.eqns)
    names.level.ends.update(b for v in jaxpr.outvars if (b := names.read(v)) is not None)
    return names.level


class Names:
    """One level while it is read from equations, and the buffer of each variable."""

    def __init__(self) -> None:
        """Begin with an empty level."""
        self.level = Level()
        self.env: dict[Var, int] = {}

    def give(self, invars: Iterable[Var]) -> None:
        """Let variables stand for buffers that belong to somebody else."""
        self.env.update((v, self.level.given(abstract.aval_bytes(v.aval), v.aval)) for v in invars)

    def read(self, atom: Any) -> int | None:
        """The buffer of an atom, None for a literal."""
        return None if isinstance(atom, Literal) else self.env[atom]

    def run(self, eqns: Iterable[Equation]) -> None:
        """Add a row for each equation that makes something."""
        level = self.level
        for eqn in eqns:
            name, operands = eqn.primitive.name, [self.read(v) for v in eqn.invars]
            if name == BARRIER:
                level.written.update(b for b in operands if b is not None)
            renamed = operands if name in RENAMING else ()
            makes = []
            for v, same in zip_longest(eqn.outvars, renamed[: len(eqn.outvars)]):
                if same is None:
                    makes.append(level.buffer(abstract.aval_bytes(v.aval), v.aval))
                self.env[v] = makes[-1] if same is None else same
            if name not in RENAMING or makes:
                reads = tuple(dict.fromkeys(b for b in operands if b is not None)) if name not in RENAMING else ()
                nested = inside(eqn)
                trips = 1 if nested is None or nested.trips is None else nested.trips
                begun = [] if nested is None else [self.read(carry.start) for carry in nested.carries]
                starts = tuple(b for b in begun if b is not None)
                into = operands[0] if operands else None
                level.rows.append(Row(name, reads, tuple(makes), into, body_of(eqn), eqn, trips, starts))
