"""Open ops whose programs run at most once: a conditional or a `jax.shard_map`, and ops that undo it.

Program by program, the forward's program and the backward's programs are read as one level of the graph. So a value
that the forward's branch makes, and the backward reads in the same branch, is one value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.partition.bodies.collect import Builder, Member, is_literal
from jointcut.partition.bodies.kinds import once
from jointcut.partition.program.bodies import Once
from jointcut.partition.program.graph import STEP, TOP, Loop
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.roles import Side
from jointcut.partition.rewrite.simplify import live


@dataclass
class Undone:
    """An equation of the forward whose programs run at most once, as a branch does, or an equation that undoes it.

    `internal` are the results of the forward's equation that only the backward's equations read.
    """

    member: Member
    eqn: Any
    inside: Once
    origin: Side
    op: int = -1
    internal: frozenset[Any] = frozenset()


@dataclass
class OnceBuilder(Builder):
    """Collect ops and values, including those in programs that run at most once."""

    opens_once: bool = True
    ends: set[int] = field(default_factory=set)  # values that a program or a body hands on
    readers: list[tuple[int, int]] = field(default_factory=list)  # a value, and the id of an equation that reads it
    loop_of: dict[int, int] = field(default_factory=dict)  # by the id of the equation of a loop that is opened

    @abstractmethod
    def level(self, loop: int, members: Sequence[Member]) -> None:
        """Read the equations of some members that run step by step together."""

    def undone(self, loop: int, members: Sequence[Member]) -> list[list[Undone]]:
        """Forward equations whose programs run at most once, each with the backward equations that undo it."""
        for member in members:
            self.ends.update(v for atom in member.ends if isinstance(v := self.read(member, atom), int))
            for eqn in member.eqns:
                self.readers += [(self.named(member, v), id(eqn)) for v in eqn.invars if not is_literal(v)]
        found = [u for m in members for u in map(lambda e, o, m=m: _opened_once(m, e, o), m.eqns, m.origins) if u]
        made = {self.named(u.member, v): u for u in found if u.origin is Side.FORWARD for v in u.eqn.outvars}
        groups: dict[int, list[Undone]] = {}
        for u in (u for u in found if u.origin is Side.BACKWARD):
            sources = [made[v] for atom in u.inside.operands if (v := self.named(u.member, atom)) in made]
            if sources and self.undoes(sources[-1], u):
                groups.setdefault(id(sources[-1]), [sources[-1]]).append(u)
        read_by = self.read_by(loop) if groups else {}
        for source, *others in groups.values():
            own = {id(u.eqn) for u in others}
            internal = (v for v in source.eqn.outvars if read_by.get(self.named(source.member, v), own) <= own)
            dropped = filter(jaxprs.is_dropped, source.eqn.outvars)
            source.internal = frozenset(v for v in (*dropped, *internal) if self.is_seen_alike(source, others, v))
        return [group for group in groups.values() if self.views_of(group) is not None]

    def read_by(self, loop: int) -> dict[int, set[int]]:
        """The equations that read each value, but for loops that hand it on to `loop`; -1 where a program ends."""
        around, found = self.loops_around(loop), dict[int, set[int]]()
        for v, eqn in (*((v, -1) for v in self.ends), *self.readers):
            if self.loop_of.get(eqn) not in around:
                found.setdefault(self.find(v), set()).add(eqn)
        return found

    def is_seen_alike(self, source: Undone, others: Sequence[Undone], result: Any) -> bool:
        """Whether the backward sees the same part of a result that the forward made."""
        if not source.inside.views[0] or jaxprs.is_dropped(result):
            return True
        v, made = self.named(source.member, result), source.inside.views[1][source.eqn.outvars.index(result)]
        pairs = [(atom, spec) for u in others for atom, spec in zip(u.inside.operands, u.inside.views[0], strict=True)]
        return all(spec == made for atom, spec in pairs if self.named(others[0].member, atom) == v)

    def views_of(self, group: Sequence[Undone]) -> dict[int, Any] | None:
        """The part of each value around that the programs of some equations see; None where they see several parts."""
        views: dict[int, Any] = {}
        internal = {self.named(group[0].member, v) for v in group[0].internal}
        for u in group:
            for atom, spec in zip(u.inside.operands, u.inside.views[0], strict=False):
                v = self.named(u.member, atom)
                if v not in internal and v != -1 and views.setdefault(v, spec) != spec:
                    return None
        return views

    def undoes(self, source: Undone, other: Undone) -> bool:
        """Whether an equation of the backward runs the same one of its programs as an equation of the forward."""
        ours, theirs = source.inside, other.inside
        is_same = source.eqn.primitive.name == other.eqn.primitive.name and len(ours.programs) == len(theirs.programs)
        chosen = {self.chosen(u.member, u.inside.chosen_by) for u in (source, other)}
        return is_same and len(chosen) == 1

    def chosen(self, member: Member, atom: Any) -> Any:
        """An identity of the atom that chooses the program to run: equal for equal choices."""
        return str(atom) if atom is None or is_literal(atom) else self.named(member, atom)

    def loops_around(self, loop: int) -> set[int]:
        """A loop and the loops around it."""
        around = {loop}
        while loop != TOP:
            loop = self.loops[loop].parent
            around.add(loop)
        return around

    def open_once(self, parent: int, group: Sequence[Undone]) -> None:
        """Read the programs of one equation of the forward, and of the equations that undo it, program by program."""
        source, count = group[0], len(group[0].inside.programs)
        views = self.views_of(group) or {}
        public = {self.named(source.member, v): v for v in source.eqn.outvars if v not in source.internal}
        self.dropped.update(source.member.names[v] for v in source.internal)
        parts = [self.parts(parent, count, k, group, public) for k in range(count)]
        for n, u in enumerate(group):
            results = [(i, v) for i, v in enumerate(u.eqn.outvars) if v not in u.internal and not jaxprs.is_dropped(v)]
            ends = [[self.read(part[n], part[n].ends[j]) for j in range(len(results))] for part in parts]
            outputs = [u.member.names[v] for _, v in results]
            self.dropped.update(u.member.names[v] for v in u.eqn.outvars if jaxprs.is_dropped(v))
            chosen = u.inside.chosen_by
            operands = [] if chosen is None else [self.read(u.member, chosen)]
            read = [v if isinstance(v, int) else None for v in (*operands, *(end for own in ends for end in own))]
            self.ops[u.op].update(operands=read, outputs=outputs)
            for v in outputs:
                self.values[v]["maker"] = u.op
            self.bodies.append({
                "op": u.op,
                "kind": u.eqn.primitive.name,
                "regions": tuple(part[n].region for part in parts),
                "loop": self.regions[parts[0][n].region]["loop"],
                "trips": 1,
                "stacks": (),
                "ends": tuple(tuple(v if isinstance(v, int) else None for v in own) for own in ends),
                "places": tuple(i for i, _ in results),
                "views": views,
            })  # fmt: skip

    def parts(self, parent: int, count: int, k: int, group: Sequence[Undone], public: Any) -> list[Member]:
        """The programs number `k` of some equations, read as one level."""
        loop = len(self.loops)
        self.loops.append(Loop(loop, parent, 1, count))
        self.copies.append(self.copies[parent])
        source, made, members = group[0], dict[int, Any](), list[Member]()
        for u in group:
            program, names = u.inside.programs[k], dict[Any, Any]()
            for variable, atom in zip(program.invars, u.inside.operands, strict=True):
                v = self.named(u.member, atom)
                names[variable] = made[v] if v in made else self.seen(loop, u, variable, atom)
            if u is source:
                made = self.made_in(loop, u, program, names, public)
            region = self.region(loop=loop, parent=u.member.region, holder=u.op, origin=u.origin, names=names)
            pairs = zip(program.outvars, u.eqn.outvars, strict=True)
            ends = [end for end, v in pairs if v not in u.internal and not jaxprs.is_dropped(v)]
            eqns = self.alive(program, k, u, group)
            if u is not source and source.inside.views[0]:
                eqns = self.without_axes(loop, members[0], names, eqns)
            members.append(Member(region, eqns, names, [u.origin] * len(eqns), ends))
        self.level(loop, members)
        return members

    def without_axes(self, loop: int, made: Member, names: dict[Any, Any], eqns: Sequence[Any]) -> list[Any]:
        """The equations of a program that undoes another, without those that take an axis from a number of that one.

        JAX gives the numbers that a `jax.shard_map` keeps an axis. Without it a number that chooses a branch is the
        same in both programs.
        """
        given = (eqn for eqn in made.eqns if eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1)
        numbers = {made.names.get(eqn.outvars[0]): eqn.invars[0] for eqn in given if not eqn.invars[0].aval.shape}
        left = list[Any]()
        for eqn in eqns:
            wide = None if eqn.primitive.name != "squeeze" or is_literal(eqn.invars[0]) else names.get(eqn.invars[0])
            if not isinstance(wide, int) or wide not in numbers or eqn.outvars[0].aval.shape:
                left.append(eqn)
                continue
            number = numbers[wide]
            if not is_literal(number) and number not in made.names:
                made.names[number] = self.value(number.aval, loop)
            names[eqn.outvars[0]] = self.read(made, number)
        return left

    def seen(self, loop: int, u: Undone, variable: Any, atom: Any) -> Any:
        """The name of an operand in a program: the value itself, or the part of it that the program sees."""
        v = self.read(u.member, atom)
        if not u.inside.views[0] or not isinstance(v, int):
            return v
        if (loop, v) not in self.steps:
            part = self.value(variable.aval, loop)
            self.op(u.member.region, STEP, (v,), (part,))
            self.steps[loop, v] = part
        return self.steps[loop, v]

    def alive(self, program: Any, k: int, u: Undone, group: Sequence[Undone]) -> list[Any]:
        """The equations of program `k`, without equations of results that no program `k` of the backward reads."""
        read = set[int]()
        for other in (other for other in group if other is not u):
            inner = other.inside.programs[k]
            own = {v for eqn in inner.eqns for v in eqn.invars if not is_literal(v)}
            own.update(v for v in inner.outvars if not is_literal(v))
            pairs = zip(inner.invars, other.inside.operands, strict=True)
            read.update(self.named(other.member, atom) for v, atom in pairs if v in own)
        results = ((end, v) for end, v in zip(program.outvars, u.eqn.outvars, strict=True) if not jaxprs.is_dropped(v))
        ends = [end for end, v in results if v not in u.internal or self.named(u.member, v) in read]
        return [program.eqns[i] for i in sorted(live(program.eqns, ends).places)]

    def made_in(self, loop: int, source: Undone, program: Any, names: dict[Any, Any], public: Any) -> dict[int, Any]:
        """The atom that stands for each result of a forward equation where the same program is undone.

        This is the atom that makes the result. If something else reads the result too, it is at hand, and stands for
        itself.
        """
        made: dict[int, Any] = {}
        for end, result in zip(program.outvars, source.eqn.outvars, strict=True):
            v = self.named(source.member, result)
            if is_literal(end):
                made[v] = end
            elif end in program.invars:
                made[v] = names[end]
            else:
                if end not in names:
                    names[end] = self.value(end.aval, loop)
                if v not in public:
                    made[v] = names[end]
                elif not source.inside.views[0]:
                    made[v] = source.member.names[result]
        return made


def _opened_once(member: Member, eqn: Any, origin: Side) -> Undone | None:
    """An equation whose programs run at most once, if they may be read as regions."""
    if jaxprs.touches_references(eqn) or (found := once(eqn)) is None:
        return None
    return Undone(member, eqn, found, origin)
