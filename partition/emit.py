"""Write a schedule out as two jaxprs.

The forward is `primals -> (outputs, residuals)`, the backward `(residuals, primals, cotangents) -> gradients`. Both are
written step by step: a loop's forward scan gets new stacks for what is saved and loses those that are not, its backward
scan gets the recomputation in its body. A value waits, or is written out, by an optimisation barrier. Equations keep
their name stack and source line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jointcut.partition import jaxprs
from jointcut.partition.errors import PlanError, message
from jointcut.partition.graph import LITERAL, STEP, TOP, Graph, Op, Region
from jointcut.partition.plan import Plan
from jointcut.partition.roles import Role
from jointcut.partition.steps import Enter, Round, Run, Schedule, Step, Wait, Write


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


def emit(graph: Graph, plan: Plan, schedule: Schedule) -> Halves:
    """Write both halves as a schedule of the plan says.

    Raises `PlanError` where the graph was read from text.
    """
    if any(v.payload is None for v in graph.values):
        what = "was read from text, so it has no equations that halves could be written of."
        raise PlanError(message("The graph", what, "Trace a function; of text, plans are made by min_cut and Front."))
    with jaxprs.paused_collection():
        backward, residuals = _backward(graph, plan, schedule.backward)
        return Halves(_forward(graph, plan, schedule.forward), backward, residuals, plan.runs_again)


def _forward(graph: Graph, plan: Plan, steps: Iterable[Step]) -> Any:
    shown = {v for v in graph.role_outputs(Role.OUTPUT) if v is not None}
    handed = [v for v in plan.values if v not in shown]
    top = _Scope(graph, graph.regions[TOP], None)
    primals = graph.role_inputs(Role.PRIMAL)
    invars = [top.define(v, jaxprs.fresh(graph.values[v].payload)) for v in primals]
    top.run(steps)
    results = [lit if v is None else top.want(v) for v, lit in _ends(graph, Role.OUTPUT)]
    return jaxprs.build(invars, [*results, *map(top.want, handed)], top.eqns)


def _backward(graph: Graph, plan: Plan, steps: Iterable[Step]) -> tuple[Any, tuple[Residual, ...]]:
    top = _Scope(graph, graph.regions[TOP], None)
    primals = graph.role_inputs(Role.PRIMAL)
    fed = {v: jaxprs.fresh(_lifted(graph, v, TOP)) for v in (*plan.values, *primals)}
    cotangents = [top.define(v, jaxprs.fresh(graph.values[v].payload)) for v in graph.role_inputs(Role.COTANGENT)]
    top.env.update(fed)
    top.run(steps)
    results = [lit if v is None else top.want(v) for v, lit in _ends(graph, Role.GRADIENT)]
    read = {v for eqn in top.eqns for v in eqn.invars if not isinstance(v, jaxprs.Literal)}
    read.update(v for v in results if not isinstance(v, jaxprs.Literal))
    residuals = tuple(r for r in _residuals(graph, plan) if fed[r.value] in read)
    return jaxprs.build([*(fed[r.value] for r in residuals), *cotangents], results, top.eqns), residuals


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
class _Scope:
    """The equations of one region while they are written.

    `env` maps value ids to atoms at this level. `before` are the atoms of values that wait, to be put back. `held` are
    those that stand for a value once a cotangent is there, `written` those that are in memory for their readers.
    """

    graph: Graph
    region: Region
    parent: _Scope | None
    env: dict[int, Any] = field(default_factory=dict)
    eqns: list[Any] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    xs: dict[int, Any] = field(default_factory=dict)
    before: dict[int, Any] = field(default_factory=dict)
    held: dict[tuple[int, int], Any] = field(default_factory=dict)
    written: set[Any] = field(default_factory=set)

    def define(self, v: int, var: Any) -> Any:
        self.env[v] = var
        return var

    def want(self, v: int) -> Any:
        """The atom that holds a value at this level, fetched from the level around it if need be."""
        if v in self.env:
            return self.env[v]
        graph, value = self.graph, self.graph.values[v]
        maker = graph.maker_of(v)
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

    def run(self, steps: Iterable[Step]) -> None:
        """Write steps, in order."""
        for step in steps:
            match step:
                case Run():
                    self.op(self.graph.ops[step.op], step.apart)
                case Enter():
                    self.loop(step)
                case Wait():
                    self.wait(step.value, step.cotangent)
                case Write():
                    self.write(step.value)
                case Round():
                    eqn, rounded = jaxprs.reduce_precision(self.want(step.value))
                    self.eqns.append(eqn)
                    self.define(step.value, rounded)
            if isinstance(step, Run | Enter) and not step.again:
                self.env.update(self.before)
                self.before.clear()

    def wait(self, v: int, cotangent: int) -> None:
        """Hold a value back until a cotangent is there; as before, where it waited for the same one already."""
        atom = self.want(v)
        self.before.setdefault(v, atom)
        if (v, cotangent) not in self.held:
            # One barrier for each value: a common one lets XLA:CPU overlap fewer kernels, and held more in memory.
            eqn, (held, _) = jaxprs.barrier([atom, self.want(cotangent)])
            self.eqns.append(eqn)
            self.held[v, cotangent] = held
        self.define(v, self.held[v, cotangent])

    def write(self, v: int) -> None:
        """Keep XLA from fusing a value into what reads it from here on."""
        atom = self.want(v)
        if atom not in self.written:
            eqn, (held,) = jaxprs.barrier([atom])
            self.eqns.append(eqn)
            self.written.add(self.define(v, held))

    def op(self, op: Op, apart: bool) -> None:
        """Write one op."""
        region = self.graph.regions[op.region]
        invars = [self.read(region, atom) for atom in op.payload.invars]
        outvars = [jaxprs.fresh(atom.aval) for atom in op.payload.outvars]
        eqn = jaxprs.rebound(op.payload, invars, outvars)
        self.eqns.append(jaxprs.called(eqn) if apart else eqn)
        for v, var in zip(op.outputs, outvars, strict=True):
            self.define(v, var)

    def loop(self, step: Enter) -> None:
        """Write one scan of a loop: its body first, which tells what the scan reads."""
        graph, eqn = self.graph, self.graph.ops[step.op].payload
        layout, body = jaxprs.scan_layout(eqn), graph.bodies[step.op]
        a, b = layout.num_consts, layout.num_consts + layout.num_carry
        inner = _Scope(graph, body, self)
        carry = [inner.define(body.names[v], jaxprs.fresh(v.aval)) for v in layout.body.invars[a:b]]
        inner.run(step.steps)
        ends = [inner.read(body, v) for v in layout.body.outvars[: layout.num_carry]]
        ends += [inner.want(v) for v in step.stacks] + [inner.read(body, v) for v in body.repeated]
        closed = jaxprs.build([*inner.consts.values(), *carry, *inner.xs.values()], ends, inner.eqns)
        home = graph.regions[graph.ops[step.op].region]
        outvars = [self.define(home.names[v], jaxprs.fresh(v.aval)) for v in eqn.outvars[: layout.num_carry]]
        outvars += [self.define(v, jaxprs.fresh(_lifted(graph, v, self.region.loop))) for v in step.stacks]
        outvars += [self.define(v, jaxprs.fresh(graph.values[v].payload)) for v in body.own]
        consts = [self.want(v) for v in inner.consts]
        init = [self.read(home, v) for v in eqn.invars[a:b]]
        xs = [self.want(v) for v in inner.xs]
        self.eqns.append(jaxprs.scan(eqn, closed, consts, init, xs, outvars))
