"""Run rows block by block where the model of a GPU or TPU finds that smaller and no slower, without a budget.

An array that is a large part of the peak is written and read whole, and on such a device this takes longer than reading
the weights once more for each block. So where one array of the default plan is large, tiles that make it smaller are
priced by their minimum cuts, and the most promising ones by default plans of their own. A block that runs forward and
backward may keep all that it needs, or compute values again to take little room: both are priced. As with the default
plan itself, nothing is compiled to decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from jointcut.aot.planning.budgets.tiling import LARGE, proposals
from jointcut.aot.progress.progress import Stage, tell
from jointcut.aot.trace.joint import Joint
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.roles import Tile
from jointcut.partition.search.best import LEAST_PEAK, ROOM, best
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.mincut import min_cut

#: The least bytes of an array for whose sake rows run in blocks, and its least share of the peak.
LARGE_BYTES, LARGE_SHARE = 1 << 26, 0.3

#: In how many blocks tiles are priced: first in the most, and in fewer where that is too slow.
BLOCKS = (8, 4, 2)

#: At least so many tiles are priced, and more while their programs together have no more ops than this.
FEWEST_PRICED, MOST_OPS = 3, 6_000

#: How many of them get a default plan: the smallest, and the fastest that are larger.
MOST_PLANNED = 3


def unasked(
    name: str, form: Joint, problem: Problem, plan: Plan, problem_with: Callable[[Tile], Problem], data: Iterable[int]
) -> tuple[Tile, Plan] | None:
    """Return the tile whose default plan takes the fewest bytes, and no more time than without a tile, and this plan.

    Args:
        name: the function's name.
        form: the program without a tile.
        problem: its planning problem.
        plan: its default plan.
        problem_with: states the planning problem of the program with a tile.
        data: the numbers of the inputs that are data.

    Returns:
        None where the device has no known rates, no array is large, or no tile makes the plan clearly smaller. If the
        device has too little memory without a tile, smaller arrays are tried too, and time is no matter.
    """
    if problem.rates is None:
        return None
    replay, room_bytes = Planner(problem.timed(problem.rates)).replay(plan), problem.room_bytes
    fits = room_bytes is None or problem.backend.calibration * replay.peak_bytes <= ROOM * room_bytes
    least_bytes = max(LARGE_BYTES, (LARGE_SHARE if fits else LARGE) * replay.peak_bytes)
    if not (large := [b for b in replay.alive if b.bytes >= least_bytes]):
        return None
    with Stage("search", name):
        usual = _priced(problem, plan)
        most_seconds = usual.seconds if fits else math.inf
        room = LEAST_PEAK * usual.predicted_bytes
        tiles = _roomy(proposals(form, large, usual.predicted_bytes - room, room, data), int(room))
        number = max(FEWEST_PRICED, MOST_OPS // len(problem.graph.ops))
        cuts = [_in_most_blocks(tile, problem_with, most_seconds) for tile in tiles[:number]]
        promising = _promising([cut for cut in cuts if cut is not None])
        found = [(tile, _priced(problem, best(problem))) for tile, problem, _ in promising]
        in_time = [row for row in found if row[1].seconds <= most_seconds]
        tile, smallest = min(in_time, key=lambda row: row[1].predicted_bytes, default=(None, usual))
        is_smaller = smallest.predicted_bytes <= (1 - LEAST_PEAK) * usual.predicted_bytes
        return (tile, smallest.plan) if tile is not None and is_smaller else None


class _Priced(NamedTuple):
    """A plan, its predicted bytes of temporaries, and the predicted time of the step."""

    plan: Plan
    predicted_bytes: float
    seconds: float


class _Cut(NamedTuple):
    """A tile, the planning problem of the program with it, and its minimum cut."""

    tile: Tile
    problem: Problem
    cut: _Priced


def _roomy(tiles: Iterable[Tile], room_bytes: int) -> list[Tile]:
    """Each tile, and where blocks run forward and backward, one whose blocks compute values again to fit a room."""
    ways = ((tile, replace(tile, block_bytes=room_bytes)) if tile.is_early else (tile,) for tile in tiles)
    return [tile for way in ways for tile in way]


def _in_most_blocks(tile: Tile, problem_with: Callable[[Tile], Problem], most_seconds: float) -> _Cut | None:
    """The tile in the most blocks for which there is time, by minimum cuts; None where it takes more time in any.

    A minimum cut is found in a tenth of the time of a default plan.
    """
    for blocks in BLOCKS:
        if blocks <= tile.blocks:
            tell(partial(str, tiled := replace(tile, blocks=blocks)))
            problem = problem_with(tiled)
            cut = _priced(problem, min_cut(problem))
            if cut.seconds <= most_seconds:
                return _Cut(tiled, problem, cut)
    return None


def _promising(cuts: Sequence[_Cut]) -> list[_Cut]:
    """The tile whose minimum cut is the smallest, and the fastest ones, which have the most time to compute again."""
    by_bytes = sorted(cuts, key=lambda row: row.cut.predicted_bytes)
    fastest = sorted(by_bytes[1:], key=lambda row: row.cut.seconds)
    return [*by_bytes[:1], *fastest][:MOST_PLANNED]


def _priced(problem: Problem, plan: Plan) -> _Priced:
    assert problem.rates is not None, "the device has rates"
    planner = Planner(problem.timed(problem.rates))
    candidate = planner.known(planner.priced(plan))
    return _Priced(plan, candidate.predicted_bytes, planner.common_seconds + candidate.step_seconds)
