"""Replay a schedule: count the bytes of both halves as one program, without writing them.

Each step becomes a row of `memory`, in which the forward's rows come first. A loop in segments is counted as what it
is: a loop over segments, each with its rerun and its part of the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from typing import Any

from jointcut.partition.lower.follow import Followed, lengths_between
from jointcut.partition.lower.memory import BARRIER, STAYS, Barrier, Buffer, Level, Row, Stack, body_of
from jointcut.partition.lower.steps import Enter, Keep, Schedule, Segments, Step, Write
from jointcut.partition.lower.xla.arranged import Arranged, Arranger
from jointcut.partition.plans.backend import PORTABLE, Backend
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.graph import LITERAL, OPEN_LOOP, STEP, TOP, Graph, Op
from jointcut.partition.program.primitives import RENAMING, UPDATING
from jointcut.partition.program.roles import Role, Side

#: They are no equations, or the graph holds their bodies.
_CLOSED = (LITERAL, OPEN_LOOP, STEP)


@dataclass(frozen=True)
class Replay:
    """The peak of a program in bytes, the side and the op where it is reached, and what is alive there, largest first.

    Inside a loop what lies around the loop counts too.
    """

    peak_bytes: int
    side: Side
    op: str
    alive: tuple[Buffer, ...]


@dataclass(frozen=True)
class Rows:
    """Both halves of a schedule as rows; the first `forward` of them are the forward's."""

    level: Level
    forward: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once."""
        return self.level.peak[0]

    def replay(self) -> Replay:
        """Where the peak is, and what is alive there."""
        peak, at = self.level.peak
        side = Side.FORWARD if at < self.forward else Side.BACKWARD
        name = self.level.rows[at].name if self.level.rows else ""
        return Replay(peak, side, name, tuple(sorted(self.level.alive(at), key=lambda b: -b.bytes)))


class Replayer:
    """Replay schedules of one graph; bodies of ops that the graph does not open are looked at once.

    `bodies` are these, by op id. A `backend` that is followed has its rows in the order in which they run, each buffer
    where the compiler puts it; see `xla`.
    """

    def __init__(self, graph: Graph, backend: Backend = PORTABLE) -> None:
        """Look at the bodies."""
        self.graph, self.backend = graph, backend
        payloads = ((op.id, op.payload) for op in graph.ops if op.payload is not None and op.name not in _CLOSED)
        self.bodies = {i: body for i, payload in payloads if (body := body_of(payload)) is not None}
        self.kept: tuple[list[Step], _Counter] | None = None
        self.arranger = Arranger(tuple(self.bodies.values())) if backend.is_followed else None

    def rows(self, schedule: Schedule) -> Rows:
        """The rows of both halves."""
        graph, forward = self.graph, self.forward(schedule.forward)
        level = forward.level
        count = len(level.rows)
        backward = _Counter(graph, graph.regions[TOP], None, level=level, bodies=self.bodies)
        for v in graph.role_inputs(Role.PRIMAL):
            backward.define(v, forward.want(v))
        cotangents = graph.role_inputs(Role.COTANGENT)
        atoms = [*map(forward.want, schedule.handed), *forward.starts.values(), *map(backward.given, cotangents)]
        if schedule.runs_again:
            level.middle = len(level.barriers)
            atoms = backward.barrier(atoms)
        backward.env.update(zip(schedule.handed, atoms, strict=False))
        first, last = len(schedule.handed), len(schedule.handed) + len(forward.starts)
        backward.starts.update(
            (v, atom) for v, atom in zip(forward.starts, atoms[first:last], strict=True) if atom is not None
        )
        backward.env.update(zip(cotangents, atoms[last:], strict=True))
        backward.run(schedule.backward)
        ends = ((forward, Role.OUTPUT), (backward, Role.GRADIENT))
        results = [half.want(v) for half, role in ends for v in graph.role_outputs(role) if v is not None]
        level.ends.update(level.same.get(b, b) for b in results if b is not None)
        return Rows(level, count) if self.arranger is None else _in_order(self.arranger.arranged(level), level, count)

    def forward(self, steps: Iterable[Step]) -> _Counter:
        """The rows of a forward.

        The forwards of most plans differ only in what they write, which adds no row. So the last one is kept. Where the
        backend is followed, what is written is written in its place.
        """
        runs: list[Step] = []
        writes: list[Step] = []
        for step in steps:
            (writes if isinstance(step, Write) and self.arranger is None else runs).append(step)
        if self.kept is None or self.kept[0] != runs:
            counter = _Counter(self.graph, self.graph.regions[TOP], None, bodies=self.bodies)
            for v in self.graph.role_inputs(Role.PRIMAL):
                counter.define(v, counter.given(v))
            counter.run(runs)
            self.kept = runs, counter
        counter = self.kept[1].copied()
        counter.run(writes)
        return counter


def _in_order(arranged: Arranged, level: Level, forward: int) -> Rows:
    """The rows of an arranged level; without a barrier between the halves, where the fewest rows stand on its side."""
    if arranged.behind is not None:
        return Rows(arranged, arranged.behind)
    first = {id(row) for row in level.rows[:forward]}
    signs = [0 if row is None else 1 if id(row) in first else -1 for row in arranged.origins]
    ahead = list(accumulate(signs, initial=0))
    return Rows(arranged, ahead.index(max(ahead)))


def handed_bytes(graph: Graph, schedule: Schedule) -> int:
    """Bytes alive between the halves, beyond what the caller holds."""
    outputs = graph.role_outputs(Role.OUTPUT)
    total = sum(graph.values[v].saved_bytes for v in schedule.handed if v not in outputs)
    for step in schedule.forward:
        if isinstance(step, Keep):
            total += _segments(graph, step) * sum(graph.values[v].bytes for v in step.starts)
    return total


def spared(graph: Graph, plan: Plan, schedule: Schedule) -> Plan:
    """The plan, with what its loops in segments do not hand over."""
    if not plan.segments:
        return plan
    return replace(plan, bytes_spared=sum(s.bytes for s in plan.saved) - handed_bytes(graph, schedule))


def _segments(graph: Graph, step: Keep) -> int:
    """How many segments a loop has."""
    return -(-_steps(graph, step.loop) // step.length)


def _steps(graph: Graph, step: Enter) -> int:
    return graph.loops[graph.bodies[step.op].loop].length


@dataclass
class _Counter(Followed[int | None]):
    """The rows of one region while they are counted; atoms are buffers, None for literals.

    `starts` are, for a carried value of a loop in segments, the stack of what the loop carries where segments start.
    """

    level: Level = field(default_factory=Level)
    bodies: Mapping[int, Level] = field(kw_only=True)
    starts: dict[int, int] = field(default_factory=dict)

    def copied(self) -> _Counter:
        """The same rows of the top of the program, to be continued."""
        return replace(self, env=dict(self.env), starts=dict(self.starts), written=set(), level=self.level.copied())

    def given(self, v: int) -> int:
        """A buffer of somebody else for a value."""
        return self.level.given(self.graph.values[v].bytes, self.graph.values[v])

    def buffer(self, v: int, lengths: Sequence[int] = ()) -> int:
        """A buffer for a value, or for a stack of it."""
        value = self.graph.values[v]
        held = Stack(value, tuple(lengths)) if lengths else value
        return self.level.buffer(value.bytes * math.prod(lengths), held)

    def fresh(self, v: int, loop: int) -> int:
        """A buffer around the level."""
        number = self.buffer(v, lengths_between(self.graph, v, loop))
        self.level.free.add(number)
        if loop == self.region.loop and v not in self.unchanged:
            self.level.sliced.add(number)
        return number

    def literal(self, payload: Any) -> None:
        """No buffer: a literal stands in the program."""

    def barrier(self, atoms: Sequence[int | None]) -> list[int | None]:
        """The same buffers, which are in memory now."""
        level, raw = self.level, tuple(b for b in atoms if b is not None)
        level.written.update(self.raw(b) for b in raw)
        made = {b: level.buffer(level.sizes[b], level.types[b]) for b in dict.fromkeys(raw)}
        level.same.update((new, self.raw(b)) for b, new in made.items())
        level.barriers.append(Barrier(len(level.rows), tuple(made), tuple(made.values())))
        return [None if b is None else made[b] for b in atoms]

    def raw(self, b: int) -> int:
        """The buffer that an atom names."""
        return self.level.same.get(b, b)

    def rounded(self, v: int) -> int:
        """A buffer of the same size."""
        maker = self.graph.maker_of(v)
        assert maker is not None, "an input is not rounded"
        made = self.buffer(v)
        self.row([self.want(v)], [made], None, maker, 1, "reduce_precision")
        return made

    def row(
        self,
        reads: Iterable[int | None],
        makes: Iterable[int],
        inside: Level | None,
        source: Op,
        trips: int,
        name: str,
        carries: Iterable[tuple[int, int | None]] = (),
    ) -> None:
        """Add a row."""
        reads = tuple(reads)
        distinct = tuple(dict.fromkeys(self.raw(b) for b in reads if b is not None))
        row = Row(name, distinct, tuple(makes), None, inside, source, trips, reads, tuple(carries))
        self.level.rows.append(row)

    def op(self, op: Op, apart: bool) -> None:
        """Count one op; another name for a buffer takes no row."""
        if op.name in RENAMING:
            self.rename(op)
            return
        env, level, values, name = self.env, self.level, self.graph.values, op.name
        atoms = [None if v is None else env[v] if v in env else self.want(v) for v in op.operands]
        same = level.same
        reads = [same.get(b, b) for b in atoms if b is not None]
        sizes, types, first = level.sizes, level.types, len(level.sizes)
        for v in op.outputs:
            env[v] = len(sizes)
            value = values[v]
            sizes.append(value.bytes)
            types.append(value)
        into = self.want(op.operands[0]) if name in UPDATING and op.operands[0] is not None else None
        makes = (first,) if len(sizes) == first + 1 else tuple(range(first, len(sizes)))
        distinct = tuple(reads if len(reads) < 2 else dict.fromkeys(reads))
        into = None if into is None else same.get(into, into)
        level.rows.append(Row(name, distinct, makes, into, self.bodies.get(op.id), op, 1, tuple(atoms)))

    def rename(self, op: Op) -> None:
        """Let results stand for the buffers of operands, each by its place; those of literals have buffers."""
        operands = [None if v is None else self.want(v) for v in op.operands]
        if op.name == BARRIER:
            operands = self.barrier(operands)
        made = []
        for v, same in zip_longest(op.outputs, operands[: len(op.outputs)]):
            if same is None:
                made.append(self.buffer(v))
            self.define(v, made[-1] if same is None else same)
        if made:
            self.row([], made, None, op, 1, op.name)

    # ----------------------------------------------------------------------------------------------------- loops

    def loop(self, step: Enter) -> None:
        """Count a loop."""
        inner = self.body(step)
        self.enter(step, self.reads(step, inner), inner.level, _steps(self.graph, step))

    def body(self, step: Enter, starts: Sequence[int] | None = None) -> _Counter:
        """The rows of a loop's body, one step of it; with `starts` it carries these values alone."""
        graph, body = self.graph, self.graph.bodies[step.op]
        carried = body.carried_in if starts is None else starts
        unchanged = frozenset(body.carried_in).difference(carried)
        inner = _Counter(graph, graph.regions[body.region], self, unchanged=unchanged, bodies=self.bodies)
        given = {v: inner.given(v) for v in carried}
        inner.env.update(given)
        inner.run(step.steps)
        ends = dict(zip(body.carried_in, body.carried, strict=True))
        following = {v: end for v, end in ends.items() if end is not None}
        inner.level.handed += [(b, inner.want(following[v]) if v in following else None) for v, b in given.items()]
        kept = [inner.want(end) for v in carried if (end := ends[v]) is not None]
        inner.level.carried.update(inner.raw(b) for b in kept if b is not None)
        inner.level.stacks.update(inner.raw(b) for b in map(inner.want, step.stacks) if b is not None)
        return inner

    def reads(self, step: Enter, inner: _Counter, made: Sequence[int] = ()) -> list[int | None]:
        """The buffers that a loop reads: where its carries start, and what its body takes from around."""
        body = self.graph.bodies[step.op]
        pairs = zip(body.carried_in, body.starts, strict=True)
        first = [self.want(start) for v, start in pairs if start is not None and v not in inner.unchanged]
        return [*first, *self.taken(step, inner, made)]

    def taken(self, step: Enter, inner: _Counter, made: Sequence[int] = ()) -> list[int | None]:
        """The buffers that a loop's body takes from around, but for the stacks that are `made` in each segment."""
        body = self.graph.bodies[step.op]
        starts = dict(zip(body.carried_in, body.starts, strict=True))
        whole = [starts[v] if v in inner.unchanged else v for v in inner.consts]
        stacks = [v for v in inner.xs if v not in made]
        return [self.want(v) for v in (*whole, *stacks) if v is not None]

    def enter(
        self, step: Enter, reads: Iterable[int | None], inside: Level, trips: int, others: Iterable[int] = ()
    ) -> None:
        """Add the row of a loop, and let its results stand for its values; `others` are further results."""
        graph, body = self.graph, self.graph.bodies[step.op]
        carried = [self.buffer(v) for v in body.carried_out]
        self.env.update(zip(body.carried_out, carried, strict=True))
        stacks = [
            self.define(v, self.buffer(v, lengths_between(graph, v, self.region.loop)))
            for v in (*step.stacks, *body.own)
        ]
        makes = [b for b in (*carried, *stacks, *others) if b is not None]
        starts = [None if v is None else self.want(v) for v in body.starts]
        carries = zip(carried, starts, strict=True)
        self.row(reads, makes, inside, graph.ops[step.op], trips, body.kind, carries)

    def keep(self, step: Keep) -> None:
        """Count a loop that keeps where its segments start."""
        graph = self.graph
        inner = self.body(step.loop)
        starts = [self.buffer(v, [_segments(graph, step)]) for v in step.starts]
        self.starts.update(zip(step.starts, starts, strict=True))
        segment = self.segment()
        segment.part(step.loop, graph.bodies[step.loop.op].carried_in, [], inner.level, step.length)
        self.enter(step.loop, self.reads(step.loop, inner), segment.level, _segments(graph, step), starts)
        self.join(step.loop, step.length)

    def segments(self, step: Segments) -> None:
        """Count a loop's backward in segments."""
        segment, reads, last = self.divided(step)
        count = -(-_steps(self.graph, last) // step.length)
        starts = [self.starts[v] for v in step.starts]
        self.enter(last, [*starts, *reads], segment.level, count)
        self.join(last, step.length)

    def segment(self) -> _Counter:
        """The rows of one segment."""
        return _Counter(self.graph, self.region, None, bodies=self.bodies)

    def divided(self, step: Segments) -> tuple[_Counter, list[int | None], Enter]:
        """One segment of a loop's backward, what it reads from around, and the backward's own loop."""
        segment, graph = self.segment(), self.graph
        if isinstance(step.rerun, Keep) and isinstance(step.then, Segments):
            again = self.body(step.rerun.loop, step.starts)
            below, reads, last = self.divided(step.then)
            count = -(-step.length // step.then.length)
            starts = [segment.buffer(v, [count]) for v in step.starts]
            rerun = step.rerun.loop.op
            segment.row([], starts, again.level, graph.ops[rerun], step.length, graph.bodies[rerun].kind)
            segment.part(last, graph.bodies[last.op].carried_in, starts, below.level, step.length, count)
            return segment, [*self.taken(step.rerun.loop, again), *reads], last
        assert isinstance(step.rerun, Enter) and isinstance(step.then, Enter)
        again, made = self.body(step.rerun, step.starts), step.rerun.stacks
        back, carried = self.body(step.then), graph.bodies[step.then.op].carried_in
        stacks = segment.part(step.rerun, step.starts, [], again.level, step.length, keeps=False)
        segment.part(step.then, carried, stacks, back.level, step.length)
        return segment, [*self.taken(step.rerun, again), *self.reads(step.then, back, made)], step.then

    def part(
        self,
        step: Enter,
        carried: Sequence[int],
        reads: Iterable[int],
        inside: Level,
        length: int,
        trips: int | None = None,
        keeps: bool = True,
    ) -> list[int]:
        """Add the part of a loop that runs in this segment, `length` steps of it; returns its stacks.

        What it `keeps` is handed to the next segment, or goes into the stacks of the whole loop.
        """
        graph = self.graph
        ends = [self.buffer(v) for v in carried]
        shapes = [lengths_between(graph, v, TOP)[1:] for v in step.stacks]
        stacks = [self.buffer(v, [length, *inner]) for v, inner in zip(step.stacks, shapes, strict=True)]
        carries = [(end, STAYS if keeps else None) for end in ends]
        trips = trips or length
        self.row(reads, [*ends, *stacks], inside, graph.ops[step.op], trips, graph.bodies[step.op].kind, carries)
        if keeps:
            self.level.carried.update(ends)
            self.level.stacks.update(stacks)
        return stacks

    def join(self, step: Enter, length: int) -> None:
        """Copy the stacks of a loop whose last segment is shorter: it runs by itself, and they are joined."""
        if _steps(self.graph, step) % length:
            for v in step.stacks:
                joined = self.buffer(v, lengths_between(self.graph, v, TOP))
                self.row([self.want(v)], [joined], None, self.graph.ops[step.op], 1, "concatenate")
                self.define(v, joined)
