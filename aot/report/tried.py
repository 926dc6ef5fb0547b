"""Try smaller budgets, so that a report lists only budgets that hold.

A budget is tried as a user would give it: as text, with the whole search for a plan that holds it. If the user gives
this budget later, the search is not repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from jointcut.aot.options.limits import Budget
from jointcut.aot.planning.weighing import Answer
from jointcut.partition.errors import BudgetError
from jointcut.partition.figures import human_bytes
from jointcut.partition.plans.plan import Plan

#: The smaller budgets, as shares of a plan's peak.
SHARES = (0.9, 0.8, 0.6, 0.4)

#: No further budget is tried after this time.
MOST_SECONDS = 60.0

#: A budget is not tried if the least expected temporaries exceed it by this factor.
_HOPELESS = 1.05

#: The least peak is searched for if it is expected below this share of the smallest known peak.
WORTH_IT = 0.95

_FIGURES = 3  # significant digits of a budget


@dataclass(frozen=True)
class Met:
    """A budget that was met, as text, and its plan.

    `share` is its share of the report's peak (0 for the least peak found), `peak_bytes` the peak of the compiled step.
    """

    share: float
    budget: str
    plan: Plan
    peak_bytes: int


@dataclass(frozen=True)
class Tried:
    """The budgets that were met, and the first other budget: `refused` by the search, or `hopeless` and not tried.

    `in_time` is False if trying ended after `MOST_SECONDS`. The last that was met takes the least that is found, to the
    share `WORTH_IT`, if `has_least`.
    """

    met: tuple[Met, ...] = ()
    refused: str = ""
    hopeless: str = ""
    in_time: bool = True
    has_least: bool = True

    @property
    def last(self) -> Met | None:
        """The smallest budget that was met."""
        return self.met[-1] if self.met else None


def typed(num_bytes: float, up: bool = False) -> str:
    """Return a number of bytes as a budget of three digits, rounded down, or up.

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
    partition: Callable[[Budget], Answer],
    seconds: Callable[[], float] = time.perf_counter,
) -> Tried:
    """Try the budgets of `SHARES` below a compiled step's peak, and at last the least peak.

    `fixed_bytes` of the peak are arguments and results. `least_bytes` returns the least temporaries expected of any
    plan, given the last budget that was met. `partition` returns the cut within a budget, and `seconds` is a clock.
    """
    end, tried = seconds() + MOST_SECONDS, Tried()
    for share in SHARES:
        budget, room = typed(share * peak_bytes), share * peak_bytes - fixed_bytes
        if seconds() > end:
            return replace(tried, in_time=False, has_least=False)
        if least_bytes(tried.last) > _HOPELESS * room:
            tried = replace(tried, hopeless=budget)
            break
        met = _met(share, budget, partition)
        if met is None:
            tried = replace(tried, refused=budget)
            break
        tried = replace(tried, met=(*(other for other in tried.met if other.plan.key != met.plan.key), met))
    smallest = peak_bytes if tried.last is None else tried.last.peak_bytes
    if fixed_bytes + least_bytes(tried.last) > WORTH_IT * smallest:
        return tried
    if seconds() > end:
        return replace(tried, in_time=False, has_least=False)
    peak = _peak(partition(0.0))
    if peak > WORTH_IT * smallest:
        return tried
    met = _met(0.0, typed(peak, up=True), partition)
    if met is None or met.peak_bytes > WORTH_IT * smallest:
        return replace(tried, has_least=False)
    return replace(tried, met=(*tried.met, met))


def _met(share: float, budget: str, partition: Callable[[Budget], Answer]) -> Met | None:
    """Return the plan that holds a budget; None if the search refuses it."""
    try:
        cut = partition(budget)
    except BudgetError:
        return None
    return Met(share, budget, cut.plan, _peak(cut))


def _peak(cut: Answer) -> int:
    assert cut.fitted is not None, "a cut within a budget knows its compiled step"
    return cut.fitted.measured.peak_bytes
