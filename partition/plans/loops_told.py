"""Say in a line how a plan runs a loop.

A loop runs in segments, keeps another number of checkpoints, or has its steps cut on their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.program.bodies import Nested


def in_segments(loops: Iterable[tuple[int, int, int]]) -> Iterator[str]:
    """A text for each loop that runs in segments, given as in `Plan.loops_in_segments`."""
    for loop, steps, kept in loops:
        yield f"loop {loop} in segments of {counted(steps, 'step')}{f', its last {kept} kept' * bool(kept)}"


def in_checkpoints(loops: Iterable[tuple[int, int]]) -> Iterator[str]:
    """A text for each loop that keeps another number of checkpoints, given as in `Plan.checkpoints`."""
    yield from (f"loop #{op} with {counted(number, 'checkpoint')}" for op, number in loops)


def in_steps(loops: Iterable[Nested]) -> Iterator[str]:
    """A text for each loop whose steps are cut on their own: its checkpoints, and the values that a step keeps."""
    for loop in loops:
        more = f" or up to {loop.most:,}" if loop.most > loop.checkpoints else ""
        fewer = f", fewer{more} under a budget" if loop.is_adjustable else ""
        count = f"at most {counted(loop.checkpoints, 'checkpoint')}{fewer}, each of"
        again = f" and runs {counted(len(loop.plan.recomputed), 'op')} again" if loop.plan.recomputed else ""
        kept = f"a step keeps {human_bytes(loop.plan.bytes_saved)} for its own backward{again}"
        trips = "trips unknown" if loop.trips is None else f"expected trips {loop.trips:,}"
        yield f"{loop.name}: {count} {human_bytes(loop.checkpoint_bytes)}; {kept}; {trips}"
