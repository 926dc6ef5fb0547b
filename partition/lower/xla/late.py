"""Say what waits, and for what: stacks as `nesting.stacks` writes them, random numbers as `habits.draws` does."""

from __future__ import annotations

from collections.abc import Set

from jointcut.partition.lower.memory import Level
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.primitives import DRAWN, REORDERING
from jointcut.partition.rewrite.habits.draws import Last


def note(level: Level, forward: int) -> None:
    """Note what waits in a program whose first `forward` rows are the forward's."""
    names = {row.name for row in level.rows}
    if DRAWN in names:
        _draws(level, 0, forward)
        _draws(level, forward, len(level.rows))
    if SCAN in names:
        made = {b for barrier in level.barriers if barrier.at >= forward for b in barrier.makes}
        _stacks(level, forward, made, level.ends)


def note_region(level: Level) -> None:
    """Note the stacks that wait in a region under `jax.checkpoint`, which runs again as a whole."""
    _stacks(level, 0, set(level.inputs), frozenset())


def _stacks(level: Level, first: int, made: set[int], left: Set[int]) -> None:
    """Note stacks that wait for what is `made` from a row on, but for those that are `left` out."""
    numbers, moved = set[int](), set[int]()
    for row in level.rows[first:]:
        waited = tuple(b for b in dict.fromkeys(row.operands) if b in made)
        waited = tuple(b for b in waited if b not in moved) or waited
        moved.update(row.makes if row.name in REORDERING else ())
        if row.name == SCAN and row.trips > 1 and waited:
            carried = {b for b, _ in row.carries}
            level.late.update((b, waited) for b in row.makes if b not in carried and b not in left)
        (made if not numbers.issuperset(row.reads) else numbers).update(row.makes)


def _draws(level: Level, first: int, end: int) -> None:
    """Note the random bits of one half, whose keys wait for what the last product before them reads."""
    last = Last[int]()
    for row in level.rows[first:end]:
        operands = [None if b is None else level.same.get(b, b) for b in row.operands]
        if row.name == DRAWN and last.read is not None:
            level.late[row.makes[0]] = (last.read,)
        last.follow(row.name, operands, row.makes)
