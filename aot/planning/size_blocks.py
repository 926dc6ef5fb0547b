"""Choose the rows that run in blocks so that a larger size of an axis holds a budget.

Rows are proposed at a size where no other plan holds the budget, as in a search for a plan. They run in the most blocks
at all sizes, so that the peak stays affine in the size. Those rows are taken whose peak is the smallest at a size that
is several times as large. Once the largest size is known, fewer blocks are taken if XLA finds that these hold, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from jointcut.aot.options.limits import Limit
from jointcut.aot.planning.budgets.searches import Lookup
from jointcut.aot.planning.budgets.tiling import FIRST_BLOCKS, MOST_BLOCKS, Priced, data_of, proposals
from jointcut.aot.planning.request import Request
from jointcut.aot.planning.size_search import NEAR, SizeSearch, Smallest, meeting
from jointcut.aot.progress.progress import tell
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.memory.levels import type_of
from jointcut.partition.program.roles import Tile
from jointcut.partition.tiles.tile import variables

#: Fewer blocks than the most that are weighed at the largest size.
FEWER = FIRST_BLOCKS, 32, 128

#: How much larger the second of two sizes is at which tiles are priced.
FARTHER = 4

#: A share of the size, as its inverse, may be spared so that all blocks are equal.
SPARED = 50


@dataclass(frozen=True)
class InBlocks:
    """The requests of sizes with rows in blocks.

    Attributes:
        tile: the rows; at every size they are parted into its number of blocks, or into fewer of two rows.
        whole: makes the request of a size without blocks.
        probe: a size for which the tile was found.
        other: another size at which the program is known.
    """

    tile: Tile
    whole: Callable[[int], Request]
    probe: int
    other: int
    _made: dict[int, Request] = field(default_factory=dict, compare=False)

    def request(self, size: int) -> Request:
        """Return the request of a size, made once; without blocks, where it has no such rows."""
        if size not in self._made:
            self._made[size] = self._parted(self.whole(size))
        return self._made[size]

    def _parted(self, request: Request) -> Request:
        numbered = variables(request.program.closed)
        if self.tile.value >= len(numbered):
            return request
        aval = numbered[self.tile.value].aval
        _, of, made = self.tile.array.partition(" of ")
        array = f"{type_of(aval)} of {made}" if of else self.tile.array
        tile = replace(self.tile, array=array, blocks=self._number(aval.shape[self.tile.axis]))
        try:
            return request.in_tiles((tile,))
        except PlanError:
            return request

    def below(self, size: int, below: Callable[[int], int]) -> int:
        """Return the largest size up to a number whose rows make equal blocks, or else the largest that is allowed."""
        most = below(size)
        near = range(most, max(most - max(most // SPARED, 1) - 1, 0), -1)
        return next((n for n in near if self._is_even(n) and below(n) == n), most)

    def _number(self, rows: int) -> int:
        """The number of blocks of so many rows. Products of one row are another thing to XLA, and may take more."""
        return min(self.tile.blocks, max(rows // 2, 1))

    def _is_even(self, size: int) -> bool:
        elsewhere, there = self._rows
        rows = max(there * size // self.probe, 1)
        return elsewhere == there or rows % -(-rows // self._number(rows)) == 0

    @cached_property
    def _rows(self) -> tuple[int, ...]:
        """The number of rows at the other size, and at that of the probe."""
        programs = (variables(self.whole(size).program.closed) for size in (self.other, self.probe))
        return tuple(numbered[self.tile.value].aval.shape[self.tile.axis] for numbered in programs)

    def fewer(self, search: SizeSearch) -> None:
        """Let the largest size of a search run in the fewest blocks that hold the budget, as plans are weighed."""
        for number in FEWER:
            tiled = replace(self, tile=replace(self.tile, blocks=number), _made={})
            request = tiled.request(search.held)
            if (fitted := request.within(Limit(fraction=0.0), to_run=False).fitted) is None:
                return
            if fitted.measured.peak_bytes <= search.budget_bytes:
                search.requests[search.held] = request
                search.known[search.held] = Smallest(fitted.plan, fitted.measured, len(fitted.trail))
                return

    def remember(self, search: SizeSearch) -> None:
        """Let a budget find these blocks at once where the function is cut for the largest size of a search."""
        lookup = Lookup.of(self.whole(search.held).wanted(search.budget))
        lookup.place.tiles[lookup.key[0]] = search.request(search.held).program.roles.tiles


def in_blocks(search: SizeSearch) -> InBlocks | None:
    """Return the rows with which the largest size holds the budget, as predicted.

    `search` looks for the size without blocks, and has predicted peaks. Returns None where no blocks are predicted to
    hold a size that is clearly larger.
    """
    probe = max(search.predicted)
    request = search.request(probe)
    form, data = Priced(request.program, request.planner), data_of(request.program, request.differentiated)
    room = max(search.budget_bytes - request.program.fixed_bytes, 0)
    proposed = proposals(form.program, form.alive(), form.least_bytes, room, data)
    far = search.near(FARTHER * probe)
    peaks = {tile: _peak(search, tile, far) for tile in (replace(tile, blocks=MOST_BLOCKS) for tile in proposed)}
    if early := [tile for tile in peaks if tile.is_early]:
        again = replace(min(early, key=lambda tile: peaks[tile]), block_bytes=0)
        peaks[again] = _peak(search, again, far)
    if not peaks:
        return None
    best = _smallest(search, peaks, far)
    reach = meeting({size: _peak(search, best, size) for size in (probe, far)}, search.budget_bytes)
    if reach <= (1 + 2 * NEAR) * max(search.held, meeting(search.predicted, search.budget_bytes)):
        return None
    return InBlocks(best, search.request, probe, far)


def _smallest(search: SizeSearch, peaks: Mapping[Tile, float], far: int) -> Tile:
    """Return the tile with the smallest peak at a size: of the best of each kind, by XLA where plans can be weighed."""
    best: dict[tuple[bool, bool], Tile] = {}
    for tile in sorted(peaks, key=lambda tile: peaks[tile]):
        best.setdefault((tile.is_early, tile.block_bytes is None), tile)

    def weighed(tile: Tile) -> float:
        fitted = InBlocks(tile, search.request, far, far).request(far).within(Limit(fraction=0.0), to_run=False).fitted
        assert fitted is not None, "a search was made"
        return fitted.measured.peak_bytes

    is_quick = search.request(far).weighing.is_quick and len(best) > 1
    return min(best.values(), key=weighed if is_quick else lambda tile: peaks[tile])


def _peak(search: SizeSearch, tile: Tile, size: int) -> float:
    """Return the smallest peak with a tile at a size, as predicted."""
    tell(lambda: f"pricing {tile}")
    request = InBlocks(tile, search.request, size, size).request(size)
    return request.program.fixed_bytes + Priced(request.program, request.planner).least_bytes
