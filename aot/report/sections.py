"""Put the rows of a report into the sections of a page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jointcut.aot.report.rows import AgainRow, LessRow, SavedRow, by_line
from jointcut.partition.picture import JSON, human_bytes, human_seconds, reason, shared, short, times
from jointcut.partition.plan import alike

_SHOWN = 12
_NAMED = 5  # arrays and kinds of ops in a cell
_MOST_LINES = 3  # that are told above the saved arrays
_ORDER = (
    "What takes most comes first, equal arrays of several layers in one row; a row leads to its array in the graph."
)


def without_what_is_shared(paths: Sequence[str]) -> list[str]:
    """Paths of modules without the names that all of them begin with, the last one always kept.

    >>> without_what_is_shared(["loss/apply/norm", "loss/apply/step/block", ""])
    ['norm', 'step/block', '']
    """
    parts = [path.split("/") if path else [] for path in paths]
    start = shared(parts)
    return ["/".join(part[start:]) for part in parts]


def _section(name: str, title: str, lead: str, columns: str, rows: Sequence[Sequence[Any]]) -> JSON:
    """A table; `columns` are names, with ">" before those of numbers; a cell of these is its text and its number."""
    named = columns.split(", ")
    numeric = [c.startswith(">") for c in named]
    return {
        "kind": "table",
        "id": name,
        "title": title,
        "lead": lead,
        "columns": [
            {"name": c.removeprefix(">"), "align": "right" if n else "left", "sort": True}
            for c, n in zip(named, numeric, strict=True)
        ],
        "rows": [[cell[0] if n else cell for cell, n in zip(row, numeric, strict=True)] for row in rows],
        "keys": [[cell[1] if n else cell for cell, n in zip(row, numeric, strict=True)] for row in rows],
        "values": None,
        "shown": _SHOWN,
    }


def saved(rows: Sequence[SavedRow], places: dict[int, int], remarks: Iterable[str] = ()) -> JSON:
    """The saved arrays; `places` gives the place of a value among those of the graph's section.

    `remarks` are what else there is to say of them all.
    """
    path_of = _paths(rows)
    groups = alike(rows, value=0, path="")
    cells = []
    for own in groups:
        r = own[0]
        size = times(own) + human_bytes(r.bytes), sum(row.bytes for row in own)
        cells.append([size, r.type, f"{r.op} at {short(r.line)}", _ends(own, path_of), r.needed_by, reason(own)])
    told = [f"{remark[:1].upper()}{remark[1:]}." for remark in remarks]
    lead = " ".join([*_by_line(rows), _ORDER, *told])
    columns = ">bytes, array, made by, module, needed by, why it is saved"
    made = _section("saved", "Saved for the backward", lead, columns, cells)
    found = [[places[r.value] for r in own if r.value in places] for own in groups]
    return {**made, "values": [places or None for places in found]}


def _paths(rows: Sequence[SavedRow | AgainRow]) -> dict[str, str]:
    """For each module path of some rows what is told of it."""
    paths = [row.path for row in rows]
    return dict(zip(paths, without_what_is_shared(paths), strict=True))


def _ends(rows: Sequence[SavedRow | AgainRow], path_of: dict[str, str]) -> str:
    """The modules of rows that read the same: the first, and the last if there are others."""
    first, last = path_of[rows[0].path], path_of[rows[-1].path]
    return first if first == last else f"{first} … {last}"


def _by_line(rows: Sequence[SavedRow]) -> list[str]:
    """How much is saved in all, and the lines that make most of it."""
    total = sum(r.bytes for r in rows)
    lines: Counter[str] = Counter()
    for r in rows:
        lines[short(r.line) or "no known line"] += r.bytes
    most = [f"{line}, {human_bytes(size)}" for line, size in lines.most_common(_MOST_LINES)]
    arrays = f"{len(rows)} arrays" if len(rows) != 1 else "One array"
    return [f"{arrays}, {human_bytes(total)}.", *([f"Most of it is made at {'; '.join(most)}."] if most else [])]


def again(rows: Sequence[AgainRow]) -> JSON:
    """What runs twice."""
    path_of = _paths(rows)
    cells = []
    for own in by_line(rows):
        r, n = own[0], len(own)
        time = times(own) + human_seconds(r.seconds), n * r.seconds
        flops = f"{times(own)}{r.flops / 1e6:,.2f}", n * r.flops
        cells.append([time, flops, _ends(own, path_of), short(r.line), r.ops])
    lead = "What runs in the forward and again in the backward, with its price by the cost model. What XLA computes "
    lead += "within its readers takes no time of its own."
    return _section("again", "Computed again", lead, ">time, >Mflop, module, source line, ops", cells)


def less(rows: Sequence[LessRow]) -> JSON:
    """What smaller budgets would cost."""
    cells = []
    for r in rows:
        share = f"−{1 - r.share:.0%}", 1 - r.share
        if r.peak_bytes is None:
            cells.append([share, ("none was found", 0), ("", 0), ("", 0), "", ""])
            continue
        time = f"{'+' if r.extra_seconds >= 0 else '−'}{human_seconds(abs(r.extra_seconds))}", r.extra_seconds
        net = r.freed_bytes - r.kept_bytes
        peak = human_bytes(r.peak_bytes), r.peak_bytes
        cells.append([share, peak, time, (human_bytes(net), net), _freed(r.freed), _few(r.again)])
    lead = "For each budget the fastest plan that was found within it: the time that it takes beyond this one, how "
    lead += "much less it saves, and what it computes again instead. Give its peak as the budget to have it."
    columns = ">memory, >predicted peak, >extra time, >saves less by, no longer saved, computed again instead"
    return _section("less", "With less memory", lead, columns, cells)


def _freed(rows: Sequence[SavedRow]) -> str:
    """Arrays that are no longer saved, by op and line, the most bytes first."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        sizes[f"{row.op} at {short(row.line)}"].append(row.bytes)
    found = sorted(sizes.items(), key=lambda item: -sum(item[1]))
    told = [
        f"{human_bytes(sum(own))}, {len(own)} × {name}" if len(own) > 1 else f"{human_bytes(sum(own))}, {name}"
        for name, own in found[:_NAMED]
    ]
    rest = sum(len(own) for _, own in found[_NAMED:])
    return "; ".join([*told, *([f"and {rest} more"] if rest else [])])


def _few(ops: str) -> str:
    """The first kinds of ops of a list of them, and how many more there are; what follows the list stays."""
    names, semicolon, rest = ops.partition("; ")
    kinds = names.split(", ")
    more = [f"and {len(kinds) - _NAMED} more kinds"] if len(kinds) > _NAMED + 1 else kinds[_NAMED:]
    return ", ".join([*kinds[:_NAMED], *more]) + semicolon + rest
