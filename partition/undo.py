"""Say what one stage takes while the backward undoes it.

What is not saved is computed again just before it is read, and lies there until it is read no more: by the rules of
`memory`, but on the graph, so that thousands of stages are tried without writing a program for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jointcut.partition.graph import LITERAL, STEP, TOP
from jointcut.partition.memory import FUSED_AWAY, READS_FUSED, RENAMING
from jointcut.partition.order import MOST_RUNS, NEAR
from jointcut.partition.policy import CALLS, CHEAP, DEAR, ELEMENTWISE, REDUCTIONS, light
from jointcut.partition.stages import Row, Stage

_NEVER = -1


@dataclass(frozen=True)
class Figures:
    """What one stage takes if some of its values are saved.

    `bytes_saved` are alive until it is undone, `seconds` what is computed again, and `peak_bytes` the most that is
    alive while it is undone, what it has saved included. Later stages of its piece are undone before, and may need
    something of it: then it leaves `held_bytes` alive, and `passed` are values of earlier stages that this takes.
    `reads` are all that it takes of earlier stages.
    """

    saved: frozenset[int]
    bytes_saved: int
    seconds: float
    held_bytes: int
    peak_bytes: int
    passed: frozenset[int]
    reads: frozenset[int]


def figures(row: Row, stage: Stage, inside: frozenset[int], outer: frozenset[int], inner: frozenset[int]) -> Figures:
    """What a stage takes if its values `inside` and `outer` are saved.

    Later stages of its piece compute from those `inner`, those after the piece from the `outer` ones. What the backward
    has no use for is not saved, except of the outer ones.
    """
    saved, ops, reads = _walk(row, stage, (*stage.needs, *inner), inside, outer)
    _, _, passed = _walk(row, stage, inner, inside, outer)
    held, peak = _Replay(row, stage, saved).figures(inner)
    seconds = sum(row.seconds[i] for i in sorted(ops))
    return Figures(saved, sum(row.prices[v] for v in saved), seconds, held, peak, passed, reads)


def _walk(
    row: Row, stage: Stage, wanted: Iterable[int], inside: frozenset[int], outer: frozenset[int]
) -> tuple[frozenset[int], set[int], frozenset[int]]:
    """For some values of a stage: what is saved, the ops that run again, and what these read of earlier stages."""
    saved, ops, seen, reads = set(outer), set[int](), set(outer), set[int]()
    stack = list(wanted)
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        is_free = not row.prices[v] and not row.verdicts[v].not_saved
        if row.made_in[v] != stage.number:
            reads.update(row.places.roots[v])
        elif v in inside or v in row.places.must_save or is_free:
            saved.add(v)
        elif (op := row.graph.maker_of(v)) is not None:
            ops.add(op.id)
            stack.extend(op.inputs)
    return frozenset(saved), ops, frozenset(reads)


@dataclass(frozen=True)
class _Run:
    """One op at its turn, with the buffers that it reads and makes."""

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]


class _Replay:
    """The backward of a stage, op by op, with what it computes again; as `memory`, but on the graph."""

    def __init__(self, row: Row, stage: Stage, saved: frozenset[int]) -> None:
        self.row, self.stage, self.graph, self.saved = row, stage, row.graph, saved
        self.now: dict[int, int] = {}  # from a value to the buffer that holds it
        self.sizes: list[int] = []
        self.runs: list[_Run] = []
        self.again: dict[int, int] = {}  # from a value that was computed again to the heavy ops before
        self.times: Counter[int] = Counter()
        self.heavy = 0
        for v in saved:
            self.now[v] = self.buffer(self.row.prices[v])
        for v in stage.late:
            self.now[v] = self.buffer(0 if v in self.row.ends else self.graph.values[v].bytes)
        self.given = len(self.sizes)

    def buffer(self, size: int) -> int:
        """A new buffer."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def figures(self, inner: frozenset[int]) -> tuple[int, int]:
        """Bytes held after what later stages read is there, and the most at once."""
        self.compute(inner)
        handed = {self.now[v] for v in inner if v in self.now}
        middle = len(self.runs)
        self.now = {v: b for v, b in self.now.items() if v not in self.again or not self.is_light(v)}
        for i in self.stage.backward:
            self.compute(self.stage.reads.get(i, {}))
            self.run(i)
        last, fused = self.lives(handed, middle)
        return self.peak(last, fused, middle)

    def is_light(self, v: int) -> bool:
        """Whether a value may be computed several times."""
        op = self.graph.maker_of(v)
        return op is not None and light(self.graph, op)

    def sources(self, values: Iterable[int]) -> Iterator[int]:
        """What must be at hand at the top of the program; a loop computes the rest in its steps."""
        seen: set[int] = set()
        stack = list(values)
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            value = self.graph.values[v]
            if value.loop == TOP or v in self.saved:
                yield v
            elif self.row.made_in[v] == self.stage.number and value.maker is not None:
                stack.extend(self.graph.ops[value.maker].inputs)

    def compute(self, values: Iterable[int]) -> None:
        """Run again what some values are computed by, if they are not at hand."""
        ops: set[int] = set()
        seen: set[int] = set()
        stack = list(self.sources(values))
        while stack:
            v = stack.pop()
            if v in seen or v in self.saved or self.row.made_in[v] != self.stage.number:
                continue
            if v in self.now and not self.is_dropped(v):
                continue
            seen.add(v)
            op = self.graph.maker_of(v)
            if op is not None and op.name not in (STEP, LITERAL):
                ops.add(op.id)
                stack.extend(self.sources(op.inputs))
        for i in sorted(ops):
            self.run(i)
            self.times[i] += 1
            self.again.update(dict.fromkeys(self.graph.ops[i].outputs, self.heavy))

    def is_dropped(self, v: int) -> bool:
        """Whether a value was computed again long ago, and is once more (`schedule`)."""
        op = self.graph.maker_of(v)
        if op is None or self.heavy - self.again.get(v, self.heavy) <= NEAR or not self.is_light(v):
            return False
        return self.times[op.id] < MOST_RUNS

    def run(self, i: int) -> None:
        """Let an op run next."""
        op = self.graph.ops[i]
        is_late = i in self.row.facts.backward
        values = self.sources(self.stage.reads.get(i, {}) if is_late else op.inputs)
        reads = tuple(dict.fromkeys(self.now[v] for v in values if v in self.now))
        if op.name in RENAMING:
            self.now.update((v, reads[0]) for v in op.outputs[:1] if reads)
            return
        makes = []
        for v in op.outputs:
            if self.graph.values[v].loop == TOP:
                self.now[v] = self.buffer(0 if v in self.row.ends else self.graph.values[v].bytes)
                makes.append(self.now[v])
        self.runs.append(_Run(op.name, reads, tuple(makes)))
        self.heavy += is_late and op.name not in CHEAP | REDUCTIONS

    def lives(self, handed: set[int], middle: int) -> tuple[list[int], set[int]]:
        """For each buffer the last run that reads it, itself or through fused ones, which have none."""
        readers: list[list[str]] = [[] for _ in self.sizes]
        for run in self.runs:
            for b in run.reads:
                readers[b].append(run.name)
        passing = {self.now[v] for v in self.stage.passing if v in self.now}
        last = [len(self.runs) if b in passing else middle if b in handed else _NEVER for b in range(len(self.sizes))]
        fused: set[int] = set()
        for r in range(len(self.runs) - 1, -1, -1):
            run, when = self.runs[r], r
            if len(run.makes) == 1 and run.makes[0] not in handed | passing and _is_fused(run, readers[run.makes[0]]):
                fused.add(run.makes[0])
                when = max(r, last[run.makes[0]])
            for b in run.reads:
                last[b] = max(last[b], when)
        return last, fused

    def peak(self, last: Sequence[int], fused: set[int], middle: int) -> tuple[int, int]:
        """Bytes that the first runs leave behind, and the most at once."""
        sizes = [0 if b in fused or last[b] == _NEVER else size for b, size in enumerate(self.sizes)]
        ending: list[list[int]] = [[] for _ in range(len(self.runs) + 1)]
        for b, r in enumerate(last):
            ending[r].append(b)  # what is never read counts nothing, wherever it ends
        now = most = sum(sizes[: self.given])
        for r, run in enumerate(self.runs):
            fresh = sum(sizes[b] for b in run.makes)
            dying = [sizes[b] for b in ending[r]]
            in_place = len(run.makes) == 1 and run.name in ELEMENTWISE | CALLS and fresh in dying
            now += fresh
            most = max(most, now - fresh * in_place)
            now -= sum(dying)
        made = [b for run in self.runs[:middle] for b in run.makes]
        return sum(sizes[b] for b in made if last[b] >= middle), most


def _is_fused(run: _Run, readers: Sequence[str]) -> bool:
    """Whether XLA computes a result within what reads it."""
    if run.name not in FUSED_AWAY or ((run.name in DEAR or run.name in CALLS) and len(readers) > 1):
        return False
    return all(name in READS_FUSED for name in readers)
