"""Read a joint jaxpr into a graph, with each forward scan joined to the scans that read it.

A residual of a scan is a stack of `length` copies that leaves the forward scan and enters the backward scan. Both
bodies see it one step at a time, so here it is one value, made in the forward body and read in the backward body;
whether it is stacked, or computed again from something smaller, is left to the cut. Scans of one length form a
*loop* when one reads a stack that another wrote and the group holds scans of both sides. Everything else that has a
body (`cond`, `while`, a scan on its own) stays one closed op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.partition import jaxprs
from jointcut.partition.errors import GraphError, message
from jointcut.partition.graph import LITERAL, SCAN, STEP, TOP, Graph, Loop, Op, Region, Value
from jointcut.partition.roles import Role, Roles, Side


@dataclass
class _Member:
    """One list of equations at some level: the whole program, or one scan body of a loop."""

    region: int
    eqns: Sequence[Any]
    names: dict[Any, Any]
    origins: Sequence[Side]


@dataclass
class _Scan:
    """One scan equation of a loop, before its body is read."""

    member: _Member
    eqn: Any
    layout: jaxprs.ScanLayout
    origin: Side
    op: int = -1


@dataclass(frozen=True)
class _Group:
    """Scans that may be one loop, by their numbers, with the stacks that they make and the values they read whole."""

    scans: list[int]
    stacks: set[int]
    whole: set[int]

    def fits(self, other: _Group) -> bool:
        """Whether neither reads a stack of the other whole."""
        return self.stacks.isdisjoint(other.whole) and other.stacks.isdisjoint(self.whole)

    def with_all_of(self, other: _Group) -> _Group:
        """Both as one."""
        return _Group(sorted(self.scans + other.scans), self.stacks | other.stacks, self.whole | other.whole)


@dataclass
class _Builder:
    """Collect ops and values level by level; ids of stacks pass to the body values that fill them."""

    values: list[dict[str, Any]] = field(default_factory=list)
    ops: list[dict[str, Any]] = field(default_factory=list)
    regions: list[dict[str, Any]] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=lambda: [Loop(TOP, TOP, 1)])
    copies: list[int] = field(default_factory=lambda: [1])
    alias: dict[int, int] = field(default_factory=dict)
    steps: dict[tuple[int, int], int] = field(default_factory=dict)

    def find(self, v: int) -> int:
        while v in self.alias:
            v = self.alias[v]
        return v

    def value(self, aval: Any, loop: int, label: str = "") -> int:
        self.values.append({"payload": aval, "loop": loop, "maker": None, "label": label})
        return len(self.values) - 1

    def op(self, region: int, name: str, operands: Sequence[int | None], outputs: Sequence[int], **more: Any) -> int:
        op_id = len(self.ops)
        self.ops.append({"name": name, "operands": operands, "outputs": list(outputs), "region": region, **more})
        for v in outputs:
            self.values[v]["maker"] = op_id
        return op_id

    def region(self, **fields: Any) -> int:
        self.regions.append({"ops": [], **fields})
        return len(self.regions) - 1

    # One level: name all results, find the loops among the scans, make the ops, then open the loops' bodies.

    def level(self, loop: int, members: Sequence[_Member]) -> None:
        for member in members:
            for eqn in member.eqns:
                for var in eqn.outvars:
                    if var not in member.names:
                        member.names[var] = self.value(var.aval, loop)
        groups = self.groups(members)
        scans = {id(scan.eqn): scan for group in groups for scan in group}
        for member in members:
            for eqn, origin in zip(member.eqns, member.origins, strict=True):
                scan = scans.get(id(eqn))
                if scan is not None and scan.member is member:
                    scan.op = self.op(member.region, SCAN, (), (), origin=origin, payload=eqn)
                    self.regions[member.region]["ops"].append(scan.op)
                else:
                    self.plain(member, eqn, origin)
        for group in groups:
            self.join(loop, group)

    def plain(self, member: _Member, eqn: Any, origin: Side) -> None:
        operands = [None if isinstance(v, jaxprs.Literal) else member.names[v] for v in eqn.invars]
        op = self.op(
            member.region,
            eqn.primitive.name,
            [v if isinstance(v, int) else None for v in operands],
            [member.names[v] for v in eqn.outvars],
            origin=origin,
            effects=jaxprs.has_effects(eqn),
            inner=jaxprs.inner_primitives(eqn),
            payload=eqn,
        )
        self.regions[member.region]["ops"].append(op)

    def groups(self, members: Sequence[_Member]) -> list[list[_Scan]]:
        """Scans of one length that read each other's stacks step by step, where both sides take part.

        One that reads a stack of the others whole, as a decoder that attends to all states of an encoder, is another
        loop: in the body of a loop the name of its stack stands for the part of one step.
        """
        scans = [s for m in members for s in map(lambda e, o, m=m: _openable(m, e, o), m.eqns, m.origins) if s]
        maker: dict[int, int] = {}
        groups: list[_Group] = []
        for i, scan in enumerate(scans):
            lay = scan.layout
            stacks = {self.named(scan.member, v) for v in scan.eqn.outvars[lay.num_carry :]}
            operands = [self.named(scan.member, v) for v in scan.eqn.invars]
            whole, steps = operands[: lay.num_consts + lay.num_carry], operands[lay.num_consts + lay.num_carry :]
            groups.append(_Group([i], stacks, set(whole) - {-1}))
            read = {maker[v] for v in steps if v in maker}
            # With the scan that it undoes, the latest of the forward, sooner than with others.
            for source in sorted(read, key=lambda j: (scans[j].origin is Side.BACKWARD, -j)):
                theirs, mine = groups[source], groups[i]
                if theirs is not mine and scans[source].layout.length == lay.length and theirs.fits(mine):
                    both = theirs.with_all_of(mine)
                    for number in both.scans:
                        groups[number] = both
            maker.update(dict.fromkeys(stacks, i))
        found = {id(group): [scans[i] for i in group.scans] for group in groups}
        return [g for g in found.values() if {s.origin for s in g} == set(Side)]

    def named(self, member: _Member, atom: Any) -> int:
        name = None if isinstance(atom, jaxprs.Literal) else member.names[atom]
        return self.find(name) if isinstance(name, int) else -1

    def join(self, parent: int, group: Sequence[_Scan]) -> None:
        """Open the bodies of one loop's scans, and read them as one level."""
        loop = len(self.loops)
        self.loops.append(Loop(loop, parent, group[0].layout.length))
        self.copies.append(self.copies[parent] * group[0].layout.length)
        members = [self.body(loop, scan) for scan in group]
        self.level(loop, members)
        for scan, member in zip(group, members, strict=True):
            carried = [self.read(member, v) for v in scan.layout.body.outvars[: scan.layout.num_carry]]
            self.regions[member.region]["carried"] = tuple(v if isinstance(v, int) else None for v in carried)
            repeated = [self.read(member, v) for v in self.regions[member.region]["repeated"]]
            self.ops[scan.op]["operands"] += [v for v in (*carried, *repeated) if isinstance(v, int)]

    @staticmethod
    def read(member: _Member, atom: Any) -> Any:
        return atom if isinstance(atom, jaxprs.Literal) else member.names[atom]

    def body(self, loop: int, scan: _Scan) -> _Member:
        """Name the inputs of one scan body, and hand the ids of its stacks to the values that fill them."""
        lay, outer, names = scan.layout, scan.member, {}
        consts, carry, xs = _split(lay, lay.body.invars)
        const_ops, init_ops, xs_ops = _split(lay, scan.eqn.invars)
        for var, atom in zip(consts, const_ops, strict=True):
            names[var] = self.read(outer, atom)
        made = {v for eqn in lay.body.eqns for v in eqn.outvars}
        stacks = list(zip(scan.eqn.outvars[lay.num_carry :], lay.body.outvars[lay.num_carry :], strict=True))
        own: list[tuple[int, Any]] = []
        for var, atom in zip(xs, xs_ops, strict=True):
            names[var] = self.step_of(loop, outer, atom)
        for stack, inner in stacks:
            v = outer.names[stack]
            if isinstance(inner, jaxprs.Literal):
                own.append((v, inner))
            elif inner in made or inner in carry:
                self.hand_over(names, inner, v, loop)
            elif inner in xs:
                self.alias[v] = self.whole(names[inner])
            else:
                own.append((v, inner))
        for var in carry:
            if var not in names:
                names[var] = self.value(var.aval, loop)
        region = self.region(loop=loop, parent=outer.region, scan=scan.op, origin=scan.origin, names=names)
        self.regions[region].update(own=tuple(v for v, _ in own), repeated=tuple(atom for _, atom in own))
        self.regions[region]["stacks"] = tuple(outer.names[stack] for stack, _ in stacks)
        finals = [outer.names[v] for v in scan.eqn.outvars[: lay.num_carry]]
        self.ops[scan.op]["operands"] = [v for a in init_ops if isinstance(v := self.read(outer, a), int)]
        made_by_scan = [*finals, *(names[v] for v in carry), *(v for v, _ in own)]
        self.ops[scan.op]["outputs"] = made_by_scan
        for v in made_by_scan:
            self.values[v]["maker"] = scan.op
        return _Member(region, lay.body.eqns, names, [scan.origin] * len(lay.body.eqns))

    def hand_over(self, names: dict[Any, Any], inner: Any, stack: int, loop: int) -> None:
        if inner in names:
            self.alias[stack] = names[inner]
            return
        names[inner] = stack
        self.values[stack].update(loop=loop, payload=inner.aval)

    def whole(self, v: int) -> int:
        """The stack that a step was taken from, or the value itself if it lives in the loop."""
        maker: int | None = self.values[v]["maker"]
        if maker is None or self.ops[maker]["name"] != STEP:
            return v
        return self.ops[maker]["operands"][0]

    def step_of(self, loop: int, outer: _Member, atom: Any) -> int:
        """One step of a scanned operand: the value that fills the stack if that lives in this loop, else a slice."""
        if isinstance(atom, jaxprs.Literal):
            stack = self.value(atom.aval, self.loops[loop].parent)
            self.op(outer.region, LITERAL, (), (stack,), payload=atom)
        else:
            name = outer.names[atom]
            if not isinstance(name, int):
                raise GraphError(message("a scan", "scans over a literal of its loop.", "Report this program."))
            stack = self.find(name)
        if self.inside(stack, loop):
            return stack
        if (loop, stack) not in self.steps:
            sliced = self.value(jaxprs.unstacked(self.seen_from(self.loops[loop].parent, stack)), loop)
            self.op(outer.region, STEP, (stack,), (sliced,))
            self.steps[loop, stack] = sliced
        return self.steps[loop, stack]

    def seen_from(self, loop: int, v: int) -> Any:
        """The abstract value of v in a loop around its own, where it is a stack."""
        lengths: list[int] = []
        home = self.values[v]["loop"]
        while home not in (loop, TOP):
            lengths.insert(0, self.loops[home].length)
            home = self.loops[home].parent
        return jaxprs.stacked(self.values[v]["payload"], lengths)

    def inside(self, v: int, loop: int) -> bool:
        home = self.values[v]["loop"]
        while home not in (loop, TOP):
            home = self.loops[home].parent
        return home == loop

    def finish(self, inputs: Any, outputs: Any, literals: Any) -> Graph:
        resolve = [self.find(v) for v in range(len(self.values))]
        values = [_value(i, fields, self.copies) for i, fields in enumerate(self.values)]
        ops = [_op(i, fields, resolve) for i, fields in enumerate(self.ops)]
        regions = [_region(i, fields, resolve) for i, fields in enumerate(self.regions)]
        ends = tuple((None if v is None else resolve[v], role) for v, role in outputs)
        return Graph(tuple(values), tuple(ops), tuple(regions), tuple(self.loops), inputs, ends, literals)


def read(joint: Any, roles: Roles) -> Graph:
    """Read a joint jaxpr `(primals, cotangents) -> (outputs, gradients)` without constants into a graph.

    Raises `GraphError` where the roles do not fit the jaxpr.
    """
    jaxpr, consts = jaxprs.opened(joint)
    if consts or len(jaxpr.invars) != len(roles.inputs) or len(jaxpr.outvars) != len(roles.outputs):
        found = f"{len(jaxpr.invars)} inputs, {len(jaxpr.outvars)} outputs and {len(consts)} constants"
        wanted = f"{len(roles.inputs)} inputs, {len(roles.outputs)} outputs"
        raise GraphError(
            message("joint", f"has {found}, but the roles name {wanted}.", "Lift constants and give every role.")
        )
    builder = _Builder()
    names = {}
    for i, var in enumerate(jaxpr.invars):
        names[var] = builder.value(var.aval, TOP, roles.input_path(i))
    inputs = tuple((names[v], role) for v, role in zip(jaxpr.invars, roles.inputs, strict=True))
    top = builder.region(loop=TOP, names=names)
    builder.level(TOP, [_Member(top, jaxpr.eqns, names, _origins(jaxpr, roles))])
    literals = tuple(v if isinstance(v, jaxprs.Literal) else None for v in jaxpr.outvars)
    outputs = [
        (None if lit is not None else names[v], role)
        for v, lit, role in zip(jaxpr.outvars, literals, roles.outputs, strict=True)
    ]
    return builder.finish(inputs, outputs, literals)


def _origins(jaxpr: Any, roles: Roles) -> list[Side]:
    """The phase of each equation: as traced if known, else backward where a cotangent is needed."""
    if roles.forward_ops is not None:
        back = len(jaxpr.eqns) - roles.forward_ops
        return [Side.FORWARD] * roles.forward_ops + [Side.BACKWARD] * back
    late = {v for v, role in zip(jaxpr.invars, roles.inputs, strict=True) if role is Role.COTANGENT}
    origins = []
    for eqn in jaxpr.eqns:
        needs = any(not isinstance(v, jaxprs.Literal) and v in late for v in eqn.invars)
        late.update(eqn.outvars if needs else ())
        origins.append(Side.BACKWARD if needs else Side.FORWARD)
    return origins


def _openable(member: _Member, eqn: Any, origin: Side) -> _Scan | None:
    """A scan whose body may be read as a region: without references and without constants of its own."""
    if eqn.primitive.name != "scan" or jaxprs.touches_references(eqn):
        return None
    layout = jaxprs.scan_layout(eqn)
    return None if layout.body_consts or layout.body.constvars else _Scan(member, eqn, layout, origin)


def _split(layout: jaxprs.ScanLayout, items: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    a, b = layout.num_consts, layout.num_consts + layout.num_carry
    return list(items[:a]), list(items[a:b]), list(items[b:])


def _value(i: int, fields: dict[str, Any], copies: Sequence[int]) -> Value:
    aval = fields["payload"]
    shape = tuple(getattr(aval, "shape", ()))
    dtype = jaxprs.dtype_facts(aval.dtype)[0] if hasattr(aval, "dtype") else str(aval)
    size = jaxprs.aval_bytes(aval)
    loop = fields["loop"]
    return Value(i, shape, dtype, size, copies[loop], loop, fields["maker"], fields["label"], aval)


def _op(i: int, fields: dict[str, Any], resolve: Sequence[int]) -> Op:
    fields = dict(fields)
    operands = tuple(None if v is None else resolve[v] for v in fields.pop("operands"))
    return Op(id=i, operands=operands, outputs=tuple(fields.pop("outputs")), **fields)


def _region(i: int, fields: dict[str, Any], resolve: Sequence[int]) -> Region:
    names = {var: resolve[v] if isinstance(v, int) else v for var, v in fields["names"].items()}
    carried = tuple(None if v is None else resolve[v] for v in fields.get("carried", ()))
    stacks = tuple(resolve[v] for v in fields.get("stacks", ()))
    ops = tuple(fields["ops"])
    return Region(**{**fields, "id": i, "names": names, "carried": carried, "stacks": stacks, "ops": ops})
