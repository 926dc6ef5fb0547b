"""Run rows block by block where the model of a GPU or TPU finds that smaller and no slower, without a budget.

An array that is a large part of the peak is written and read whole, and on such a device this takes longer than reading
the weights once more for each block. So where one array of the default plan is large, blocks of a few numbers are
priced, each with its own default plan. As with the default plan itself, nothing is compiled to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from jointcut.aot.planning.budgets.tiling import proposals
from jointcut.aot.progress.progress import Stage, tell
from jointcut.aot.trace.joint import Joint
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import CostModel
from jointcut.partition.program.roles import Tile
from jointcut.partition.search.best import LEAST_PEAK, best
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.mincut import min_cut

#: The least bytes of an array for whose sake rows run in blocks, and its least share of the peak.
LARGE_BYTES, LARGE_SHARE = 1 << 26, 0.3

#: How many tiles are priced by their minimum cuts, and in how many blocks: first in the most, and in fewer where that
#: is too slow.
MOST_PRICED, BLOCKS = 4, (8, 4, 2)

#: How many of these get a default plan, those with the smallest minimum cuts first, until one is good enough.
MOST_PLANNED = 2


def unasked(
    name: str, problem: Problem, plan: Plan, form: Joint, problem_of: Callable[[Joint], Problem], data: Iterable[int]
) -> Joint | None:
    """Return the program with rows in blocks whose default plan is the smallest, and no slower than one without blocks.

    Args:
        name: the function's name.
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
    replay = planner.replay(plan)
    large = [b for b in replay.alive if b.bytes >= max(LARGE_BYTES, LARGE_SHARE * replay.peak_bytes)]
    if not large:
        return None
    with Stage("search", name):
        usual = planner.known(planner.priced(plan))
        room = LEAST_PEAK * usual.predicted_bytes
        tiles = proposals(form, large, usual.predicted_bytes - room, room, data)[:MOST_PRICED]
        limits = (1 - LEAST_PEAK) * usual.predicted_bytes, planner.common_seconds + usual.step_seconds
        return _smallest([_in_blocks(form, tile, problem) for tile in tiles], problem_of, problem.rates, *limits)


def _smallest(
    forms: Iterable[Iterable[Joint]],
    problem_of: Callable[[Joint], Problem],
    rates: CostModel,
    most_bytes: float,
    most_seconds: float,
) -> Joint | None:
    """The program whose default plan is the smallest within limits, of the first of each group that is fast enough."""
    found: list[tuple[float, Joint, Problem]] = []
    for programs in forms:
        for program in programs:
            problem = problem_of(program)
            predicted_bytes, seconds = _priced(problem, rates, min_cut)
            if seconds <= most_seconds:
                found.append((predicted_bytes, program, problem))
                break
    for _, program, problem in sorted(found, key=lambda row: row[0])[:MOST_PLANNED]:
        predicted_bytes, seconds = _priced(problem, rates, best)
        if predicted_bytes <= most_bytes and seconds <= most_seconds:
            return program
    return None


def _priced(problem: Problem, rates: CostModel, strategy: Callable[[Problem], Plan]) -> tuple[float, float]:
    """The predicted bytes of temporaries and seconds of a step, with a plan by a strategy."""
    planner = Planner(problem.timed(rates))
    candidate = planner.known(planner.priced(strategy(problem)))
    return candidate.predicted_bytes, planner.common_seconds + candidate.step_seconds


def _in_blocks(form: Joint, tile: Tile, problem: Problem) -> Iterator[Joint]:
    """Yield the program with a tile in several numbers of blocks, the most first."""
    for blocks in BLOCKS:
        if blocks <= tile.blocks:
            tell(partial(str, tiled := replace(tile, blocks=blocks)))
            yield form.with_tile(tiled, problem.backend)
