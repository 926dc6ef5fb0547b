"""Let the number of checkpoints of a loop follow from a budget, where nobody said how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from jointcut.aot.choices.limits import Limit
from jointcut.aot.loops.fitting import checkpoint_bytes, fewest_bytes, limited
from jointcut.aot.loops.memory import FEWEST
from jointcut.aot.trace.joint import Joint
from jointcut.partition.errors import BudgetError

#: The parts of a budget that the checkpoints of all loops may take together, each tried where the one before fails.
#: What a budget leaves beside arguments and results also has to hold what lies around the loops, and their steps.
_SHARES = (0.5, 0.125, 1 / 32)

#: The same of a fraction: parts of what it leaves of all checkpoints.
_PARTS = (0.9, 0.5)

_T = TypeVar("_T")


def in_budget(program: Joint, budget: Limit, search: Callable[[Joint], _T]) -> _T:
    """What a search for a budget finds in a program, or in one whose loops keep fewer checkpoints.

    Raises the last `BudgetError` of the search.
    """
    *first, last = _forms(program, budget)
    for form in first:
        try:
            return search(form)
        except BudgetError:  # too many checkpoints, perhaps
            continue
    return search(last)


def _forms(program: Joint, budget: Limit) -> Iterator[Joint]:
    """The program with ever fewer checkpoints; at least one form."""
    kept = checkpoint_bytes(program.closed)
    allowed = list(_allowed(program, budget, kept)) if kept else []
    if not allowed or kept <= allowed[0]:
        yield program
    for most in dict.fromkeys(allowed):
        if most < kept:
            yield replace(program, closed=limited(program.closed, most))


def _allowed(program: Joint, budget: Limit, kept: int) -> Iterator[int]:
    """The bytes that checkpoints may take, for each form."""
    if budget.peak_bytes is not None:
        room = max(budget.peak_bytes - program.fixed_bytes, 0)
        yield from (int(share * room) for share in _SHARES)
    elif budget.fraction is not None:
        least = fewest_bytes(program.closed, FEWEST)
        yield from (max(int(part * budget.fraction * kept), least) for part in _PARTS)
