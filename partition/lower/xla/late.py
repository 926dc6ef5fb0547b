"""Say which stacks of loops wait, and for what, as `nesting.stacks` writes them."""

from __future__ import annotations

from jointcut.partition.lower.memory import Level
from jointcut.partition.program.bodies import SCAN


def note(level: Level, first: int = 0, is_region: bool = False) -> None:
    """Note the stacks that wait among the rows of a level from the `first` on: those of a backward, or of a region."""
    made = set(level.inputs) if is_region else set[int]()
    made.update(b for barrier in level.barriers if barrier.at >= first for b in barrier.makes)
    left = set[int]() if is_region else level.ends
    numbers = set[int]()
    for row in level.rows[first:]:
        waited = tuple(b for b in dict.fromkeys(row.operands) if b in made)
        if row.name == SCAN and row.trips > 1 and waited:
            carried = {b for b, _ in row.carries}
            level.late.update((b, waited) for b in row.makes if b not in carried and b not in left)
        (made if not numbers.issuperset(row.reads) else numbers).update(row.makes)
