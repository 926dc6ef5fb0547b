"""Show what each budget would cost.

The front of a program: plans that no other betters in both peak and time, as the model sees them. Nothing is compiled
for it. A plan is taken by `traced.partition(plan=point.plan)`; its peak is predicted, and may be refused as a budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jointcut.aot.budget.axes import apart, kept, optional, shown, unit_of
from jointcut.partition.drawing.displays import table
from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.figures import counted
from jointcut.partition.plans.plan import Plan

_SIZE = (6, 4)  # inches
_BLUE, _ORANGE = "#0072b2", "#d55e00"  # of Okabe and Ito's palette, which colour-blind people tell apart


@dataclass(frozen=True)
class ParetoPoint:
    """One plan of the front.

    `peak_bytes` is the predicted peak of the whole step, arguments and results included; `seconds` the predicted time
    beyond what every plan takes: computing again, and writing and reading what is saved.
    """

    peak_bytes: int
    seconds: float
    plan: Plan

    def __iter__(self) -> Iterator[Any]:
        """Peak, seconds and plan, for `for peak, seconds, plan in cut.pareto()`."""
        return iter((self.peak_bytes, self.seconds, self.plan))


@dataclass(frozen=True)
class Pareto:
    """The front of a program.

    Attributes:
        name: of the function.
        points: the plans, the fastest and largest first.
        chosen: the plan that was chosen if one was, on the front or not.
        plain: what plain JAX keeps, as a plan, where that is known.
        common_seconds: what every plan takes, by the model, to compute what it computes once.
    """

    name: str
    points: tuple[ParetoPoint, ...]
    chosen: ParetoPoint | None = None
    plain: ParetoPoint | None = None
    common_seconds: float = 0.0

    def __iter__(self) -> Iterator[ParetoPoint]:
        """The points, the fastest and largest first."""
        return iter(self.points)

    def __len__(self) -> int:
        """How many plans are on the front."""
        return len(self.points)

    def __str__(self) -> str:
        """A line for each plan: predicted peak, extra time, time over plain JAX's, what is saved, how it came about.

        A star marks the plan that was chosen, which comes last where it is not on the front.
        """
        unit, name = self._unit
        over = "" if self.plain is None else "   ÷ plain"
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
        """The predicted time of a step with a plan over that of plain JAX's; None where that is not known."""
        if self.plain is None or not (whole := self.common_seconds + self.plain.seconds):
            return None
        return (self.common_seconds + point.seconds) / whole

    @property
    def _shown(self) -> tuple[ParetoPoint, ...]:
        """The points, with the chosen one behind them where it is not among them."""
        if self.chosen is None or any(_are_same(point, self.chosen) for point in self.points):
            return self.points
        return (*self.points, self.chosen)

    @property
    def _unit(self) -> tuple[float, str]:
        """Bytes of the unit in which peaks are shown, and its name."""
        largest = max((point.peak_bytes for point in self._shown), default=0)
        return unit_of(largest / 10)  # two figures before the point, as rows of a table have one behind it

    def plot(self, axes: Any = None) -> Any:
        """Draw peak against time with matplotlib, on new axes if none are given; returns the axes.

        The line gives for each peak the time of the fastest plan within it. Without `axes` the figure is pyplot's: a
        notebook shows it, elsewhere `matplotlib.pyplot.show()` does, and `axes.figure.savefig("front.png")` keeps it.
        Raises `JointcutError` where matplotlib is not installed.
        """
        if axes is None:
            axes = shown(_SIZE)
        unit, name = self._unit
        peaks = [p.peak_bytes / unit for p in self.points]
        times = [self._height(p) for p in self.points]
        axes.step(peaks, times, where="pre", color=_BLUE, linewidth=1.5)  # from a peak down to the next, the next time
        axes.plot(peaks, times, "o", color=_BLUE, markersize=5, label="plans")
        if self.chosen is not None:
            at = self.chosen.peak_bytes / unit, self._height(self.chosen)
            axes.plot(*at, "*", color=_ORANGE, markeredgecolor="black", markersize=14, label="chosen")
        if self.plain is None:
            axes.set_ylim(bottom=0)
            ylabel = "predicted extra time (ms)"
        else:
            axes.plot(self.plain.peak_bytes / unit, 1, "X", color="black", markersize=8, label="plain JAX")
            ylabel = "predicted time of a step ÷ plain JAX's"
        axes.set(xlabel=f"predicted peak of the step ({name})", ylabel=ylabel, title=self.name)
        axes.grid(alpha=0.3)
        axes.legend()
        return axes

    def _height(self, point: ParetoPoint) -> float:
        """Where a plan stands in the picture: its time over plain JAX's, or its extra milliseconds."""
        share = self.time_share(point)
        return 1e3 * point.seconds if share is None else share

    def section(self, marks: Iterable[tuple[str, ParetoPoint]] = ()) -> dict[str, Any]:
        """The curve as a section of a page; `marks` are other plans by name, with their places."""
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
        """Where a plan stands on the page: its peak, its time (of a step where plain JAX's is known), the share."""
        share = self.time_share(point)
        seconds = point.seconds + (0.0 if share is None else self.common_seconds)
        return {"peak_bytes": point.peak_bytes, "seconds": seconds, "share": share}

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """In a notebook the curve with its plans; for code hosts a picture, where matplotlib is there, and the text."""
        data = {"format": 1, "title": self.name, "subtitle": "budgets", "totals": [], "sections": [self.section()]}
        found: dict[str, Any] = {"text/plain": str(self), "text/html": framed(page(data))}
        with optional():
            found["image/png"] = kept(self.plot(apart(_SIZE)))
        return found


_LEAD = (
    "Each point is a plan: click it to see what it saves. The line is the fastest within a peak. Peak and time are "
    "predicted; time counts what is computed, what is computed again, and writing and reading what is saved."
)


def _are_same(point: ParetoPoint, other: ParetoPoint | None) -> bool:
    """Whether two plans run the same programs."""
    return other is not None and (point.plan.values, point.plan.segments) == (other.plan.values, other.plan.segments)
