"""Run rows block by block where the model of a GPU or TPU finds that smaller and no slower, without a budget.

An array that is a large part of the peak is written and read whole, and on such a device this takes longer than reading
the weights once more for each block. So where one array of the default plan is large, tiles that make it smaller are
priced, each with a default plan of its own. As with the default plan itself, nothing is compiled to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from jointcut.aot.planning.budgets.tiling import proposals
from jointcut.aot.progress.progress import Stage, tell
from jointcut.aot.trace.joint import Joint
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.roles import Tile
from jointcut.partition.search.best import LEAST_PEAK, best
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.mincut import min_cut

#: The least bytes of an array for whose sake rows run in blocks, and its least share of the peak.
LARGE_BYTES, LARGE_SHARE = 1 << 26, 0.3

#: How many tiles are priced, and in how many blocks: first in the most, and in fewer where that is too slow.
MOST_PRICED, BLOCKS = 2, (8, 4, 2)


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
        None where the device has no known rates, no array is large, or no tile makes the plan clearly smaller.
    """
    if problem.rates is None:
        return None
    replay = Planner(problem.timed(problem.rates)).replay(plan)
    large = [b for b in replay.alive if b.bytes >= max(LARGE_BYTES, LARGE_SHARE * replay.peak_bytes)]
    if not large:
        return None
    with Stage("search", name):
        usual = _priced(problem, plan)
        room = LEAST_PEAK * usual.predicted_bytes
        tiles = proposals(form, large, usual.predicted_bytes - room, room, data)[:MOST_PRICED]
        found = [row for tile in tiles if (row := _in_most_blocks(tile, problem_with, usual.seconds)) is not None]
        tile, smallest = min(found, key=lambda row: row[1].predicted_bytes, default=(None, usual))
        is_smaller = smallest.predicted_bytes <= (1 - LEAST_PEAK) * usual.predicted_bytes
        return (tile, smallest.plan) if tile is not None and is_smaller else None


class _Priced(NamedTuple):
    """A plan, its predicted bytes of temporaries, and the predicted time of the step."""

    plan: Plan
    predicted_bytes: float
    seconds: float


def _in_most_blocks(
    tile: Tile, problem_with: Callable[[Tile], Problem], most_seconds: float
) -> tuple[Tile, _Priced] | None:
    """The tile in the most blocks for which there is time, and its default plan; None where that takes more time.

    The number of blocks is chosen by minimum cuts, as these are found in a tenth of the time.
    """
    for blocks in BLOCKS:
        if blocks <= tile.blocks:
            tell(partial(str, tiled := replace(tile, blocks=blocks)))
            problem = problem_with(tiled)
            if _priced(problem, min_cut(problem)).seconds <= most_seconds:
                priced = _priced(problem, best(problem))
                return (tiled, priced) if priced.seconds <= most_seconds else None
    return None


def _priced(problem: Problem, plan: Plan) -> _Priced:
    assert problem.rates is not None, "the device has rates"
    planner = Planner(problem.timed(problem.rates))
    candidate = planner.known(planner.priced(plan))
    return _Priced(plan, candidate.predicted_bytes, planner.common_seconds + candidate.step_seconds)
