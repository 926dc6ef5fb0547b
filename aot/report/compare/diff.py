"""Say what a step takes more and less than another."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from jointcut.aot.report import tabular
from jointcut.aot.report.compare.files import written_to
from jointcut.aot.report.compare.matching import Change, changes
from jointcut.aot.report.compare.snapshot import FIGURES, JSON, Snapshot
from jointcut.aot.report.sections import section
from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.drawing.picture import short
from jointcut.partition.errors import RecordError, message
from jointcut.partition.figures import human_bytes

_LISTS = {"at_peak": "Alive at the peak", "saved": "Saved for the backward"}


@dataclass(frozen=True)
class Diff:
    """The differences from one step to another: figures, and arrays by scope, source line and type.

    `print` shows a table, Jupyter a page, and `save` writes either to a file.

    Attributes:
        before: the step that is compared with.
        after: the step that is compared.
    """

    before: Snapshot
    after: Snapshot

    @cached_property
    def at_peak(self) -> tuple[Change, ...]:
        """What became of the temporaries that are alive at their peak, what grew most first."""
        return changes(self.before.at_peak, self.after.at_peak)

    @cached_property
    def saved(self) -> tuple[Change, ...]:
        """What became of the arrays that the forward hands to the backward, what grew most first."""
        return changes(self.before.saved, self.after.saved)

    @property
    def figures(self) -> dict[str, tuple[float, float]]:
        """The figures that both steps have, before and after, by their names in `Snapshot.figures`."""
        old, new = self.before.figures, self.after.figures
        return {name: (old[name], new[name]) for name in FIGURES if name in old and name in new}

    @property
    def told(self) -> list[tuple[str, str, tuple[float, float]]]:
        """The figures that are shown, each with its words: of both steps, and what is `outside` if that changes."""
        found = [(name, FIGURES[name], pair) for name, pair in self.figures.items()]
        if self.outside[0] != self.outside[1]:
            found.insert(2, ("outside_bytes", "arguments and results", self.outside))
        return found

    @property
    def outside(self) -> tuple[float, float]:
        """The bytes of arguments and results, what is donated once, before and after; 0 where they are not known."""
        peaks, temps = (self.figures.get(name) for name in ("peak_bytes", "temp_bytes"))
        return (0, 0) if peaks is None or temps is None else (peaks[0] - temps[0], peaks[1] - temps[1])

    @property
    def is_empty(self) -> bool:
        """Whether all figures and arrays are the same, but for scopes and lines."""
        is_same = all(change.how == "same" for change in (*self.at_peak, *self.saved))
        return is_same and all(old == new for old, new in self.figures.values())

    @property
    def remarks(self) -> tuple[str, ...]:
        """What else differs, which the figures may follow from."""
        old, new = self.before, self.after
        lines = [f"the function was {old.function}, and is {new.function} now"] if old.function != new.function else []
        if old.jax != new.jax:
            lines.append(f"JAX {old.jax} compiled the first, JAX {new.jax} the second")
        if old.backend != new.backend:
            lines.append(f"the first is for {old.backend}, the second for {new.backend}")
        if old.account != new.account:
            lines.append(f"the first is by {old.account}, the second by {new.account}: they differ by that, too")
        return tuple(lines)

    # ------------------------------------------------------------------------------------------------- in words

    def __str__(self) -> str:
        """Return the table, in colour in a terminal, plain in a pipe."""
        return self.table()

    def table(self, everything: bool = False, in_colour: bool | None = None) -> str:
        """Return the differences as text of at most 100 columns; `everything` lists all arrays, the same ones too."""
        return tabular.written(self._parts(everything), in_colour)

    def _parts(self, everything: bool) -> Iterator[RenderableType]:
        yield tabular.headline(self.after.function, f", {self.headline}")
        rows = [(words, figure_cells(name, *pair)) for name, words, pair in self.told]
        yield tabular.figures(rows[:1], [(f"  {name}", cells) for name, cells in rows[1:]], _COLUMNS)
        yield from tabular.notes(self.remarks)
        yield from arrays(self.at_peak, _LISTS["at_peak"], everything)
        yield from arrays(self.saved, _LISTS["saved"], everything)

    @property
    def _per(self) -> str:
        """What figures in bytes say beside themselves, if the memory over the step was kept, which says so."""
        return "" if self.after.memory is None else self.after.memory.get("per", "")

    @property
    def headline(self) -> str:
        """What becomes of the peak, and where the figures come from."""
        old, new = self.before, self.after
        made = new.made_by if old.made_by == new.made_by else f"{old.made_by} -> {new.made_by}"
        more = new.figures.get("peak_bytes", 0) - old.figures.get("peak_bytes", 0)
        told = (
            f"{human_bytes(abs(more))}{self._per} {'more' if more > 0 else 'less'} at the peak"
            if more
            else "the peak is the same"
        )
        return f"{'nothing changes' if self.is_empty else told}; {made}"

    # ----------------------------------------------------------------------------------------------- in pictures

    @cached_property
    def data(self) -> JSON:
        """The contents of the page, as plain JSON."""
        totals = []
        for place, (name, words, pair) in enumerate(self.told):
            old, new, more, share = figure_cells(name, *pair)
            detail = f"before: {old}" + (f", {more} ({share})" if more != "same" else ", the same")
            label = words + self._per * name.endswith("bytes")
            totals.append({"label": label, "value": new, "detail": detail, **({"main": True} if not place else {})})
        sections = [
            *self._memory(),
            *(table_of(name, title, getattr(self, name), self._per) for name, title in _LISTS.items()),
        ]
        subtitle = f"{self.headline}. {' '.join(f'{remark}.' for remark in self.remarks)}".strip()
        known = {"format": 1, "title": self.after.function, "subtitle": subtitle, "per": self._per}
        return {**known, "totals": totals, "sections": sections}

    def _memory(self) -> Iterator[JSON]:
        """Yield the memory over both steps, over one axis, if both were kept."""
        old, new = self.before.memory, self.after.memory
        if old is None or new is None or not old["steps"] or not new["steps"]:
            return
        ghost = {"name": "the step before", **{name: old[name] for name in ("total", "boundary")}}
        ghost["peak"] = {name: old["peak"][name] for name in ("step", "bytes")}
        lead = "Every array that is alive while the second step runs, by what made it; the line is the first step."
        yield {**new, "ghost": ghost, "title": "Memory over both steps", "lead": lead}

    @cached_property
    def html(self) -> str:
        """The page, as one self-contained file."""
        return page(self.data)

    def _repr_mimebundle_(self, **_: Any) -> Mapping[str, Any]:
        """Return the forms for notebooks: the page in a frame, and the table."""
        return {"text/plain": self.table(in_colour=False), "text/html": framed(self.html)}

    # --------------------------------------------------------------------------------------------------- in files

    def to_dict(self) -> JSON:
        """Return the differences as plain JSON: who is compared, figures before and after, changes of arrays."""
        sides = {
            side: {name: getattr(snapshot, name) for name in ("function", "backend", "jax", "account")}
            for side, snapshot in (("before", self.before), ("after", self.after))
        }
        figures = {name: {"before": old, "after": new, "more": new - old} for name, (old, new) in self.figures.items()}
        lists = {name: [change.to_dict() for change in getattr(self, name)] for name in _LISTS}
        return {**sides, "is_empty": self.is_empty, "figures": figures, **lists}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the differences to a file, in the format of its ending, and return the path.

        `.html` is the page, `.json` the result of `to_dict` and `.txt` the table with every row. Raises `JointcutError`
        for another ending, or if the file cannot be written.
        """
        contents = {
            ".html": lambda: self.html,
            ".json": lambda: json.dumps(self.to_dict(), indent=1) + "\n",
            ".txt": lambda: self.table(everything=True, in_colour=False) + "\n",
        }
        return written_to(path, contents)


def diff(
    before: Snapshot, after: Snapshot, renamed: bool = False, names: tuple[str, str] = ("This", "the other")
) -> Diff:
    """Return the differences of two steps of one function; `names` are those of the steps in errors.

    Raises `RecordError` for two functions of other names, unless the function was `renamed`.
    """
    if before.function != after.function and not renamed:
        what = f"is a report of {before.function}, and {names[1]} of {after.function}."
        cure = "Compare two reports of one function; if it has another name now, give renamed=True (--renamed)."
        raise RecordError(message(names[0], what, cure))
    return Diff(before, after)


# ------------------------------------------------------------------------------------------------------------- rows

_COLUMNS = ("before", "after", "change", "")


def figure_cells(name: str, old: float, new: float) -> tuple[str, str, str, str]:
    """Return a figure before and after, the change, and the change as a share.

    >>> figure_cells("peak_bytes", 25_000_000, 33_000_000)
    ('25.0 MB', '33.0 MB', '+8.00 MB', '+32%')
    >>> figure_cells("flops", 1e9, 1e9)
    ('1,000.0 M', '1,000.0 M', 'same', '')
    """
    told = human_bytes if name.endswith("bytes") else _millions
    if old == new:
        return told(old), told(new), "same", ""
    share = f"{(new - old) / old:+.{0 if abs(new - old) >= 0.1 * old else 2}%}" if old else ""
    return told(old), told(new), signed(new - old, told), share


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f} M"


def signed(count: float, told: Any = human_bytes) -> str:
    """Return a number of bytes with its sign.

    >>> signed(8_000_000), signed(-960), signed(0)
    ('+8.00 MB', '-960 B', '0 B')
    """
    return f"{'+' if count > 0 else '-' if count < 0 else ''}{told(abs(count))}"


def arrays(found: Sequence[Change], title: str, everything: bool = False) -> Iterator[RenderableType]:
    """Yield the arrays that changed, what grew most first; all of them with `everything`."""
    changed = [change for change in found if everything or change.how != "same"]
    if not changed:
        return
    shown = changed if everything else sorted(changed, key=lambda c: -abs(c.bytes_more))[: tabular.SHOWN]
    shown = [change for change in changed if change in shown]
    table = tabular.plain_table()
    table.add_column("", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    widths = _widths(shown)
    for name, width in widths.items():
        table.add_column(name, no_wrap=True, max_width=width)
    for change in shown:
        table.add_row(*_cells(change, *widths.values()))
    yield Text("")
    yield Text(f"{title}: {signed(sum(c.bytes_more for c in found))}", style="bold")
    yield table
    if rest := [change for change in changed if change not in shown]:
        size = signed(sum(change.bytes_more for change in rest))
        yield Text(f"  and {len(rest):,} smaller changes, {size} together", style="dim")


#: The columns of arrays, with the most and the least that each may have; the last gives way first.
_WIDTHS = {"array": (36, 20), "made by": (13, 9), "at": (26, 18), "in": (16, 10)}


def _widths(shown: Sequence[Change]) -> dict[str, int]:
    """Return the widths of the columns of arrays, which leave those of what changed whole."""
    cells = [_cells(change, *(most for most, _ in _WIDTHS.values())) for change in shown]
    how, change, *rest = (max(map(len, column)) for column in zip(*cells, strict=True))
    widths = {name: max(len(name), width) for name, width in zip(_WIDTHS, rest, strict=True)}
    excess = how + max(change, len("change")) + sum(widths.values()) + 2 * (len(widths) + 1) - tabular.WIDTH
    for name in reversed(widths):
        spared = max(0, min(excess, widths[name] - _WIDTHS[name][1]))
        widths[name] -= spared
        excess -= spared
    return widths


def _cells(change: Change, *widths: int) -> tuple[str, ...]:
    array = change.array
    texts = (
        tabular.tail(_type(change), widths[0]),
        tabular.cut_off(array.op, widths[1]),
        tabular.line_within(array.line, widths[2]) or "no known line",
        tabular.module_within(array.scope, widths[3]),
    )
    return change.how, signed(change.bytes_more), *texts


def _type(change: Change) -> str:
    """Return the type of an array, with what it was if that was another: `float32[3,8] -> [4,8]`."""
    old, new = "" if change.before is None else change.before.type, change.array.type
    if not old or old == new:
        return new
    dtype, _, shape = new.partition("[")
    return f"{old} -> [{shape}" if old.startswith(f"{dtype}[") else f"{old} -> {new}"


def table_of(name: str, title: str, found: Sequence[Change], per: str = "") -> JSON:
    """Return the arrays that changed as a table of a page; `per` says whose bytes these are."""
    cells = [
        [
            c.how,
            (signed(c.bytes_more), c.bytes_more),
            (human_bytes(c.bytes_before), c.bytes_before),
            (human_bytes(c.bytes_after), c.bytes_after),
            _type(c),
            f"{c.array.op} at {short(c.array.line) or 'no known line'}",
            c.array.scope,
        ]
        for c in found
        if c.how != "same"
    ]
    lead = f"What is new, gone, larger or smaller: {signed(sum(c.bytes_more for c in found))}{per} together."
    columns = f"what, >change{per}, >before{per}, >after{per}, array, made by, module"
    return section(name, title, lead, columns, cells)
