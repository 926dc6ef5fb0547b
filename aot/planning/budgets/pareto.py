"""Show the cost of each budget.

The Pareto front of a program: the plans for which no other plan has both a lower peak and a lower time. Both are
predicted; nothing is compiled. `traced.partition(plan=point.plan)` uses a plan. Since its peak is predicted, a budget
of that size may be refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jointcut.partition.drawing.displays import table
from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.figures import BYTE_UNITS, counted
from jointcut.partition.plans.plan import Plan


@dataclass(frozen=True)
class ParetoPoint:
    """One plan of the front.

    `peak_bytes` is the predicted peak of the whole step, arguments and results included. `seconds` is the predicted
    time to recompute, and to write and read the saved values.
    """

    peak_bytes: int
    seconds: float
    plan: Plan

    def __iter__(self) -> Iterator[Any]:
        """Peak, seconds and plan, to unpack."""
        return iter((self.peak_bytes, self.seconds, self.plan))


@dataclass(frozen=True)
class Pareto:
    """The Pareto front of a program.

    Attributes:
        name: of the function.
        points: the plans, fastest and largest first.
        chosen: the chosen plan, on the front or not; None where there is none.
        plain: plain JAX as a plan; None where not known.
        common_seconds: predicted seconds of the computation that all plans share.
    """

    name: str
    points: tuple[ParetoPoint, ...]
    chosen: ParetoPoint | None = None
    plain: ParetoPoint | None = None
    common_seconds: float = 0.0

    @property
    def per(self) -> str:
        """What stands beside its figures in bytes, as in `Plan.per`."""
        return next((point.plan.per for point in self._shown), "")

    def __iter__(self) -> Iterator[ParetoPoint]:
        """The points, fastest and largest first."""
        return iter(self.points)

    def __len__(self) -> int:
        """Number of plans on the front."""
        return len(self.points)

    def __str__(self) -> str:
        """A line for each plan: predicted peak, extra time, time over plain JAX's, saved bytes, strategy.

        A star marks the chosen plan, which comes last where it is not on the front.
        """
        unit, name = self._unit
        over = "" if self.plain is None else f"   ÷ {self.plain.plan.baseline.removesuffix(' JAX')}"
        lines = [
            f"{self.name}: {counted(len(self.points), 'plan')}",
            f"   peak {name}   extra ms{over}   saved {name}  plan",
        ]
        for point in self._shown:
            mark, (peak, seconds, plan) = "*" if _are_same(point, self.chosen) else " ", point
            share = self.time_share(point)
            ratio = "" if share is None else f"  {share:8.2f}"
            saved = plan.bytes_saved / unit
            lines.append(f"{mark} {peak / unit:8.1f}  {1e3 * seconds:9.2f}{ratio}  {saved:9.1f}  {plan.strategy}")
        return "\n".join(lines)

    def time_share(self, point: ParetoPoint) -> float | None:
        """Return the predicted time of a step with a plan, divided by plain JAX's; None where that is not known."""
        if self.plain is None or not (whole := self.common_seconds + self.plain.seconds):
            return None
        return (self.common_seconds + point.seconds) / whole

    @property
    def _shown(self) -> tuple[ParetoPoint, ...]:
        """The points, followed by the chosen one where it is not among them."""
        if self.chosen is None or any(_are_same(point, self.chosen) for point in self.points):
            return self.points
        return (*self.points, self.chosen)

    @property
    def _unit(self) -> tuple[float, str]:
        """Number of bytes and name of the unit of the peaks."""
        largest = max((point.peak_bytes for point in self._shown), default=0)
        enough = largest / 10  # two digits before the point, since rows have one after it
        return next((unit, name) for unit, name in BYTE_UNITS if enough >= unit or name == "kB")

    def section(self, marks: Iterable[tuple[str, ParetoPoint]] = ()) -> dict[str, Any]:
        """Return the curve as a section of a page; `marks` are further plans by name."""
        shown = self._shown
        chosen = next((i for i, point in enumerate(shown) if _are_same(point, self.chosen)), None)
        named = [{"name": name, **self.place(point), "lines": point.plan.summary()} for name, point in marks]
        return {
            "kind": "pareto",
            "id": "pareto",
            "title": "What each budget would cost",
            "lead": _LEAD,
            "points": [
                {**self.place(point), "saved_bytes": point.plan.bytes_saved, "strategy": point.plan.strategy,
                 "lines": point.plan.summary(), "saved": table(point.plan, shown=8)}
                for point in shown
            ],
            "chosen": chosen,
            "marks": named,
            "plain": None,
            "time": "extra time" if self.plain is None else "time of a step",
        }  # fmt: skip

    def place(self, point: ParetoPoint) -> dict[str, Any]:
        """Return peak, time and share of plain JAX's time; the time is a whole step's where plain JAX's is known."""
        share = self.time_share(point)
        seconds = point.seconds + (0.0 if share is None else self.common_seconds)
        return {"peak_bytes": point.peak_bytes, "seconds": seconds, "share": share}

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return forms for notebooks: the page and the text."""
        known = {"format": 1, "title": self.name, "subtitle": "budgets", "totals": [], "per": self.per}
        data = {**known, "sections": [self.section()]}
        return {"text/plain": str(self), "text/html": framed(page(data))}


_LEAD = (
    "Each point is a plan: click it to see what it saves. The line is the fastest within a peak. Peak and time are "
    "predicted; time counts what is computed, what is computed again, and writing and reading what is saved."
)


def _are_same(point: ParetoPoint, other: ParetoPoint | None) -> bool:
    """Whether two plans run the same programs."""
    return other is not None and point.plan.key == other.plan.key
