"""Say in which order instructions run, and from when to when each buffer lives.

XLA:CPU runs what is ready first come, first served, so that kernels can overlap: what depends on little runs early,
and zeros that a loop fills are there from the start. Buffers of the level's results hold other arrays before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from jointcut.partition.lower.xla.fusion import Fused
from jointcut.partition.lower.xla.instructions import Kind, Program
from jointcut.partition.lower.xla.users import Users

#: Of the peak: smaller arrays are not looked at when buffers of results are shared out.
_SMALL = 300

#: The readers of values, or of buffers.
Readers = defaultdict[int, list[int]]


def _start(life: Life) -> int:
    return life.first


class Life(NamedTuple):
    """An instruction's buffer, the step that writes it and the last one that reads it."""

    instruction: int
    first: int
    last: int


@dataclass
class Sequence:
    """The instructions that run, in order; `reading` is what `readers` knows already."""

    program: Program
    fused: Fused
    users: Users
    steps: list[int] = field(default_factory=list)
    reading: dict[int, tuple[Readers, Readers]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Run each instruction once all that it reads has run."""
        waits = {n: len(set(reads)) for n, reads in self.fused.reads.items()}
        ready = deque(n for n in self.fused.steps if not waits[n])
        while ready:
            n = ready.popleft()
            self.steps.append(n)
            for reader in self.users.of[n]:
                waits[reader] -= 1
                if not waits[reader]:
                    ready.append(reader)
        assert len(self.steps) == len(self.fused.steps), "every instruction runs"

    @cached_property
    def places(self) -> dict[int, int]:
        """The place of each instruction."""
        return {n: i for i, n in enumerate(self.steps)}

    @cached_property
    def lives(self) -> list[Life]:
        """The buffers that take memory of their own."""
        program, last = self.program, dict[int, int]()
        for i, n in enumerate(self.steps):
            for v in self.fused.reads[n]:
                last[program.buffer(v)] = i
        results = {b for n in program.results for b in (n, program.buffer(n))}
        kept, free = {program.buffer(n) for n in program.kept}, self.handed | results
        found = []
        for n in self.steps:
            is_given = program.kinds[n] is Kind.GIVEN or n in program.lies_in
            if not is_given and program.types[n].bytes and n not in free:
                first = self.written(n)
                found.append(Life(n, first, len(self.steps) if n in kept else max(last.get(n, first), first)))
        return self.beside(found, {program.buffer(n) for n in results} - {program.buffer(n) for n in program.apart})

    def written(self, n: int) -> int:
        """The step that writes an instruction's buffer."""
        is_part = self.program.kinds[n] is Kind.PART
        return self.places[self.program.reads[n][0] if is_part else n]

    @cached_property
    def handed(self) -> set[int]:
        """What a loop's step writes where the carried value lay that it was given, which is read by then."""
        program, places, found = self.program, self.places, set[int]()
        for given, handed in program.handed:
            b = program.buffer(handed)
            if b in places and program.kinds[b] is not Kind.GIVEN:
                read = max((places[n] for n in self.users.of[given] if n in places), default=-1)
                if read < places[b] or (read == places[b] and b in self.fused.loops):
                    found.add(b)
        return found

    # ------------------------------------------------------------------------------------- buffers of the results

    def beside(self, lives: list[Life], results: set[int]) -> list[Life]:
        """The buffers that do not fit into one of a result while that is not written yet, the largest first."""
        program, end = self.program, len(self.steps)
        change = [0] * (end + 2)
        for n, first, last in lives:
            change[first] += program.types[n].bytes
            change[last + 1] -= program.types[n].bytes
        least = max(accumulate(change)) / _SMALL
        owned = [n for n in results if n in self.places and program.kinds[n] is not Kind.GIVEN]
        large = [(program.types[n].bytes, -self.written(n), n) for n in owned if program.types[n].bytes >= least]
        rooms = [(size, [Life(n, -place, end)]) for size, place, n in sorted(large)]
        left: list[Life] = []
        for life in sorted(lives, key=lambda life: (-program.types[life.instruction].bytes, life.first)):
            size = program.types[life.instruction].bytes
            room = next((taken for most, taken in rooms if most >= size >= least and self.fits(life, taken)), None)
            if room is None:
                left.append(life)
            else:
                insort(room, life, key=_start)
        return left

    def fits(self, life: Life, taken: list[Life]) -> bool:
        """Whether a buffer lives beside others, which are in order, or one is written over the other."""
        at = bisect_left(taken, life.first, key=_start)
        return all(
            life.last < other.first
            or life.first > other.last
            or (life.last == other.first and self.is_over(other.instruction, life.instruction))
            or (life.first == other.last and self.is_over(life.instruction, other.instruction))
            for other in taken[max(at - 2, 0) : at + 2]
        )

    def is_over(self, n: int, operand: int) -> bool:
        """Whether an instruction may be written over an operand of its size: only if it reads each place just there.

        The compiler looks at operands that an instruction reads itself, not behind a barrier or in another shape.
        """
        program, loop = self.program, self.fused.loops.get(n)
        if loop is None or operand in program.shown or program.types[n].bytes != program.types[operand].bytes:
            return False  # a loop's own buffers are left alone
        if operand not in self.fused.reads[n] or program.is_flat(operand):
            return False
        readers_of, readers_of_buffer = self.readers(n)
        readers = list(readers_of_buffer.get(operand, ()))
        seen = set(readers)
        while readers:
            m = readers.pop()
            if program.kinds[m] is not Kind.POINT:
                return False
            fresh = [k for k in readers_of.get(m, ()) if k not in seen]
            readers += fresh
            seen.update(fresh)
        return True

    def readers(self, n: int) -> tuple[Readers, Readers]:
        """The members of an instruction's loop that read each value, and each buffer."""
        if n not in self.reading:
            readers_of, readers_of_buffer = self.reading[n] = defaultdict(list), defaultdict(list)
            for m in self.fused.loops[n]:
                for v in self.program.reads[m]:
                    readers_of[v].append(m)
                    readers_of_buffer[self.program.buffer(v)].append(m)
        return self.reading[n]
