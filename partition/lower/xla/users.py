"""Hold who reads each instruction, in the order in which XLA lists them.

The order decides what runs first. A reader that goes leaves its place to the last one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from jointcut.partition.lower.xla.instructions import Program


@dataclass
class Users:
    """The readers `of` each instruction, and whether it is still `alive` on its own, not within others."""

    program: Program
    of: list[list[int]]
    alive: list[bool]
    places: list[dict[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Note the place of each reader."""
        self.places += [{n: i for i, n in enumerate(readers)} for readers in self.of]

    def add(self, v: int, n: int) -> None:
        """Let `n` read `v`."""
        places, readers = self.places[v], self.of[v]
        if n not in places:
            places[n] = len(readers)
            readers.append(n)

    def remove(self, v: int, n: int) -> None:
        """Let `n` read `v` no longer."""
        place = self.places[v].pop(n, None)
        if place is not None:
            last = self.of[v].pop()
            if last != n:
                self.of[v][place] = last
                self.places[v][last] = place

    def replace(self, v: int, old: int, new: int) -> None:
        """Let `new` read `v` in the place of `old`."""
        if new in self.places[v]:
            self.remove(v, old)
        elif old in self.places[v]:
            place = self.places[v].pop(old)
            self.places[v][new] = place
            self.of[v][place] = new

    def move_in(self, n: int, reader: int, reads: dict[int, None], members: Collection[int] = ()) -> None:
        """Compute `n` within a reader, which then reads its operands too; without other readers `n` is gone."""
        mine = self.program.reads[n]
        for v in mine:
            if v not in reads and v not in members:
                reads[v] = None
                self.add(v, reader)
        reads.pop(n, None)
        self.remove(n, reader)
        if not self.of[n] and n not in self.program.kept:
            self.alive[n] = False
            for v in mine:
                self.remove(v, n)
