"""Put the rows of a report into the sections of a page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jointcut.aot.options.limits import limit
from jointcut.aot.report.lists import AgainRow, LessRow, SavedRow, by_line
from jointcut.aot.report.tried import MOST_SECONDS, WORTH_IT, Tried
from jointcut.partition.drawing.picture import JSON, file_and_line, reason, shared, short, times
from jointcut.partition.figures import counted, human_bytes, human_seconds
from jointcut.partition.plans.loops_told import in_segments
from jointcut.partition.plans.saved import alike

_SHOWN = 14  # rows before "show all"
_NAMED = 5  # arrays in a cell
_KINDS = 3  # kinds of ops for a line
_MOST_LINES = 3  # lines above the saved arrays, and in a cell

#: The meaning of "heavy" in reasons and bounds.
HEAVY = (
    "Heavy are matrix products, convolutions, random bits and sorts: all but elementwise arithmetic, moving data and "
    "small reductions."
)
_ORDER = (
    "What takes most comes first, equal arrays of several layers in one row; a row leads to its array in the graph."
)


def without_what_is_shared(paths: Sequence[str]) -> list[str]:
    """Return paths of modules without the outer names that all share; the last name of each path stays.

    >>> without_what_is_shared(["loss/apply/norm", "loss/apply/step/block", ""])
    ['norm', 'step/block', '']
    """
    parts = [path.split("/") if path else [] for path in paths]
    start = shared(parts)
    return ["/".join(part[start:]) for part in parts]


def section(name: str, title: str, lead: str, columns: str, rows: Sequence[Sequence[Any]]) -> JSON:
    """Return a table; ">" marks names of `columns` of numbers, whose cells are pairs of text and number.

    A column "module" is left out if no row has a module.
    """
    named = columns.split(", ")
    if "module" in named and not any(row[named.index("module")] for row in rows):
        place = named.index("module")
        named, rows = [*named[:place], *named[place + 1 :]], [[*row[:place], *row[place + 1 :]] for row in rows]
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


def sentence(text: str) -> str:
    """Return a remark as a sentence.

    >>> sentence("2 ops run twice"), sentence("no plan saves less.")
    ('2 ops run twice.', 'No plan saves less.')
    """
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def saved(rows: Sequence[SavedRow], places: dict[int, int], remarks: Iterable[str] = (), per: str = "") -> JSON:
    """Return the saved arrays; `places` gives the position of each value in the section of the graph.

    `remarks` are added to the text above them. `per` says whose bytes they are, as `per_device` does.
    """
    path_of = modules(rows)
    groups = alike(rows, value=0, path="")
    cells = []
    for group in groups:
        r = group[0]
        size = times(group) + human_bytes(r.bytes), sum(row.bytes for row in group)
        array = f"{r.type}, {r.part} on each device" if r.part else r.type
        cells.append([size, array, f"{r.op} at {short(r.line)}", ends(group, path_of), r.needed_by, reason(group)])
    lead = " ".join([*_by_line(rows, per), _ORDER, *map(sentence, remarks), HEAVY])
    columns = f">bytes{per}, array, made by, module, needed by, why it is saved"
    told = section("saved", "Saved for the backward", lead, columns, cells)
    values = [[places[r.value] for r in group if r.value in places] or None for group in groups]
    return {**told, "values": values}


def modules(rows: Sequence[SavedRow | AgainRow]) -> dict[str, str]:
    """Return the shown name of each module path: without the outer names that all rows share."""
    paths = [row.path for row in rows]
    return dict(zip(paths, without_what_is_shared(paths), strict=True))


def ends(rows: Sequence[SavedRow | AgainRow], path_of: dict[str, str]) -> str:
    """Return the modules of a group of rows: the first, and the last if it differs."""
    first, last = path_of[rows[0].path], path_of[rows[-1].path]
    names = first.split("/"), last.split("/")
    if len(names[0]) != len(names[1]):
        return f"{first} … {last}"
    return "/".join(a if a == b else f"{a} … {b}" for a, b in zip(*names, strict=True))


def _by_line(rows: Sequence[SavedRow], per: str) -> list[str]:
    """Return the number of saved arrays, their bytes, and the lines that make most of the bytes."""
    total = sum(r.bytes for r in rows)
    lines: Counter[str] = Counter()
    for r in rows:
        lines[short(r.line) or "no known line"] += r.bytes
    most = [f"{line}, {human_bytes(size)}{per}" for line, size in lines.most_common(_MOST_LINES)]
    return [
        f"{counted(len(rows), 'array')}, {human_bytes(total)}{per}.",
        *([f"Most of it is made at {'; '.join(most)}."] if most else []),
    ]


def again(rows: Sequence[AgainRow]) -> JSON:
    """Return the ops that run twice, by line, and the number of ops that take no time."""
    path_of = modules(rows)
    cells, free = [], []
    for group in by_line(rows):
        r, n = group[0], len(group)
        if not r.seconds:
            free += group
            continue
        time = times(group) + human_seconds(r.seconds), n * r.seconds
        flops = f"{times(group)}{r.flops / 1e6:,.2f}", n * r.flops
        cells.append([time, flops, ends(group, path_of), short(r.line), r.ops])
    lead = "What runs in the forward and again in the backward, with its price by the cost model."
    if free:
        ops, lines = counted(sum(r.count for r in free), "more op"), counted(len({r.line for r in free}), "line")
        lead += f" {ops} of {lines} are fused into what reads them and take no time."
    return section("again", "Computed again", lead, ">time, >Mflop, module, source line, ops", cells)


def less(rows: Sequence[LessRow], peak_bytes: int, tried: Tried | None, per: str = "") -> JSON:
    """Return the cost of less memory than `peak_bytes`, this plan's peak; `tried` are the budgets that were tried.

    `per` says whose bytes they are, as `per_device` does.
    """
    cells = []
    known = tried is not None and tried.has_least
    for r in rows:
        bound = within(r, peak_bytes), r.share
        if r.peak_bytes is None:
            cells.append([bound, ("none was found", 0), ("", 0), ("", 0), "", "", ""])
            continue
        text = f"{human_bytes(r.peak_bytes)} ({r.peak_bytes / peak_bytes - 1:+.0%})".replace("-", "−")
        peak = f"least: {human_bytes(r.peak_bytes)}" if known and r is rows[-1] else text, r.peak_bytes
        time, change = (extra_time(r), r.extra_seconds), (saved_change(r), r.kept_bytes - r.freed_bytes)
        cells.append([bound, peak, time, change, _arrays(r.freed), _arrays(r.kept), _work(r)])
    lead = [
        f"For each budget below {human_bytes(peak_bytes)}{per} the fastest plan that was found: what it takes, how "
        "many bytes more or less it saves in all, and what changes.",
        *map(sentence, promises(rows, tried)),
    ]
    if rows and known:
        lead.append(f"The last takes the least that is found, to {1 - WORTH_IT:.0%}.")
    peak = "peak" if tried else "predicted peak"
    columns = f">budget{per}, >{peak}{per}, >extra time, >saved bytes{per}, no longer saved{per}, saved instead{per}, "
    columns += "computed again instead"
    return section("less", "With less memory", " ".join(lead), columns, cells)


def promises(rows: Sequence[LessRow], tried: Tried | None) -> list[str]:
    """Return sentences on the budgets that were tried, and on the budgets that hold."""
    if tried is None:
        text = "These budgets are predictions and may be refused: nothing was compiled. Explain with measure=True "
        return [f"{text}(by default) to have them tried"] if rows else []
    first = next((row.budget for row in rows), None)
    lines = []
    if first is not None:
        lines.append(f'Each budget was tried and holds: aot.function(budget="{first}")')
    if any(row.extra_seconds < 0 for row in rows):
        lines.append("Try what is faster by the model: the default goes by fixed rates, these times by this machine's")
    if tried.refused:
        lines.append(f"No plan was found for {tried.refused}")
    if tried.hopeless:
        lines.append(f"{tried.hopeless} was not tried: every plan is expected to take more")
    if not tried.in_time:
        lines.append(f"Trying ended after {MOST_SECONDS:.0f} s. budget=0.0 finds the least memory")
    return lines or ["No plan was found that takes less"]


def within(row: LessRow, peak_bytes: int) -> str:
    """Return the budget of a row, and its distance below this plan's peak in per cent."""
    if row.budget:
        limit_bytes = limit(row.budget).peak_bytes or 0
        return f"{row.budget} (−{max(0.0, 1 - limit_bytes / max(peak_bytes, 1)):.0%})"
    return f"{human_bytes(row.share * peak_bytes)} (−{1 - row.share:.0%})" if row.share else "the least"


def extra_time(row: LessRow) -> str:
    """Return the extra time of a step, in seconds and in per cent."""
    sign = "+" if row.extra_seconds >= 0 else "−"
    return f"{sign}{human_seconds(abs(row.extra_seconds))} ({sign}{abs(row.extra_share):.1%})"


def saved_change(row: LessRow) -> str:
    """Return the change of saved bytes, with its sign."""
    more = row.kept_bytes - row.freed_bytes
    return f"{'+' if more > 0 else '−' if more < 0 else ''}{human_bytes(abs(more))}"


def _arrays(rows: Sequence[SavedRow]) -> str:
    """Return the bytes of some arrays, in total and by op and line, most bytes first."""
    if not rows:
        return "nothing"
    sizes: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        sizes[f"{row.op} at {file_and_line(row.line)}"].append(row.bytes)
    by_size = sorted(sizes.items(), key=lambda item: -sum(item[1]))
    texts = [
        f"{human_bytes(sum(group))}, {len(group)} × {name}" if len(group) > 1 else f"{human_bytes(sum(group))}, {name}"
        for name, group in by_size[:_NAMED]
    ]
    rest = [size for _, group in by_size[_NAMED:] for size in group]
    more = [f"{human_bytes(sum(rest))}, {len(rest)} more"] if rest else []
    return f"{human_bytes(sum(row.bytes for row in rows))}: {'; '.join([*texts, *more])}"


def _work(row: LessRow) -> str:
    """Return the further work of a smaller budget: lines that run again, longest time first, and loops in segments."""
    lines = [r for r in row.lines if r.seconds]
    texts = [f"{human_seconds(r.seconds)} at {file_and_line(r.line)}: {_few(r.ops)}" for r in lines[:_MOST_LINES]]
    if rest := lines[_MOST_LINES:]:
        texts.append(f"{human_seconds(sum(r.seconds for r in rest))} at {counted(len(rest), 'more line')}")
    if texts := [*texts, *in_segments(row.segments)]:
        return "; ".join(texts)
    return "what is fused into its readers" if row.again else "nothing"


def _few(ops: str) -> str:
    """Return the first kinds of ops in a list, and the number of further kinds."""
    kinds = ops.split(", ")
    more = [f"{len(kinds) - _KINDS} more kinds"] if len(kinds) > _KINDS + 1 else kinds[_KINDS:]
    return ", ".join([*kinds[:_KINDS], *more])


def words() -> JSON:
    """Return the glossary of a report."""
    return section("words", "Words", "", "word, what it means", [list(pair) for pair in _WORDS.items()])


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
    "segments": "A loop runs in stretches of steps. What enters a stretch is kept, and each stretch runs again. Of the "
    "last steps, which come first in the backward, all may be kept; then they do not run again.",
    "no plan of as few bytes": "A bound that is proved; the gap is how far above it the plan lies.",
    "temporaries": "The memory that XLA takes for a step beside arguments and results.",
    "peak": "The most that a step holds at once, arguments and results included, by memory_analysis() of the compiled "
    "step.",
    "predicted": "By the model: what ops cost on this device, and when each array of the plan is alive.",
}
