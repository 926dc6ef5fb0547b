"""Write a report as a table of at most 100 columns.

In a terminal with colours and rules, by the `rich` library; in a pipe the same text without either. A cell that is too
long loses its head or its end, never its number.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jointcut.aot.report.rows import AgainRow, LessRow, SavedRow, by_line
from jointcut.aot.report.sections import HEAVY, extra_time, recipe, within
from jointcut.partition.figures import human_bytes, human_seconds
from jointcut.partition.picture import reason, short, times
from jointcut.partition.plan import alike

WIDTH = 100
SHOWN = 12  # rows of a kind that are listed


def written(parts: Iterable[RenderableType], in_colour: bool | None = None) -> str:
    """Parts of a report as text, by default in colour where standard output is a terminal that shows it."""
    if in_colour is None:
        in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    out = io.StringIO()
    system = "truecolor" if in_colour else None
    console = Console(
        file=out,
        width=WIDTH,
        force_terminal=in_colour,
        force_jupyter=False,  # in a kernel rich would show the text as an output of its own, and write none
        color_system=system,
        legacy_windows=False,
        highlight=False,
        markup=False,  # float32[b,8] is no markup
        emoji=False,
    )
    console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def headline(text: str, rest: str = "") -> Text:
    """The title of a report or of a part of it."""
    return Text.assemble((text, "bold"), rest)


def figures(rows: Sequence[tuple[str, Sequence[str]]], columns: Sequence[str]) -> Table:
    """Figures by name, one column of numbers for each thing that they are of."""
    table = _table()
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def saved(rows: Sequence[SavedRow], everything: bool, hint: str) -> Iterator[RenderableType]:
    """The saved arrays, the largest first, and below them the reasons by number.

    Without `everything` rows that read the same, as of layers written one after the other, are one row.
    """
    if not rows:
        return
    groups = [[row] for row in rows] if everything else alike(rows, value=0, path="")
    shown = groups if everything else groups[:SHOWN]
    reasons = list(dict.fromkeys(map(reason, shown)))
    table = _table()
    table.add_column("bytes", justify="right", no_wrap=True)
    for name, width in (("array", 26), ("made by", 13), ("at", 23), ("needed by", 13)):
        table.add_column(name, no_wrap=True, max_width=width)
    table.add_column("why", justify="right", no_wrap=True)
    for own in shown:
        row = own[0]
        cells = tail(row.type, 26), cut_off(row.op, 13), line_within(row.line, 23), cut_off(row.needed_by, 13)
        table.add_row(times(own) + human_bytes(row.bytes), *cells, str(reasons.index(reason(own)) + 1))
    yield Text(f"Saved for the backward, {len(rows)} arrays", style="bold")
    yield table
    yield from _rest([row for own in groups[len(shown) :] for row in own], hint)
    for i, text in enumerate(reasons):
        yield Padding(Text(f"{i + 1}  {text}"), (0, 0, 0, 2))
    yield from notes([HEAVY])


def _rest(rows: Sequence[SavedRow], hint: str) -> Iterator[RenderableType]:
    if rows:
        size = human_bytes(sum(row.bytes for row in rows))
        yield Text(f"  and {len(rows)} smaller ones, {size}: {hint} lists them", style="dim")


def again(rows: Sequence[AgainRow], everything: bool = False) -> Iterator[RenderableType]:
    """What runs twice, by line; without `everything` rows that read the same are one."""
    if not rows:
        return
    found = [[row] for row in rows] if everything else by_line(rows)
    shown = found if everything else [own for own in found[:SHOWN] if own[0].seconds]
    table = _table()
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("Mflop", justify="right", no_wrap=True)
    table.add_column("at", no_wrap=True, max_width=36)
    table.add_column("ops", no_wrap=True, max_width=36)
    for own in shown:
        row = own[0]
        cells = times(own) + human_seconds(row.seconds), f"{times(own)}{row.flops / 1e6:,.1f}"
        table.add_row(*cells, line_within(row.line, 36), cut_off(row.ops, 36))
    yield Text("Computed again in the backward", style="bold")
    if shown:
        yield table
    if rest := [row for own in found[len(shown) :] for row in own]:
        taken, count = sum(row.seconds for row in rest), sum(row.count for row in rest)
        cost = human_seconds(taken) if taken else "within what reads them, in no time of their own"
        lines, more = len({row.line for row in rest}), " more" if shown else ""
        told = f"  {'and ' if shown else ''}{count} ops of {lines}{more} line{'s' if lines > 1 else ''}, {cost}"
        yield Text(told, style="dim")


def less(rows: Sequence[LessRow], peak_bytes: int) -> Iterator[RenderableType]:
    """What less memory would cost; `peak_bytes` is the predicted peak of the plan at hand."""
    if not rows:
        return
    table = _table()
    for name in ("at most", "found", "extra time", "saves less"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("by computing again", no_wrap=True, max_width=31)
    for row in rows:
        bound = within(row, peak_bytes)
        if row.peak_bytes is None:
            table.add_row(bound, "none", "", "", "")
            continue
        net = human_bytes(row.freed_bytes - row.kept_bytes)
        table.add_row(bound, human_bytes(row.peak_bytes), extra_time(row), net, cut_off(row.again or "nothing", 31))
    yield Text(f"With less memory than the {human_bytes(peak_bytes)} that are predicted", style="bold")
    yield table
    yield from notes([recipe(rows)] if recipe(rows) else [])


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)


def cut_off(text: str, width: int) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def tail(text: str, width: int) -> str:
    """The end of a text that is too long."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def line_within(line: str, width: int) -> str:
    """A source line in so many letters: without its folder, and then without the function, if that is too long.

    >>> line_within("/home/me/train/model.py:40 (loss)", 26), line_within("/home/me/train/model.py:40 (loss)", 16)
    ('train/model.py:40 (loss)', 'model.py:40')
    """
    text = short(line)
    name = text.rpartition("/")[2]
    forms = text, text.partition(" (")[0], name, name.partition(" (")[0]
    return next((form for form in forms if len(form) <= width), tail(forms[-1], width))


def ratio(part: float, whole: float) -> str:
    """One figure over another, where there is another."""
    return f"{part / whole:.2f}" if whole else ""


def notes(lines: Iterable[Any]) -> Iterator[RenderableType]:
    """Sentences below a table."""
    for line in lines:
        yield Text(str(line), style="dim")
