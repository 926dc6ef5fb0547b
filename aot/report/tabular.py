"""Write a report as a table of at most 100 columns.

A terminal gets colours, by the `rich` library; a pipe gets the same text without colours. A text that is too long for
its cell loses its beginning or its end; numbers are never cut.
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

from jointcut.aot.options.target import ON_H200, Target
from jointcut.aot.report.lists import AgainRow, LessRow, SavedRow, by_line
from jointcut.aot.report.sections import HEAVY, ends, extra_time, modules, promises, saved_change, sentence, within
from jointcut.aot.report.tried import Tried
from jointcut.partition.drawing.picture import reason, short, times
from jointcut.partition.figures import counted, human_bytes, human_seconds
from jointcut.partition.plans.saved import alike

WIDTH = 100
SHOWN = 12  # rows in a table

#: What the figures of a report mean.
WHAT = {
    "saved for the backward": "Arrays that the forward hands to the backward",
    "most alive in the forward": "Arrays at once, without arguments and results",
    "most alive in the backward": "Arrays at once, without arguments and results",
    "offloaded to host memory": "Arrays that wait in host memory between the halves",
    "arguments and results": "What the caller holds, and the gradients",
    "temporaries of the compiled step": "The peak without arguments and results",
}


def written(parts: Iterable[RenderableType], in_colour: bool | None = None) -> str:
    """Return parts of a report as text, by default in colour if standard output is a terminal with colours."""
    if in_colour is None:
        in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    out = io.StringIO()
    console = Console(
        file=out,
        width=WIDTH,
        force_terminal=in_colour,
        force_jupyter=False,  # in a notebook rich would display the text and write nothing to `out`
        color_system="truecolor" if in_colour else None,
        legacy_windows=False,
        highlight=False,
        markup=False,  # float32[b,8] is not markup
        emoji=False,
    )
    console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def headline(text: str, rest: str = "") -> Text:
    """Return the title of a report or of a part of it."""
    return Text.assemble((text, "bold"), rest)


def figures(
    first: Sequence[tuple[str, Sequence[str]]], rest: Sequence[tuple[str, Sequence[str]]], columns: Sequence[str]
) -> Table:
    """Return named figures, with a cell for each of `columns`; the rows of `first` are bold."""
    table = plain_table()
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for rows, style in ((first, "bold"), (rest, "dim")):
        for name, cells in rows:
            table.add_row(name, *cells, style=style)
    return table


def saved(rows: Sequence[SavedRow], everything: bool, hint: str) -> Iterator[RenderableType]:
    """Yield the saved arrays, largest first, and then the numbered reasons.

    Without `everything`, rows with equal text, such as the rows of equal layers, become one row.
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
    yield from _rest([row for group in groups[len(shown) :] for row in group], hint)
    if with_modules and len(lines := {row.line for group in shown for row in group}) == 1:
        yield Text(f"  all of them are made at {line_within(lines.pop(), 70)}", style="dim")
    for i, text in enumerate(reasons):
        yield Padding(Text(f"{i + 1}  {text}"), (0, 0, 0, 2))
    yield from notes([HEAVY])


#: The columns of saved arrays on one device, with their widths.
_WIDTHS = {"array": 26, "made by": 13, "at": 23, "needed by": 13}


def _saved_of_lines(rows: Sequence[SavedRow], shown: Sequence[list[SavedRow]], reasons: Sequence[str]) -> Table:
    """Return saved arrays by the line that makes them."""
    table = plain_table()
    table.add_column("bytes", justify="right", no_wrap=True)
    laid = any(row.part for row in rows)
    widths = {"array": 22, "each has": 8, "made by": 13, "at": 20, "needed by": 10} if laid else _WIDTHS
    for name, width in widths.items():
        table.add_column(name, no_wrap=True, max_width=width)
    table.add_column("why", justify="right", no_wrap=True)
    for group in shown:
        row = group[0]
        cells = [tail(row.type, widths["array"]), *[row.part] * laid, cut_off(row.op, 13)]
        cells += [line_within(row.line, widths["at"]), cut_off(row.needed_by, widths["needed by"])]
        table.add_row(times(group) + human_bytes(row.bytes), *cells, str(reasons.index(reason(group)) + 1))
    return table


def _saved_of_modules(rows: Sequence[SavedRow], shown: Sequence[list[SavedRow]], reasons: Sequence[str]) -> Table:
    """Return saved arrays by the module that makes them, and by line if there are several lines.

    The column of modules gets the width that the other columns leave.
    """
    table, module_of, first = plain_table(), modules(rows), [group[0] for group in shown]
    columns = {
        "bytes": [times(group) + human_bytes(group[0].bytes) for group in shown],
        "array": [tail(row.type, 24) for row in first],
        **({"each has": [row.part for row in first]} if any(row.part for row in first) else {}),
        "made by": [cut_off(row.op, 11) for row in first],
        "module": [ends(group, module_of) for group in shown],
        "at": [line_within(row.line, 18) for row in first],
        "why": [str(reasons.index(reason(group)) + 1) for group in shown],
    }
    if len({row.line for group in shown for row in group}) == 1:
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
    """Yield the ops that run twice, by line; without `everything`, rows with equal text become one."""
    if not rows:
        return
    groups = [[row] for row in rows] if everything else by_line(rows)
    shown = groups if everything else [group for group in groups[:SHOWN] if group[0].seconds]
    table, module_of = plain_table(), modules(rows)
    columns = [("at", 36), ("ops", 36)]
    if with_modules := len({module_of[row.path] for group in shown for row in group}) > 1:
        columns = [("module", 32), ("at", 20), ("ops", 20)]
    for name in ("time", "Mflop"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, width in columns:
        table.add_column(name, no_wrap=True, max_width=width)
    for group in shown:
        row, widths = group[0], dict(columns)
        cells = [module_within(ends(group, module_of), widths["module"])] if with_modules else []
        cells += [line_within(row.line, widths["at"]), names_within(row.ops, widths["ops"])]
        table.add_row(times(group) + human_seconds(row.seconds), f"{times(group)}{row.flops / 1e6:,.1f}", *cells)
    yield Text("Computed again in the backward", style="bold")
    if shown:
        yield table
    if rest := [row for group in groups[len(shown) :] for row in group]:
        seconds, count = sum(row.seconds for row in rest), sum(row.count for row in rest)
        cost = human_seconds(seconds) if seconds else "fused into what reads them: no time"
        lines = counted(len({row.line for row in rest}), "more line" if shown else "line")
        yield Text(f"  {'and ' if shown else ''}{counted(count, 'op')} of {lines}, {cost}", style="dim")


def less(rows: Sequence[LessRow], peak_bytes: int, tried: Tried | None) -> Iterator[RenderableType]:
    """Yield the cost of less memory than `peak_bytes`, this plan's peak; `tried` are the budgets that were tried."""
    if not rows and tried is None:
        return
    table = plain_table()
    for name in ("budget", "peak" if tried else "predicted", "extra time", "saved bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("by computing again", no_wrap=True, max_width=31)
    for row in rows:
        bound = within(row, peak_bytes)
        if row.peak_bytes is None:
            table.add_row(bound, "none", "", "", "")
            continue
        names = names_within(row.again or "nothing", 31)
        table.add_row(bound, human_bytes(row.peak_bytes), extra_time(row), saved_change(row), names)
    yield Text(f"With less memory than {human_bytes(peak_bytes)}", style="bold")
    if rows:
        yield table
    yield from notes(promises(rows, tried))


def plain_table() -> Table:
    """Return a table without lines, to be given columns and rows."""
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)


def cut_off(text: str, width: int) -> str:
    """Return the text, with its end cut off if it is longer than `width`."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def names_within(names: str, width: int) -> str:
    """Return the first items of a list that fit in `width`.

    >>> names_within("4 mul, 3 add, dot_general", 20), names_within("dot_general, transpose", 22)
    ('4 mul, 3 add, …', 'dot_general, transpose')
    """
    if len(names) <= width:
        return names
    items = names.split(", ")
    forms = (", ".join([*items[:n], "…"]) for n in range(len(items) - 1, 0, -1))
    return next((form for form in forms if len(form) <= width), cut_off(names, width))


def tail(text: str, width: int) -> str:
    """Return the text, with its beginning cut off if it is longer than `width`."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def line_within(line: str, width: int) -> str:
    """Shorten a source line to `width` letters: leave out its function, its folder or both.

    >>> line_within("/home/me/train/model.py:40 (loss)", 26), line_within("/home/me/train/model.py:40 (loss)", 16)
    ('train/model.py:40 (loss)', 'model.py:40')
    """
    text = short(line)
    name = text.rpartition("/")[2]
    forms = text, text.partition(" (")[0], name, name.partition(" (")[0]
    return next((form for form in forms if len(form) <= width), tail(forms[-1], width))


def module_within(path: str, width: int) -> str:
    """Shorten a module's path to `width` letters: leave out outer modules.

    >>> module_within("FlaxGPT2Model/h/0/attn", 16), module_within("h/0 … 11/attn/c_proj", 16)
    ('…/h/0/attn', '…/attn/c_proj')
    """
    if len(path) <= width:
        return path
    parts = path.split("/")
    forms = ("/".join(["…", *parts[n:]]) for n in range(1, len(parts)))
    return next((form for form in forms if len(form) <= width), tail(path, width))


def ratio(part: float, whole: float) -> str:
    """Return one figure divided by another; empty if the other is 0."""
    return f"{part / whole:.2f}" if whole else ""


def of_account(target: Target | None) -> str:
    """Describe the source of a peak by XLA's account; for a GPU that is not here, add its measured accuracy."""
    told = "of the compiled step, as XLA tells it"
    if target is None or not target.is_unseen_gpu:
        return told
    if target.platform != "cuda":
        return f"{told} without the device; how much one takes was not measured"
    least, most, count = ON_H200
    took = f"took {least:.2f} to {most:.2f} times as much for {count} programs"
    return f"{told} without the device, where it times no kernels: an H200 that timed none {took}"


def on_target(target: Target | None, peak_bytes: int, is_timed: bool, times: str) -> Iterator[str]:
    """Yield remarks on a step: whether it fits on the target, and the source or accuracy of its times."""
    if target is not None:
        verdict = "fits on" if peak_bytes <= target.memory_bytes else "does not fit on"
        yield f"{human_bytes(peak_bytes)} {verdict} {target.name}, with {human_bytes(target.memory_bytes)} a device"
    if is_timed:
        yield times if target is None else f"times are by {target.share} of the figures of {target.source}"


def notes(lines: Iterable[str]) -> Iterator[RenderableType]:
    """Yield sentences below a table."""
    for line in lines:
        yield Text(sentence(line), style="dim")
