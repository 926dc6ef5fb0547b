"""Try smaller budgets, so that a report tells only those that hold.

A budget is tried in the way in which a user would ask for it: by its text, through the whole search, which compiles
plans until one holds it. The search of a budget that was tried is not done again when the user asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jointcut.aot.limits import Budget
from jointcut.partition.errors import BudgetError
from jointcut.partition.figures import human_bytes
from jointcut.partition.plans.plan import Plan

if TYPE_CHECKING:
    import jointcut.aot.stages.cut

#: The shares of a plan's peak for which other plans are looked for.
SHARES = (0.9, 0.8, 0.6, 0.4)

#: No further budget is tried when trying has taken this long.
MOST_SECONDS = 60.0

#: A budget is not tried where the least temporaries that are expected are larger by this factor.
_HOPELESS = 1.05

#: The least peak is looked for where it should be below this share of the smallest that is known.
_WORTH_IT = 0.95

_FIGURES = 3  # of a budget


@dataclass(frozen=True)
class Met:
    """A budget that was met: as it is typed, its share of the peak at hand (0 for the least that is found), and the
    plan that holds it, whose compiled step takes `peak_bytes` in all.
    """

    share: float
    budget: str
    plan: Plan
    peak_bytes: int


@dataclass(frozen=True)
class Tried:
    """The budgets that were met, and the first that was not: `refused` by the search, or `hopeless` and not tried.

    `in_time` says whether the time sufficed.
    """

    met: tuple[Met, ...] = ()
    refused: str = ""
    hopeless: str = ""
    in_time: bool = True

    @property
    def last(self) -> Met | None:
        """The smallest budget that was met."""
        return self.met[-1] if self.met else None


def typed(num_bytes: float, up: bool = False) -> str:
    """A number of bytes as a budget of three figures, rounded down, or up.

    >>> typed(31_649_000), typed(31_649_000, up=True), typed(999_999), typed(2.5)
    ('31.6 MB', '31.7 MB', '999.0 kB', '2 B')
    """
    whole = int(num_bytes)
    unit = 10 ** max(0, len(str(whole)) - _FIGURES)
    return human_bytes((-(-whole // unit) if up else whole // unit) * unit)


def try_budgets(
    peak_bytes: int,
    fixed_bytes: int,
    least_bytes: Callable[[Met | None], float],
    partition: Callable[[Budget], jointcut.aot.stages.cut.Cut],
    seconds: Callable[[], float] = time.perf_counter,
) -> Tried:
    """Try the budgets of `SHARES` below a compiled step's peak, and at last the least peak that is found.

    `fixed_bytes` of the peak are arguments and results. `least_bytes` are the fewest temporaries to be expected of any
    plan, given the budget that was met last. `partition` gives the cut within a budget, `seconds` is a clock.
    """
    end, found = seconds() + MOST_SECONDS, Tried()
    for share in SHARES:
        budget, room = typed(share * peak_bytes), share * peak_bytes - fixed_bytes
        if seconds() > end:
            return replace(found, in_time=False)
        if least_bytes(found.last) > _HOPELESS * room:
            found = replace(found, hopeless=budget)
            break
        new = _met(share, budget, partition)
        if new is None:
            found = replace(found, refused=budget)
            break
        found = replace(found, met=(*(row for row in found.met if not _is_same(row, new)), new))
    known = peak_bytes if found.last is None else found.last.peak_bytes
    if fixed_bytes + least_bytes(found.last) > _WORTH_IT * known:
        return found
    if seconds() > end:
        return replace(found, in_time=False)
    return replace(found, met=(*found.met, *_least(partition, known)))


def _met(share: float, budget: str, partition: Callable[[Budget], jointcut.aot.stages.cut.Cut]) -> Met | None:
    """What holds a budget, None where nothing that was found does."""
    try:
        cut = partition(budget)
    except BudgetError:
        return None
    return Met(share, budget, cut.plan, _peak(cut))


def _least(partition: Callable[[Budget], jointcut.aot.stages.cut.Cut], below: int) -> Iterable[Met]:
    """The least that is found, as a budget that holds, where it is less than what is known."""
    peak = _peak(partition(0.0))
    found = _met(0.0, typed(peak, up=True), partition) if peak <= _WORTH_IT * below else None
    return [] if found is None or found.peak_bytes > _WORTH_IT * below else [found]


def _peak(cut: jointcut.aot.stages.cut.Cut) -> int:
    assert cut.fitted is not None, "a cut within a budget knows its compiled step"
    return cut.fitted.measured.peak_bytes


def _is_same(one: Met, other: Met) -> bool:
    return (one.plan.values, one.plan.segments) == (other.plan.values, other.plan.segments)
