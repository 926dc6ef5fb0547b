"""Replay a schedule: count the bytes of both halves as one program, without writing them.

Each step becomes a row of `memory`, in which the forward's rows come first. A loop in segments is counted as what it
is: a loop over segments, each with its rerun and its part of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from jointcut.partition.lower.counter import Counter
from jointcut.partition.lower.follow import in_forms, segments_of, steps_of
from jointcut.partition.lower.memory import Buffer, Level, body_of
from jointcut.partition.lower.steps import Keep, Schedule, Step, Write
from jointcut.partition.lower.xla import late
from jointcut.partition.lower.xla.arranged import Arranged, Arranger
from jointcut.partition.plans.backend import PORTABLE, Backend
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.graph import LITERAL, OPEN_LOOP, STEP, TOP, Graph
from jointcut.partition.program.primitives import REGION
from jointcut.partition.program.roles import Role, Side

#: They are no equations, or the graph holds their bodies.
_CLOSED = (LITERAL, OPEN_LOOP, STEP)


@dataclass(frozen=True)
class Replay:
    """The peak of a program in bytes, the side and the op where it is reached, and what is alive there, largest first.

    Inside a loop what lies around the loop counts too. `own_bytes` are those that the op at the peak itself reads and
    makes: `own_op`, at the user's line `source`; where the peak is in a loop's body, the op there.
    """

    peak_bytes: int
    side: Side
    op: str
    alive: tuple[Buffer, ...]
    own_op: str = ""
    own_bytes: int = 0
    source: str = ""


@dataclass(frozen=True)
class Rows:
    """Both halves of a schedule as rows; the first `forward` of them are the forward's.

    `host_bytes` are the most that are alive at once in host memory.
    """

    level: Level
    forward: int
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once."""
        return self.level.peak[0]

    def replay(self) -> Replay:
        """Where the peak is, and what is alive there."""
        peak, at = self.level.peak
        side = Side.FORWARD if at < self.forward else Side.BACKWARD
        alive = tuple(sorted(self.level.alive(at), key=lambda b: -b.bytes))
        name = self.level.rows[at].name if self.level.rows else ""
        op, own_bytes, source = self.level.own(at) if self.level.rows else ("", 0, "")
        return Replay(peak, side, name, alive, op, own_bytes, source)


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
        for region in graph.ops if backend.runs_early else ():
            if region.name == REGION and region.region == TOP and region.id in self.bodies:
                late.note_region(self.bodies[region.id])
        self.kept: tuple[list[Step], Counter] | None = None
        self.arranger = Arranger(tuple(self.bodies.values())) if backend.is_followed else None

    def rows(self, schedule: Schedule) -> Rows:
        """The rows of both halves."""
        graph, forward = self.graph, self.forward(schedule.forward)
        level = forward.level
        count = len(level.rows)
        backward = replace(self.counter(), level=level, on_host=set(schedule.offloaded), forms=dict(schedule.stored))
        for v in graph.role_inputs(Role.PRIMAL):
            backward.define(v, forward.want(v))
        cotangents = graph.role_inputs(Role.COTANGENT)
        given = [*map(backward.given, cotangents)]
        atoms = [*map(forward.leaving, schedule.handed), *forward.starts.values(), *forward.tails.values(), *given]
        if schedule.waits:
            level.middle = len(level.barriers)
            atoms = backward.barrier(atoms)
        held = iter(atoms)
        backward.env.update(zip(schedule.handed, held, strict=False))
        for kept, mine in ((forward.starts, backward.starts), (forward.tails, backward.tails)):
            mine.update((v, atom) for v, atom in zip(kept, held, strict=False) if atom is not None)
        backward.env.update(zip(cotangents, held, strict=True))
        backward.run(schedule.backward)
        ends = ((forward, Role.OUTPUT), (backward, Role.GRADIENT))
        results = [half.want(v) for half, role in ends for v in graph.role_outputs(role) if v is not None]
        level.ends.update(level.same.get(b, b) for b in results if b is not None)
        if self.backend.runs_early:
            late.note(level, count)
        if graph.replaced:
            made = (backward.want(v) for v in graph.role_outputs(Role.GRADIENT) if v is not None)
            level.apart.update(level.same.get(b, b) for b in made if b is not None)
        host_bytes = level.host_peak if level.host else 0
        if self.arranger is None:
            return Rows(level, count, host_bytes)
        if level.host:  # results of the forward, as the compiler sees it
            level = level.copied()
            level.ends |= level.host
        return replace(_in_order(self.arranger.arranged(level), level, count), host_bytes=host_bytes)

    def counter(self) -> Counter:
        """The rows of the top of the program, none so far."""
        top, follows = self.graph.regions[TOP], self.backend.is_followed
        kept = {"bodies": self.bodies, "names_barriers": follows, "moves_inside": self.backend.moves_inside}
        return Counter(self.graph, top, None, **kept)

    def forward(self, steps: Iterable[Step]) -> Counter:
        """The rows of a forward.

        The forwards of most plans differ only in what they write, which adds no row. So the last one is kept. Where the
        backend is followed, what is written is written in its place.
        """
        runs: list[Step] = []
        writes: list[Step] = []
        for step in steps:
            (writes if isinstance(step, Write) and self.arranger is None else runs).append(step)
        if self.kept is None or self.kept[0] != runs:
            counter = self.counter()
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
    handed = [
        (graph.values[v], schedule.stored.get(v, ()))
        for v in schedule.handed
        if v not in outputs or v in schedule.stored
    ]
    total = sum(value.copies * in_forms(value, forms).bytes for value, forms in handed)
    for step in schedule.forward:
        if isinstance(step, Keep):
            total += segments_of(graph, step) * sum(graph.values[v].bytes for v in step.starts)
            total += sum(step.last * graph.values[v].saved_bytes // steps_of(graph, step.loop) for v in step.tails)
    return total


def spared(graph: Graph, plan: Plan, schedule: Schedule) -> Plan:
    """The plan, with what its loops in segments do not hand over."""
    if not plan.segments:
        return plan
    return replace(plan, bytes_spared=sum(s.bytes for s in plan.saved) - handed_bytes(graph, schedule))
