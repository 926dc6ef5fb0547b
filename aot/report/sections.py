"""Put the rows of a report into the sections of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jointcut.aot.report.rows import AgainRow, LessRow, SavedRow
from jointcut.partition.picture import JSON, human_bytes, human_seconds, shared, short

_SHOWN = 12


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


def saved(rows: Sequence[SavedRow], places: dict[int, int]) -> JSON:
    """The saved arrays; `places` gives the place of a value among those of the graph's section."""
    paths = without_what_is_shared([r.path for r in rows])
    cells = [
        [(human_bytes(r.bytes), r.bytes), r.type, f"{r.op} at {short(r.line)}", path, r.needed_by, r.reason]
        for r, path in zip(rows, paths, strict=True)
    ]
    lead = "What the forward hands to the backward, the largest first. A row shows its array in the graph."
    columns = ">bytes, array, made by, module, needed by, why it is saved"
    made = _section("saved", "Saved for the backward", lead, columns, cells)
    return {**made, "values": [places.get(r.value) for r in rows]}


def again(rows: Sequence[AgainRow]) -> JSON:
    """What runs twice."""
    cells = [
        [(human_seconds(r.seconds), r.seconds), (f"{r.flops / 1e6:,.2f}", r.flops), path, short(r.line), r.ops]
        for r, path in zip(rows, without_what_is_shared([r.path for r in rows]), strict=True)
    ]
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
        freed = "; ".join(f"{row.type} {row.op} at {short(row.line)}" for row in r.freed[:5])
        more = f"; and {len(r.freed) - 5} more" if len(r.freed) > 5 else ""
        cells.append(
            [share, (human_bytes(r.peak_bytes), r.peak_bytes), time, (human_bytes(net), net), freed + more, r.again]
        )
    lead = "The fastest plan that was found within a smaller predicted peak: what it no longer saves, and what it runs "
    lead += "again instead."
    columns = ">memory, >predicted peak, >extra time, >freed, no longer saved, computed again instead"
    return _section("less", "With less memory", lead, columns, cells)
