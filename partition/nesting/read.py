"""Read a joint jaxpr into a graph, with each forward loop joined to the loops that read it.

A residual of a loop is a stack of `trips` copies that leaves the forward loop and enters the backward loop. Both
bodies see it one step at a time, so here it is one value, made in the forward body and read in the backward body;
whether it is stacked, or computed again from something smaller, is left to the cut. Equations whose program can be
opened (`kinds`) and that run it equally often form a *loop* when one reads a stack that another wrote and the group
holds equations of both sides. Everything else that has a body (`cond`, `while`, a loop on its own) stays one closed op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jointcut.partition.errors import GraphError, message
from jointcut.partition.nesting.kinds import inside
from jointcut.partition.nesting.taken import taken
from jointcut.partition.program import jaxprs
from jointcut.partition.program.bodies import Body, Inside, Nested
from jointcut.partition.program.graph import LITERAL, OPEN_LOOP, STEP, TOP, Graph, Loop, Op, Region, Value
from jointcut.partition.program.roles import Role, Roles, Side


@dataclass
class _Member:
    """One list of equations at some level: the whole program, or one body of a loop."""

    region: int
    eqns: Sequence[Any]
    names: dict[Any, Any]
    origins: Sequence[Side]


@dataclass
class _Holder:
    """One equation of a loop, the program inside it, and what becomes of both: an op, and the fields of its body."""

    member: _Member
    eqn: Any
    inside: Inside
    origin: Side
    op: int = -1
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Group:
    """Equations that may be one loop, by number, with the stacks that they make and the values they read whole."""

    holders: list[int]
    stacks: set[int]
    whole: set[int]

    def fits(self, other: _Group) -> bool:
        """Whether neither reads a stack of the other whole."""
        return self.stacks.isdisjoint(other.whole) and other.stacks.isdisjoint(self.whole)

    def with_all_of(self, other: _Group) -> _Group:
        """Both as one."""
        return _Group(sorted(self.holders + other.holders), self.stacks | other.stacks, self.whole | other.whole)


@dataclass
class _Builder:
    """Collect ops and values level by level; ids of stacks pass to the body values that fill them."""

    values: list[dict[str, Any]] = field(default_factory=list)
    ops: list[dict[str, Any]] = field(default_factory=list)
    regions: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=lambda: [Loop(TOP, TOP, 1)])
    copies: list[int] = field(default_factory=lambda: [1])
    alias: dict[int, int] = field(default_factory=dict)
    steps: dict[tuple[int, int], int] = field(default_factory=dict)
    nested: dict[int, Nested] = field(default_factory=dict)

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

    # One level: name all results, find the loops among the equations, make the ops, then open the loops' bodies.

    def level(self, loop: int, members: Sequence[_Member]) -> None:
        for member in members:
            for eqn in member.eqns:
                for var in eqn.outvars:
                    if var not in member.names:
                        member.names[var] = self.value(var.aval, loop)
        groups = self.groups(members)
        holders = {id(holder.eqn): holder for group in groups for holder in group}
        for member in members:
            for eqn, origin in zip(member.eqns, member.origins, strict=True):
                holder = holders.get(id(eqn))
                if holder is not None and holder.member is member:
                    holder.op = self.op(member.region, OPEN_LOOP, (), (), origin=origin, payload=eqn)
                    self.regions[member.region]["ops"].append(holder.op)
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
        if (step := jaxprs.nested_in(eqn)) is not None:
            self.nested[op] = step

    def groups(self, members: Sequence[_Member]) -> list[list[_Holder]]:
        """Equations that run equally often and read each other's stacks step by step, where both sides take part.

        One that reads a stack of the others whole, as a decoder that attends to all states of an encoder, is another
        loop: in the body of a loop the name of its stack stands for the part of one step.
        """
        holders = [h for m in members for h in map(lambda e, o, m=m: _openable(m, e, o), m.eqns, m.origins) if h]
        maker: dict[int, int] = {}
        groups: list[_Group] = []
        for i, holder in enumerate(holders):
            lay, member = holder.inside, holder.member
            stacks = {self.named(member, result) for _, result in lay.stacks}
            whole = {self.named(member, v) for v in (*(v for _, v in lay.whole), *(c.start for c in lay.carries))}
            groups.append(_Group([i], stacks, whole - {-1}))
            read = {maker[v] for v in (self.named(member, stack) for _, stack in lay.sliced) if v in maker}
            # With the one that it undoes, the latest of the forward, sooner than with others.
            for source in sorted(read, key=lambda j: (holders[j].origin is Side.BACKWARD, -j)):
                theirs, mine = groups[source], groups[i]
                if theirs is not mine and holders[source].inside.trips == lay.trips and theirs.fits(mine):
                    both = theirs.with_all_of(mine)
                    for number in both.holders:
                        groups[number] = both
            maker.update(dict.fromkeys(stacks, i))
        found = {id(group): [holders[i] for i in group.holders] for group in groups}
        return [g for g in found.values() if {h.origin for h in g} == set(Side)]

    def named(self, member: _Member, atom: Any) -> int:
        name = None if isinstance(atom, jaxprs.Literal) else member.names[atom]
        return self.find(name) if isinstance(name, int) else -1

    def join(self, parent: int, group: Sequence[_Holder]) -> None:
        """Open the bodies of one loop, and read them as one level."""
        loop, trips = len(self.loops), group[0].inside.trips
        assert trips is not None, "a loop is of bodies that are known to run equally often"
        self.loops.append(Loop(loop, parent, trips))
        self.copies.append(self.copies[parent] * trips)
        members = [self.body(loop, holder) for holder in group]
        self.level(loop, members)
        for holder, member in zip(group, members, strict=True):
            ends = [self.read(member, carry.following) for carry in holder.inside.carries]
            holder.body["carried"] = tuple(v if isinstance(v, int) else None for v in ends)
            slices = taken(holder.inside, holder.member.eqns).items()
            holder.body["taken"] = {self.read(holder.member, start): member.names[v] for start, v in slices}
            repeated = [self.read(member, v) for v in holder.body["repeated"]]
            self.ops[holder.op]["operands"] += [v for v in (*ends, *repeated) if isinstance(v, int)]
            self.bodies.append(holder.body)

    @staticmethod
    def read(member: _Member, atom: Any) -> Any:
        return atom if isinstance(atom, jaxprs.Literal) else member.names[atom]

    def body(self, loop: int, holder: _Holder) -> _Member:
        """Name the inputs of one body, and hand the ids of its stacks to the values that fill them."""
        inside, outer = holder.inside, holder.member
        names = {var: self.read(outer, atom) for var, atom in inside.whole}
        for var, atom in inside.sliced:
            names[var] = self.step_of(loop, outer, atom)
        own = self.stacks(loop, holder, names)
        carry = [c.variable for c in inside.carries]
        for var in carry:
            if var not in names:
                names[var] = self.value(var.aval, loop)
        region = self.region(loop=loop, parent=outer.region, holder=holder.op, origin=holder.origin, names=names)
        starts = (self.read(outer, carry.start) for carry in inside.carries)
        holder.body = {
            "op": holder.op,
            "kind": holder.eqn.primitive.name,
            "regions": (region,),
            "loop": loop,
            "trips": inside.trips,
            "starts": tuple(v if isinstance(v, int) else None for v in starts),
            "carried_in": tuple(names[v] for v in carry),
            "carried_out": tuple(outer.names[c.result] for c in inside.carries),
            "stacks": tuple(outer.names[stack] for _, stack in inside.stacks),
            "own": tuple(v for v, _ in own),
            "repeated": tuple(atom for _, atom in own),
            "inside": inside,
        }
        outputs = [v for name in ("carried_out", "carried_in", "own") for v in holder.body[name]]
        self.ops[holder.op].update(operands=list(holder.body["starts"]), outputs=outputs)
        for v in outputs:
            self.values[v]["maker"] = holder.op
        return _Member(region, inside.program.eqns, names, [holder.origin] * len(inside.program.eqns))

    def stacks(self, loop: int, holder: _Holder, names: dict[Any, Any]) -> list[tuple[int, Any]]:
        """Hand the ids of stacks to the values that fill them; returns the other stacks, with the atoms they repeat."""
        inside, outer = holder.inside, holder.member.names
        made = {v for eqn in inside.program.eqns for v in eqn.outvars} | {c.variable for c in inside.carries}
        sliced = dict(inside.sliced)
        own: list[tuple[int, Any]] = []
        for inner, stack in inside.stacks:
            v = outer[stack]
            if isinstance(inner, jaxprs.Literal) or inner not in made | sliced.keys():
                own.append((v, inner))
            elif inner in names:
                self.alias[v] = self.whole(names[inner]) if inner in sliced else names[inner]
            else:
                names[inner] = v
                self.values[v].update(loop=loop, payload=inner.aval)
        return own

    def whole(self, v: int) -> int:
        """The stack that a step was taken from, or the value itself if it lives in the loop."""
        maker: int | None = self.values[v]["maker"]
        if maker is None or self.ops[maker]["name"] != STEP:
            return v
        return self.ops[maker]["operands"][0]

    def step_of(self, loop: int, outer: _Member, atom: Any) -> int:
        """One step of an operand: the value that fills the stack if that lives in this loop, else a slice."""
        if isinstance(atom, jaxprs.Literal):
            stack = self.value(atom.aval, self.loops[loop].parent)
            self.op(outer.region, LITERAL, (), (stack,), payload=atom)
        else:
            name = outer.names[atom]
            if not isinstance(name, int):
                raise GraphError(message("a loop", "steps over a literal of its loop.", "Report this program."))
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
        bodies = sorted((_body(fields, resolve) for fields in self.bodies), key=lambda body: body.regions)
        ends = tuple((None if v is None else resolve[v], role) for v, role in outputs)
        held = {body.op: body for body in bodies}
        parts = tuple(values), tuple(ops), tuple(regions), tuple(self.loops)
        return Graph(*parts, inputs, ends, literals, held, self.nested)


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
    replaced = frozenset(inputs[i][0] for i in roles.replaced)
    return replace(builder.finish(inputs, outputs, literals), replaced=replaced)


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


def _openable(member: _Member, eqn: Any, origin: Side) -> _Holder | None:
    """An equation whose program may be read as a region: run a known number of times, and without references or
    constants of its own.
    """
    if jaxprs.touches_references(eqn) or (found := inside(eqn)) is None or found.trips is None:
        return None
    return None if found.constants or found.program.constvars else _Holder(member, eqn, found, origin)


def _value(i: int, fields: dict[str, Any], copies: Sequence[int]) -> Value:
    aval = fields["payload"]
    shape = tuple(getattr(aval, "shape", ()))
    dtype = aval.dtype.name if hasattr(aval, "dtype") else str(aval)
    size = jaxprs.aval_bytes(aval)
    loop = fields["loop"]
    return Value(i, shape, dtype, size, copies[loop], loop, fields["maker"], fields["label"], aval)


def _op(i: int, fields: dict[str, Any], resolve: Sequence[int]) -> Op:
    fields = dict(fields)
    operands = tuple(None if v is None else resolve[v] for v in fields.pop("operands"))
    return Op(id=i, operands=operands, outputs=tuple(fields.pop("outputs")), **fields)


def _region(i: int, fields: dict[str, Any], resolve: Sequence[int]) -> Region:
    names = {var: resolve[v] if isinstance(v, int) else v for var, v in fields["names"].items()}
    return Region(**{**fields, "id": i, "names": names, "ops": tuple(fields["ops"])})


def _body(fields: dict[str, Any], resolve: Sequence[int]) -> Body:
    names = ("starts", "carried", "stacks")
    read = {name: tuple(None if v is None else resolve[v] for v in fields[name]) for name in names}
    taken = {resolve[start]: resolve[v] for start, v in fields["taken"].items()}
    return Body(**{**fields, **read, "taken": taken})
