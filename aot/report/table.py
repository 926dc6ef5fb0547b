"""Write a report as a table of at most 100 columns.

In a terminal with colours and rules, by the `rich` library; in a pipe the same text without either. A cell that is too
long loses its middle or its head, never its number.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jointcut.aot.report.rows import AgainRow, LessRow, SavedRow
from jointcut.partition.picture import human_bytes, human_seconds, short

WIDTH = 100
SHOWN = 12  # rows of a kind that are listed

Cell = str | Text


def written(parts: Iterable[RenderableType], in_colour: bool | None = None) -> str:
    """Parts of a report as text, by default in colour where standard output is a terminal that shows it."""
    if in_colour is None:
        in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    out = io.StringIO()
    system = "truecolor" if in_colour else None
    console = Console(
        file=out, width=WIDTH, force_terminal=in_colour, color_system=system, legacy_windows=False, highlight=False
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


def saved(rows: Sequence[SavedRow], everything: bool = False) -> Iterator[RenderableType]:
    """The saved arrays, the largest first, and below them the reasons by number."""
    if not rows:
        return
    shown = rows if everything else rows[:SHOWN]
    reasons = list(dict.fromkeys(row.reason for row in shown))
    table = _table()
    table.add_column("bytes", justify="right", no_wrap=True)
    for name, width in (("array", 27), ("made by", 14), ("at", 24), ("needed by", 14)):
        table.add_column(name, no_wrap=True, max_width=width)
    table.add_column("why", justify="right", no_wrap=True)
    for row in shown:
        at = tail(short(row.line).partition(" (")[0], 24)
        cells = tail(row.type, 27), cut_off(row.op, 14), at, cut_off(row.needed_by, 14)
        table.add_row(human_bytes(row.bytes), *cells, str(reasons.index(row.reason) + 1))
    yield Text(f"Saved for the backward, {len(rows)} arrays", style="bold")
    yield table
    yield from _rest(rows[len(shown) :])
    for i, reason in enumerate(reasons):
        yield Padding(Text(f"{i + 1}  {reason}"), (0, 0, 0, 2))


def _rest(rows: Sequence[SavedRow]) -> Iterator[RenderableType]:
    if rows:
        size = human_bytes(sum(row.bytes for row in rows))
        yield Text(f"  and {len(rows)} smaller ones, {size}: report.table(everything=True) lists them", style="dim")


def again(rows: Sequence[AgainRow], everything: bool = False) -> Iterator[RenderableType]:
    """What runs twice, by line."""
    if not rows:
        return
    shown = rows if everything else [row for row in rows[:SHOWN] if row.seconds]
    table = _table()
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("Mflop", justify="right", no_wrap=True)
    table.add_column("at", no_wrap=True, max_width=40)
    table.add_column("ops", no_wrap=True, max_width=36)
    for row in shown:
        at = tail(short(row.line), 40)
        table.add_row(human_seconds(row.seconds), f"{row.flops / 1e6:,.1f}", at, cut_off(row.ops, 36))
    yield Text("Computed again in the backward", style="bold")
    if shown:
        yield table
    if rest := rows[len(shown) :]:
        taken, count = sum(row.seconds for row in rest), sum(row.count for row in rest)
        cost = human_seconds(taken) if taken else "within what reads them, in no time of their own"
        yield Text(
            f"  {'and ' if shown else ''}{count} ops of {len(rest)} {'more ' if shown else ''}lines, {cost}",
            style="dim",
        )


def less(rows: Sequence[LessRow]) -> Iterator[RenderableType]:
    """What less memory would cost."""
    if not rows:
        return
    table = _table()
    for name in ("memory", "peak", "extra time", "freed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of it", no_wrap=True, max_width=27)
    table.add_column("by computing again", no_wrap=True, max_width=27)
    for row in rows:
        share = f"−{1 - row.share:.0%}"
        if row.peak_bytes is None:
            table.add_row(share, "none", "", "", Text("no plan was found", style="dim"), "")
            continue
        net = human_bytes(row.freed_bytes - row.kept_bytes)
        time = f"{'+' if row.extra_seconds >= 0 else '−'}{human_seconds(abs(row.extra_seconds))}"
        table.add_row(
            share, human_bytes(row.peak_bytes), time, net, _largest(row.freed), cut_off(row.again or "nothing", 27)
        )
    yield Text("With less memory", style="bold")
    yield table


def _largest(freed: Sequence[SavedRow]) -> str:
    if not freed:
        return "by running in pieces"
    more = f" and {len(freed) - 1} more" if len(freed) > 1 else ""
    largest = f"{freed[0].op} at {Path(short(freed[0].line)).name.partition(' (')[0]}"
    return f"{cut_off(largest, 27 - len(more))}{more}"


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)


def cut_off(text: str, width: int) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def tail(text: str, width: int) -> str:
    """The end of a text that is too long."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def ratio(part: float, whole: float) -> str:
    """One figure over another, where there is another."""
    return f"{part / whole:.2f}" if whole else ""


def notes(lines: Iterable[Any]) -> Iterator[RenderableType]:
    """Sentences below a table."""
    for line in lines:
        yield Text(str(line), style="dim")
