"""Write the plan out as two jaxprs.

The forward is `primals -> (outputs, residuals)`, the backward `(residuals, primals, cotangents) -> gradients`. Both are
written region by region: a loop's forward scan gets new stacks for what is saved and loses those that are not, its
backward scan gets the recomputation in its body. Equations keep their name stack and source line.

What is recomputed is tied to the cotangent that needs it (`schedule`) by an optimisation barrier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jointcut.partition import jaxprs
from jointcut.partition.backend import Backend
from jointcut.partition.classify import Facts
from jointcut.partition.errors import PlanError, message
from jointcut.partition.graph import LITERAL, SCAN, STEP, TOP, Graph, Op, Region
from jointcut.partition.plan import Plan, runs_forward
from jointcut.partition.policy import MOVEMENT
from jointcut.partition.roles import Role
from jointcut.partition.schedule import Order, Step, schedule


@dataclass(frozen=True)
class Residual:
    """Where the backward finds one value of the forward: `kind` is "saved", "output" or "input", `index` its place
    among the forward's saved results, its outputs, or the program's primals.
    """

    kind: str
    index: int
    value: int


@dataclass(frozen=True)
class Halves:
    """The two jaxprs; `residuals` describes the leading inputs of the backward, in order.

    `waits` says that the backward computes something again, so that in one program with the forward its residuals
    wait for the cotangents.
    """

    forward: Any
    backward: Any
    residuals: tuple[Residual, ...]
    waits: bool = False


def emit(graph: Graph, facts: Facts, plan: Plan, backend: Backend) -> Halves:
    """Write both halves of a plan that closes, for one backend.

    An op that the backend takes apart is called in a computation of its own, so that the arrays which the compiler adds
    to it live and die there. Some values are written out before the ops that read them. Raises `PlanError` where the
    graph was read from text.
    """
    if any(v.payload is None for v in graph.values):
        what = "was read from text, so it has no equations that halves could be written of."
        raise PlanError(message("The graph", what, "Trace a function; of text, plans are made by min_cut and Front."))
    with jaxprs.paused_collection():
        orders = schedule(graph, facts, plan, backend)
        backward, residuals = _backward(graph, facts, plan, orders)
        forward = _forward(graph, facts, plan, backend.written_forward(graph, plan))
        return Halves(forward, jaxprs.build(*backward), residuals, plan.runs_again)


def _forward(graph: Graph, facts: Facts, plan: Plan, apart: frozenset[int]) -> Any:
    outputs = graph.role_outputs(Role.OUTPUT)
    shown = {v for v in outputs if v is not None}
    handed = [v for v in plan.values if v not in shown]
    run = runs_forward(graph, facts, plan)
    exported = _exported(graph, run, {*shown, *plan.values})
    half = _Half(graph, {}, {}, _rounded(graph, plan), plan.runs_again, apart=apart)
    primals = graph.role_inputs(Role.PRIMAL)
    top = _Scope(half, graph.regions[TOP], None, _Run(run, exported))
    invars = [top.define(v, jaxprs.fresh(graph.values[v].payload)) for v in primals]
    top.run_forward()
    results = [lit if v is None else top.want(v) for v, lit in _ends(graph, Role.OUTPUT)]
    return jaxprs.build(invars, [*results, *map(top.want, handed)], top.eqns)


def _backward(graph: Graph, facts: Facts, plan: Plan, orders: dict[int, Order]) -> Any:
    gradients = {v for v in graph.role_outputs(Role.GRADIENT) if v is not None}
    run = _Run(facts.backward, _exported(graph, facts.backward, gradients))
    half = _Half(graph, orders, _reruns(graph, orders), frozenset(), plan.runs_again)
    top = _Scope(half, graph.regions[TOP], None, run)
    primals = graph.role_inputs(Role.PRIMAL)
    fed = {v: jaxprs.fresh(_lifted(graph, v, TOP)) for v in (*plan.values, *primals)}
    cotangents = [top.define(v, jaxprs.fresh(graph.values[v].payload)) for v in graph.role_inputs(Role.COTANGENT)]
    top.env.update(fed)
    top.run_backward(orders[TOP])
    results = [lit if v is None else top.want(v) for v, lit in _ends(graph, Role.GRADIENT)]
    read = {v for eqn in top.eqns for v in eqn.invars if not isinstance(v, jaxprs.Literal)}
    read.update(v for v in results if not isinstance(v, jaxprs.Literal))
    residuals = tuple(r for r in _residuals(graph, plan) if fed[r.value] in read)
    invars = [*(fed[r.value] for r in residuals), *cotangents]
    return (invars, results, top.eqns), residuals


@dataclass(frozen=True)
class _Run:
    """What a part of a half runs: the ops, and what each region among them stacks."""

    ops: frozenset[int]
    exported: Mapping[int, list[int]]


def _reruns(graph: Graph, orders: Mapping[int, Order]) -> dict[tuple[int, int], _Run]:
    """What is run for a loop that runs again, by the region that does so and the op id of the scan."""
    found = {(region, scan): rerun for region, order in orders.items() for scan, rerun in order.reruns.items()}
    return {
        (region, scan): _Run(again.ops, _exported(graph, again.ops | {scan}, set(again.stacks)))
        for (region, scan), again in found.items()
    }


def _residuals(graph: Graph, plan: Plan) -> Iterable[Residual]:
    outputs = graph.role_outputs(Role.OUTPUT)
    places: dict[int | None, int] = {}
    for i, v in enumerate(outputs):
        places.setdefault(v, i)
    saved = 0
    for v in plan.values:
        if v in places:
            yield Residual("output", places[v], v)
        else:
            yield Residual("saved", saved, v)
            saved += 1
    for i, v in enumerate(graph.role_inputs(Role.PRIMAL)):
        yield Residual("input", i, v)


def _ends(graph: Graph, role: Role) -> list[tuple[int | None, Any]]:
    pairs = zip(graph.outputs, graph.literals or (None,) * len(graph.outputs), strict=True)
    return [(v, lit) for (v, r), lit in pairs if r is role]


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
    return frozenset(v for v in half if graph.ops[graph.values[v].maker or 0].name not in MOVEMENT)


def _lifted(graph: Graph, v: int, loop: int) -> Any:
    """The abstract value of v as seen from a loop around its own: one axis for each loop between."""
    value = graph.values[v]
    lengths: list[int] = []
    home = value.loop
    while home != loop and home != TOP:
        lengths.insert(0, graph.loops[home].length)
        home = graph.loops[home].parent
    return jaxprs.stacked(value.payload, lengths)


@dataclass
class _Half:
    """What all regions of one half share.

    `apart` are values kept from being fused into their readers, `waits` says whether anything is held back at all.
    """

    graph: Graph
    orders: dict[int, Order]
    reruns: dict[tuple[int, int], _Run]
    rounded: frozenset[int]
    waits: bool
    apart: frozenset[int] = frozenset()


@dataclass
class _Scope:
    """The equations of one region while they are written: `env` maps value ids to atoms at this level, `written` are
    the atoms that stand in memory for their readers, `held` those that stand for a value once a cotangent is there.
    """

    half: _Half
    region: Region
    parent: _Scope | None
    run: _Run
    env: dict[int, Any] = field(default_factory=dict)
    eqns: list[Any] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    xs: dict[int, Any] = field(default_factory=dict)
    written: set[Any] = field(default_factory=set)
    held: dict[tuple[int, int], Any] = field(default_factory=dict)

    def define(self, v: int, var: Any) -> Any:
        self.env[v] = var
        return var

    def want(self, v: int) -> Any:
        """The atom that holds a value at this level, fetched from the level around it if need be."""
        if v in self.env:
            return self.env[v]
        graph, value = self.half.graph, self.half.graph.values[v]
        maker = None if value.maker is None else graph.ops[value.maker]
        if maker is not None and maker.name == LITERAL:
            return maker.payload
        assert self.parent is not None, f"{graph.where(v)} is not at hand"
        around = value.loop  # the innermost loop around both the value and this region
        while around not in graph.ancestors[self.region.loop]:
            around = graph.loops[around].parent
        if around != self.region.loop:
            self.consts[v] = jaxprs.fresh(_lifted(graph, v, around))
            return self.define(v, self.consts[v])
        stack = maker.inputs[0] if maker is not None and maker.name == STEP else v
        self.xs[stack] = jaxprs.fresh(_lifted(graph, v, self.region.loop))
        return self.define(v, self.xs[stack])

    def read(self, region: Region, atom: Any) -> Any:
        """The atom that stands for one of the jaxpr's own, read in the region that it comes from."""
        name = atom if isinstance(atom, jaxprs.Literal) else region.names[atom]
        return self.want(name) if isinstance(name, int) else name

    def run_forward(self) -> None:
        for i in self.region.ops:
            if i in self.run.ops:
                self.op(self.half.graph.ops[i])

    def run_backward(self, order: Order) -> None:
        for step in order.steps:
            self.step(step)
        for i in order.last:
            self.op(self.half.graph.ops[i])

    def step(self, step: Step) -> None:
        """One op of the backward after what it needs recomputed, which is held back until its cotangents are there."""
        before = self.hold(step)
        for i in step.again:
            self.op(self.half.graph.ops[i])
        self.write_out(step.written)
        op = self.half.graph.ops[step.op]
        self.op(op)
        if step.whole:
            self.eqns.append(jaxprs.called(self.eqns.pop()))
        self.env.update(before)

    def write_out(self, values: Iterable[int]) -> None:
        """Keep XLA from fusing values into what reads them from here on."""
        if not self.half.waits:
            return
        for v in values:
            atom = self.want(v)
            if atom not in self.written and _can_wait(atom):
                eqn, (held,) = jaxprs.barrier([atom])
                self.eqns.append(eqn)
                self.written.add(self.define(v, held))

    def hold(self, step: Step) -> dict[int, Any]:
        """Let values wait for cotangents; returns the atoms to put back for those that read them later."""
        before = {v: self.want(v) for v, _ in step.waits if _can_wait(self.want(v))}
        if not self.half.waits:
            return {}
        # One barrier for each value: a common one lets XLA:CPU overlap fewer kernels, and held more in memory.
        for v, anchor in step.waits:
            if v not in before:
                continue
            if (v, anchor) not in self.held:
                eqn, (held, _) = jaxprs.barrier([before[v], self.want(anchor)])
                self.eqns.append(eqn)
                self.held[v, anchor] = held
            self.define(v, self.held[v, anchor])
        return before

    def op(self, op: Op) -> None:
        if op.name == SCAN:
            self.scan(op)
            return
        region = self.half.graph.regions[op.region]
        invars = [self.read(region, atom) for atom in op.payload.invars]
        outvars = [jaxprs.fresh(atom.aval) for atom in op.payload.outvars]
        self.eqns.append(jaxprs.rebound(op.payload, invars, outvars))
        for v, var in zip(op.outputs, outvars, strict=True):
            self.define(v, var)
            if v in self.half.rounded:
                eqn, rounded = jaxprs.reduce_precision(var)
                self.eqns.append(eqn)
                self.define(v, rounded)
        self.write_out(v for v in op.outputs if v in self.half.apart)

    def scan(self, op: Op) -> None:
        """Write one scan of a loop: its body first, which tells what the scan reads and what it must stack."""
        graph, eqn = self.half.graph, op.payload
        layout, body = jaxprs.scan_layout(eqn), graph.bodies[op.id]
        a, b = layout.num_consts, layout.num_consts + layout.num_carry
        inner = _Scope(self.half, body, self, self.half.reruns.get((self.region.id, op.id), self.run))
        carry = [inner.define(body.names[v], jaxprs.fresh(v.aval)) for v in layout.body.invars[a:b]]
        if body.id in self.half.orders:
            inner.run_backward(self.half.orders[body.id])
        else:
            inner.run_forward()
        stacks = inner.run.exported[body.id]
        ends = [inner.read(body, v) for v in layout.body.outvars[: layout.num_carry]]
        ends += [inner.want(v) for v in stacks] + [inner.read(body, v) for v in body.repeated]
        closed = jaxprs.build([*inner.consts.values(), *carry, *inner.xs.values()], ends, inner.eqns)
        home = graph.regions[op.region]
        outvars = [self.define(home.names[v], jaxprs.fresh(v.aval)) for v in eqn.outvars[: layout.num_carry]]
        outvars += [self.define(v, jaxprs.fresh(_lifted(graph, v, self.region.loop))) for v in stacks]
        outvars += [self.define(v, jaxprs.fresh(graph.values[v].payload)) for v in body.own]
        consts = [self.want(v) for v in inner.consts]
        init = [self.read(home, v) for v in eqn.invars[a:b]]
        xs = [self.want(v) for v in inner.xs]
        self.eqns.append(jaxprs.scan(eqn, closed, consts, init, xs, outvars))


def _can_wait(atom: Any) -> bool:
    """Whether a barrier may hold an atom: an array variable, not a reference, a key or a token."""
    aval = getattr(atom, "aval", None)
    return not isinstance(atom, jaxprs.Literal) and jaxprs.is_plain(aval)
