"""Run rows block by block where no plan of a program holds a budget.

No choice of residuals helps where one array is the peak. So tiles grow from the largest arrays at the peak of the
smallest plan, along each of their axes. Each tiled program has plans of its own. The fastest that are expected to hold
the budget are searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Generic, TypeVar

import jax.numpy as jnp

from jointcut.aot.planning.budgets.attempts import Fitted
from jointcut.aot.progress.progress import tell
from jointcut.aot.trace.joint import Joint
from jointcut.partition.errors import BudgetError
from jointcut.partition.lower.memory.levels import Buffer, type_of
from jointcut.partition.program.jax import abstract
from jointcut.partition.program.roles import Role, Side, Tile
from jointcut.partition.search.budget import Planner
from jointcut.partition.tiles.apart import apart
from jointcut.partition.tiles.tile import Prepared, grown, variables

#: How many of the tiles are priced, and how many of these cover the most for their number of rows.
MOST_PRICED, MOST_WIDEST = 6, 2

#: The shares of the room that blocks are sized for, in turn, with what was learnt by then; and how many programs are
#: searched for plans each time.
AIMS, MOST_SEARCHED = (1.0, 1.0, 0.5), 2

#: Arrays that take at least this share of the peak may be tiled.
LARGE = 0.04

#: Values that take less than this share of the room are borders of tiles.
BORDER = 1 / 32

#: The number of blocks that is priced first, the most, and how many other numbers are priced.
FIRST_BLOCKS, MOST_BLOCKS, MOST_NUMBERS = 8, 256, 2

#: The fewest and the most of XLA's bytes for each predicted byte, and the most before a program in blocks was refused.
RATIOS, MOST_RATIO = (0.8, 2.5), 1.25

#: A block that computes values again may first take this share of the room.
ROOMY = 0.7

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Priced:
    """A program with its plans."""

    program: Joint
    planner: Planner

    @cached_property
    def least_bytes(self) -> float:
        """The temporaries of the smallest plan, as predicted."""
        return min((c.predicted_bytes for c in self.planner.small(0.0, 1.0)), default=math.inf)

    @property
    def tile(self) -> Tile | None:
        """Its last tile; None without one."""
        return next(reversed(self.program.roles.tiles), None)

    def ratio(self, refusal: BudgetError) -> float:
        """XLA's bytes for each predicted byte of its smallest plan, by a refusal."""
        if refusal.least_bytes is None or not self.least_bytes or math.isinf(self.least_bytes):
            return 1.0
        least, most = RATIOS
        return min(max((refusal.least_bytes - self.program.fixed_bytes) / self.least_bytes, least), most)

    def seconds(self, room: float) -> float:
        """The time of the fastest plan that is expected to take no more than the room."""
        found = self.planner.fastest(room, lambda c: c.predicted_bytes)
        return math.inf if found is None else self.planner.common_seconds + found.step_seconds

    def alive(self) -> list[Buffer]:
        """The large arrays at the peak of the smallest plan, the largest first."""
        smallest = min(self.planner.small(0.0, 1.0), key=lambda c: c.predicted_bytes)
        replay = self.planner.replay(smallest.plan)
        return [b for b in replay.alive if b.bytes >= LARGE * replay.peak_bytes]


@dataclass(frozen=True)
class Tilings(Generic[_T]):
    """The search for rows that run in blocks within a budget.

    XLA's bytes for each predicted byte are learnt from each program that is refused, for tiles of its kind.

    Attributes:
        form: the program without tiles.
        data: the numbers of the inputs that are data, as `data_of` finds them.
        room: the bytes of temporaries that the budget leaves.
        refusal: the error of the program without tiles.
        planner, search: make the plans of a program, and find one that holds the budget.
    """

    form: Priced
    data: Sequence[int]
    room: float
    refusal: BudgetError
    planner: Callable[[Joint], Planner]
    search: Callable[[Joint], Fitted[_T]]
    _refusals: dict[Tile, BudgetError] = field(default_factory=dict)
    _ratios: dict[tuple[bool, bool], float] = field(default_factory=dict)
    _made: dict[Tile, Priced] = field(default_factory=dict)

    def found(self) -> tuple[Joint, Fitted[_T]]:
        """Return a program with rows in blocks, and a plan of it for the budget.

        Raises the refusal of the smallest peak where no such program holds the budget either.
        """
        for form in self.candidates():
            if (fitted := self.tries(form)) is not None:
                return form.program, fitted
        refusals = [self.refusal, *self._refusals.values()]
        refusal = min(refusals, key=lambda error: math.inf if error.least_bytes is None else error.least_bytes)
        if met := _meeting(self.form.program, self.data):
            refusal.add_note(met)
        raise refusal

    def candidates(self) -> Iterator[Priced]:
        """The programs to search for plans, in order. The smallest one also tells what to expect of more blocks."""
        room = self.predicted_room(None)
        tiles = proposals(self.form.program, self.form.alive(), self.form.least_bytes - room, room, self.data)
        for aim in AIMS:
            yield from self.fitting(tiles, aim)
        yield min((self.form, *self._made.values()), key=self.expected)
        yield from self.fitting(tiles, 1.0)

    def fitting(self, tiles: Sequence[Tile], aim: float) -> list[Priced]:
        """The fastest programs with one of some tiles, sized for a share of the room, that are expected to fit."""
        forms = dict.fromkeys(self.sized(tile, aim) for tile in tiles)
        found = [f for f in forms if self.expected(f) <= self.room and f.least_bytes < self.form.least_bytes]
        return sorted(found, key=lambda f: f.seconds(self.predicted_room(f.tile)))[:MOST_SEARCHED]

    def tries(self, form: Priced) -> Fitted[_T] | None:
        """A plan of a program for the budget; None if it is refused now, or was before."""
        if (tile := form.tile) is None or tile in self._refusals:
            return None
        try:
            return self.search(form.program)
        except BudgetError as error:
            self._refusals[tile] = error
            self._ratios[_kind(tile)] = form.ratio(error)
            return None

    def ratio(self, tile: Tile | None) -> float:
        """XLA's bytes for each predicted byte of a program with a tile; of programs without, if none was refused."""
        known = None if tile is None else self._ratios.get(_kind(tile))
        return min(self.form.ratio(self.refusal), MOST_RATIO) if known is None else known

    def expected(self, form: Priced) -> float:
        """XLA's bytes of the smallest plan, as expected."""
        return self.ratio(form.tile) * form.least_bytes

    def predicted_room(self, tile: Tile | None) -> float:
        """The bytes that a program with a tile may take by its prediction."""
        return self.room / self.ratio(tile)

    def sized(self, tile: Tile, aim: float) -> Priced:
        """The program with a tile, in the fewest blocks of a few numbers that are expected to fit into a share."""
        tell(lambda: f"pricing {tile}")
        room = aim * self.predicted_room(tile)
        tried = {1: self.form, tile.blocks: self.with_tile(tile)}
        for _ in range(MOST_NUMBERS):
            few, many = sorted(tried)[-2:]
            needed = _blocks((few, tried[few].least_bytes), (many, tried[many].least_bytes), room)
            number = None if needed is None else _even(self.form.program, tile, needed)
            if number is None or number in tried:
                break
            tried[number] = self.with_tile(replace(tile, blocks=number))
        del tried[1]
        fitting = [number for number in tried if tried[number].least_bytes <= room]
        if fitting:
            return tried[min(fitting)]
        number = min(tried, key=lambda number: tried[number].least_bytes)
        return self.cut(replace(tile, blocks=number), aim) if tile.is_early else tried[number]

    def cut(self, tile: Tile, aim: float) -> Priced:
        """The program with blocks whose backward computes values again, as few as a share of the room asks for."""
        least = self.with_tile(replace(tile, block_bytes=0))
        room = aim * self.predicted_room(least.tile)
        if least.least_bytes > room:
            return least
        roomy = self.with_tile(replace(tile, block_bytes=int(ROOMY * room)))
        return roomy if roomy.least_bytes <= room else least

    def with_tile(self, tile: Tile) -> Priced:
        """The program with a tile."""
        if tile not in self._made:
            program = self.form.program.with_tile(tile, self.form.planner.problem.backend)
            self._made[tile] = Priced(program, self.planner(program))
        return self._made[tile]


def _kind(tile: Tile) -> tuple[bool, bool]:
    """Where the backward of a block runs, and whether it computes values again. One kind is predicted alike."""
    return tile.is_early, tile.block_bytes is None


def _blocks(few: tuple[int, float], many: tuple[int, float], room: float) -> int | None:
    """The number of blocks with which a program fits, by its peaks with two numbers of them; None if more are no use.

    A share of the peak shrinks with the blocks. Where the rest leaves no room, blocks shrink to a tenth of it.
    """
    shared = (few[1] - many[1]) / (1 / few[0] - 1 / many[0])
    fixed = many[1] - shared / many[0]
    if shared <= 0:
        return None
    needed = math.ceil(1.05 * shared / (max(room, 1.1 * fixed) - fixed))
    return min(max(needed, 2), MOST_BLOCKS)


def _even(program: Joint, tile: Tile, least: int) -> int:
    """A number of blocks that divides the rows, if one of those that may be taken is not much larger than the least."""
    rows = variables(program.closed)[tile.value].aval.shape[tile.axis]
    count = rows // (program.layout.devices(tile.over).number if program.layout else 1)
    return next((n for n in range(least, min(2 * least, count, MOST_BLOCKS) + 1) if count % n == 0), least)


def proposals(program: Joint, alive: list[Buffer], excess: float, room: float, data: Iterable[int]) -> list[Tile]:
    """The tiles that have the most equations, the ones that cover the most, and then the smallest that may be enough.

    Enough is what covers so many bytes of `excess` over the `room` of the arrays that are `alive` at the peak. For each
    number of rows one covers the most with a border, and one without.
    """
    found: dict[tuple[bool, frozenset[int]], tuple[Tile, int, int]] = {}
    covers: dict[tuple[int, bool], tuple[Tile, int]] = {}
    for tile in _seeds(program, alive, max(int(BORDER * room), 0), data):
        if (region := grown(program.closed, program.roles, tile)) is not None:
            covered, eqns = _covered(region, alive), region.tiling.eqns
            found.setdefault((tile.is_early, eqns), (tile, covered, len(eqns)))
            kind = region.tiling.count, tile.least_bytes > 0
            if covered > covers.get(kind, (tile, 0))[1]:
                covers[kind] = tile, covered
    early, late = ([row for row in found.values() if row[0].is_early == is_early] for is_early in (True, False))
    largest = [max(rows, key=lambda row: row[2])[0] for rows in (early, late) if rows]
    widest = [tile for tile, _ in sorted(covers.values(), key=lambda row: -row[1])[:MOST_WIDEST]]
    enough = sorted((row for row in found.values() if row[1] >= excess), key=lambda row: (row[2], not row[0].is_early))
    others = sorted((row for row in found.values() if row[1] < excess), key=lambda row: (-row[1], not row[0].is_early))
    return [*dict.fromkeys([*largest, *widest, *(tile for tile, *_ in (*enough, *others))])][:MOST_PRICED]


def _seeds(program: Joint, alive: list[Buffer], border: int, data: Iterable[int]) -> Iterator[Tile]:
    """Yield tiles along each axis of the largest arrays at the peak, and along the first axis of the data.

    Each is tried with and without a border, and with forward and backward of a block together and apart. On a mesh
    they are along the axes that lie on several devices: then each device has rows of its own.
    """
    numbered, laid = variables(program.closed), program.laid
    known = {type_of(v.aval): n for n, v in reversed([*enumerate(numbered)])}
    arrays = {known[b.type]: _named(b) for b in reversed(alive) if b.type in known}
    named = [(n, axis, text) for n, text in reversed(arrays.items()) for axis in range(len(numbered[n].aval.shape))]
    for value, axis, text in [*named, *((n, 0, program.roles.input_path(n)) for n in data)]:
        over = () if laid is None else laid.axes(numbered[value], axis)
        count = numbered[value].aval.shape[axis] // (1 if laid is None else laid.layout.devices(over).number)
        for least_bytes, is_early in product((border, 0), (True, False)):
            if count > 1 and (laid is None or over):
                yield Tile(value, axis, least_bytes, min(FIRST_BLOCKS, count), is_early, text, over=over)


def _named(buffer: Buffer) -> str:
    """An array by its type, its op and the user's line."""
    return f"{buffer.type} of {buffer.op}{' at ' + buffer.source if buffer.source else ''}"


def data_of(program: Joint, differentiated: Iterable[int]) -> list[int]:
    """Return the number of the largest input of each length that is not differentiated.

    `differentiated` counts inputs from the last one (-1). Vectors of real numbers are seldom data, and are left out.
    """
    places = [n for n, role in enumerate(program.roles.inputs) if role is Role.PRIMAL]
    fixed = {places[i] for i in differentiated}
    sizes: dict[int, list[tuple[int, int]]] = {}
    for n, v in enumerate(variables(program.closed)[: len(program.roles.inputs)]):
        shape = getattr(v.aval, "shape", ())
        is_data = len(shape) > 1 or (shape and not jnp.issubdtype(v.aval.dtype, jnp.inexact))
        if n in places and n not in fixed and is_data:
            sizes.setdefault(v.aval.shape[0], []).append((abstract.aval_bytes(v.aval), n))
    return [max(several)[1] for several in sizes.values()]


def _meeting(program: Joint, data: Iterable[int]) -> str:
    """Tell which op is the first to mix the rows of the largest argument that is not differentiated, if one does."""
    numbered = variables(program.closed)
    largest = max(data, key=lambda n: abstract.aval_bytes(numbered[n].aval), default=None)
    _, mixing = ((), ()) if largest is None else apart(program.closed, program.roles, {largest: 0}, program.carries)
    if largest is None or not mixing or mixing[0].side is Side.BACKWARD:
        return ""
    where = f"{mixing[0].op}{f' at {mixing[0].source}' if mixing[0].source else ''}"
    return f"Rows of {program.roles.input_path(largest)} are mixed first by {where}, so no block goes past it."


def _covered(region: Prepared, alive: list[Buffer]) -> int:
    """The bytes at the peak of arrays that are never whole in blocks."""
    rows = region.tiling.rows.places
    inside = {type_of(v.aval) for v, place in rows.items() if isinstance(place, int)}
    return sum(b.bytes for b in alive if b.type in inside)
