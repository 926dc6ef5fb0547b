"""Count the bytes of temporaries alive at each instruction that a compiled program executes."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate

from jointcut.aot.report.liveness import HeldValue, Liveness


def live_bytes(found: Liveness) -> list[int]:
    """Bytes in use at each executed instruction, in order; a loop's body counts as often as it runs."""
    per_time = occupied(found.values, len(found.order.instructions))
    return [per_time[time] for time in found.executed]


def occupied(values: list[HeldValue], times: int) -> list[int]:
    """Bytes in use at each time; a byte that several values share counts once."""
    bounds = sorted({edge for v in values for edge in (v.offset, v.offset + v.size)})
    rank = {bound: i for i, bound in enumerate(bounds)}
    intervals: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for value in values:
        for slot in range(rank[value.offset], rank[value.offset + value.size]):
            intervals[slot].add((value.start, value.end))
    change = [0] * (times + 2)
    for slot, lives in intervals.items():
        for start, end in merged(lives):
            change[start] += bounds[slot + 1] - bounds[slot]
            change[end + 1] -= bounds[slot + 1] - bounds[slot]
    return list(accumulate(change[:times]))


def merged(intervals: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Closed intervals joined where they overlap."""
    ordered = sorted(intervals)
    low, high = ordered[0]
    for start, end in ordered[1:]:
        if start > high:
            yield low, high
            low = start
        high = max(high, end)
    yield low, high
