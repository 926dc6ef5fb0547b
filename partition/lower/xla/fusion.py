"""Let loops over elements take what is cheap to compute again.

A loop takes an operand where it can be computed element by element. If other ops read the operand too, it is computed
again for each, unless it is dear, or reads several arrays and must be written out for one of them anyway.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from jointcut.partition.lower.xla.instructions import DEAR, FUSIBLE, Kind, Program, without_ones
from jointcut.partition.lower.xla.layouts import flattens
from jointcut.partition.lower.xla.library import Kernel
from jointcut.partition.lower.xla.users import Users

#: A loop computes an operand at most so often for one element.
_MOST_AGAIN = 15

#: Ops whose code branches. A loop takes one only where it is the one reader, and computes it once for an element; but
#: the first operand that it takes is not looked at.
_BRANCHING = frozenset({"concatenate", "dynamic_update_slice"})

#: An array put together along its last axis is written by itself, if it has more bytes than these, whole and in a row.
_LEAST_JOINED, _LEAST_ROW, _MOST_JOINED = 2048, 64, 8


#: Of a longer program only the ways from one instruction straight to the next are looked at.
_MOST_LOOKED_AT = 20_000


@dataclass(frozen=True)
class Fused:
    """What runs: the instructions that write a buffer, in order, what each reads, and what each loop computes."""

    steps: list[int]
    reads: dict[int, list[int]]
    loops: dict[int, list[int]]
    kernels: Mapping[int, Kernel]


def fused(program: Program, users: Users, kernels: Mapping[int, Kernel]) -> Fused:
    """Fuse what the library has not taken."""
    return _Fusion(program, users, kernels).run()


class _Fusion:
    """One level while it is fused."""

    def __init__(self, program: Program, users: Users, kernels: Mapping[int, Kernel]) -> None:
        self.program, self.users, self.kernels = program, users, kernels
        count = range(len(program))
        alive = users.alive
        self.reads = [
            [] if not alive[n] else list(kernels[n].reads if n in kernels else dict.fromkeys(program.reads[n]))
            for n in count
        ]
        kinds = program.kinds
        self.fusible = [
            alive[n] and n not in kernels and kinds[n] in FUSIBLE and not _is_joined(program, n) for n in count
        ]
        self.dear = [self.fusible[n] and _is_dear(program, n) for n in count]
        self.branching = [self.fusible[n] and _is_branching(program, n) for n in count]
        self.once = self.written_once()

    def run(self) -> Fused:
        """Let each loop take its operands, from the last loop to the first."""
        program, alive, loops = self.program, self.users.alive, {}
        for n in range(len(program) - 1, -1, -1):
            if self.fusible[n] and alive[n]:
                if not self.users.of[n] and n not in program.kept:
                    alive[n] = False
                else:
                    loops[n], self.reads[n] = _Loop(self, n).grown()
        steps = [n for n in range(len(program)) if alive[n]]
        return Fused(steps, {n: self.reads[n] for n in steps}, loops, self.kernels)

    def readers(self, n: int) -> int:
        """How many read an instruction, the caller included."""
        return len(self.users.of[n]) + (n in self.program.kept)

    # -------------------------------------------------------------------------------------- what is computed once

    def written_once(self) -> set[int]:
        """Instructions on several arrays that have several readers, one of which cannot compute them itself.

        A product that flattens its operand reads it through a reshape, which can.
        """
        program, kept = self.program, self.program.kept
        found: set[int] = set()
        several = [n for n in range(len(program)) if self.fusible[n] and self.readers(n) > 1 and self.reads_several(n)]
        before = self.before() if several else []
        for n in reversed(several):
            known: dict[int, bool] = {n: True}
            takers = (r for r in self.users.of[n] if not flattens(program, r, n))
            if n in kept or not all(self.reaches(n, reader, found, before, known) for reader in takers):
                found.add(n)
        return found

    def before(self) -> list[int]:
        """For each instruction a bit for each one that it depends on; none in a long program."""
        if len(self.reads) > _MOST_LOOKED_AT:
            return [0] * len(self.reads)
        before: list[int] = []
        for reads in self.reads:
            bits = 0
            for v in reads:
                bits |= before[v] | (1 << v)
            before.append(bits)
        return before

    def reads_several(self, n: int) -> bool:
        """Whether an instruction reads several arrays as large as its result, and more elements than it has."""
        program = self.program
        rank = len(without_ones(program.types[n].shape))
        large = 0
        for v in program.reads[n]:
            is_made = program.kinds[v] is Kind.SPREAD or program.names[v] == "iota"
            large += not is_made and len(without_ones(program.types[v].shape)) >= rank
        return large > 1 and sum(program.elements[v] for v in self.reads[n]) > program.elements[n]

    def reaches(self, n: int, reader: int, once: set[int], before: list[int], known: dict[int, bool]) -> bool:
        """Whether an instruction can be computed within a reader, on all ways from one to the other."""
        if reader not in known:
            known[reader] = self.fusible[reader] and all(
                v not in once and self.can_take(v, reader) and self.reaches(n, v, once, before, known)
                for v in self.reads[reader]
                if v == n or before[v] >> n & 1
            )
        return known[reader]

    def can_take(self, v: int, reader: int) -> bool:
        """Whether a reader could compute an operand by itself, before anything is fused."""
        if not self.fusible[v]:
            return False
        return not self.dear[v] or (self.program.kinds[reader] is not Kind.SPREAD and self.readers(v) == 1)


class _Loop:
    """A loop over elements while it takes operands, the last one first.

    `indices` are for each instruction those whose index it is computed at, and `times` how often each is computed.
    `repeated` are operands that the loop reads more than once for an element, and `read_by` is how many members read
    each operand.
    """

    def __init__(self, fusion: _Fusion, result: int) -> None:
        self.fusion, self.program, self.result = fusion, fusion.program, result
        self.members = [result]
        self.reads = dict.fromkeys(fusion.reads[result])
        self.indices: dict[int, frozenset[int]] = {result: frozenset([-1])}
        self.times = {-1: 1}
        self.heap: list[int] = []
        self.read_by: dict[int, int] = {}
        self.repeated = set[int]()
        self.open(result)

    def open(self, n: int) -> None:
        """Put the operands of a member in the queue."""
        elements, indices, reads = self.program.elements, self.indices, self.fusion.reads[n]
        if n in self.repeated or self.program.kinds[n] is Kind.SPREAD:
            self.repeated.update(reads)
        self.times[n] = self.computed(n)
        size, mine = elements[n], indices[n]
        for v in reads:
            self.read_by[v] = self.read_by.get(v, 0) + 1
            at = mine if elements[v] == size else frozenset([n])
            if v not in indices:
                indices[v] = at
                heapq.heappush(self.heap, -v)
            elif indices[v] is not at:
                indices[v] |= at

    def computed(self, n: int) -> int:
        """How often an instruction is computed for one element."""
        times, indices = self.times, self.indices[n]
        if len(indices) == 1:  # nearly always
            (at,) = indices
            return times[at]
        return sum(times[at] for at in indices)

    def grown(self) -> tuple[list[int], list[int]]:
        """The members, and what they read."""
        left: list[int] = []
        while self.heap:
            v = -heapq.heappop(self.heap)
            if not self.takes(v):
                left.append(v)
                continue
            self.members.append(v)
            self.fusion.users.move_in(v, self.result, self.reads)
            self.open(v)
        return self.members, left

    def takes(self, v: int) -> bool:
        """Whether the loop computes an operand itself."""
        fusion = self.fusion
        if not fusion.fusible[v] or v in fusion.once:
            return False
        if fusion.dear[v] and (v in self.repeated or fusion.readers(v) > 1):
            return False
        if self.program.kinds[v] is Kind.SPREAD:
            return True
        if fusion.branching[v] and len(self.members) > 1:
            return self.computed(v) == 1 and self.read_by[v] + fusion.readers(v) == 2
        return self.computed(v) <= _MOST_AGAIN


def _is_joined(program: Program, n: int) -> bool:
    """Whether arrays are put together so that copying beats computing: many of them, or along the last axis."""
    if program.names[n] != "concatenate":
        return False
    made, last = program.types[n], len(program.types[n].shape) - 1
    row = made.shape[-1] * made.bytes // max(program.elements[n], 1)
    is_last = last > 0 and program.params(n).get("dimension") == last
    return len(program.reads[n]) > _MOST_JOINED or (is_last and row >= _LEAST_ROW and made.bytes >= _LEAST_JOINED)


def _is_branching(program: Program, n: int) -> bool:
    """Whether the code of an instruction branches; a padding that only cuts off is a slice."""
    if program.names[n] == "pad":
        return any(length > 0 for axis in program.params(n).get("padding_config", ()) for length in axis)
    return program.names[n] in _BRANCHING or program.kinds[n] is Kind.REDUCE


def _is_dear(program: Program, n: int) -> bool:
    name = program.names[n]
    if name in ("div", "rem") and "int" in program.types[n].dtype:
        return False
    return name in DEAR or program.kinds[n] is Kind.REDUCE or (name == "integer_pow" and program.params(n)["y"] < 0)
