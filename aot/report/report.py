"""Report what is saved, what is recomputed, and what it costs.

`loss.explain(*args)` and `cut.explain()` give a `Report`. So does `aot.explain(f, *args)` for any other function: then
it says what `jax.vjp` keeps, and what jointcut would keep. A report prints as a table, appears as a page in Jupyter,
and is written to a file by `save`.
"""

from __future__ import annotations

import functools
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from jointcut.aot.choices.target import Target
from jointcut.aot.fitting.axes import optional
from jointcut.aot.fitting.pareto import Pareto
from jointcut.aot.report import drawing, table
from jointcut.aot.report.derived import DerivedRow, in_words
from jointcut.aot.report.lists import AgainRow, LessRow, SavedRow
from jointcut.aot.report.tried import Tried
from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.errors import JointcutError, choices, message
from jointcut.partition.figures import counted, human_bytes, human_seconds
from jointcut.partition.lower.lifetimes import Lifetimes
from jointcut.partition.plans.plan import ALL_SAVED, PLAIN_JAX, Plan, in_segments
from jointcut.partition.program.bodies import Nested

JSON = dict[str, Any]

_HINT = "report.table(everything=True)"  # lists all rows

#: Accuracy of predicted peaks, from the programs of the tests and of `make bench`.
PEAKS = "predicted peaks were mostly 0.9 to 1.1 of the compiled ones on a CPU"

#: Accuracy of predicted times, from `make bench`.
TIMES = "predicted times were 0.55 to 1.25 of the measured ones, 0.95 in the middle"

_WHAT = {
    "saved for the backward": "Arrays that the forward hands to the backward",
    "most alive in the forward": "Arrays at once, without arguments and results",
    "most alive in the backward": "Arrays at once, without arguments and results",
    "offloaded to host memory": "Arrays that wait in host memory between the halves",
    "arguments and results": "What the caller holds, and the gradients",
    "temporaries of the compiled step": "The peak without arguments and results",
}

#: The endings of file names that `Report.save` takes.
FORMATS = (".html", ".png", ".svg", ".pdf", ".json", ".txt")


@dataclass(frozen=True)
class Totals:
    """The figures of a plan.

    Bytes: `saved_bytes` between the halves, `forward_bytes` and `backward_bytes` the most that temporaries take at
    once in each half, `fixed_bytes` of arguments and results, `peak_bytes` the predicted peak of the whole step.
    `again_ops`, `again_flops` and `again_seconds` are of ops that run twice, `step_flops` of a step without them.
    `offloaded_bytes` wait in host memory between the halves.
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
    """XLA's figures in bytes: temporaries and peak of the step, and those of plain JAX."""

    temp_bytes: int
    peak_bytes: int
    plain_temp_bytes: int
    plain_peak_bytes: int


@dataclass(frozen=True)
class Report:
    """The arrays that a plan of a program saves, the ops that it computes again, and its costs.

    `print` shows a table, Jupyter a page, and `save` writes either to a file.

    Attributes:
        name: of the function.
        plan: which arrays are saved and which ops are recomputed.
        totals: figures of the plan.
        plain: figures of plain JAX.
        saved: the saved arrays, largest first.
        again: the ops that run twice, by the user's line.
        less: the cost of smaller budgets. Where the step was compiled, each of them was tried and holds.
        front: the Pareto front of plans, with this one as the chosen one. Where the step was compiled, predicted peaks
            are scaled so that this plan's is XLA's.
        account: XLA's figures, None where nothing was compiled (`cut.explain(measure=False)`).
        backend: where the step runs: "cpu", "gpu", "tpu", or the name of its target.
        life: the arrays alive at each step: at XLA's instructions where it was compiled, else in a replay of the plan.
        plain_life: the same of plain JAX.
        sections: the sections of the page, as plain JSON.
        default_saved_bytes: bytes that jointcut's default plan would save, in a report of plain JAX.
        tried: the smaller budgets that were tried, None where nothing was compiled.
        derived: where derivatives may differ from JAX's, by rule and line.
        target: the device that the step was planned for, None for JAX's default device.
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

    @property
    def is_plain(self) -> bool:
        """Whether this is a report of plain JAX, whose plan is `save_all`."""
        return self.plan.strategy == "save_all"

    def __repr__(self) -> str:
        """`<Report of loss: 12 arrays, 47.2 MB saved>`."""
        arrays = counted(len(self.saved), "array")
        return f"<Report of {self.name}: {arrays}, {human_bytes(self.totals.saved_bytes)} saved>"

    def __str__(self) -> str:
        """The table, in colour in a terminal, plain in a pipe."""
        return self.table()

    # ------------------------------------------------------------------------------------------------- in words

    def table(self, everything: bool = False, in_colour: bool | None = None, hint: str = _HINT) -> str:
        """The report as text of at most 100 columns: peak and time, saved arrays, repeated ops, smaller budgets.

        `everything` lists all rows, and `hint` says how to list them; `in_colour` depends on the terminal where None.
        """
        return table.written(self._parts(everything, hint), in_colour)

    def _parts(self, everything: bool, hint: str) -> Iterator[RenderableType]:
        yield table.headline(self.name, f", {self.subtitle}")
        yield self._figures()
        yield from table.notes(self.remarks)
        parts = (
            table.saved(self.saved, everything, hint),
            table.again(self.again, everything),
            table.less(self.less, self.peak_bytes, self.tried),
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
        """The peak of the step: of the compiled step where it was compiled, else predicted."""
        return self.totals.peak_bytes if self.account is None else self.account.peak_bytes

    @property
    def plain_peak_bytes(self) -> int | None:
        """The peak of plain JAX's compiled step; None where nothing was compiled, as predictions are often too low."""
        return None if self.account is None else self.account.plain_peak_bytes

    @property
    def _peak_name(self) -> str:
        return "peak of a step" if self.account else "peak of a step, predicted"

    @property
    def time_share(self) -> float | None:
        """Predicted time of a step divided by plain JAX's; None in a report of plain JAX."""
        return None if self.is_plain or self.front.chosen is None else self.front.time_share(self.front.chosen)

    @property
    def verdict(self) -> str:
        """A sentence on the bytes that the forward keeps."""
        ours = f"The forward keeps {human_bytes(self.totals.saved_bytes)} for the backward"
        return ours if self.is_plain else f"{ours}, {self.plan.baseline} {human_bytes(self.plain.saved_bytes)}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on the totals: how accurate they are, the cost of what runs twice, and `bounds`."""
        peak = f"the peak is that {table.of_account(self.target)}" if self.account else PEAKS
        again = [f"{counted(self.totals.again_ops, 'op')} run twice: {self._price}"] if self.totals.again_ops else []
        there = table.on_target(self.target, self.peak_bytes, self.time_share is not None, TIMES)
        return (peak, *there, *again, *self.bounds, *in_words(self.derived))

    @property
    def _price(self) -> str:
        """The cost of what runs twice, in flops and seconds."""
        more = self.totals.again_flops / max(self.totals.step_flops, 1.0)
        return f"{more:.1%} more flops, {human_seconds(self.totals.again_seconds)} by the model"

    @property
    def bounds(self) -> tuple[str, ...]:
        """Remarks on the saved bytes: loops in segments, what the plan says, the bound, jointcut's default plan."""
        lines = [*in_segments(self.plan.loops_in_segments), *self.plan.remarks]
        for loop in [loop for loop in self.plan.nested if loop.is_of_jax][:1]:
            lines.insert(0, f"plain JAX has no gradient through {loop.name}: {ALL_SAVED} is this step with nothing cut")
        if self.plan.bound_bytes is not None and not self.is_plain:
            rules = "under the policy" if self.plan.is_told else "that computes nothing heavy twice"
            lines.append(f"every plan {rules} saves at least {human_bytes(self.plan.bound_bytes)}")
        if self._is_held_less:
            holds = "reads more than its step holds: XLA computes the rest twice"
            lines.append(f"the backward of {self.plan.baseline} {holds}")
        if self.is_plain and (default := self.default_saved_bytes) is not None:
            keeps = f"with jointcut it would keep {human_bytes(default)}: aot.function({self.name})"
            same = "the default of aot.function is this plan, too: none that is clearly better is found"
            lines.append(same if default == self.plan.bytes_saved else keeps)
        return tuple(lines)

    @property
    def _is_held_less(self) -> bool:
        """Whether XLA holds less than plain JAX's backward reads."""
        return self.account is not None and self.plain.saved_bytes > self.account.plain_temp_bytes

    def _figures(self) -> RenderableType:
        baseline = self.plan.baseline
        columns = (baseline,) if self.is_plain else ("jointcut", baseline, "ratio")
        first = [(self._peak_name, self._cells(self.peak_bytes, self.plain_peak_bytes))]
        if self.time_share is not None:
            first.append(("time of a step, by the model", ("", "", f"{self.time_share:.2f}")))
        rest = [(f"  {name}", self._cells(ours, plain)) for name, ours, plain in self.compared()]
        return table.figures(first, rest, columns)

    def _cells(self, ours: int, plain: int | None) -> tuple[str, ...]:
        if self.is_plain or plain is None:
            return (human_bytes(ours),)
        return human_bytes(ours), human_bytes(plain), table.ratio(ours, plain)

    def compared(self) -> list[tuple[str, int, int]]:
        """The figures in bytes except the peak: name, this plan's and plain JAX's."""
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
        }

    def _first(self) -> Iterator[JSON]:
        """Peak and time, which the page shows large."""
        ours, plain = self.peak_bytes, self.plain_peak_bytes
        how = PEAKS if self.account is None else table.of_account(self.target)
        detail = how if self.is_plain or plain is None else f"{self._against(ours, plain)}; {how}"
        yield {"label": self._peak_name, "value": human_bytes(ours), "detail": detail, "main": True}
        if self.time_share is not None:
            value = f"{self.time_share:.2f} × {self.plan.baseline}"
            yield {"label": "time of a step, by the model", "value": value, "detail": TIMES, "main": True}

    def _rest(self) -> Iterator[JSON]:
        """The other figures, which the page shows small."""
        for name, ours, plain in self.compared():
            detail = _WHAT[name] if self.is_plain else f"{self._against(ours, plain)}. {_WHAT[name]}"
            yield {"label": name, "value": human_bytes(ours), "detail": detail}
        if not self.is_plain:
            yield {"label": "computed again", "value": counted(self.totals.again_ops, "op"), "detail": self._price}

    def _against(self, ours: int, plain: int) -> str:
        return f"{self.plan.baseline}: {human_bytes(plain)}" + (f", ratio {ours / plain:.2f}" if plain else "")

    @functools.cached_property
    def html(self) -> str:
        """The page, as one self-contained file."""
        return page(self.data)

    def plot(self, axes: Any = None, by: str = "module") -> Any:
        """Draw the memory over a step with matplotlib, by "module" or by "line"; returns the axes.

        Without `axes` the figure is pyplot's: a notebook shows it, elsewhere `matplotlib.pyplot.show()` does.
        Raises `JointcutError` where matplotlib is not installed.
        """
        return drawing.memory(self.name, self.sections[0], axes, by)

    def _repr_mimebundle_(self, **_: Any) -> Mapping[str, Any]:
        """Forms for notebooks: the page in a frame, the table, and a picture where matplotlib is installed."""
        bundle: dict[str, Any] = {"text/plain": self.table(in_colour=False), "text/html": framed(self.html)}
        with optional():
            bundle["image/png"] = drawing.picture(self.name, self.sections[0])
        return bundle

    # --------------------------------------------------------------------------------------------------- in files

    def to_dict(self) -> JSON:
        """The report as plain JSON: totals, rows, the plan's figures, and XLA's where they are known."""
        return {
            "function": self.name,
            "strategy": self.plan.strategy,
            "backend": self.backend,
            "device_bytes": None if self.target is None else self.target.memory_bytes,
            "totals": asdict(self.totals),
            "plain": asdict(self.plain),
            "saved": [asdict(row) for row in self.saved],
            "recomputed": [asdict(row) for row in self.again],
            "less": [{**asdict(row), "segments": _segments(row.segments)} for row in self.less],
            "segments": _segments(self.plan.loops_in_segments),
            "loops": [_loop(loop) for loop in self.plan.nested],
            "forms": [asdict(form) for form in self.plan.forms],
            "overruled": [{**asdict(row), "demand": row.demand.name} for row in self.plan.overruled],
            "packed": None if self.plan.packed is None else asdict(self.plan.packed),
            "gradient_error": None if self.plan.gradient_error is None else asdict(self.plan.gradient_error),
            "bound_bytes": self.plan.bound_bytes,
            "derivatives": [asdict(row) for row in self.derived],
            "account": None if self.account is None else asdict(self.account),
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to a file, in the format of its ending, and return the path.

        `.html` is the page, `.png`, `.svg` and `.pdf` the memory over a step, `.json` the result of `to_dict` and
        `.txt` the table with every row. Raises `JointcutError` for another ending, without matplotlib where it is
        needed, or where the file cannot be written; then no part of it is left behind.
        """
        path = Path(path)
        if path.suffix not in FORMATS:
            raise JointcutError(message(str(path), "has no known ending.", choices(path.suffix, FORMATS)))
        content, draft = self._content(path.suffix), path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            draft.write_bytes(content)
            draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            what = f"cannot be written: {error.strerror}."
            raise JointcutError(message(str(path), what, "Give a file in a folder that takes it.")) from error
        return path

    def _content(self, ending: str) -> bytes:
        """The bytes of a file in one of `FORMATS`."""
        if ending == ".html":
            return self.html.encode()
        if ending == ".json":
            return (json.dumps(self.to_dict(), indent=1) + "\n").encode()
        if ending == ".txt":
            return (self.table(everything=True, in_colour=False) + "\n").encode()
        return drawing.picture(self.name, self.sections[0], ending.removeprefix("."), dpi=150)


def _loop(loop: Nested) -> JSON:
    """A loop whose steps are cut on their own, as plain JSON; bytes and ops are those of one step."""
    return {
        "name": loop.name,
        "trips": loop.trips,
        "checkpoints": loop.checkpoints,
        "checkpoint_bytes": loop.checkpoint_bytes,
        "saved_bytes": loop.plan.bytes_saved,
        "recomputed": len(loop.plan.recomputed),
    }


def _segments(loops: Iterable[tuple[int, int, int]]) -> list[JSON]:
    return [{"loop": loop, "steps": steps, "kept_steps": kept} for loop, steps, kept in loops]
