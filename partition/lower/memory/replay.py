"""Replay a schedule: count the bytes of both halves as one program, without writing them.

Each step becomes a row of `memory`, in which the forward's rows come first. A loop in segments is counted as a loop
over segments, each with its rerun and its part of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jointcut.partition.lower.follow import in_forms, once, segments_of, steps_of
from jointcut.partition.lower.listing import Schedule
from jointcut.partition.lower.memory.counter import Counter
from jointcut.partition.lower.memory.levels import Buffer, Level, body_of
from jointcut.partition.lower.steps import Branch, Enter, Fork, Keep, Step, Write
from jointcut.partition.plans.backend import PORTABLE, Backend
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.graph import LITERAL, OPEN, STEP, TOP, Graph
from jointcut.partition.program.roles import Role, Side

#: Ops that are no equations, or whose bodies the graph holds.
_CLOSED = (LITERAL, *OPEN, STEP)


@dataclass(frozen=True)
class Replay:
    """The peak of a program in bytes, the side and op of the peak, and the buffers alive there, largest first.

    Inside a loop the buffers around the loop count too. `own_bytes` counts only the buffers that the op at the peak
    itself reads and makes. That op is `own_op`, at the user's line `source`. If the peak is in a loop's body, it is an
    op of the body.
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
    """Both halves of a schedule as rows; the first `forward` rows are the forward's.

    `host_bytes` is the most bytes alive at once in host memory.
    """

    level: Level
    forward: int
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once."""
        return self.level.peak[0]

    def replay(self) -> Replay:
        """The place of the peak, and the buffers alive there."""
        peak, at = self.level.peak
        side = Side.FORWARD if at < self.forward else Side.BACKWARD
        alive = tuple(sorted(self.level.alive(at), key=lambda b: -b.bytes))
        name = self.level.rows[at].name if self.level.rows else ""
        op, own_bytes, source = self.level.own(at) if self.level.rows else ("", 0, "")
        return Replay(peak, side, name, alive, op, own_bytes, source)


class Replayer:
    """Replay schedules of one graph, or of the graph with other numbers of checkpoints.

    `bodies` holds the bodies of ops that the graph does not open, by op id. Each is read only once. A replayer `like`
    another one knows the bodies that both graphs have.
    """

    def __init__(self, graph: Graph, backend: Backend = PORTABLE, like: Replayer | None = None) -> None:
        """Look at the bodies."""
        self.graph, self.backend = graph, backend
        known = {} if like is None else {id(like.graph.ops[i].payload): body for i, body in like.bodies.items()}
        payloads = ((op.id, op.payload) for op in graph.ops if op.payload is not None and op.name not in _CLOSED)
        found = ((i, known.get(id(payload)) or body_of(payload)) for i, payload in payloads)
        self.bodies = {i: body for i, body in found if body is not None}
        self.kept: tuple[list[Step], Counter] | None = None
        self.others: dict[int, Replayer] = {}

    def rows(self, schedule: Schedule) -> Rows:
        """The rows of both halves."""
        if (graph := schedule.graph) is not self.graph:
            if id(graph) not in self.others:
                self.others[id(graph)] = Replayer(graph, self.backend, self)
            return self.others[id(graph)].rows(schedule)
        forward = self.forward(schedule.forward)
        level = forward.level
        count = len(level.rows)
        kept = {"on_host": set(schedule.offloaded), "forms": dict(schedule.stored), "shared": forward.shared}
        backward = replace(self.counter(), level=level, **kept)
        for v in graph.role_inputs(Role.PRIMAL):
            backward.define(v, forward.want(v))
        cotangents = graph.role_inputs(Role.COTANGENT)
        given = [*map(backward.given, cotangents)]
        atoms = [*map(forward.leaving, schedule.handed), *forward.starts.values(), *forward.tails.values(), *given]
        if schedule.waits:
            atoms = backward.barrier(atoms)
        held = iter(atoms)
        backward.env.update(zip(schedule.handed, held, strict=False))
        for kept, mine in ((forward.starts, backward.starts), (forward.tails, backward.tails)):
            mine.update((v, atom) for v, atom in zip(kept, held, strict=False) if atom is not None)
        backward.env.update(zip(cotangents, held, strict=True))
        backward.run(schedule.backward)
        ends = ((forward, Role.OUTPUT), (backward, Role.GRADIENT))
        results = [half.want(v) for half, role in ends for v in graph.role_outputs(role) if v is not None]
        level.ends.update(b for b in results if b is not None)
        return Rows(level, count, level.host_peak if level.host else 0)

    def counter(self) -> Counter:
        """The rows of the top of the program, none so far."""
        top = self.graph.regions[TOP]
        return Counter(self.graph, top, None, bodies=self.bodies, moves_inside=self.backend.moves_inside)

    def forward(self, steps: Iterable[Step]) -> Counter:
        """The rows of a forward.

        The forwards of most plans differ only in what they write, which adds no row. So the last rows are kept.
        """
        runs: list[Step] = []
        writes: list[Step] = []
        for step in steps:
            (writes if isinstance(step, Write) else runs).append(step)
        if self.kept is None or self.kept[0] != runs:
            counter = self.counter()
            for v in self.graph.role_inputs(Role.PRIMAL):
                counter.define(v, counter.given(v))
            counter.run(runs)
            self.kept = runs, counter
        counter = self.kept[1].copied()
        counter.run(writes)
        return counter


def handed_bytes(graph: Graph, schedule: Schedule) -> int:
    """Bytes alive between the halves, beyond the arrays that the caller holds."""
    outputs, together = graph.role_outputs(Role.OUTPUT), kept_together(graph, schedule)
    handed = [
        (graph.values[v], schedule.stored.get(v, ()))
        for v in schedule.handed
        if v not in together and (v not in outputs or v in schedule.stored)
    ]
    total = sum(value.copies * in_forms(value, forms).bytes for value, forms in handed) + sum(together.values())
    for step in once(graph, schedule.forward):
        if isinstance(step, Keep):
            total += segments_of(graph, step) * sum(graph.values[v].bytes for v in step.starts)
            total += sum(step.last * graph.values[v].saved_bytes // steps_of(graph, step.loop) for v in step.tails)
    return total


def spared(graph: Graph, plan: Plan, schedule: Schedule) -> Plan:
    """The plan, with the bytes that its loops in segments do not hand over."""
    if not plan.segments:
        return plan
    return replace(plan, bytes_spared=sum(s.bytes for s in plan.saved) - handed_bytes(graph, schedule))


def kept_together(graph: Graph, schedule: Schedule) -> dict[int, int]:
    """The bytes that branches keep in the space that they share, by the value that stands for them all."""
    found: dict[int, int] = {}

    def size(step: Fork) -> int:
        """Bytes of one run of an op."""
        return max(sum(of_branch(branch).values()) for branch in step.branches)

    def of_branch(branch: Branch) -> dict[int, int]:
        inner = {s.stacks[0]: size(s) for s in branch.steps if isinstance(s, Fork) and s.stacks}
        plain = {v: in_forms(graph.values[v], schedule.stored.get(v, ())).bytes for v in branch.stacks}
        return {v: inner.get(v, plain[v]) for v in branch.stacks}

    def walk(steps: Iterable[Step]) -> None:
        for step in steps:
            if isinstance(step, Fork) and step.stacks:
                found[step.stacks[0]] = graph.trips[graph.loop_of(graph.ops[step.op])] * size(step)
            for inner in (step.steps,) if isinstance(step, Enter) else ():
                walk(inner)

    walk(schedule.forward)
    return found
