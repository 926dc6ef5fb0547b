"""Show what each budget would cost.

The front of a program: plans that no other betters in both peak and time, as the model sees them. Nothing is compiled
for it; a plan is taken by `traced.partition(plan=point.plan)` or by its peak as a budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from typing import Any

from jointcut.partition.errors import JointcutError, message
from jointcut.partition.plan import Plan


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
    """The front of a program, the fastest plan first, with the predicted peak of the plan that was chosen if any."""

    name: str
    points: tuple[ParetoPoint, ...]
    chosen: ParetoPoint | None = None

    def __iter__(self) -> Iterator[ParetoPoint]:
        """The points, the fastest and largest first."""
        return iter(self.points)

    def __len__(self) -> int:
        """How many plans there are."""
        return len(self.points)

    def __str__(self) -> str:
        """A line for each plan: predicted peak, time, what is saved, and how the plan came about."""
        lines = [f"{self.name}: {len(self.points)} plans", "   peak MB   extra ms   saved MB  plan"]
        for peak, seconds, plan in self.points:
            mark = "*" if self.chosen is not None and plan.values == self.chosen.plan.values else " "
            saved = plan.bytes_saved / 1e6
            lines.append(f"{mark} {peak / 1e6:8.1f}  {1e3 * seconds:9.2f}  {saved:9.1f}  {plan.strategy}")
        return "\n".join(lines)

    def plot(self, axes: Any = None) -> Any:
        """Draw peak (MB) against extra time (ms) with matplotlib, on new axes if none are given; returns the axes.

        Raises `JointcutError` where matplotlib is not installed.
        """
        if axes is None:
            try:
                figure = import_module("matplotlib.figure")
            except ModuleNotFoundError as error:
                cure = "pip install matplotlib, or print the front instead."
                raise JointcutError(message("Pareto.plot", "needs matplotlib.", cure)) from error
            axes = figure.Figure(figsize=(6, 4), layout="constrained").subplots()
        peaks = [p.peak_bytes / 1e6 for p in self.points]
        times = [1e3 * p.seconds for p in self.points]
        axes.step(peaks, times, where="post", color="#2a6f97", linewidth=1.5)
        axes.plot(peaks, times, "o", color="#2a6f97", markersize=5, label="plans")
        if self.chosen is not None:
            axes.plot(self.chosen.peak_bytes / 1e6, 1e3 * self.chosen.seconds, "*", color="#c1121f", markersize=14,
                      label="chosen")  # fmt: skip
        axes.set(xlabel="predicted peak of the step, MB", ylabel="extra time, ms", title=self.name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        return axes

    def _repr_png_(self) -> bytes:
        """The picture, in a notebook."""
        out = BytesIO()
        self.plot().figure.savefig(out, format="png", dpi=110)
        return out.getvalue()
