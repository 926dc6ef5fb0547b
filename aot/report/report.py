"""Report the saved arrays, the recomputed ops, and the costs.

`loss.explain(*args)` and `cut.explain()` give a `Report`. So does `aot.explain(f, *args)` for any other function; this
report lists the arrays that `jax.vjp` keeps, and the bytes that jointcut would keep. A report prints as a table,
appears as a page in Jupyter, and is written to a file by `save`.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from jointcut.aot.options.target import Target
from jointcut.aot.planning.budgets.pareto import Pareto
from jointcut.aot.report import tabular
from jointcut.aot.report.compare.collectives import Collectives
from jointcut.aot.report.compare.diff import Diff, diff
from jointcut.aot.report.compare.files import written_to
from jointcut.aot.report.compare.snapshot import Array, Snapshot, alive_at_peak, together
from jointcut.aot.report.compare.stored import read
from jointcut.aot.report.derived import DerivedRow, in_words
from jointcut.aot.report.lists import AgainRow, LessRow, SavedRow, loop_told, segments_told
from jointcut.aot.report.tried import Tried
from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.drawing.perfetto import perfetto
from jointcut.partition.drawing.pprof import pprof
from jointcut.partition.figures import counted, human_bytes, human_seconds
from jointcut.partition.lower.memory.lifetimes import Lifetimes
from jointcut.partition.plans.asjax import underived
from jointcut.partition.plans.loops_told import in_segments
from jointcut.partition.plans.plan import ALL_SAVED, PLAIN_JAX, Plan

JSON = dict[str, Any]

_HINT = "report.table(everything=True)"  # lists all rows

#: Accuracy of predicted peaks, from the programs of the tests and of `make bench`.
PEAKS = "predicted peaks were mostly 0.6 to 1.3 of the compiled ones on a CPU"

#: Accuracy of predicted times, from `make bench`.
TIMES = "predicted times were 0.55 to 1.25 of the measured ones, 0.95 in the middle"


@dataclass(frozen=True)
class Totals:
    """The figures of a plan.

    `saved_bytes` lie between the halves. `forward_bytes` and `backward_bytes` are the peaks of temporaries in each
    half. `fixed_bytes` are arguments and results, and `peak_bytes` is the predicted peak of the whole step.
    `again_ops`, `again_flops` and `again_seconds` count ops that run twice; `step_flops` are the flops of a step
    without them. `offloaded_bytes` are in host memory between the halves.
    """

    saved_bytes: int
    num_saved: int
    forward_bytes: int
    backward_bytes: int
    peak_bytes: int
    fixed_bytes: int
    again_ops: int
    again_flops: float
    again_seconds: float
    step_flops: float
    offloaded_bytes: int = 0


@dataclass(frozen=True)
class Account:
    """XLA's figures in bytes: temporaries and peak, of the step and of plain JAX's step."""

    temp_bytes: int
    peak_bytes: int
    plain_temp_bytes: int
    plain_peak_bytes: int


@dataclass(frozen=True)
class Report:
    """The arrays that a plan of a program saves, the ops that it computes again, and its costs.

    `print` shows a table, Jupyter a page, and `save` writes either to a file.

    Attributes:
        name: the name of the function.
        plan: the choice of saved arrays and recomputed ops.
        totals: the figures of the plan.
        plain: the figures of plain JAX.
        saved: the saved arrays, largest first.
        again: the ops that run twice, by the user's line.
        less: the cost of smaller budgets. If the step was compiled, each budget was tried and holds.
        front: the Pareto front of plans; this plan is the chosen one. If the step was compiled, the predicted peaks are
            scaled so that this plan's peak equals XLA's.
        account: XLA's figures; None if nothing was compiled (`cut.explain(measure=False)`).
        backend: the backend of the step: "cpu", "gpu", "tpu", or the name of its target.
        life: the arrays alive at each step: at XLA's instructions if it was compiled, else in a replay of the plan.
        plain_life: the same for plain JAX.
        sections: the sections of the page, as plain JSON.
        default_saved_bytes: the bytes that jointcut's default plan would save, in a report of plain JAX.
        tried: the smaller budgets that were tried; None if nothing was compiled.
        derived: the derivatives that may differ from JAX's, by rule and line.
        target: the device that the step was planned for; None for JAX's default device.
        collectives: what the devices of a mesh exchange, beside plain JAX; None on one device, or if it is not known.
    """

    name: str
    plan: Plan
    totals: Totals
    plain: Totals
    saved: tuple[SavedRow, ...]
    again: tuple[AgainRow, ...]
    less: tuple[LessRow, ...]
    front: Pareto = field(repr=False)
    account: Account | None
    backend: str
    life: Lifetimes = field(repr=False)
    plain_life: Lifetimes = field(repr=False)
    sections: tuple[JSON, ...] = field(repr=False)
    default_saved_bytes: int | None = None
    tried: Tried | None = field(default=None, repr=False)
    derived: tuple[DerivedRow, ...] = ()
    target: Target | None = None
    collectives: Collectives | None = None

    @property
    def is_plain(self) -> bool:
        """Whether this is a report of plain JAX, whose plan is `save_all`."""
        return self.plan.strategy == "save_all"

    def __repr__(self) -> str:
        """`<Report of loss: 12 arrays, 47.2 MB saved>`."""
        arrays = counted(len(self.saved), "array")
        return f"<Report of {self.name}: {arrays}, {human_bytes(self.totals.saved_bytes)}{self.front.per} saved>"

    def __str__(self) -> str:
        """Return the table, in colour in a terminal, plain in a pipe."""
        return self.table()

    # ------------------------------------------------------------------------------------------------- in words

    def table(self, everything: bool = False, in_colour: bool | None = None, hint: str = _HINT) -> str:
        """Return the report as text of at most 100 columns: peak and time, saved arrays, repeated ops, smaller budgets.

        `everything` lists all rows, and `hint` says how to list them. If `in_colour` is None, it depends on the
        terminal.
        """
        return tabular.written(self._parts(everything, hint), in_colour)

    def _parts(self, everything: bool, hint: str) -> Iterator[RenderableType]:
        yield tabular.headline(self.name, f", {self.subtitle}")
        yield self._figures()
        yield from tabular.notes(self.remarks)
        parts = (
            tabular.saved(self.saved, everything, hint),
            tabular.again(self.again, everything),
            tabular.less(self.less, self.peak_bytes, self.tried),
        )
        for part in parts:
            lines = list(part)
            if lines:
                yield Text("")
                yield from lines

    @property
    def subtitle(self) -> str:
        """The plan's strategy, the backend and the version of JAX."""
        how = f"cut by {self.plan.strategy}"
        if self.is_plain:
            how = "what jax.vjp keeps" if self.plan.baseline == PLAIN_JAX else self.plan.baseline
        return f"{how}; on {self.backend}, JAX {version('jax')}"

    @property
    def peak_bytes(self) -> int:
        """The peak of the compiled step, or the predicted peak if nothing was compiled."""
        return self.totals.peak_bytes if self.account is None else self.account.peak_bytes

    @property
    def plain_peak_bytes(self) -> int | None:
        """The peak of plain JAX's compiled step; None if nothing was compiled, since predictions are often too low."""
        return None if self.account is None else self.account.plain_peak_bytes

    @property
    def _peak_name(self) -> str:
        return f"peak of a step{self.front.per}" if self.account else f"peak of a step{self.front.per}, predicted"

    @property
    def time_share(self) -> float | None:
        """Predicted time of a step divided by plain JAX's; None in a report of plain JAX."""
        return None if self.is_plain or self.front.chosen is None else self.front.time_share(self.front.chosen)

    @property
    def verdict(self) -> str:
        """A sentence on the bytes that the forward keeps for the backward."""
        ours, plain = (f"{human_bytes(t.saved_bytes)}{self.front.per}" for t in (self.totals, self.plain))
        kept = f"The forward keeps {ours} for the backward"
        return kept if self.is_plain else f"{kept}, {self.plan.baseline} {plain}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on the totals: their accuracy, the cost of the ops that run twice, and `bounds`."""
        peak = f"the peak is that {tabular.of_account(self.target)}" if self.account else PEAKS
        again = [f"{counted(self.totals.again_ops, 'op')} run twice: {self._price}"] if self.totals.again_ops else []
        there = tabular.on_target(self.target, self.peak_bytes, self.time_share is not None, TIMES)
        moved = self.collectives.remarks if self.collectives else ()
        return (peak, *there, *again, *self.bounds, *moved, *in_words(self.derived))

    @property
    def _price(self) -> str:
        """The cost of the ops that run twice, in flops and seconds."""
        more = self.totals.again_flops / max(self.totals.step_flops, 1.0)
        return f"{more:.1%} more flops, {human_seconds(self.totals.again_seconds)} by the model"

    @property
    def bounds(self) -> tuple[str, ...]:
        """Remarks on the saved bytes: loops in segments, the plan's remarks, the bound, jointcut's default plan."""
        lines = [*in_segments(self.plan.loops_in_segments), *self.plan.remarks]
        if op := underived(self.plan.problem, self.plan.nested):
            lines.insert(0, f"plain JAX has no gradient through {op}: {ALL_SAVED} is this step with nothing cut")
        if self.plan.bound_bytes is not None and not self.is_plain:
            rules = "under the policy" if self.plan.is_told else "that computes nothing heavy twice"
            lines.append(f"every plan {rules} saves at least {human_bytes(self.plan.bound_bytes)}{self.front.per}")
        if self.account is not None and self.plain.saved_bytes > self.account.plain_temp_bytes:
            holds = "reads more than its step holds: XLA computes the rest twice"
            lines.append(f"the backward of {self.plan.baseline} {holds}")
        if self.is_plain and (default := self.default_saved_bytes) is not None:
            keeps = f"with jointcut it would keep {human_bytes(default)}{self.front.per}: aot.function({self.name})"
            same = "the default of aot.function is this plan, too: none that is clearly better is found"
            lines.append(same if default == self.plan.bytes_saved else keeps)
        return tuple(lines)

    def _figures(self) -> RenderableType:
        baseline = self.plan.baseline
        columns = (baseline,) if self.is_plain else ("jointcut", baseline, "ratio")
        first = [(self._peak_name, self._cells(self.peak_bytes, self.plain_peak_bytes))]
        if self.time_share is not None:
            first.append(("time of a step, by the model", ("", "", f"{self.time_share:.2f}")))
        rest = [(f"  {name}{self.front.per}", self._cells(ours, plain)) for name, ours, plain in self.compared()]
        return tabular.figures(first, rest, columns)

    def _cells(self, ours: int, plain: int | None) -> tuple[str, ...]:
        if self.is_plain or plain is None:
            return (human_bytes(ours),)
        return human_bytes(ours), human_bytes(plain), tabular.ratio(ours, plain)

    def compared(self) -> list[tuple[str, int, int]]:
        """Return the figures in bytes, except the peak: the name, this plan's figure and plain JAX's."""
        ours, plain = self.totals, self.plain
        figures = [
            ("saved for the backward", ours.saved_bytes, plain.saved_bytes),
            ("most alive in the forward", ours.forward_bytes, plain.forward_bytes),
            ("most alive in the backward", ours.backward_bytes, plain.backward_bytes),
            ("arguments and results", ours.fixed_bytes, plain.fixed_bytes),
        ]
        if ours.offloaded_bytes:
            figures.insert(1, ("offloaded to host memory", ours.offloaded_bytes, plain.offloaded_bytes))
        if self.account is None:
            return figures
        return [*figures, ("temporaries of the compiled step", self.account.temp_bytes, self.account.plain_temp_bytes)]

    # ----------------------------------------------------------------------------------------------- in pictures

    @functools.cached_property
    def data(self) -> JSON:
        """The contents of the page, as plain JSON."""
        return {
            "format": 1,
            "title": self.name,
            "subtitle": f"{self.verdict} ({self.subtitle}).",
            "totals": [*self._first(), *self._rest()],
            "sections": list(self.sections),
            "per": self.front.per,
        }

    def _first(self) -> Iterator[JSON]:
        """Yield peak and time, which the page shows large."""
        ours, plain = self.peak_bytes, self.plain_peak_bytes
        how = PEAKS if self.account is None else tabular.of_account(self.target)
        detail = how if self.is_plain or plain is None else f"{self._against(ours, plain)}; {how}"
        yield {"label": self._peak_name, "value": human_bytes(ours), "detail": detail, "main": True}
        if self.time_share is not None:
            value = f"{self.time_share:.2f} × {self.plan.baseline}"
            yield {"label": "time of a step, by the model", "value": value, "detail": TIMES, "main": True}

    def _rest(self) -> Iterator[JSON]:
        """Yield the other figures, which the page shows small."""
        for name, ours, plain in self.compared():
            detail = tabular.WHAT[name] if self.is_plain else f"{self._against(ours, plain)}. {tabular.WHAT[name]}"
            yield {"label": f"{name}{self.front.per}", "value": human_bytes(ours), "detail": detail}
        if not self.is_plain:
            yield {"label": "computed again", "value": counted(self.totals.again_ops, "op"), "detail": self._price}

    def _against(self, ours: int, plain: int) -> str:
        told = f"{self.plan.baseline}: {human_bytes(plain)}{self.front.per}"
        return f"{told}, ratio {ours / plain:.2f}" if plain else told

    @functools.cached_property
    def html(self) -> str:
        """The page, as one self-contained file."""
        return page(self.data)

    def _repr_mimebundle_(self, **_: Any) -> Mapping[str, Any]:
        """Return the forms for notebooks: the page in a frame, and the table."""
        return {"text/plain": self.table(in_colour=False), "text/html": framed(self.html)}

    # --------------------------------------------------------------------------------------------------- in files

    def to_dict(self) -> JSON:
        """Return the report as plain JSON: totals, rows, the plan's figures, and XLA's figures if known."""
        return {
            "function": self.name,
            "strategy": self.plan.strategy,
            "backend": self.backend,
            "device_bytes": None if self.target is None else self.target.memory_bytes,
            "totals": asdict(self.totals),
            "plain": asdict(self.plain),
            "saved": [asdict(row) for row in self.saved],
            "recomputed": [asdict(row) for row in self.again],
            "less": [{**asdict(row), "segments": segments_told(row.segments)} for row in self.less],
            "segments": segments_told(self.plan.loops_in_segments),
            "loops": [loop_told(loop) for loop in self.plan.nested],
            "forms": [asdict(form) for form in self.plan.forms],
            "overruled": [{**asdict(row), "demand": row.demand.name} for row in self.plan.overruled],
            "packed": None if self.plan.packed is None else asdict(self.plan.packed),
            "gradient_error": None if self.plan.gradient_error is None else asdict(self.plan.gradient_error),
            "bound_bytes": self.plan.bound_bytes,
            "derivatives": [asdict(row) for row in self.derived],
            "account": None if self.account is None else asdict(self.account),
            "collectives": None if self.collectives is None else self.collectives.to_dict(),
            "snapshot": self.snapshot().to_dict(),
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to a file, in the format of its ending, and return the path.

        `.html` is the page, `.json` the result of `to_dict` and `.txt` the table with every row. Raises `JointcutError`
        for another ending, or if the file cannot be written; then no part of the file is left behind.
        """
        contents = {
            ".html": lambda: self.html,
            ".json": lambda: json.dumps(self.to_dict(), indent=1) + "\n",
            ".txt": lambda: self.table(everything=True, in_colour=False) + "\n",
        }
        return written_to(path, contents)

    def perfetto(self, path: str | os.PathLike[str]) -> Path:
        """Write the memory over the step, and over plain JAX's, as a trace for https://ui.perfetto.dev.

        Returns the path, whose ending is `.json`. A step has a microsecond. Raises as `save`.
        """
        lives = {self.name: self.life} if self.is_plain else {self.name: self.life, self.plan.baseline: self.plain_life}
        return written_to(path, {".json": lambda: perfetto(lives)})

    def pprof(self, path: str | os.PathLike[str]) -> Path:
        """Write the arrays at the peak, and the saved ones, as a profile for pprof, by the user's calls and lines.

        Returns the path, whose ending is `.gz`, as in `step.pb.gz`. `pprof -diff_base` compares two. Raises as `save`.
        """
        saved = [(row.line, row.op, row.type, row.bytes) for row in self.saved]
        return written_to(path, {".gz": lambda: pprof(self.life, saved, f"{self.name}: {self.subtitle}")})

    # ------------------------------------------------------------------------------------------ beside another one

    def snapshot(self) -> Snapshot:
        """Return what is compared with another report."""
        totals, account = self.totals, self.account
        temp_bytes = max(totals.forward_bytes, totals.backward_bytes) if account is None else account.temp_bytes
        figures: dict[str, float] = {"peak_bytes": self.peak_bytes, "temp_bytes": temp_bytes}
        figures |= {"residual_bytes": totals.saved_bytes, "flops": totals.step_flops + totals.again_flops}
        saved = together(Array(row.bytes, row.type, row.op, row.path, row.line) for row in self.saved)
        own = {"ghost": None, "per": self.front.per}
        memory = next(({**s, **own} for s in self.sections if s["kind"] == "timeline"), None)
        by = "the model" if account is None else "XLA"
        known = self.name, self.backend, version("jax"), by
        return Snapshot(*known, figures, alive_at_peak(self.life), saved, memory)

    def diff(self, other: Report | Snapshot | str | os.PathLike[str], *, renamed: bool = False) -> Diff:
        """Say what this step takes more and less than another one; `print` the result.

        `other` is the step before: a report, or the JSON file that one was saved to. So the two may be of different
        commits, plans, budgets, targets or versions of JAX. Arrays are known by scope, op and type, not by their line
        alone. Raises `RecordError` for a damaged file, and for a report of a function of another name, unless it was
        `renamed`.
        """
        if not isinstance(other, Report | Snapshot):
            before, name = read(other), str(other)
        else:
            before, name = (other.snapshot() if isinstance(other, Report) else other), "the other"
        return diff(before, self.snapshot(), renamed, (name, "this"))
