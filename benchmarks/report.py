"""Lay out what was measured: tables for the terminal, targets, JSON."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.measure import Spread, Timing
from benchmarks.methods import AGAIN, INSIDE, MIN_CUT, PLAIN, Figures
from benchmarks.scaling import CallCost, Scaling

MB = 1e6

HEADINGS = (
    "activations\nMB",
    "÷ plain",
    "peak\nMB",
    "÷ plain",
    "saved\nMB",
    "step\nms",
    "÷ plain\n(quartiles)",
    "trace\ns",
    "cut\ns",
    "compile\ns",
    "dots",
)
CAPTION = (
    "activations: XLA's temp bytes, and residuals between programs; peak: arguments and results as well; "
    "saved: residuals by the jaxprs\n"
    "dots: matrix products in the jaxprs, a loop's counted once; "
    "+ barriers: without the CPU pass that expands them; plain again: the same program, what the noise alone does"
)
SUMMARY_CAPTION = (
    "again: plain over plain, the noise; activations, peak and time over plain's; "
    "in jit: inside the user's own jax.jit\n"
    "forward: f(x) over jax.jit(f)(x)\n"
    "checkpoint: of the methods with jax.checkpoint that take no more time than jointcut, or 3 % more than plain, "
    "the one with the lowest peak"
)


@dataclass(frozen=True)
class Row:
    """One method on one program: as built, and as timed beside plain."""

    step: Figures
    timing: Timing


@dataclass(frozen=True)
class Result:
    """One program under all methods; `forward` is the time of a call without gradient over that of `jax.jit`."""

    name: str
    title: str
    sizes: Mapping[str, Any]
    rows: Mapping[str, Row]
    forward: Spread

    def activations(self, name: str) -> float:
        """Activation bytes of a method over plain's."""
        return self.rows[name].step.activation_bytes / self.rows[PLAIN].step.activation_bytes

    def peak(self, name: str) -> float:
        """Peak bytes of a method over plain's."""
        return self.rows[name].step.peak_bytes / self.rows[PLAIN].step.peak_bytes

    def time(self, name: str) -> float:
        """Time of a method over plain's, the median of close pairs."""
        return self.rows[name].timing.ratio.median

    def best_checkpoint(self) -> str | None:
        """The method with `jax.checkpoint` that a patient user would pick: least peak among those fast enough."""
        allowed = max(self.time(MIN_CUT), 1.03)
        fit = [n for n in self.rows if n.startswith("checkpoint") and self.time(n) <= allowed]
        return min(fit, key=self.peak, default=None)


@dataclass(frozen=True)
class Target:
    """One bound that the project has set itself, and what was measured."""

    claim: str
    measured: float
    bound: float
    unit: str = ""

    @property
    def reached(self) -> bool:
        """Whether the measured figure is within the bound."""
        return self.measured <= self.bound


def table_of(result: Result) -> Table:
    """All methods on one program."""
    title = f"{result.name}: {result.title}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, caption=CAPTION, caption_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in result.rows.items():
        step, ratio = row.step, row.timing.ratio
        table.add_row(
            name,
            f"{step.activation_bytes / MB:.1f}",
            f"{result.activations(name):.2f}",
            f"{step.peak_bytes / MB:.1f}",
            f"{result.peak(name):.2f}",
            f"{step.saved_bytes / MB:.1f}",
            f"{row.timing.seconds.median * 1e3:.0f}",
            f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
            f"{step.trace_s:.2f}",
            f"{step.cut_s:.2f}",
            f"{step.compile_s:.1f}",
            str(step.dots),
            style="bold" if name == MIN_CUT else None,
        )
    return table


#: The ratios in a line of the summary, as `summary_of` heads them.
_COLUMNS: tuple[Callable[[Result], float], ...] = (
    lambda r: r.time(AGAIN),
    lambda r: r.activations(MIN_CUT),
    lambda r: r.peak(MIN_CUT),
    lambda r: r.time(MIN_CUT),
    lambda r: r.peak(INSIDE),
    lambda r: r.time(INSIDE),
    lambda r: r.forward.median,
)


def summary_of(results: Sequence[Result]) -> Table:
    """One line for each program."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="The suite", caption=SUMMARY_CAPTION)
    table.caption_justify = "left"
    table.add_column("program", no_wrap=True)
    headings = (
        "plain\npeak MB",
        "ms",
        "again",
        "jointcut\nactivations",
        "peak",
        "time",
        "in jit\npeak",
        "time",
        "forward\ntime",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("checkpoint\npeak, time", no_wrap=True)
    for r in results:
        plain, best = r.rows[PLAIN], r.best_checkpoint()
        shown = (
            "none as fast" if best is None else f"{r.peak(best):.2f} {r.time(best):.2f} {best[len('checkpoint ') :]}"
        )
        table.add_row(
            r.name,
            f"{plain.step.peak_bytes / MB:.0f}",
            f"{plain.timing.seconds.median * 1e3:.0f}",
            *(f"{column(r):.2f}" for column in _COLUMNS),
            shown,
        )
    if len(results) > 1:
        means = [geometric_mean(map(column, results)) for column in _COLUMNS]
        table.add_section()
        table.add_row("geometric mean", "", "", *(f"{x:.3f}" for x in means), style="bold")
    return table


def geometric_mean(ratios: Iterable[float]) -> float:
    """The mean that a ratio and its inverse agree on."""
    return math.exp(statistics.fmean(math.log(r) for r in ratios))


def judge(results: Sequence[Result], scaling: Sequence[Scaling], calls: Sequence[CallCost]) -> list[Target]:
    """Hold the figures against what the project has promised."""
    targets: list[Target] = []
    for r in results:
        name = r.name
        for method, where in ((MIN_CUT, ""), (INSIDE, " in jit")):
            targets.append(Target(f"{name}{where}: peak over plain's", r.peak(method), 1.00))
            targets.append(Target(f"{name}{where}: time over plain's", r.time(method), 1.03))
        targets.append(Target(f"{name}: forward-only call over jax.jit's", r.forward.median, 1.02))
        targets += _of_gpt(r)
    if len(results) > 1:
        for method, where in ((MIN_CUT, ""), (INSIDE, " in jit")):
            peak = geometric_mean(r.peak(method) for r in results)
            targets.append(Target(f"geometric mean{where}: peak over plain's", peak, 0.55))
            time = geometric_mean(r.time(method) for r in results)
            targets.append(Target(f"geometric mean{where}: time over plain's", time, 0.97))
    for s in scaling:
        if s.equations > 50_000:
            targets.append(Target(f"trace, cut and emit {s.equations} equations", s.seconds, 20.0, " s"))
            targets.append(Target(f"cut and emit {s.equations} equations", s.cut_s, 10.0, " s"))
            targets.append(Target(f"plan {s.equations} equations", s.plan_s, 30.0, " s"))
        elif s.equations > 5_000:
            targets.append(Target(f"trace, cut and emit {s.equations} equations", s.seconds, 3.0, " s"))
            targets.append(Target(f"plan {s.equations} equations", s.plan_s, 3.0, " s"))
    if len(scaling) > 1:
        few, many = scaling[0], scaling[-1]
        growth = (many.seconds / few.seconds) / _n_log_n(many.equations, few.equations)
        targets.append(Target(f"growth from {few.equations} to {many.equations} equations over n log n", growth, 1.0))
    for call in calls:
        targets.append(Target(f"a call with {call.leaves} leaves over jax.jit's", call.ratio, _call_bound(call)))
    return targets


def _of_gpt(r: Result) -> list[Target]:
    plain, ours = r.rows[PLAIN].step, r.rows[MIN_CUT].step
    if r.name == "gpt-scan":
        return [Target("gpt-scan: activation bytes over plain's", r.activations(MIN_CUT), 0.50)]
    if r.name == "gpt-unrolled":
        saved = ours.saved_bytes / plain.saved_bytes
        return [
            Target("gpt-unrolled: bytes saved over JAX's residuals", saved, 0.40),
            Target("gpt-unrolled: matrix products recomputed", ours.dots - plain.dots, 0),
            Target("gpt-unrolled: trace, cut and emit over XLA's compile time", ours.share_of_compile, 0.25),
        ]
    return []


def _n_log_n(many: int, few: int) -> float:
    return many * math.log(many) / (few * math.log(few))


def _call_bound(call: CallCost) -> float:
    return 2.0 if call.leaves < 10 else 1.2


def write_results(
    where: Mapping[str, Any],
    results: Sequence[Result],
    scaling: Sequence[Scaling],
    calls: Sequence[CallCost],
    targets: Sequence[Target],
    path: Path,
) -> None:
    """Write everything measured as JSON; a file that is there is replaced whole or not at all."""
    record = {
        "machine": dict(where),
        "programs": {r.name: _record(r) for r in results},
        "scaling": [asdict(s) for s in scaling],
        "calls": [asdict(c) for c in calls],
        "targets": [asdict(t) | {"reached": t.reached} for t in targets],
    }
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(path)


def read_results(where: Mapping[str, Any], path: Path) -> list[Result]:
    """The programs that were measured when the file was last written; none if there is no file.

    Raises `ValueError` if that was on another machine, with other versions or at another size.
    """
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    for key in where:
        there, here = record["machine"].get(key), where[key]
        if key != "date" and there != here:
            raise ValueError(f"{path} was measured with {key} {there}, here it is {here}: measure all again")
    return [result_of(name, fields) for name, fields in record["programs"].items()]


def _record(result: Result) -> dict[str, Any]:
    methods = {name: asdict(row.step) | {"timing": asdict(row.timing)} for name, row in result.rows.items()}
    return {
        "title": result.title,
        "sizes": dict(result.sizes),
        "forward": asdict(result.forward),
        "methods": methods,
    }


def result_of(name: str, record: Mapping[str, Any]) -> Result:
    """One program as it was written."""
    rows = {}
    for method, fields in record["methods"].items():
        timing = {part: Spread(**spread) for part, spread in fields["timing"].items()}
        step = Figures(**{key: value for key, value in fields.items() if key != "timing"})
        rows[method] = Row(step, Timing(**timing))
    return Result(name, record.get("title", ""), record["sizes"], rows, Spread(**record["forward"]))
