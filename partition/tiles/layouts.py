"""Follow how arrays are laid over a mesh through a program.

On automatic axes only the arguments tell how they lie. What a program computes from them row by row lies as they do,
and XLA finds it so. A reshape that puts axes together, or takes one apart, keeps the devices on the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jointcut.partition.program.axes import Joined, Rows, through
from jointcut.partition.program.graph import STEP, TOP, Graph, Region, Value
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.jax.devices import Devices
from jointcut.partition.program.jax.jaxprs import Equation, Var
from jointcut.partition.program.jax.meshes import Spec, mesh_within, read_specs, spec_of, told_specs
from jointcut.partition.program.primitives import PRODUCTS, REDUCTIONS, UNPARTED, VIEWS
from jointcut.partition.program.roles import Move, Side
from jointcut.partition.tiles.apart import in_graph


@dataclass(frozen=True)
class Layout:
    """How the inputs of a program lie on a mesh.

    Attributes:
        mesh: the mesh.
        specs: for each input, the axes of the mesh along each of its axes; empty for one that is equal on all devices,
            and None for one of which that is not known.
    """

    mesh: Any
    specs: tuple[Spec | None, ...]

    @classmethod
    def among(cls, inputs: Sequence[Any]) -> Layout | None:
        """How inputs lie; None where none has parts on a mesh of several devices, as far as is known."""
        return cls.of([*map(spec_of, inputs)])

    @classmethod
    def of(cls, found: Sequence[tuple[Any, Spec | None] | None]) -> Layout | None:
        """How inputs lie of which `spec_of` told."""
        mesh = next((one[0] for one in found if one is not None and (one[1] is None or any(one[1]))), None)
        specs = (() if one is None or one[0] != mesh else one[1] for one in found)
        return None if mesh is None else cls(mesh, tuple(specs))

    @classmethod
    def within(cls, closed: Any) -> Layout | None:
        """How values lie that a `jax.shard_map` in a program makes; None without one.

        The mesh is that of the first one.
        """
        mesh = mesh_within(jaxprs.opened(closed)[0])
        return None if mesh is None else cls(mesh, ())

    @property
    def is_known(self) -> bool:
        """Whether it is known of all inputs how they lie."""
        return None not in self.specs

    def spec(self, number: int) -> Spec:
        """The axes of the mesh along each axis of an input, as far as they are known."""
        return (self.specs[number] if number < len(self.specs) else None) or ()

    def devices(self, axes: Sequence[str]) -> Devices:
        """The devices along some axes of the mesh."""
        return Devices(self.mesh, tuple(axes))

    def laid(self, closed: Any) -> Laid:
        """How the values of a program lie.

        Inputs that lie on no mesh, and what is put on automatic axes, are laid as a `jax.shard_map` reads them.
        """
        jaxpr, _ = jaxprs.opened(closed)
        laid = Laid(self, {})
        read = read_specs(jaxpr.eqns)
        for number, v in enumerate(jaxpr.invars):
            laid.lay(v, self.spec(number) or read.get(v, ()))
        for eqn in jaxpr.eqns:
            told = told_specs(eqn)
            if eqn.primitive.name == "reshard" and told == [None]:
                told = [read.get(eqn.outvars[0])]
            for axes, own in laid.rows.items():
                for v, place, spec in zip(eqn.outvars, own.through(eqn), told, strict=True):
                    if spec is None and place is not None and self._may_lie(v, place, axes, laid.rows):
                        own.put([v], [place])
            for v, spec in zip(eqn.outvars, told, strict=True):
                laid.lay(v, spec or ())
        return laid

    def _may_lie(self, v: Any, place: int, axes: tuple[str, ...], rows: Mapping[tuple[str, ...], Rows]) -> bool:
        """Whether an axis of a value may lie along axes of the mesh: no other does, and the parts are equally large."""
        known = ((given, own.place(v)) for given, own in rows.items())
        is_taken = any(p == place or (p is not None and not {*axes}.isdisjoint(given)) for given, p in known)
        return not is_taken and v.aval.shape[place] % self.devices(axes).number == 0


@dataclass
class Along(Rows):
    """Where the values of one program lie along some axes of a mesh, and what the devices exchange.

    Attributes:
        moves: the products, reductions and reshapes at which devices exchange something: the equation, the value that
            all of them need whole, and whether it is a sum of theirs.
    """

    moves: list[tuple[Equation, Any, bool]] = field(default_factory=list)

    def follow(self, eqns: Iterable[Equation]) -> None:
        """Follow the values through equations; what is summed up over devices is whole on each."""
        self.moves.clear()
        for eqn in eqns:
            self.put(eqn.outvars, self.through(eqn))

    def through(self, eqn: Equation) -> Sequence[int | None]:
        """The axis of each result that lies along axes of the mesh as the operands do.

        Where two operands lie along them, and no result can as both do, one that was gathered before is gathered, or
        the smaller one.
        """
        places = [self.place(v) for v in eqn.invars]
        whole = {v for _, v, is_sum in self.moves if not is_sum}
        given = {n: p for n, p in enumerate(places) if isinstance(p, int)}
        if given and eqn.primitive.name == "reshape":
            if (place := _reshaped(eqn, given[0])) is None:
                self.moves.append((eqn, eqn.invars[0], False))
            return [place]
        by_size = sorted(given, key=lambda n: (eqn.invars[n] in whole, -abstract.aval_bytes(eqn.invars[n].aval)))
        ways = [given, *({n: given[n]} for n in by_size)] if given else []
        for way in ways:
            if (found := through(self, eqn, [way.get(n) for n in range(len(places))])) is not None:
                break
        else:
            way, found = {}, [None] * len(eqn.outvars)
        if eqn.primitive.name in UNPARTED:
            self.moves.extend((eqn, eqn.invars[n], False) for n in given)
        if eqn.primitive.name in PRODUCTS | REDUCTIONS:
            self.moves.extend((eqn, eqn.invars[n], False) for n in given if n not in way)
            sums = zip(eqn.outvars, found, strict=True)
            self.moves.extend((eqn, v, True) for v, p in sums if isinstance(p, Joined))
        return [p if isinstance(p, int) else None for p in found]


@dataclass(frozen=True)
class Laid:
    """How the values of one program lie on a mesh.

    Attributes:
        layout: how its inputs lie.
        rows: for some axes of the mesh, the axis of each value that lies along them.
    """

    layout: Layout
    rows: dict[tuple[str, ...], Along]

    def lay(self, v: Var, spec: Spec) -> None:
        """Note how a value lies."""
        for place, axes in enumerate(spec):
            if axes:
                self.rows.setdefault(axes, Along()).put([v], [place])

    def axes(self, v: Var, place: int) -> tuple[str, ...]:
        """The axes of the mesh along an axis of a value; empty where all of it is on all devices."""
        return next((axes for axes, rows in self.rows.items() if rows.place(v) == place), ())

    def parts(self, v: Var) -> int:
        """How many parts a value has."""
        along = (axes for axes, rows in self.rows.items() if rows.place(v) is not None)
        return math.prod(self.layout.devices(axes).number for axes in along)

    def on_each(self, graph: Graph) -> Graph:
        """The graph of the program with the bytes that one device has of each value."""
        found = [(self.layout.devices(axes).number, in_graph(rows, graph)) for axes, rows in self.rows.items()]

        def part(value: Value) -> Value:
            parts = math.prod(number for number, places in found if value.id in places)
            return value if parts == 1 else replace(value, bytes=-(-value.bytes // parts), parts=parts)

        on_one = replace(graph, values=tuple(map(part, graph.values)), devices=self.layout.mesh.size)
        return replace(on_one, moves=tuple(self._moves(on_one)))

    def _moves(self, graph: Graph) -> Iterator[Move]:
        """What devices exchange if the forward runs again, by the op that must run for it.

        A sum belongs to its op. An array that is needed whole belongs to the op that computes it, or to the op that
        needs it if no op of the backward does. The copy of an input that the forward gathered serves the backward, too.
        """
        ops = {id(op.payload): op for op in graph.ops if op.payload is not None}
        for axes, rows in self.rows.items():
            number, whole = self.layout.devices(axes).number, dict[int, list[tuple[int, int]]]()
            for region, along in _by_region(rows, graph):
                for eqn, v, is_sum in along.moves:
                    op, value = ops.get(id(eqn)), region.names.get(v)
                    if op is None or not isinstance(value, int):
                        continue
                    if not is_sum:
                        whole.setdefault(_source(graph, value), []).append((op.id, value))
                    elif op.origin is Side.FORWARD:
                        yield Move(op.id, "all-reduce", graph.values[value].bytes)
            for value, readers in whole.items():
                maker, sides = graph.maker_of(value), {graph.ops[op].origin for op, _ in readers}
                if maker is not None and Side.FORWARD in sides:
                    op = maker.id if Side.BACKWARD in sides else readers[0][0]
                    yield Move(op, "all-gather", number * graph.values[value].bytes, tuple(readers))


def _source(graph: Graph, value: int) -> int:
    """The value of which another one is a view."""
    while (maker := graph.maker_of(value)) is not None and maker.name in VIEWS | {STEP}:
        value = maker.inputs[0]
    return value


def _reshaped(eqn: Equation, axis: int) -> int | None:
    """The axis of a reshaped array that begins where an axis of the operand does."""
    old: Any = eqn.invars[0].aval
    new: Any = eqn.outvars[0].aval
    before = math.prod(old.shape[:axis])
    return next((n for n, m in enumerate(new.shape) if m > 1 and math.prod(new.shape[:n]) == before), None)


def _by_region(rows: Rows, graph: Graph) -> Iterator[tuple[Region, Along]]:
    """The regions of a graph, each with what is known along some axes of the mesh."""
    known: dict[int, Rows] = {TOP: rows}
    for region in graph.regions:
        if region.holder is not None and region.parent in known:
            inside = known[region.parent].inside.get(id(graph.ops[region.holder].payload), ())
            known |= dict(zip(graph.bodies[region.holder].regions, inside, strict=False))
        found = known.get(region.id)
        if isinstance(found, Along):
            yield region, found
