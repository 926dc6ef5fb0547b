"""Record the plans that a search for a budget tried, their memory by XLA's account, and the chosen one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.plans.plan import Plan
from jointcut.wrappers.record import Record

_T = TypeVar("_T")


@dataclass(frozen=True)
class Attempt(Record):
    """One plan that was tried during a search.

    Attributes:
        strategy: how the plan was chosen.
        bytes_saved: bytes handed from the forward to the backward.
        promised_bytes: predicted peak, from when the plan was chosen.
        peak_bytes: peak of the compiled step, as XLA reports it.
        activation_bytes: its temporaries alone.
        fits: whether it holds the budget.
        compile_ms: milliseconds that compiling or weighing it took.
        weighed: whether only its memory was learned, without compiling it to run.
    """

    strategy: str
    bytes_saved: int
    promised_bytes: int
    peak_bytes: int
    activation_bytes: int
    fits: bool
    compile_ms: float
    weighed: bool = False

    def __str__(self) -> str:
        """`front: promised 61,000,000 bytes, takes 62,500,000: fits (compiled in 812 ms)`."""
        verdict = "fits" if self.fits else "does not fit"
        took = f"promised {self.promised_bytes:,} bytes, takes {self.peak_bytes:,}"
        return f"{self.strategy}: {took}: {verdict} ({_HOW[self.weighed]} in {self.compile_ms:.0f} ms)"


_HOW = {True: "weighed", False: "compiled"}


@dataclass(frozen=True)
class Weighed(Generic[_T]):
    """A plan that was compiled or weighed: XLA's peak of the step and of its temporaries, and the time it took."""

    made: _T
    peak_bytes: int
    activation_bytes: int
    compile_ms: float

    @property
    def fixed_bytes(self) -> int:
        """Bytes of arguments and results."""
        return self.peak_bytes - self.activation_bytes


@dataclass(frozen=True)
class Fitted(Generic[_T]):
    """The compiled plan that holds the budget, and the plans that were weighed or compiled, in order.

    If the plan of an earlier search is reused, these are the plans that were tried in that search.
    """

    plan: Plan
    measured: Weighed[_T]
    trail: tuple[Attempt, ...]


@dataclass(frozen=True)
class Ways(Generic[_T]):
    """Two ways to learn about plans: compile them to run, or weigh several at once for their memory alone.

    Attributes:
        measure: compiles a plan, to run it.
        weigh: begins to learn the memory of plans, without compiling them to run; None where it would take as long.
        compiles: whether `measure` takes longer than weighing.
    """

    measure: Callable[[Plan], Weighed[_T]]
    weigh: Callable[[Sequence[Plan]], Sequence[Future[Weighed[Any]]]] | None = None
    compiles: bool = True


def attempt(plan: Plan, promised: int, weighed: Weighed[Any], fits: bool, is_weighed: bool = False) -> Attempt:
    """Return the record of a plan, with its predicted and its actual bytes."""
    figures = promised, weighed.peak_bytes, weighed.activation_bytes, fits, weighed.compile_ms, is_weighed
    return Attempt(plan.strategy, plan.bytes_saved, *figures)


def followed(plan: Plan, weighed: Weighed[_T]) -> Fitted[_T]:
    """Return the result without a search: a known plan, now compiled."""
    promised = plan.peak_bytes or weighed.peak_bytes
    return Fitted(replace(plan, peak_bytes=promised), weighed, (attempt(plan, promised, weighed, True),))


def summary(plan: Plan) -> str:
    """Return a plan in a few words: `12 values, 4.2 MB saved, 31 ops recomputed`."""
    return (
        f"{counted(len(plan.values), 'value')}, {human_bytes(plan.bytes_saved)} saved, "
        f"{counted(len(plan.recomputed), 'op')} recomputed"
    )
