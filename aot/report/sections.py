"""Put the rows of a report into the sections of a page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jointcut.aot.report.rows import AgainRow, LessRow, SavedRow, by_line
from jointcut.partition.picture import JSON, file_and_line, human_bytes, human_seconds, reason, shared, short, times
from jointcut.partition.plan import alike, in_segments

_SHOWN = 14
_NAMED = 5  # arrays in a cell
_KINDS = 3  # of ops at a line
_MOST_LINES = 3  # that are told above the saved arrays, and in a cell

#: What the word says in reasons and bounds.
HEAVY = (
    "Heavy, and so not run twice unless a budget asks for it, is all but elementwise arithmetic, moving data and small "
    "reductions: matrix products, convolutions, random bits, sorts."
)
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
    told = [*(f"{remark[:1].upper()}{remark[1:]}." for remark in remarks), HEAVY]
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
    names = first.split("/"), last.split("/")
    if len(names[0]) != len(names[1]):
        return f"{first} … {last}"
    return "/".join(a if a == b else f"{a} … {b}" for a, b in zip(*names, strict=True))


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
    """What runs twice, where that takes time; of the rest how much there is."""
    path_of = _paths(rows)
    cells, free = [], []
    for own in by_line(rows):
        r, n = own[0], len(own)
        if not r.seconds:
            free += own
            continue
        time = times(own) + human_seconds(r.seconds), n * r.seconds
        flops = f"{times(own)}{r.flops / 1e6:,.2f}", n * r.flops
        cells.append([time, flops, _ends(own, path_of), short(r.line), r.ops])
    lead = "What runs in the forward and again in the backward, with its price by the cost model."
    if free:
        ops, lines = sum(r.count for r in free), len({r.line for r in free})
        lead += f" {ops} more ops of {lines} line{'s' * (lines > 1)} are fused into what reads them and take no time."
    return _section("again", "Computed again", lead, ">time, >Mflop, module, source line, ops", cells)


def less(rows: Sequence[LessRow], peak_bytes: int, note: str = "") -> JSON:
    """What smaller budgets would cost; `peak_bytes` is the predicted peak of the plan at hand."""
    cells = []
    for r in rows:
        bound = within(r, peak_bytes), r.share
        if r.peak_bytes is None:
            cells.append([bound, ("none was found", 0), ("", 0), ("", 0), "", "", ""])
            continue
        net = r.freed_bytes - r.kept_bytes
        peak = f"{human_bytes(r.peak_bytes)} ({r.peak_bytes / peak_bytes - 1:+.0%})".replace("-", "−"), r.peak_bytes
        time = extra_time(r), r.extra_seconds
        cells.append([bound, peak, time, (human_bytes(net), net), _arrays(r.freed), _arrays(r.kept), _work(r)])
    lead = (
        "For each bound the fastest plan that was found: how much longer a step takes with it, by the model, how much "
    )
    lead += f"less it saves in all, and what changes. {recipe(rows)}{note}"
    columns = ">at most, >found, >extra time, >saves less by, no longer saved, saved instead, computed again instead"
    return _section("less", "With less memory", lead, columns, cells)


def within(row: LessRow, peak_bytes: int) -> str:
    """The bound that a row's plan was asked to hold: bytes, and the share of the peak at hand."""
    return f"{human_bytes(row.share * peak_bytes)} (−{1 - row.share:.0%})" if row.share else "the least found"


def extra_time(row: LessRow) -> str:
    """How much longer a step takes, in seconds and as a part of it."""
    sign = "+" if row.extra_seconds >= 0 else "−"
    return f"{sign}{human_seconds(abs(row.extra_seconds))} ({sign}{abs(row.extra_share):.1%})"


def recipe(rows: Sequence[LessRow]) -> str:
    """How to have the plan of the first row that has one."""
    peak = next((r.peak_bytes for r in rows if r.peak_bytes is not None), None)
    if peak is None:
        return ""
    unit = 10 ** max(0, len(str(peak)) - 3)
    return (
        f'Give a row\'s peak, rounded up, as the budget: aot.function(budget="{human_bytes(-(-peak // unit) * unit)}").'
    )


def _arrays(rows: Sequence[SavedRow]) -> str:
    """Arrays by op and line, the most bytes first, and the bytes of all of them."""
    if not rows:
        return "nothing"
    sizes: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        sizes[f"{row.op} at {file_and_line(row.line)}"].append(row.bytes)
    found = sorted(sizes.items(), key=lambda item: -sum(item[1]))
    told = [
        f"{human_bytes(sum(own))}, {len(own)} × {name}" if len(own) > 1 else f"{human_bytes(sum(own))}, {name}"
        for name, own in found[:_NAMED]
    ]
    rest = [size for _, own in found[_NAMED:] for size in own]
    more = [f"{human_bytes(sum(rest))}, {len(rest)} more"] if rest else []
    return f"{human_bytes(sum(row.bytes for row in rows))}: {'; '.join([*told, *more])}"


def _work(row: LessRow) -> str:
    """What runs again beside what ran before: the lines that take longest, and loops in segments."""
    lines = [r for r in row.lines if r.seconds]
    told = [f"{human_seconds(r.seconds)} at {file_and_line(r.line)}: {_few(r.ops)}" for r in lines[:_MOST_LINES]]
    if rest := lines[_MOST_LINES:]:
        told.append(f"{human_seconds(sum(r.seconds for r in rest))} at {len(rest)} more lines")
    if found := [*told, *in_segments(row.segments)]:
        return "; ".join(found)
    return "what is fused into its readers" if row.again else "nothing"


def _few(ops: str) -> str:
    """The first kinds of ops of a list of them, and how many more there are."""
    kinds = ops.split(", ")
    more = [f"{len(kinds) - _KINDS} more kinds"] if len(kinds) > _KINDS + 1 else kinds[_KINDS:]
    return ", ".join([*kinds[:_KINDS], *more])


def words() -> JSON:
    """What the words of a report mean."""
    return _section("words", "Words of this report", "", "word, what it means", [list(pair) for pair in _WORDS.items()])


_WORDS = {
    "saved": "An array that the forward hands to the backward.",
    "recomputed": "An op of the forward that the backward runs again, in place of reading what it made.",
    "heavy": HEAVY,
    "plan": "Which arrays are saved and which ops are recomputed.",
    "min_cut": "The plan of the fewest bytes with which nothing heavy runs twice. It is the default, unless a plan of "
    "the front takes clearly less memory and time, by the model.",
    "save_all": "What plain JAX keeps, as a plan.",
    "front": "A plan of the curve of budgets: among those that save as little, none computes less again, by the model.",
    "pieces, stages kept": "The forward is divided into stages, and these into pieces. What passes from piece to piece "
    "is saved, and the backward runs one piece again at a time; of the stages kept more is saved than that.",
    "segments": "A loop runs in stretches of steps. What enters a stretch is kept, and each stretch runs again.",
    "no plan of as few bytes": "A bound that is proved; the gap is how far above it the plan lies.",
    "temporaries": "The memory that XLA takes for a step beside arguments and results.",
    "XLA's account": "What the compiled step's memory_analysis() says.",
    "predicted": "By the cost model and a replay of the plan, before anything is compiled.",
}
