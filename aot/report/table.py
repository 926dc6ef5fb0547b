"""Write a report as a table of at most 100 columns.

In a terminal with colours and rules, by the `rich` library; in a pipe the same text without either. A cell that is too
long loses its head or its end, never its number.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jointcut.aot.report.rows import AgainRow, LessRow, SavedRow, by_line
from jointcut.aot.report.sections import HEAVY, ends, extra_time, modules, promises, saved_change, sentence, within
from jointcut.aot.report.tried import Tried
from jointcut.partition.drawing.picture import reason, short, times
from jointcut.partition.figures import counted, human_bytes, human_seconds
from jointcut.partition.plans.plan import alike

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


def figures(
    first: Sequence[tuple[str, Sequence[str]]], rest: Sequence[tuple[str, Sequence[str]]], columns: Sequence[str]
) -> Table:
    """Figures by name, one column of numbers for each thing that they are of; `first` are those that matter most."""
    table = _table()
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for rows, style in ((first, "bold"), (rest, "dim")):
        for name, cells in rows:
            table.add_row(name, *cells, style=style)
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
    with_modules = len(set(modules(rows).values())) > 1
    table = (_saved_of_modules if with_modules else _saved_of_lines)(rows, shown, reasons)
    yield Text(f"Saved for the backward, {counted(len(rows), 'array')}", style="bold")
    yield table
    yield from _rest([row for own in groups[len(shown) :] for row in own], hint)
    if with_modules and len(lines := {row.line for own in shown for row in own}) == 1:
        yield Text(f"  all of them are made at {line_within(lines.pop(), 70)}", style="dim")
    for i, text in enumerate(reasons):
        yield Padding(Text(f"{i + 1}  {text}"), (0, 0, 0, 2))
    yield from notes([HEAVY])


def _saved_of_lines(rows: Sequence[SavedRow], shown: Sequence[list[SavedRow]], reasons: Sequence[str]) -> Table:
    """Saved arrays by the line that makes them."""
    table = _table()
    table.add_column("bytes", justify="right", no_wrap=True)
    for name, width in (("array", 26), ("made by", 13), ("at", 23), ("needed by", 13)):
        table.add_column(name, no_wrap=True, max_width=width)
    table.add_column("why", justify="right", no_wrap=True)
    for own in shown:
        row = own[0]
        cells = tail(row.type, 26), cut_off(row.op, 13), line_within(row.line, 23), cut_off(row.needed_by, 13)
        table.add_row(times(own) + human_bytes(row.bytes), *cells, str(reasons.index(reason(own)) + 1))
    return table


def _saved_of_modules(rows: Sequence[SavedRow], shown: Sequence[list[SavedRow]], reasons: Sequence[str]) -> Table:
    """Saved arrays by the module that makes them, and the line where there are several; a module gets what is left."""
    table, module_of, first = _table(), modules(rows), [own[0] for own in shown]
    columns = {
        "bytes": [times(own) + human_bytes(own[0].bytes) for own in shown],
        "array": [tail(row.type, 24) for row in first],
        "made by": [cut_off(row.op, 11) for row in first],
        "module": [ends(own, module_of) for own in shown],
        "at": [line_within(row.line, 18) for row in first],
        "why": [str(reasons.index(reason(own)) + 1) for own in shown],
    }
    if len({row.line for own in shown for row in own}) == 1:
        del columns["at"]
    taken = sum(2 + max(map(len, [name, *cells])) for name, cells in columns.items() if name != "module")
    columns["module"] = [module_within(path, max(WIDTH - taken, 8)) for path in columns["module"]]
    for name in columns:
        table.add_column(name, justify="right" if name in ("bytes", "why") else "left", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _rest(rows: Sequence[SavedRow], hint: str) -> Iterator[RenderableType]:
    if rows:
        size = human_bytes(sum(row.bytes for row in rows))
        ones = "1 smaller one" if len(rows) == 1 else f"{len(rows):,} smaller ones"
        yield Text(f"  and {ones}, {size}: {hint} lists {'it' if len(rows) == 1 else 'them'}", style="dim")


def again(rows: Sequence[AgainRow], everything: bool = False) -> Iterator[RenderableType]:
    """What runs twice, by line; without `everything` rows that read the same are one."""
    if not rows:
        return
    found = [[row] for row in rows] if everything else by_line(rows)
    shown = found if everything else [own for own in found[:SHOWN] if own[0].seconds]
    table, module_of = _table(), modules(rows)
    columns = [("at", 36), ("ops", 36)]
    if told := len({module_of[row.path] for own in shown for row in own}) > 1:
        columns = [("module", 32), ("at", 20), ("ops", 20)]
    for name in ("time", "Mflop"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, width in columns:
        table.add_column(name, no_wrap=True, max_width=width)
    for own in shown:
        row, widths = own[0], dict(columns)
        cells = [module_within(ends(own, module_of), widths["module"])] if told else []
        cells += [line_within(row.line, widths["at"]), names_within(row.ops, widths["ops"])]
        table.add_row(times(own) + human_seconds(row.seconds), f"{times(own)}{row.flops / 1e6:,.1f}", *cells)
    yield Text("Computed again in the backward", style="bold")
    if shown:
        yield table
    if rest := [row for own in found[len(shown) :] for row in own]:
        taken, count = sum(row.seconds for row in rest), sum(row.count for row in rest)
        cost = human_seconds(taken) if taken else "fused into what reads them: no time"
        lines = counted(len({row.line for row in rest}), "more line" if shown else "line")
        told = f"  {'and ' if shown else ''}{counted(count, 'op')} of {lines}, {cost}"
        yield Text(told, style="dim")


def less(rows: Sequence[LessRow], peak_bytes: int, tried: Tried | None) -> Iterator[RenderableType]:
    """What less memory costs than `peak_bytes`, the peak of the plan at hand; `tried` is how trying went."""
    if not rows and tried is None:
        return
    table = _table()
    for name in ("budget", "peak" if tried else "predicted", "extra time", "saved bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("by computing again", no_wrap=True, max_width=31)
    for row in rows:
        bound = within(row, peak_bytes)
        if row.peak_bytes is None:
            table.add_row(bound, "none", "", "", "")
            continue
        cells = (
            human_bytes(row.peak_bytes),
            extra_time(row),
            saved_change(row),
            names_within(row.again or "nothing", 31),
        )
        table.add_row(bound, *cells)
    yield Text(f"With less memory than {human_bytes(peak_bytes)}", style="bold")
    if rows:
        yield table
    yield from notes(promises(rows, tried))


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)


def cut_off(text: str, width: int) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def names_within(names: str, width: int) -> str:
    """As many of a list's items as there is room for.

    >>> names_within("4 mul, 3 add, dot_general", 20), names_within("dot_general, transpose", 22)
    ('4 mul, 3 add, …', 'dot_general, transpose')
    """
    if len(names) <= width:
        return names
    items = names.split(", ")
    forms = (", ".join([*items[:n], "…"]) for n in range(len(items) - 1, 0, -1))
    return next((form for form in forms if len(form) <= width), cut_off(names, width))


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


def module_within(path: str, width: int) -> str:
    """A module's path in so many letters: the outer modules go first, each as one letter.

    >>> module_within("FlaxGPT2Model/h/0/attn", 16), module_within("h/0 … 11/attn/c_proj", 16)
    ('…/h/0/attn', '…/attn/c_proj')
    """
    if len(path) <= width:
        return path
    parts = path.split("/")
    forms = ("/".join(["…", *parts[n:]]) for n in range(1, len(parts)))
    return next((form for form in forms if len(form) <= width), tail(path, width))


def ratio(part: float, whole: float) -> str:
    """One figure over another, where there is another."""
    return f"{part / whole:.2f}" if whole else ""


def notes(lines: Iterable[str]) -> Iterator[RenderableType]:
    """Sentences below a table."""
    for line in lines:
        yield Text(sentence(line), style="dim")
