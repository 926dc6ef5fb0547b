"""Say why no plan holds a budget: the smallest peak found, what is alive there, and what would help."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jointcut.aot.choices.limits import Limit, activations
from jointcut.aot.fitting.attempts import Weighed
from jointcut.partition.errors import BudgetError, message
from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.lower.replay import Replay

_SHOWN = 5  # arrays alive at the peak that the error names


def refusal(budget: Limit, room: float, least: Weighed[Any], tried: int, replay: Replay, baseline: str) -> BudgetError:
    """The error that names the smallest peak found and the largest arrays there.

    `room` is the budget as bytes of temporaries, `least` and `replay` are of the smallest of the plans that were tried.
    `baseline` is that of the plans.
    """
    alive = Counter(map(str, replay.alive[:_SHOWN]))
    share = ""
    if budget.fraction and room:
        share = f" ({math.ceil(100 * least.activation_bytes * budget.fraction / room)}% of {activations(baseline)})"
    lines = [
        f"The smallest peak found is {least.peak_bytes:,} bytes ({counted(tried, 'plan')} tried): "
        f"{least.fixed_bytes:,} are arguments and results, {least.activation_bytes:,} temporaries.",
        *(["Alive there, by the model:"] if alive else []),
        *(f"    {buffer}" if times == 1 else f"    {times} × {buffer}" for buffer, times in alive.items()),
        *_alone(replay),
        f"Give at least that much{share}, a smaller batch, or budget=0.0 for the least that is found.",
    ]
    return BudgetError(
        message("budget", f"of {budget.told(baseline)} cannot be met.", "\n".join(lines)), least.peak_bytes
    )


def _alone(replay: Replay) -> Iterator[str]:
    """A line if the op at the peak holds most of it by itself, so that no choice of what to save makes it much less."""
    if 2 * replay.own_bytes > replay.peak_bytes:
        where = f" at {replay.source}" if replay.source else ""
        share = f"{human_bytes(replay.own_bytes)} of it are what {replay.own_op}{where} reads and makes"
        yield f"{share}: no choice of what to save makes that less."
