"""Collect the ops, values, regions and loops of a graph while a program is read.

Values, ops and bodies are rows of fields until all is known. The id of a stack passes to the value that fills it; a
value that no op makes in the end has no number in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.partition.program.bodies import Body, Nested
from jointcut.partition.program.graph import TOP, Graph, Loop, Op, Region, Value
from jointcut.partition.program.jax import abstract, jaxprs, own_primitives, side_effects
from jointcut.partition.program.roles import Side


@dataclass
class Member:
    """One list of equations at some level: the whole program, or one body; `ends` are the atoms that it hands on."""

    region: int
    eqns: Sequence[Any]
    names: dict[Any, Any]
    origins: Sequence[Side]
    ends: Sequence[Any] = ()


@dataclass
class Builder:
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
    dropped: set[int] = field(default_factory=set)  # values that no op makes

    def find(self, v: int) -> int:
        """The value that a value's id now stands for."""
        while v in self.alias:
            v = self.alias[v]
        return v

    def value(self, aval: Any, loop: int, label: str = "") -> int:
        """A new value; returns its id."""
        self.values.append({"payload": aval, "loop": loop, "maker": None, "label": label})
        return len(self.values) - 1

    def op(self, region: int, name: str, operands: Sequence[int | None], outputs: Sequence[int], **more: Any) -> int:
        """A new op; returns its id."""
        op_id = len(self.ops)
        self.ops.append({"name": name, "operands": operands, "outputs": list(outputs), "region": region, **more})
        for v in outputs:
            self.values[v]["maker"] = op_id
        return op_id

    def region(self, **fields: Any) -> int:
        """A new region; returns its id."""
        self.regions.append({"ops": [], **fields})
        return len(self.regions) - 1

    def plain(self, member: Member, eqn: Any, origin: Side) -> None:
        """Make the op of an equation that is not opened."""
        operands = [None if isinstance(v, jaxprs.Literal) else member.names[v] for v in eqn.invars]
        op = self.op(
            member.region,
            eqn.primitive.name,
            [v if isinstance(v, int) else None for v in operands],
            [member.names[v] for v in eqn.outvars],
            origin=origin,
            effects=side_effects.has_effects(eqn),
            inner=jaxprs.inner_primitives(eqn),
            payload=eqn,
        )
        self.regions[member.region]["ops"].append(op)
        if (step := own_primitives.nested_in(eqn)) is not None:
            self.nested[op] = step

    def named(self, member: Member, atom: Any) -> int:
        """The value that an atom stands for; -1 for a literal."""
        name = None if isinstance(atom, jaxprs.Literal) else member.names[atom]
        return self.find(name) if isinstance(name, int) else -1

    @staticmethod
    def read(member: Member, atom: Any) -> Any:
        """The value of an atom; for a literal, the literal."""
        return atom if isinstance(atom, jaxprs.Literal) else member.names[atom]

    def finish(self, inputs: Any, outputs: Any, literals: Any) -> Graph:
        """The graph of all rows that were collected."""
        place_of = self.places()
        resolve = [place_of.get(self.find(v), -1) for v in range(len(self.values))]
        values = [_value(i, self.values[v], self.copies) for v, i in place_of.items()]
        ops = [_op(i, fields, resolve) for i, fields in enumerate(self.ops)]
        regions = [_region(i, fields, resolve) for i, fields in enumerate(self.regions)]
        bodies = sorted((_body(fields, resolve) for fields in self.bodies), key=lambda body: body.regions)
        ends = tuple((None if v is None else resolve[v], role) for v, role in outputs)
        held = {body.op: body for body in bodies}
        parts = tuple(values), tuple(ops), tuple(regions), tuple(self.loops)
        return Graph(*parts, inputs, ends, literals, held, self.nested)

    def places(self) -> dict[int, int]:
        """The number in the graph of each value; values of no op have none."""
        gone = {v for v in map(self.find, self.dropped) if self.values[v]["maker"] is None}
        return {v: i for i, v in enumerate(v for v in range(len(self.values)) if v not in gone)}


def is_literal(atom: Any) -> bool:
    """Whether an atom is a literal."""
    return isinstance(atom, jaxprs.Literal)


def _value(i: int, fields: dict[str, Any], copies: Sequence[int]) -> Value:
    aval = fields["payload"]
    shape = tuple(getattr(aval, "shape", ()))
    dtype = aval.dtype.name if hasattr(aval, "dtype") else str(aval)
    size = abstract.aval_bytes(aval)
    loop = fields["loop"]
    return Value(i, shape, dtype, size, copies[loop], loop, fields["maker"], fields["label"], aval)


def _op(i: int, fields: dict[str, Any], resolve: Sequence[int]) -> Op:
    fields = dict(fields)
    operands = tuple(None if v is None else resolve[v] for v in fields.pop("operands"))
    return Op(id=i, operands=operands, outputs=tuple(resolve[v] for v in fields.pop("outputs")), **fields)


def _region(i: int, fields: dict[str, Any], resolve: Sequence[int]) -> Region:
    names = {var: resolve[v] if isinstance(v, int) else v for var, v in fields["names"].items()}
    names = {var: v for var, v in names.items() if v != -1}
    return Region(**{**fields, "id": i, "names": names, "ops": tuple(fields["ops"])})


def _body(fields: dict[str, Any], resolve: Sequence[int]) -> Body:
    def resolved(values: Sequence[int | None]) -> tuple[int | None, ...]:
        return tuple(None if v is None else resolve[v] for v in values)

    names = ("starts", "carried", "carried_in", "carried_out", "own")
    read: dict[str, Any] = {name: resolved(fields[name]) for name in names if name in fields}
    read["stacks"] = tuple(v for v in resolved(fields["stacks"]) if v != -1)
    read["taken"] = {resolve[start]: resolve[v] for start, v in fields.get("taken", {}).items()}
    read["ends"] = tuple(map(resolved, fields.get("ends", ())))
    read["views"] = {resolve[v]: spec for v, spec in fields.get("views", {}).items()}
    return Body(**{**fields, **read})
