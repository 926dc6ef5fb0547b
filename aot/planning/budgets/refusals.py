"""Say why no plan holds a budget: the smallest peak found, the arrays alive there, and what would help."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jointcut.aot.options.limits import Limit, activations
from jointcut.aot.planning.budgets.attempts import Weighed
from jointcut.partition.errors import BudgetError, message
from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.lower.memory.replay import Replay

_SHOWN = 5  # arrays alive at the peak that the error names


def refusal(budget: Limit, room: float, least: Weighed[Any], tried: int, replay: Replay, baseline: str) -> BudgetError:
    """Return the error that names the smallest peak found and the largest arrays there.

    `room` is the budget as bytes of temporaries. `least` and `replay` are of the smallest of the plans that were tried.
    `baseline` is the baseline of the plans.
    """
    share = ""
    if budget.fraction and room:
        share = f" ({math.ceil(100 * least.activation_bytes * budget.fraction / room)}% of {activations(baseline)})"
    cure = f"Give at least that much{share}, a smaller batch, or budget=0.0 for the least that is found."
    text = "\n".join([*_smallest(least, tried, replay), cure])
    return BudgetError(message("budget", f"of {budget.told(baseline)} cannot be met.", text), least.peak_bytes)


def holds_no_size(budget: Limit, axis: str, size: int, least: Weighed[Any], tried: int, replay: Replay) -> BudgetError:
    """Return the error for a budget that not even the smallest size of an axis holds; see `refusal`."""
    text = "\n".join([*_smallest(least, tried, replay), "Give at least that much."])
    what = f"of {budget} cannot be met, not even with {axis}={size}."
    return BudgetError(message("budget", what, text), least.peak_bytes)


def _smallest(least: Weighed[Any], tried: int, replay: Replay) -> Iterator[str]:
    """Yield the lines about the smallest peak that was found."""
    alive = Counter(map(str, replay.alive[:_SHOWN]))
    yield (
        f"The smallest peak found is {least.peak_bytes:,} bytes ({counted(tried, 'plan')} tried): "
        f"{least.fixed_bytes:,} are arguments and results, {least.activation_bytes:,} temporaries."
    )
    if alive:
        yield "Alive there, by the model:"
    yield from (f"    {buffer}" if times == 1 else f"    {times} × {buffer}" for buffer, times in alive.items())
    yield from _alone(replay)


def _alone(replay: Replay) -> Iterator[str]:
    """Yield a line if the op at the peak holds most of it by itself, so that other saved values make it hardly less."""
    if 2 * replay.own_bytes > replay.peak_bytes:
        where = f" at {replay.source}" if replay.source else ""
        share = f"{human_bytes(replay.own_bytes)} of it are what {replay.own_op}{where} reads and makes"
        yield f"{share}: no choice of what to save makes that less."
