"""Read a joint jaxpr into a graph, with each forward loop joined to the loops that read it.

A residual of a loop is a stack of `trips` copies that leaves the forward loop and enters the backward loop. Both bodies
see it one step at a time. So here it is one value, made in the forward body and read in the backward body. The cut
decides whether it is stacked, or computed again from something smaller.

Equations whose program can be opened (`kinds`) and that run it equally often form a *loop*, if one reads a stack that
another wrote and the group holds equations of both sides. A conditional of the forward is opened branch by branch, with
the conditionals of the backward that read the values its branches keep. A value of a branch that another side reads in
the same branch is one value, too. Every other op with a body (`while`, a loop on its own, a conditional that nothing
undoes) stays one closed op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jointcut.partition.bodies.collect import Member
from jointcut.partition.bodies.kinds import ONCE_KINDS, inside
from jointcut.partition.bodies.once import OnceBuilder, Undone
from jointcut.partition.errors import GraphError, message
from jointcut.partition.program.bodies import Inside
from jointcut.partition.program.graph import LITERAL, OPEN_LOOP, STEP, TOP, Graph, Loop, lengths_between
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.roles import Role, Roles, Side


@dataclass
class _Holder:
    """One equation of a loop, the program inside it, and the op and the body's fields that they become."""

    member: Member
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
        """Whether neither group reads a stack of the other whole."""
        return self.stacks.isdisjoint(other.whole) and other.stacks.isdisjoint(self.whole)

    def with_all_of(self, other: _Group) -> _Group:
        """Both groups as one."""
        return _Group(sorted(self.holders + other.holders), self.stacks | other.stacks, self.whole | other.whole)


@dataclass
class _Reader(OnceBuilder):
    """Read a program level by level; ids of stacks pass to the body values that fill them."""

    # One level: name all results, find the equations that can be opened, make the ops, then open the bodies.

    def level(self, loop: int, members: Sequence[Member]) -> None:
        for member in members:
            for eqn in member.eqns:
                for var in eqn.outvars:
                    if var not in member.names:
                        member.names[var] = self.value(var.aval, loop)
        groups = self.groups(members)
        pairs = self.undone(loop, members) if self.opens_once else []
        holders: dict[int, _Holder | Undone] = {id(h.eqn): h for group in (*groups, *pairs) for h in group}
        for member in members:
            for eqn, origin in zip(member.eqns, member.origins, strict=True):
                holder = holders.get(id(eqn))
                if holder is not None and holder.member is member:
                    name = OPEN_LOOP if isinstance(holder, _Holder) else ONCE_KINDS[eqn.primitive.name].op
                    holder.op = self.op(member.region, name, (), (), origin=origin, payload=eqn)
                    self.regions[member.region]["ops"].append(holder.op)
                else:
                    self.plain(member, eqn, origin)
        for group in groups:
            self.join(loop, group)
        for group in pairs:
            self.open_once(loop, group)

    def groups(self, members: Sequence[Member]) -> list[list[_Holder]]:
        """Equations that run equally often and read each other's stacks step by step, with both sides among them.

        An equation that reads a stack of the others whole is another loop, such as a decoder that attends to all states
        of an encoder. In the body of a loop the name of its stack stands for one step of it.
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
            # Join with the equation that it undoes, the latest of the forward, before others.
            for source in sorted(read, key=lambda j: (holders[j].origin is Side.BACKWARD, -j)):
                theirs, mine = groups[source], groups[i]
                if theirs is not mine and holders[source].inside.trips == lay.trips and theirs.fits(mine):
                    both = theirs.with_all_of(mine)
                    for number in both.holders:
                        groups[number] = both
            maker.update(dict.fromkeys(stacks, i))
        found = {id(group): [holders[i] for i in group.holders] for group in groups}
        return [g for g in found.values() if {h.origin for h in g} == set(Side)]

    def join(self, parent: int, group: Sequence[_Holder]) -> None:
        """Open the bodies of one loop, and read them as one level."""
        loop, trips = len(self.loops), group[0].inside.trips
        assert trips is not None, "a loop is of bodies that are known to run equally often"
        self.loops.append(Loop(loop, parent, trips))
        self.copies.append(self.copies[parent] * trips)
        self.loop_of.update((id(holder.eqn), loop) for holder in group)
        members = [self.body(loop, holder) for holder in group]
        self.level(loop, members)
        for holder, member in zip(group, members, strict=True):
            ends = [self.read(member, carry.following) for carry in holder.inside.carries]
            holder.body["carried"] = tuple(v if isinstance(v, int) else None for v in ends)
            slices = [(carry.start, carry.slice) for carry in holder.inside.carries if carry.slice is not None]
            holder.body["taken"] = {self.read(holder.member, start): member.names[v] for start, v in slices}
            repeated = [self.read(member, v) for v in holder.body["repeated"]]
            self.ops[holder.op]["operands"] += [v for v in (*ends, *repeated) if isinstance(v, int)]
            self.bodies.append(holder.body)

    def body(self, loop: int, holder: _Holder) -> Member:
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
        following = [carry.following for carry in inside.carries]
        return Member(region, inside.program.eqns, names, [holder.origin] * len(inside.program.eqns), following)

    def stacks(self, loop: int, holder: _Holder, names: dict[Any, Any]) -> list[tuple[int, Any]]:
        """Hand the ids of stacks to the values that fill them; return the other stacks, with the atoms they repeat."""
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

    def step_of(self, loop: int, outer: Member, atom: Any) -> int:
        """One step of an operand: the value that fills the stack if that lives in this loop, else a slice."""
        if isinstance(atom, jaxprs.Literal):
            stack = self.value(atom.aval, self.loops[loop].parent)
            self.op(outer.region, LITERAL, (), (stack,), payload=atom)
        else:
            name = outer.names[atom]
            if not isinstance(name, int):
                raise GraphError(message("a loop", "steps over a literal of its loop.", "Report this program."))
            stack = self.find(name)
        if loop in self.loops_around(self.values[stack]["loop"]):
            return stack
        if (loop, stack) not in self.steps:
            fields = self.values[stack]
            lengths = lengths_between(self.loops, fields["loop"], self.loops[loop].parent)
            sliced = self.value(abstract.unstacked(abstract.stacked(fields["payload"], lengths)), loop)
            self.op(outer.region, STEP, (stack,), (sliced,))
            self.steps[loop, stack] = sliced
        return self.steps[loop, stack]


def read(joint: Any, roles: Roles, *, opens_once: bool = True) -> Graph:
    """Read a joint jaxpr `(primals, cotangents) -> (outputs, gradients)` without constants into a graph.

    Unless it `opens_once`, conditionals stay closed, as in plain JAX. Raises `GraphError` where the roles do not fit
    the jaxpr.
    """
    jaxpr, consts = jaxprs.opened(joint)
    if consts or len(jaxpr.invars) != len(roles.inputs) or len(jaxpr.outvars) != len(roles.outputs):
        found = f"{len(jaxpr.invars)} inputs, {len(jaxpr.outvars)} outputs and {len(consts)} constants"
        wanted = f"{len(roles.inputs)} inputs, {len(roles.outputs)} outputs"
        raise GraphError(
            message("joint", f"has {found}, but the roles name {wanted}.", "Lift constants and give every role.")
        )
    builder = _Reader(opens_once=opens_once)
    names = {}
    for i, var in enumerate(jaxpr.invars):
        names[var] = builder.value(var.aval, TOP, roles.input_path(i))
    inputs = tuple((names[v], role) for v, role in zip(jaxpr.invars, roles.inputs, strict=True))
    top = builder.region(loop=TOP, names=names)
    builder.level(TOP, [Member(top, jaxpr.eqns, names, _origins(jaxpr, roles), jaxpr.outvars)])
    literals = tuple(v if isinstance(v, jaxprs.Literal) else None for v in jaxpr.outvars)
    outputs = [
        (None if lit is not None else names[v], role)
        for v, lit, role in zip(jaxpr.outvars, literals, roles.outputs, strict=True)
    ]
    ops = builder.regions[top]["ops"]
    updates = (replace(u, parameter=inputs[u.parameter][0], ops=tuple(ops[i] for i in u.ops)) for u in roles.updates)
    return replace(builder.finish(inputs, outputs, literals), updates=tuple(updates), tiles=roles.tiles)


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


def _openable(member: Member, eqn: Any, origin: Side) -> _Holder | None:
    """An equation whose program may be read as a region.

    Such a program runs a known number of times, and has no references or constants of its own.
    """
    if jaxprs.touches_references(eqn) or (found := inside(eqn)) is None or found.trips is None:
        return None
    return None if found.constants or found.program.constvars else _Holder(member, eqn, found, origin)
