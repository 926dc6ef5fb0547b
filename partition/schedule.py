"""Say when each op runs: the plan as steps of both halves (`steps`), for one backend.

The forward runs in program order. The backward runs in the order of `order`, each op after what it needs recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jointcut.partition import jaxprs
from jointcut.partition.backend import Backend
from jointcut.partition.classify import Facts
from jointcut.partition.graph import LITERAL, SCAN, STEP, TOP, Graph
from jointcut.partition.order import Order, ordered
from jointcut.partition.plan import Plan, runs_forward
from jointcut.partition.policy import MOVEMENT
from jointcut.partition.roles import Role
from jointcut.partition.steps import Enter, Round, Run, Schedule, Step, Wait, Write


def schedule(graph: Graph, facts: Facts, plan: Plan, backend: Backend) -> Schedule:
    """The steps of a plan that closes. Where nothing runs again, nothing waits and nothing is written out."""
    return Schedule(_forward(graph, facts, plan, backend), _backward(graph, facts, plan, backend))


def _forward(graph: Graph, facts: Facts, plan: Plan, backend: Backend) -> tuple[Step, ...]:
    outputs = {v for v in graph.role_outputs(Role.OUTPUT) if v is not None}
    ops = runs_forward(graph, facts, plan)
    written = backend.written_forward(graph, plan) if plan.runs_again else frozenset[int]()
    pass_ = _Pass(graph, ops, _exported(graph, ops, {*outputs, *plan.values}), written, _rounded(graph, plan))
    return tuple(pass_.steps(TOP))


def _backward(graph: Graph, facts: Facts, plan: Plan, backend: Backend) -> tuple[Step, ...]:
    gradients = {v for v in graph.role_outputs(Role.GRADIENT) if v is not None}
    exported = _exported(graph, facts.backward, gradients)
    return tuple(_Turns(graph, ordered(graph, facts, plan, backend), exported, plan.runs_again).steps(TOP))


@dataclass(frozen=True)
class _Pass:
    """Regions in program order: the ops that run, what each region of a loop stacks, what is written and rounded."""

    graph: Graph
    ops: frozenset[int]
    exported: Mapping[int, list[int]]
    written: frozenset[int] = frozenset()
    rounded: frozenset[int] = frozenset()

    def steps(self, region: int) -> Iterator[Step]:
        """The steps of one region."""
        for op in (self.graph.ops[i] for i in self.graph.regions[region].ops if i in self.ops):
            if op.name == SCAN:
                yield self.loop(op.id)
                continue
            yield Run(op.id)
            yield from (Round(v) for v in op.outputs if v in self.rounded)
            yield from (Write(v) for v in op.outputs if v in self.written and _can_wait(self.graph, v))

    def loop(self, scan: int, again: bool = False) -> Enter:
        """A loop with its steps."""
        body = self.graph.bodies[scan].id
        return Enter(scan, tuple(self.steps(body)), tuple(self.exported[body]), again)


@dataclass(frozen=True)
class _Turns:
    """Regions of the backward in their own order: what each region of a loop stacks, and whether anything waits."""

    graph: Graph
    orders: Mapping[int, Order]
    exported: Mapping[int, list[int]]
    waits: bool

    def steps(self, region: int) -> Iterator[Step]:
        """The steps of one region."""
        order = self.orders[region]
        for turn in order.steps:
            if self.waits:
                yield from (Wait(v, anchor) for v, anchor in turn.waits if _can_wait(self.graph, v))
            yield from (self.run(order, i, again=True) for i in turn.again)
            if self.waits:
                yield from (Write(v) for v in turn.written if _can_wait(self.graph, v))
            yield self.run(order, turn.op, apart=turn.whole)
        yield from (self.run(order, i, again=True) for i in order.last)

    def run(self, order: Order, op: int, again: bool = False, apart: bool = False) -> Step:
        """One op, or a loop with its steps."""
        if self.graph.ops[op].name != SCAN:
            return Run(op, again, apart)
        if (rerun := order.reruns.get(op)) is not None:
            exported = _exported(self.graph, rerun.ops | {op}, set(rerun.stacks))
            return _Pass(self.graph, rerun.ops, exported).loop(op, again)
        body = self.graph.bodies[op].id
        return Enter(op, tuple(self.steps(body)), tuple(self.exported[body]), again)


def _exported(graph: Graph, run: frozenset[int], leaving: set[int]) -> dict[int, list[int]]:
    """For each region the values of its loops that someone outside it reads, so that its scan must stack them."""
    exported: dict[int, list[int]] = {r.id: [] for r in graph.regions}
    for value in graph.values:
        if value.loop == TOP or value.maker is None:
            continue
        op = graph.ops[value.maker]
        if op.id not in run or op.name in (STEP, LITERAL):
            continue
        steps = op.name == SCAN and value.loop == graph.bodies[op.id].loop
        home: int | None = graph.bodies[op.id].id if steps else op.region
        readers = {_reads_in(graph, i, value.id) for i in graph.consumers[value.id] if i in run}
        while home is not None and home != TOP:
            if value.id in leaving or any(home not in graph.around[r] for r in readers):
                exported[home].append(value.id)
            home = graph.regions[home].parent
    return exported


def _reads_in(graph: Graph, i: int, v: int) -> int:
    """The region in which an op reads a value: a scan reads the values of its own next step in its body."""
    op = graph.ops[i]
    if op.name == SCAN and graph.values[v].loop == graph.bodies[i].loop:
        return graph.bodies[i].id
    return op.region


def _rounded(graph: Graph, plan: Plan) -> frozenset[int]:
    """Saved half-precision values: XLA may keep them wider than they are, but only on the side that makes them."""
    if not plan.recomputed:
        return frozenset()
    half = (v for v in plan.values if graph.values[v].dtype in ("bfloat16", "float16"))
    return frozenset(v for v in half if (op := graph.maker_of(v)) is not None and op.name not in MOVEMENT)


def _can_wait(graph: Graph, v: int) -> bool:
    """Whether a value can wait and be written: an array that an op makes or that is given, not a reference or a key."""
    op, payload = graph.maker_of(v), graph.values[v].payload
    return (op is None or op.name != LITERAL) and (payload is None or jaxprs.is_plain(payload))
