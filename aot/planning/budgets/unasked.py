"""Run rows block by block where the model of a GPU or TPU finds that smaller and no slower, without a budget.

An array that is a large part of the peak is written and read whole, and on such a device this takes longer than reading
the weights once more for each block. So where one array of the default plan is large, blocks of a few numbers are
priced, each with its own default plan. As with the default plan itself, nothing is compiled to decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from jointcut.aot.planning.budgets.tiling import Priced, proposals
from jointcut.aot.progress.progress import tell
from jointcut.aot.trace.joint import Joint
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.roles import Tile
from jointcut.partition.search.best import LEAST_PEAK, leanest
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.mincut import min_cut

#: The least bytes of an array for whose sake rows run in blocks, and its least share of the peak.
LARGE_BYTES, LARGE_SHARE = 1 << 26, 0.3

#: How many tiles are priced, and in how many blocks: first in the most, and in fewer where that is too slow.
MOST_PRICED, BLOCKS = 4, (8, 4, 2)


def unasked(
    problem: Problem, plan: Plan, form: Joint, problem_of: Callable[[Joint], Problem], data: Iterable[int]
) -> Joint | None:
    """Return the program with rows in blocks whose default plan is the smallest, and no slower than one without blocks.

    Args:
        problem: the planning problem of the program without blocks.
        plan: its default plan.
        form: this program.
        problem_of: states the planning problem of a program.
        data: the numbers of the inputs that are data.

    Returns:
        None where the device has no known rates, no array is large, or no such program takes clearly fewer bytes.
    """
    if problem.rates is None:
        return None
    planner = Planner(problem.timed(problem.rates))
    replay, usual = planner.replay(plan), planner.known(planner.priced(plan))
    if max((b.bytes for b in replay.alive), default=0) < max(LARGE_BYTES, LARGE_SHARE * replay.peak_bytes):
        return None
    most_bytes, most_seconds = (1 - LEAST_PEAK) * usual.predicted_bytes, planner.common_seconds + usual.step_seconds
    found: list[tuple[float, Joint]] = []
    for tile in proposals(Priced(form, planner), LEAST_PEAK * usual.predicted_bytes, data)[:MOST_PRICED]:
        for program in _in_blocks(form, tile, problem):
            other = Planner((stated := problem_of(program)).timed(problem.rates))
            if other.common_seconds > most_seconds:
                continue
            smallest = other.known(other.priced(leanest(other, min_cut(stated))))
            if other.common_seconds + smallest.step_seconds <= most_seconds:
                found.append((smallest.predicted_bytes, program))
                break
    least_bytes, program = min(found, key=lambda pair: pair[0], default=(math.inf, None))
    return program if least_bytes <= most_bytes else None


def _in_blocks(form: Joint, tile: Tile, problem: Problem) -> Iterator[Joint]:
    """Yield the program with a tile in several numbers of blocks, the most first."""
    for blocks in BLOCKS:
        if blocks <= tile.blocks:
            tell(partial(str, tiled := replace(tile, blocks=blocks)))
            yield form.with_tile(tiled, problem.backend)
