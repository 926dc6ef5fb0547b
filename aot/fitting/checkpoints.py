"""Let the number of checkpoints of a loop follow from a budget, where nobody said how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from jointcut.aot.choices.limits import Limit
from jointcut.aot.fitting.attempts import Fitted
from jointcut.aot.loops.fitting import checkpoint_bytes, fewest_bytes, limited
from jointcut.aot.loops.memory import FEWEST
from jointcut.aot.trace.joint import Joint
from jointcut.partition.errors import BudgetError

#: The parts of a budget that the checkpoints of all loops may take together, each tried where the one before fails.
#: What a budget leaves beside arguments and results also has to hold what lies around the loops, and their steps.
_SHARES = (0.5, 0.125, 1 / 32)

#: The same of a fraction: parts of what it leaves of all checkpoints, but no fewer than `FEWEST` of each loop.
_PARTS = (0.9, 0.5)

#: So many checkpoints of each loop are tried next, unless the budget is bytes. One of each loop is tried last.
_FEW = 4

_T = TypeVar("_T")


def in_budget(program: Joint, budget: Limit, search: Callable[[Joint], Fitted[_T]]) -> Fitted[_T]:
    """What a search for a budget finds in a program, or in one whose loops keep fewer checkpoints.

    For the least, 0.0, the most and the fewest are tried, and the fewest taken if that takes less memory. Raises the
    last `BudgetError` of the search.
    """
    *first, last = _forms(program, budget)
    if budget.fraction == 0.0:
        return min(map(search, [*first[:1], last]), key=lambda found: found.measured.peak_bytes)
    for form in first:
        try:
            return search(form)
        except BudgetError:  # too many checkpoints, perhaps
            continue
    return search(last)


def _forms(program: Joint, budget: Limit) -> list[Joint]:
    """The program with ever fewer checkpoints; at least one form."""
    if not (kept := checkpoint_bytes(program.closed)):
        return [program]
    two = fewest_bytes(program.closed, 2)
    allowed = list(dict.fromkeys(most if most >= two else 0 for most in _allowed(program, budget, kept)))
    first = [program] if kept <= allowed[0] else []
    return [*first, *(replace(program, closed=limited(program.closed, most)) for most in allowed if most < kept)]


def _allowed(program: Joint, budget: Limit, kept: int) -> Iterator[int]:
    """The bytes that checkpoints may take, for each form."""
    if budget.peak_bytes is not None:
        room = max(budget.peak_bytes - program.fixed_bytes, 0)
        yield from (int(share * room) for share in _SHARES)
    else:
        least, fraction = fewest_bytes(program.closed, FEWEST), budget.fraction
        yield from [kept] if fraction is None else (max(int(part * fraction * kept), least) for part in _PARTS)
        yield from (least, fewest_bytes(program.closed, _FEW))
    yield 0
