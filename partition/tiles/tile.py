"""Run equations of a joint program block by block.

The equations of the forward become one scan over blocks, and those of the backward another, which reads the values of a
block as the forward's scan stacks them. So the two are read as one loop (`bodies/read`), and the plan decides which
values a block keeps and which it computes again. Where rows meet in between, there are several such scans. Where rows
lie on several devices, each runs them over rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jointcut.partition.errors import PlanError, message
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.jax.devices import Devices
from jointcut.partition.program.jax.jaxprs import Equation, Literal, Var
from jointcut.partition.program.places import line_of
from jointcut.partition.program.roles import Role, Roles, Tile
from jointcut.partition.tiles import grow, hoist
from jointcut.partition.tiles.devices import Change, OnDevices
from jointcut.partition.tiles.grow import Tiling, reading
from jointcut.partition.tiles.layouts import Layout
from jointcut.partition.tiles.passing import Loop, loops
from jointcut.partition.tiles.pieces import in_pieces
from jointcut.partition.tiles.scan import Blocks, BlockScan


@dataclass(frozen=True)
class Prepared:
    """A program and its tiling, before it runs in blocks.

    `boundary` is the number of forward equations. If the program of a block is cut on its own, `one` is its cotangent.
    """

    closed: Any
    boundary: int
    tiling: Tiling
    one: Var | None = None

    @property
    def ones(self) -> set[Var]:
        """The cotangent of one, and what is computed from it."""
        return set() if self.one is None else hoist.reached(jaxprs.opened(self.closed)[0].eqns, [self.one])


def grown(closed: Any, roles: Roles, tile: Tile) -> Prepared | None:
    """Return the tiling of a tile; None where there is none, or no early one."""
    jaxpr, _ = jaxprs.opened(closed)
    numbered, boundary = variables(closed), roles.forward_ops
    v = numbered[tile.value] if tile.value < len(numbered) else None
    if boundary is None or v is None or not (*getattr(v.aval, "shape", ()), *[0] * tile.axis)[tile.axis] > 1:
        return None
    fixed = {i for update in roles.updates for i in update.ops}
    if not tile.is_early:
        found = grow.grown(closed, boundary, v, tile.axis, tile.least_bytes, fixed)
        return Prepared(closed, boundary, found) if found.eqns else None
    cotangents = [v for v, role in zip(jaxpr.invars, roles.inputs, strict=True) if role is Role.COTANGENT]
    early = hoist.grown_early(closed, boundary, cotangents, v, tile.axis, tile.least_bytes, fixed)
    if early is None:
        return None
    one = None if tile.block_bytes is None else jaxprs.fresh(early.factor.aval)
    return Prepared(*hoist.hoisted(closed, boundary, early, one), one)


def meeting(closed: Any, roles: Roles, tile: Tile) -> str:
    """Return the first op of the forward in which the rows of a tile meet, with its line; empty without one."""
    jaxpr, _ = jaxprs.opened(closed)
    v = variables(closed)[tile.value]
    growing = grow.Growing.of(jaxpr, v.aval.shape[tile.axis], 0)
    growing.start(v, tile.axis)
    for i, eqn in enumerate(jaxpr.eqns[: roles.forward_ops]):
        if i not in growing.inside and not growing.places.keys().isdisjoint(reading(eqn)):
            line = line_of(eqn)
            return f"{eqn.primitive.name}{f' at {line}' if line else ''}"
    return ""


def variables(closed: Any) -> list[Any]:
    """The inputs of a program, and then the results of its equations."""
    jaxpr, _ = jaxprs.opened(closed)
    return [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]


#: Cuts the program of a block so that it takes at most so many bytes, given first.
Cut = Callable[[int, Any, Roles], Any]


def with_tile(
    closed: Any, roles: Roles, tile: Tile, cut: Cut, has_pieces: bool = False, layout: Layout | None = None
) -> tuple[Any, Roles]:
    """Return the program with a tile, and its roles. If it `has_pieces`, large products are added in pieces.

    `layout` tells how the inputs lie on a mesh. Raises `PlanError` where the program has no such tile, or the tile has
    rows of several devices and the inputs do not lie on such.
    """
    found, devices = grown(closed, roles, tile), devices_of(tile, layout)
    if found is None:
        cure = "Read the plan for the program that it was made for, or make a plan for this one."
        raise PlanError(message("plan.tiles", "name rows that this program does not have.", cure))
    each = 1 if devices is None else devices.number
    blocks = Blocks.of(found.tiling.count // each, tile.blocks, found.tiling.needs_even)
    ones = set() if tile.block_bytes is None else found.ones

    def change(loop: Loop, eqns: list[Equation], names: Mapping[Var, Var]) -> list[Equation]:
        pieces = in_pieces(eqns, loop.rows_bytes // (each * blocks.number)) if has_pieces else eqns
        own = {names.get(v, v) for v in ones}
        return _with_cut_block(pieces, own, partial(cut, tile.block_bytes or 0)) if ones else pieces

    made, boundary = tiled(found, blocks, devices, change)
    before, after = (jaxprs.opened(program)[0].eqns for program in (closed, made))
    places = {id(eqn): n for n, eqn in enumerate(after)}
    updates = (replace(u, ops=tuple(places[id(before[i])] for i in u.ops)) for u in roles.updates)
    return made, replace(
        roles, forward_ops=boundary, updates=tuple(updates), tiles=(*roles.tiles, replace(tile, blocks=blocks.number))
    )


def devices_of(tile: Tile, layout: Layout | None) -> Devices | None:
    """Return the devices over which the rows of a tile lie; None where each row is on all of them.

    Raises `PlanError` where the inputs do not lie along the axes of a mesh that the tile names.
    """
    if not tile.over:
        return None
    names = () if layout is None else layout.mesh.axis_names
    if missing := [axis for axis in tile.over if axis not in names]:
        what = f"have rows along {missing[0]!r}, an axis of a mesh on which no argument lies."
        raise PlanError(message("plan.tiles", what, "Lay the arguments over a mesh with this axis, or make a plan."))
    assert layout is not None, "it has names"
    return layout.devices(tile.over)


def _with_cut_block(eqns: list[Equation], ones: set[Var], cut: Callable[[Any, Roles], Any]) -> list[Equation]:
    """The equations of a loop, in which the block that reads a cotangent of one, or numbers made from it, is cut."""
    reached = hoist.reached(eqns, ones)
    scans = ((n, eqn) for n, eqn in enumerate(eqns) if eqn.primitive.name == SCAN)
    place, scan = next((n, eqn) for n, eqn in scans if not reached.isdisjoint(jaxprs.variables(eqn.invars)))
    layout = jaxprs.scan_layout(scan)
    given = zip(layout.body.invars, scan.invars, strict=True)
    cotangents = {v for v, atom in given if not isinstance(atom, Literal) and atom in reached}
    late = hoist.reached(layout.body.eqns, cotangents)
    first = next(n for n, eqn in enumerate(layout.body.eqns) if not late.isdisjoint(eqn.outvars))
    inputs = tuple(Role.COTANGENT if v in cotangents else Role.PRIMAL for v in layout.body.invars)
    is_late = (not isinstance(v, Literal) and v in late for v in layout.body.outvars)
    roles = Roles(inputs, tuple(Role.GRADIENT if one else Role.OUTPUT for one in is_late), first)
    program = jaxprs.build(layout.body.invars, layout.body.outvars, layout.body.eqns)
    new = jaxprs.scan(scan, cut(program, roles), *layout.parts(scan.invars), scan.outvars)
    return [*eqns[:place], new, *eqns[place + 1 :]]


def tiled(found: Prepared, blocks: Blocks, devices: Devices | None, change: Change) -> tuple[Any, int]:
    """Return the program with the equations of a tiling in blocks, and its number of forward equations.

    Args:
        found: the program and its tiling.
        blocks: the blocks of its rows, or of the rows of each device.
        devices: the devices that have rows of their own, if there are some.
        change: changes the equations of a loop.
    """
    jaxpr, _ = jaxprs.opened(found.closed)
    rows, stacks, scans = found.tiling.rows, dict[Var, Var](), list[tuple[frozenset[int], list[Equation]]]()
    wanted, again = loops(jaxpr, found.tiling, blocks.is_even)
    for loop in (loop for loop in wanted if loop.own):
        if devices is None:
            written = change(loop, BlockScan(loop.own, rows, blocks).written(stacks, loop.wanted, loop.handed), {})
        else:
            written = OnDevices(rows, blocks, devices).written(loop, stacks, change)
        scans.append((loop.level, written))
    spans = (range(found.boundary), range(found.boundary, len(jaxpr.eqns)))
    halves = [_arranged(jaxpr.eqns, [i for i in span if i not in again], scans) for span in spans]
    return jaxprs.build(jaxpr.invars, jaxpr.outvars, [*halves[0], *halves[1]]), len(halves[0])


def _arranged(
    eqns: Sequence[Equation], span: Sequence[int], scans: Iterable[tuple[frozenset[int], list[Equation]]]
) -> list[Equation]:
    """The equations of one half with scans in the place of some: as late as these, and before all that need them."""
    mine = [(level, written) for level, written in scans if not level.isdisjoint(span)]
    inside = frozenset[int]().union(*(level for level, _ in mine))
    items = [(i, [eqns[i]]) for i in span if i not in inside]
    items = sorted([*items, *((max(level), written) for level, written in mine)], key=lambda item: item[0])
    makers: dict[Any, int] = {v: n for n, (_, several) in enumerate(items) for eqn in several for v in eqn.outvars}
    needs: list[list[int]] = []
    last_effect: int | None = None
    for n, (_, several) in enumerate(items):
        reads = {v for eqn in several for v in reading(eqn)}
        needs.append([makers[v] for v in reads if v in makers and makers[v] != n])
        if any(eqn.effects for eqn in several):
            needs[n] += [] if last_effect is None else [last_effect]
            last_effect = n
    return [eqn for n in _in_order(needs) for eqn in items[n][1]]


def _in_order(needs: Sequence[Sequence[int]]) -> list[int]:
    """Numbers in order, but each after those that it needs."""
    order: dict[int, None] = {}
    for first in range(len(needs)):
        waiting = [first]
        while waiting:
            missing = [n for n in needs[waiting[-1]] if n not in order]
            if missing:
                waiting += missing
            else:
                order[waiting.pop()] = None
    return list(order)
