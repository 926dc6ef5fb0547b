"""Write loops over blocks in which each device of a mesh runs over rows of its own.

Rows that lie on several devices stay where they are. The loop is the program of one device, in a `jax.shard_map` over
the axes of the mesh along which the rows lie; other axes are XLA's as ever. Values without rows are whole on each
device. What the loop adds up is added over the devices once, behind the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.partition.program.axes import Rows
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.jax.devices import Devices, nowhere, unlaid, without_mesh
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Literal, Var
from jointcut.partition.program.jax.meshes import Spec
from jointcut.partition.tiles.blocks import shorter
from jointcut.partition.tiles.passing import Loop
from jointcut.partition.tiles.scan import Blocks, BlockScan

#: Changes the equations of a loop over blocks; it is also given the name of each variable inside.
Change = Callable[[Loop, list[Equation], Mapping[Var, Var]], list[Equation]]


@dataclass
class OnDevices:
    """A loop over blocks on each device, while it is written.

    Attributes:
        rows: the places of the rows in the values of all devices.
        blocks: the blocks of the rows of one device.
        devices: the devices.
        names: the name of each value as one device sees it.
    """

    rows: Rows
    blocks: Blocks
    devices: Devices
    names: dict[Var, Var] = field(default_factory=dict)

    def written(self, loop: Loop, stacks: dict[Var, Var], change: Change) -> list[Equation]:
        """The equation that takes the place of a loop's own.

        `stacks` has the values that another loop leaves block by block, and gets those that this one leaves so.
        """
        own = [jaxprs.rebound(eqn, *([*map(self.named, vs)] for vs in (eqn.invars, eqn.outvars))) for eqn in loop.own]
        inside = zip((self.rows.inside.get(id(eqn)) for eqn in loop.own), own, strict=True)
        bodies = {id(eqn): several for several, eqn in inside if several is not None}
        rows = Rows({new: self.rows.place(v) for v, new in self.names.items()}, inside=bodies)
        passed = {
            self.names[v]: self.part(stack, self.rows.place(v), 1) for v, stack in stacks.items() if v in self.names
        }
        outer = {passed[self.names[v]]: (stack, self.spec(v, 1)) for v, stack in stacks.items() if v in self.names}
        scan = BlockScan(own, rows, self.blocks, self.devices)
        wanted, handed = ([self.names[v] for v in vs] for vs in (loop.wanted, loop.handed))
        with nowhere():
            eqns = without_mesh(change(loop, without_mesh(scan.written(passed, wanted, handed)), self.names))
        for v in loop.handed:
            stacks[v] = self.whole(v)
            outer[passed[self.names[v]]] = stacks[v], self.spec(v, 1)
        outer |= {new: (v, self.spec(v)) for v, new in self.names.items()}
        return self.equations(eqns, outer, [*wanted, *(passed[self.names[v]] for v in loop.handed)])

    def equations(
        self, eqns: Sequence[Equation], outer: Mapping[Var, tuple[Var, Spec]], results: Sequence[Var]
    ) -> list[Equation]:
        """The equations that run the program of one device on each."""
        made = {v for eqn in eqns for v in eqn.outvars}
        read = [v for v in dict.fromkeys(v for eqn in eqns for v in jaxprs.variables(eqn.invars)) if v not in made]
        closed = jaxprs.build(read, results, eqns)
        return self.devices.equations(closed, [outer[v] for v in read], [outer[v] for v in results])

    def named(self, atom: Atom) -> Atom:
        """A value as one device sees it."""
        if isinstance(atom, Literal):
            return atom
        if atom not in self.names:
            self.names[atom] = self.part(atom, self.rows.place(atom))
        return self.names[atom]

    def part(self, v: Var, place: Any, ahead: int = 0) -> Var:
        """A variable for the part of a value that one device has, behind so many other axes."""
        if not isinstance(place, int):
            return jaxprs.fresh(unlaid(v.aval))
        axis, aval = place + ahead, unlaid(v.aval)
        return jaxprs.fresh(shorter(aval, axis, aval.shape[axis] // self.devices.number))

    def whole(self, v: Var) -> Var:
        """A variable for the stack of the blocks of a value on all devices."""
        place, size = self.rows.place(v), self.blocks.size * self.devices.number
        assert isinstance(place, int), "it has rows"
        return jaxprs.fresh(abstract.stacked(shorter(v.aval, place, size), [self.blocks.number]))

    def spec(self, v: Var, ahead: int = 0) -> Spec:
        """How a value lies on the mesh, behind so many other axes."""
        place = self.rows.place(v)
        return (*((),) * (place + ahead), self.devices.axes) if isinstance(place, int) else ()
