"""Write a graph again in which the backward reads other values than before.

New ops have equations of their own, each a call, so that it stays one op. Ops keep their order and get new numbers;
new values come after the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jointcut.partition.program.graph import STEP, TOP, Form, Graph, Op, Region, Value
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.rewrite.simplify import call_of

#: The position of a new op: after or before an op of the old graph, by its id; then the order in which ops were added.
_Place = tuple[int, int, int]


@dataclass
class Rewriting:
    """Changes to a graph while they are collected.

    Attributes:
        graph: the old graph.
        values, ops: the new ones.
        names: the variables of regions that got more of them.
        read: for an op of the backward, the variable that it reads instead of an old value.
        others: ops that replace old ops.
    """

    graph: Graph
    values: list[Value] = field(default_factory=list)
    ops: list[tuple[_Place, Op]] = field(default_factory=list)
    names: dict[int, dict[Any, Any]] = field(default_factory=dict)
    read: dict[int, dict[int, tuple[int, Any]]] = field(default_factory=dict)
    forms: list[Form] = field(default_factory=list)
    others: dict[int, Op] = field(default_factory=dict)

    def after(self, op: Op, function: Callable[..., Any], operands: Sequence[Any]) -> int:
        """Add an op right after another; returns the value that it makes."""
        return self._add((op.id, 1, len(self.ops)), op, function, operands)

    def before(self, op: Op, function: Callable[..., Any], operands: Sequence[Any]) -> int:
        """Add an op right before another one; returns the value that it makes."""
        return self._add((op.id, -1, len(self.ops)), op, function, operands)

    def seen_before(self, op: Op, function: Callable[..., Any], operand: int) -> int:
        """Add an op of one equation right before another one, which is a view of a value and takes no memory."""
        invars = [self._atom(op.region, operand)]
        call = call_of(function, (abstract.struct(invars[0].aval),))
        (equation,) = jaxprs.opened(call.params["jaxpr"])[0].eqns
        return self._put((op.id, -1, len(self.ops)), op, equation, invars, [operand])

    def _add(self, place: _Place, near: Op, function: Callable[..., Any], operands: Sequence[Any]) -> int:
        """Add an op at a place; `operands` are ids of values, and literals."""
        invars = [self._atom(near.region, v) for v in operands]
        equation = call_of(function, tuple(abstract.struct(v.aval) for v in invars))
        return self._put(place, near, equation, invars, operands)

    def _put(self, place: _Place, near: Op, equation: Any, invars: Sequence[Any], operands: Sequence[Any]) -> int:
        """Add an op to the region of another one, under its name stack and source line."""
        out = jaxprs.fresh(equation.outvars[0].aval)
        parts = max((self.value(x).parts for x in operands if isinstance(x, int)), default=1)
        v = self._value(out.aval, self.graph.regions[near.region].loop, len(self.ops), parts)
        self._named(near.region)[out] = v
        read = tuple(x if isinstance(x, int) else None for x in operands)
        payload = jaxprs.rebound(equation, invars, [out])
        payload = payload.replace(source_info=near.payload.source_info, ctx=near.payload.ctx)
        inner = jaxprs.inner_primitives(equation)
        name = equation.primitive.name
        op = Op(len(self.ops), name, read, (v,), near.region, near.origin, inner=inner, payload=payload)
        self.ops.append((place, op))
        return v

    def instead_of(self, op: Op, function: Callable[..., Any], operands: Sequence[int]) -> None:
        """Let an op compute its result by another function, from other values."""
        invars = [self.variable(op.region, v) for v in operands]
        equation = call_of(function, tuple(abstract.struct(v.aval) for v in invars))
        payload = jaxprs.rebound(equation, invars, op.payload.outvars)
        payload = payload.replace(source_info=op.payload.source_info, ctx=op.payload.ctx)
        inner = jaxprs.inner_primitives(equation)
        name = equation.primitive.name
        self.others[op.id] = replace(op, name=name, operands=tuple(operands), inner=inner, payload=payload)

    def _atom(self, region: int, operand: Any) -> Any:
        return self.variable(region, operand) if isinstance(operand, int) else operand

    def step(self, op: Op, stack: int, loop: int, aval: Any) -> int:
        """Add an op that takes one step's slice of a stack, before an op outside the loop; return the slice."""
        v = self._value(aval, loop, len(self.ops), self.value(stack).parts)
        self.ops.append(((op.id, -1, len(self.ops)), Op(len(self.ops), STEP, (stack,), (v,), op.region)))
        return v

    def instead(self, readers: Iterable[Op], old: int, new: int) -> None:
        """Let ops read a new value in the place of an old one."""
        for op in readers:
            self.read.setdefault(op.id, {})[old] = new, self.variable(op.region, new)

    def variable(self, region: int, v: int) -> Any:
        """A variable that stands for a value in a region, or for its stack, seen from around its loop."""
        value, around = self.value(v), self.graph.regions[region].loop
        var = jaxprs.fresh(abstract.stacked(value.payload, self._lengths(value.loop, around)))
        self._named(region)[var] = v
        return var

    def value(self, v: int) -> Value:
        """A value of the graph, or a new one."""
        count = len(self.graph.values)
        return self.graph.values[v] if v < count else self.values[v - count]

    def _value(self, aval: Any, loop: int, maker: int, parts: int) -> int:
        copies = self.graph.trips[loop]
        v, size = len(self.graph.values) + len(self.values), -(-abstract.aval_bytes(aval) // parts)
        known = {"payload": aval, "parts": parts}
        self.values.append(Value(v, tuple(aval.shape), aval.dtype.name, size, copies, loop, maker, **known))
        return v

    def _named(self, region: int) -> dict[Any, Any]:
        if region not in self.names:
            self.names[region] = dict(self.graph.regions[region].names)
        return self.names[region]

    def _lengths(self, loop: int, around: int) -> list[int]:
        lengths: list[int] = []
        while loop not in (around, TOP) and loop not in self.graph.ancestors[around]:
            lengths[:0] = [] if self.graph.loops[loop].rivals else [self.graph.loops[loop].length]
            loop = self.graph.loops[loop].parent
        return lengths

    # ----------------------------------------------------------------------------------------------- the new graph

    def finished(self) -> Graph:
        """The new graph."""
        graph = self.graph
        old = [((op.id, 0, 0), False, op) for op in graph.ops]
        new = [(place, True, op) for place, op in self.ops]
        every = sorted([*old, *new], key=lambda item: item[0])
        number = {op.id: i for i, (_, is_new, op) in enumerate(every) if not is_new}
        fresh = {op.id: i for i, (_, is_new, op) in enumerate(every) if is_new}
        ops = [
            replace(op, id=i) if is_new else replace(self._reading(op), id=i) for i, (_, is_new, op) in enumerate(every)
        ]
        values = [v if v.maker is None else replace(v, maker=number[v.maker]) for v in graph.values]
        values += [replace(v, maker=fresh[v.maker]) for v in self.values if v.maker is not None]
        added: dict[int, list[int]] = {}
        for _, is_new, op in every:
            if is_new and op.name != STEP:
                added.setdefault(op.region, []).append(fresh[op.id])
        regions = [self._region(region, number, added.get(region.id, [])) for region in graph.regions]
        bodies = {number[i]: replace(body, op=number[i]) for i, body in graph.bodies.items()}
        nested = {number[i]: step for i, step in graph.nested.items()}
        updates = tuple(replace(update, ops=tuple(number[i] for i in update.ops)) for update in graph.updates)
        readers = [tuple((number[op], v) for op, v in move.readers) for move in graph.moves]
        pairs = zip(graph.moves, readers, strict=True)
        moves = tuple(replace(move, op=number[move.op], readers=own) for move, own in pairs)
        parts = {"values": tuple(values), "ops": tuple(ops), "regions": tuple(regions), "updates": updates}
        forms = (*graph.forms, *self.forms)
        return replace(graph, **parts, bodies=bodies, nested=nested, forms=forms, moves=moves)

    def _reading(self, op: Op) -> Op:
        """The op with new values in the place of old ones."""
        op, change = self.others.get(op.id, op), self.read.get(op.id)
        if not change:
            return op
        names = self._named(op.region)
        atoms = [_other(atom, names, change) for atom in op.payload.invars]
        operands = tuple(change[v][0] if v is not None and v in change else v for v in op.operands)
        return replace(op, operands=operands, payload=jaxprs.rebound(op.payload, atoms, op.payload.outvars))

    def _region(self, region: Region, number: Mapping[int, int], added: Sequence[int]) -> Region:
        holder = None if region.holder is None else number[region.holder]
        ops = tuple(sorted([*(number[i] for i in region.ops), *added]))
        return replace(region, holder=holder, ops=ops, names=self.names.get(region.id, region.names))


def _other(atom: Any, names: Mapping[Any, Any], change: Mapping[int, tuple[int, Any]]) -> Any:
    v = None if isinstance(atom, jaxprs.Literal) else names[atom]
    return change[v][1] if isinstance(v, int) and v in change else atom
