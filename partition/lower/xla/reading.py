"""Read the rows of a level as instructions.

Calls are opened. An operand that is shorter along some axis is spread over an array first, as is a number. Equal
instructions are one. A slice of a stack, and the write into one, are instructions that can be fused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from jointcut.partition.lower.memory import STAYS, Barrier, Level, Row
from jointcut.partition.lower.xla import layouts
from jointcut.partition.lower.xla.instructions import (
    CONVOLUTION,
    DOT,
    ROUNDS,
    Kind,
    Program,
    Type,
    equation,
    kind_of,
    type_in,
    without_ones,
)
from jointcut.partition.program.jaxprs import Equation
from jointcut.partition.program.primitives import CALLS, DRAWN, ELEMENTWISE, LOOPS, UPDATING

#: Another name for the operand.
_SAME = frozenset({"copy", "name", "pvary", "stop_gradient"})

#: The parameters in which two instructions on the same operands may differ; of all others none has any that matter.
_TOLD_APART = {
    "broadcast_in_dim": ("broadcast_dimensions",),
    "integer_pow": ("y",),
    "reduce_precision": ("exponent_bits", "mantissa_bits"),
    "slice": ("start_indices", "limit_indices", "strides"),
    "transpose": ("permutation",),
    **dict.fromkeys(("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"), ("axes",)),
}


def read(level: Level) -> Program:
    """The instructions of a level."""
    reader = _Reader(level, Program())
    reader.whole()
    return reader.program


@dataclass
class _Reader:
    """One level, or a call in it, while it is read.

    `made` are instructions by buffer, `counts` the number of readers of each buffer, empty until it is asked for.
    """

    level: Level
    program: Program
    made: dict[int, int] = field(default_factory=dict)
    counts: Counter[int | None] = field(default_factory=Counter)

    def whole(self) -> None:
        """Read all of a level that stands by itself."""
        level, program = self.level, self.program
        computed = {b for row in level.rows for b in row.makes}
        for b in range(len(level.sizes)):
            if b not in computed and b not in level.same:
                self.made[b] = program.add(Kind.GIVEN, "given", [], type_in(level, b), None)
                if b in level.sliced:
                    row = level.rows[0] if level.rows else None
                    self.made[b] = program.add(Kind.MOVE, "dynamic_slice", [self.made[b]], type_in(level, b), row)
        self.run()
        for b in sorted(level.stacks):
            n = self.made[b]
            nothing = program.types[n]._replace(bytes=0)
            program.kept.add(program.add(Kind.MOVE, "dynamic_update_slice", [n], nothing, program.rows[n]))
        for given, handed in level.handed:
            if handed is not None and self.made[handed] != self.made[given]:
                program.handed.append((self.made[given], self.made[handed]))
        program.results.update(self.made[b] for b in level.ends if b in self.made)
        program.apart.update(self.made[b] for b in level.apart if b in self.made)
        program.kept.update(program.results, (self.made[b] for b in level.carried if b in self.made))

    def run(self) -> None:
        """Read the rows, each barrier in its place."""
        level = self.level
        barriers = iter([*enumerate(level.barriers), (-1, Barrier(len(level.rows) + 1, (), ()))])
        number, barrier = next(barriers)
        for i, row in enumerate(level.rows):
            while barrier.at <= i:
                self.barrier(barrier, number == level.middle)
                number, barrier = next(barriers)
            self.row(row)
        while barrier.at <= len(level.rows):
            self.barrier(barrier, number == level.middle)
            number, barrier = next(barriers)

    def barrier(self, barrier: Barrier, is_middle: bool) -> None:
        """Add a barrier, and the names of its operands behind it."""
        program, operands = self.program, [self.made[b] for b in barrier.reads]
        if len(operands) == 1:
            n = program.add(Kind.BARRIER, "barrier", operands, program.types[operands[0]], None)
            program.lies_in[n], self.made[barrier.makes[0]] = operands[0], n
            return
        whole = program.add(Kind.BARRIER, "barrier", operands, Type((), "", 0), None)
        for n, b in zip(operands, barrier.makes, strict=True):
            part = self.made[b] = program.add(Kind.PART, "part", [whole], program.types[n], None)
            program.lies_in[part] = n
            if is_middle:
                program.middle = whole
                program.crossing.append((n, part))

    def row(self, row: Row) -> None:
        """Add the instructions of one row."""
        inner = row.inside
        if row.name in CALLS and inner is not None and inner.outputs is not None:
            self.call(row, inner, inner.outputs)
        elif row.name in LOOPS and inner is not None:
            self.loop(row)
        elif len(row.makes) != 1 or (inner is not None and row.name not in CALLS | UPDATING):
            self.several(row)
        else:
            made = type_in(self.level, row.makes[0])
            self.made[row.makes[0]] = self.one(row, list(self.operands(row, made)), made)

    def operands(self, row: Row, made: Type) -> Iterator[int]:
        """The operands of a row; numbers only where they are repeated over an array, or written over."""
        repeats = row.name in ELEMENTWISE or row.name in ("broadcast_in_dim", DOT)
        for k, b in enumerate(row.operands):
            if b is not None:
                yield self.made[b]
            elif repeats or (row.name in UPDATING and k == 0):
                eqn = equation(row)
                text = "?" if eqn is None else str(eqn.invars[k])
                yield self.program.number(text, made, row)

    def call(self, row: Row, inner: Level, outputs: Sequence[int | None]) -> None:
        """Read a call's rows as if they stood here."""
        reader = _Reader(inner, self.program)
        first = len(inner.inputs) - len(row.operands)  # the program's own constants come first
        for k, b in enumerate(inner.inputs):
            operand = row.operands[k - first] if k >= first else None
            made = type_in(inner, b)
            reader.made[b] = (
                self.made[operand] if operand is not None else self.program.number(f"operand {k}", made, row)
            )
        reader.run()
        for b, output in zip(row.makes, outputs, strict=True):
            made = type_in(self.level, b)
            self.made[b] = self.program.number("result", made, row) if output is None else reader.made[output]

    def several(self, row: Row) -> None:
        """Add an instruction with several results, or with a program inside."""
        program, level = self.program, self.level
        if row.name == "split":
            operands = list(self.operands(row, type_in(level, row.makes[0])))
            for b in row.makes:
                self.made[b] = program.add(Kind.MOVE, "slice", operands, type_in(level, b), row)
            return
        whole = program.add(
            Kind.ALONE, row.name, [self.made[b] for b in row.operands if b is not None], Type((), "", 0), row
        )
        for b in row.makes:
            self.made[b] = program.add(Kind.PART, "part", [whole], type_in(level, b), row)

    def one(self, row: Row, reads: list[int], made: Type) -> int:
        """Add an instruction with one result, or find what stands for it."""
        program, name, eqn = self.program, row.name, equation(row)
        if (same := self.same(row, reads, made)) is not None:
            return same
        if name == DRAWN:
            return self.bits(row, reads, made)
        if name in ELEMENTWISE:
            reads = [self.spread(n, made, row) for n in reads]
        if eqn is not None and name == DOT:
            return layouts.product(program, eqn, reads, made, row)
        if eqn is not None and name == CONVOLUTION:
            return layouts.convolution(program, eqn, reads, made, row)
        if name in UPDATING and kind_of(name) is Kind.ALONE and reads:
            copy = program.copied(reads[0], made, row)
            n = program.add(Kind.ALONE, name, [copy, *reads[1:]], made, row)
            program.lies_in[n] = copy
            return n
        key = _key(row, eqn, reads, made)
        if key is None or key not in program.known:
            n = program.add(kind_of(name), name, reads, made, row)
            program.known[key or ("only", n)] = n
            return n
        return program.known[key]

    def bits(self, row: Row, reads: Sequence[int], made: Type) -> int:
        """Add a loop over the rounds of a threefry key, which carries two arrays of counters, and join these."""
        program = self.program
        waits = [self.made[b] for b in self.level.late.get(row.makes[0], ())]
        reads = [program.behind([*reads, *waits], "")] if waits else reads
        counters = [program.add(Kind.ALONE, "counters", reads, made, row) for _ in range(2)]
        rounds = program.add(Kind.ALONE, ROUNDS, counters, Type((), "", 0), row)
        both = [program.add(Kind.PART, "part", [rounds], made, row) for _ in range(2)]
        program.lies_in.update(zip(both, counters, strict=True))
        return program.add(Kind.POINT, "xor", both, made, row)

    def same(self, row: Row, reads: Sequence[int], made: Type) -> int | None:
        """What stands for a row that computes nothing of its own; None for most."""
        program, name = self.program, row.name
        if not reads:  # all operands are literals
            return program.number("a literal", made, row) if name in _SAME else None
        if name in _SAME or (name == "convert_element_type" and program.types[reads[0]].dtype == made.dtype):
            return reads[0]
        if name == "broadcast_in_dim":
            is_longer = len(reads) == 1 and program.elements[reads[0]] != math.prod(made.shape)
            return None if is_longer and not program.is_number(reads[0]) else reads[0]
        if name == "transpose" and self.readers[row.operands[0]] == 1:
            if not layouts.only_swaps(program, reads[0], _permutation(row)):
                return None
            layouts.swap(program, reads[0])
            return reads[0]
        return self.scattered(row, reads, made) if name in ("add", "add_any") and len(reads) == 2 else None

    def scattered(self, row: Row, reads: Sequence[int], made: Type) -> int | None:
        """A scatter into the other operand of a sum, where one operand was scattered into zeros."""
        program = self.program
        for k in (0, 1):
            n = reads[k]
            is_alone = program.names[n] == "scatter-add" and self.readers[row.operands[k]] == 1
            if is_alone and program.is_number(program.reads[program.reads[n][0]][0]):
                copy = program.copied(reads[1 - k], made, row)
                into = program.add(Kind.ALONE, "scatter-add", [copy, *program.reads[n][1:]], made, row)
                program.lies_in[into] = copy
                return into
        return None

    @property
    def readers(self) -> Counter[int | None]:
        """For each buffer how many read it."""
        if not self.counts:
            for row in self.level.rows:
                self.counts.update(set(row.operands))
            for barrier in self.level.barriers:
                self.counts.update(barrier.reads)
            self.counts.update(self.level.ends)
        return self.counts

    def spread(self, n: int, made: Type, row: Row) -> int:
        """An operand of an elementwise op over the whole array."""
        program = self.program
        if program.elements[n] == math.prod(made.shape) or program.kinds[n] is Kind.NUMBER:
            return n
        short = program.types[n]
        first = len(made.shape) - len(short.shape)
        places = [p for d, p in enumerate(_places(made.shape)[first:]) if short.shape[d] != 1]
        width = short.bytes // max(program.elements[n], 1)
        wide = Type(made.shape, short.dtype, math.prod(made.shape) * width)
        return program.spread(n, places, wide, row)

    def loop(self, row: Row) -> None:
        """Add a loop, whose results lie where their starts lie: a carried value's, or zeros for a stack."""
        program, level, starts = self.program, self.level, dict(row.carries)
        deps = [self.made[b] for b in row.operands if b is not None]
        copies: dict[int, int] = {}
        for b in row.makes:
            start, made = starts.get(b), type_in(level, b)
            if start == STAYS:
                continue
            if start is not None:
                source = self.made[start]
            elif b in level.late:
                source = program.zeros_behind([self.made[w] for w in level.late[b]], made, row)
            else:
                source = program.number("a start" if b in starts else "zeros", made, row)
            copies[b] = program.copied(source, made, row)
            program.shown[copies[b]] = level.types[b]
        whole = program.add(Kind.ALONE, row.name, [*deps, *copies.values()], Type((), "", 0), row)
        for b in row.makes:
            part = self.made[b] = program.add(Kind.PART, "part", [whole], type_in(level, b), row)
            if b in copies:
                program.lies_in[part] = copies[b]
                program.parts.setdefault(whole, []).append((part, copies[b], b in starts))
            else:
                nothing = Type((), "", 0)
                program.lies_in[part] = program.add(Kind.GIVEN, "given", [], nothing, row)


def _places(shape: Sequence[int]) -> list[int]:
    """For each axis how many longer than one come before it."""
    places, seen = [], 0
    for length in shape:
        places.append(seen)
        seen += length != 1
    return places


def _permutation(row: Row) -> Sequence[int]:
    """The permutation of a row that changes the order of axes; none if it is not known."""
    eqn = equation(row)
    return () if eqn is None else eqn.params["permutation"]


def _key(row: Row, eqn: Equation | None, reads: Sequence[int], made: Type) -> Hashable | None:
    """What equal instructions have in common; None for one that is never merged."""
    name, kind = row.name, kind_of(row.name)
    if kind not in (Kind.POINT, Kind.REDUCE, Kind.SPREAD) and name not in ("transpose", "slice"):
        return None
    params = {} if eqn is None else eqn.params
    if name == "broadcast_in_dim" and eqn is not None:
        shape, places = layouts.shapes(eqn)[0], _places(made.shape)
        axes = zip(params["broadcast_dimensions"], shape, strict=True)
        return "spread", reads[0], without_ones(made.shape), tuple(places[d] for d, length in axes if length != 1)
    told = _TOLD_APART.get(name)
    apart = None if told is None else tuple(str(params.get(p)) for p in told)
    return name, tuple(reads), without_ones(made.shape), made.dtype, apart
