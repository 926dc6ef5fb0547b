"""Fit a schedule into a budget by dropping one value at a time.

A greedy search, without a promise: while the peak is over the budget, drop a value that is only waiting there, and run
its op again in front of the next reader. Of the values that may go, the one that takes away most excess for a second
of rerunning goes first. In the end each rerun that turned out needless is taken back, the dearest first. `intervals`
starts from what this finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.fixed_order import Instance, Schedule, copies_of, held_bytes, stages_of


def evict(instance: Instance, budget_bytes: int, copies: int = 2) -> Schedule | None:
    """A schedule with a peak within the budget, None where the search gets stuck.

    Each op runs once or twice; where `copies` allows one run only, once.
    """
    again: dict[int, int] = {}
    over = _excess(instance, again, budget_bytes)
    least = instance.nominal_seconds * 1e-9 or 1.0  # what a rerun that takes nothing is taken to cost
    while over:
        if copies < 2:
            return None
        tried = {
            (op, stage): over - _excess(instance, {**again, op: stage}, budget_bytes)
            for op, stage in dict.fromkeys(_waiting(instance, again))
        }
        best = max(tried, key=lambda move: tried[move] / (instance.seconds[move[0]] + least), default=None)
        if best is None or tried[best] <= 0:
            return None
        op, stage = best
        again[op] = stage
        over -= tried[best]
    for op in sorted(again, key=lambda op: -instance.seconds[op]):
        fewer = {i: stage for i, stage in again.items() if i != op}
        if not _excess(instance, fewer, budget_bytes):
            again = fewer
    return Schedule.of(instance, _runs(instance, again))


def _runs(instance: Instance, again: Mapping[int, int]) -> list[int]:
    """All ops in order, each of `again` once more in front of the op that it is mapped to, or in the end."""
    out: list[int] = []
    for stage in range(len(instance.names) + 1):
        out += sorted(op for op, place in again.items() if place == stage)
        out += [stage] if stage < len(instance.names) else []
    return out


def _excess(instance: Instance, again: Mapping[int, int], budget_bytes: int) -> int:
    """Bytes over the budget, over all places."""
    return sum(max(0, held - budget_bytes) for held in held_bytes(instance, _runs(instance, again)))


def _waiting(instance: Instance, again: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Ops whose values only wait where most is held, each with the stage in which something reads them next."""
    runs = _runs(instance, again)
    held = held_bytes(instance, runs)
    peak = held.index(max(held))
    stages = stages_of(instance, runs)
    for copy in copies_of(instance, runs):
        op = runs[copy.made]
        waits = copy.made < peak < copy.last and copy.value not in instance.reads[runs[peak]]
        if waits and op not in again and op not in instance.once and instance.value_bytes[copy.value]:
            readers = (p for p in range(peak + 1, len(runs)) if copy.value in instance.reads[runs[p]])
            yield op, stages[next(readers, len(runs))]
