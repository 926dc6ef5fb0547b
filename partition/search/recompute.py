"""Count the bytes and seconds that one stretch takes while the backward undoes it.

A value that is not saved is computed again just before it is read, and is alive until its last read, by the rules of
`order` and `memory`. Nothing is scheduled, so that thousands of stretches can be tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jointcut.partition.lower.memory import levels
from jointcut.partition.lower.memory.levels import Level
from jointcut.partition.lower.order import Progress
from jointcut.partition.program.graph import LITERAL, OPEN, SHARDS, STEP, TOP
from jointcut.partition.program.primitives import RENAMING
from jointcut.partition.program.sides import reached
from jointcut.partition.search.stretches import Stretch, Stretches


@dataclass(frozen=True)
class Figures:
    """The figures of one stretch if some of its values are saved.

    Later stretches of its piece are undone before it, and may need values of it.

    Attributes:
        bytes_saved: the bytes that are alive until it is undone.
        seconds: the time of the ops that run again.
        peak_bytes: the most bytes alive while it is undone, its saved values included.
        held_bytes: the bytes that computing values for later stretches leaves alive.
        passed: the values of earlier stretches that computing values for later stretches reads.
        reads: all values of earlier stretches that it reads.
        dropped: the values that are computed for later stretches, and once more when it is undone.
    """

    saved: frozenset[int]
    bytes_saved: int
    seconds: float
    held_bytes: int
    peak_bytes: int
    passed: frozenset[int]
    reads: frozenset[int]
    dropped: frozenset[int] = frozenset()


def figures(
    row: Stretches,
    stretch: Stretch,
    inside: frozenset[int],
    outer: frozenset[int],
    inner: frozenset[int],
    drops: bool = False,
) -> Figures:
    """Return the figures of a stretch if its values `inside` and `outer` are saved.

    Later stretches of its piece compute from its values `inner`, stretches after the piece from its values `outer`. A
    value `inside` that the backward does not need is not saved. If it `drops`, it keeps only the values `inner` for
    later stretches, and computes all others once more when it is undone.
    """
    saved, ops, reads = _walk(row, stretch, (*stretch.needs, *inner), inside, outer)
    _, passing, passed = _walk(row, stretch, inner, inside, outer)
    twice = passing & _walk(row, stretch, stretch.needs, inside, outer | inner)[1] if drops else set[int]()
    dropped = frozenset(_droppable(row, twice)) - inner
    held, peak = _Replay(row, stretch, saved, dropped).figures(inner)
    seconds = sum(row.problem.weighed[i] for i in [*sorted(ops), *sorted(twice)])
    return Figures(saved, sum(row.problem.prices[v] for v in saved), seconds, held, peak, passed, reads, dropped)


def _droppable(row: Stretches, ops: Iterable[int]) -> Iterator[int]:
    """The results of ops that may run any number of times; a loop runs again only once."""
    graph = row.graph
    for op in (graph.ops[i] for i in ops):
        if graph.loop_of(op) in graph.once and op.name not in OPEN:
            yield from op.outputs


def _walk(
    row: Stretches, stretch: Stretch, wanted: Iterable[int], inside: frozenset[int], outer: frozenset[int]
) -> tuple[frozenset[int], set[int], frozenset[int]]:
    """For some values of a stretch: the saved values, the ops that run again, and the values of earlier stretches."""
    saved, ops, seen, reads = set(outer), set[int](), set(outer), set[int]()
    stack = list(wanted)
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        is_free = not row.problem.prices[v] and not row.problem.verdicts[v].not_saved
        if row.made_in[v] != stretch.number:
            reads.update(row.places.roots[v])
        elif v in inside or v in row.places.must_save or is_free:
            saved.add(v)
        elif (op := row.graph.maker_of(v)) is not None:
            ops.add(op.id)
            stack.extend(op.inputs)
    return frozenset(saved), ops, frozenset(reads)


class _Replay:
    """The backward of a stretch as rows of `memory`, op by op, with the ops that run again."""

    def __init__(self, row: Stretches, stretch: Stretch, saved: frozenset[int], dropped: frozenset[int]) -> None:
        self.row, self.stretch, self.graph, self.saved = row, stretch, row.graph, saved
        self.level, self.progress = Level(), Progress(TOP, dropped=dropped)
        self.now = {v: self.level.buffer(row.problem.prices[v], None) for v in saved}  # the buffer that holds a value
        self.now.update((v, self.buffer(v)) for v in stretch.late)
        self.level.rows.append(levels.Row("given", (), tuple(self.now.values()), None, None, None))

    def buffer(self, v: int) -> int:
        """A new buffer for a value; results lie with the caller."""
        return self.level.buffer(0 if v in self.row.ends else self.graph.values[v].bytes, None)

    def figures(self, inner: frozenset[int]) -> tuple[int, int]:
        """The bytes held once the values for later stretches are computed, and the most bytes alive at once."""
        self.compute(inner)
        middle = len(self.level.rows)
        handed = dict.fromkeys(self.now[v] for v in inner if v in self.now)
        self.level.rows.append(levels.Row("hand", tuple(handed), (), None, None, None))
        progress = self.progress
        gone = {v for v in progress.made_at if progress.may_run_again(self.graph, v)}
        self.now = {v: b for v, b in self.now.items() if v not in gone}
        for i in self.stretch.backward:
            if reads := self.stretch.reads.get(i):
                self.compute(reads)
            self.run(i)
        self.level.carried.update(self.now[v] for v in self.stretch.passing if v in self.now)
        last, counted = self.level.lives
        made = (b for row in self.level.rows[1:middle] for b in row.makes)
        # Later stretches that drop their values compute them from these once more.
        kept = handed if progress.dropped else ()
        held = (b for b in made if counted[b] and (last[b] >= middle or b in kept))
        return sum(map(self.level.sizes.__getitem__, held)), self.level.peak[0]

    def sources(self, values: Iterable[int]) -> Iterable[int]:
        """The values that must be at hand where ops run once; a loop computes the others in its steps."""
        return values if len(self.graph.regions) == 1 else self.outside(values)

    def outside(self, values: Iterable[int]) -> list[int]:
        """The values of ops that run once from which some values are computed; the whole for a device's part."""
        found: list[int] = []

        def further(v: int) -> Iterable[int]:
            maker, is_once = self.graph.maker_of(v), self.graph.values[v].loop in self.graph.once
            is_part = is_once and maker is not None and maker.name == STEP
            if v in self.saved or (is_once and not is_part):
                found.append(v)
                return ()
            return self.graph.made_from(v) if is_part or self.row.made_in[v] == self.stretch.number else ()

        reached(values, further)
        return found

    def compute(self, values: Iterable[int]) -> None:
        """Run again the ops that compute some values, where these are not at hand."""
        made_in, number = self.row.made_in, self.stretch.number
        ops: set[int] = set()
        seen: set[int] = set()
        stack = list(self.sources(values))
        while stack:
            v = stack.pop()
            if v in seen or v in self.saved or made_in[v] != number:
                continue
            if v in self.now and not self.progress.is_dropped(self.graph, v):
                continue
            seen.add(v)
            op = self.graph.maker_of(v)
            if op is not None and op.name not in (STEP, LITERAL):
                ops.add(op.id)
                stack.extend(self.sources(op.inputs))
        for i in sorted(ops):
            self.run(i)
            self.progress.note_again(self.graph.ops[i])

    def run(self, i: int) -> None:
        """Let an op run next."""
        op = self.graph.ops[i]
        is_late = i in self.row.problem.sides.backward
        values = self.sources(self.stretch.reads.get(i, {}) if is_late else op.inputs)
        now = self.now
        reads = tuple(dict.fromkeys([now[v] for v in values if v in now]))
        if op.name in RENAMING:
            now.update((v, reads[0]) for v in op.outputs[:1] if reads)
            return
        if op.name == SHARDS:
            pairs = zip(op.outputs, self.graph.bodies[i].ends[0], strict=True)
            now.update((v, now[end]) for v, end in pairs if end in now)
            return
        makes = []
        for v in op.outputs:
            if self.graph.values[v].loop in self.graph.once:
                now[v] = self.buffer(v)
                makes.append(now[v])
        self.level.rows.append(levels.Row(op.name, reads, tuple(makes), None, None, op))
        if is_late:
            self.progress.note(op)
