"""Print the results of each command as text of at most 100 columns.

The text is made from the objects of `facts`. A path or a type that is too long for its column loses its beginning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jointcut.aot.call.largest import Largest
from jointcut.aot.command.facts import JSON
from jointcut.aot.export.artefact import SIGNATURE
from jointcut.aot.report.compare.diff import Diff
from jointcut.aot.report.report import Report
from jointcut.aot.report.tabular import tail as _tail
from jointcut.aot.stages.cut import Cut
from jointcut.partition.figures import counted, human_bytes

_SHOWN = 12  # the most arrays of a kind that are listed without --all
_WIDTH = 100


def report(shown: Report, facts: JSON, everything: bool) -> str:
    """Return the output of `jointcut explain`."""
    lines = [shown.table(everything, hint="--all")]
    if facts["spilled_bytes"]:
        lines += ["", f"between forward and backward {human_bytes(facts['spilled_bytes'])} of it wait in files"]
    files = [facts[name] for name in ("file", "perfetto", "pprof") if facts[name] is not None]
    if files:
        lines += ["", *(f"written to {file}" for file in files)]
    return "\n".join(lines)


def difference(shown: Diff, file: Path | None, everything: bool) -> str:
    """Return the output of `jointcut diff`."""
    return shown.table(everything) + ("" if file is None else f"\n\nwritten to {file}")


def takes_a_gradient(name: str, loss: str) -> str:
    """Say that a function is a step rather than a loss, and what to ask instead."""
    return (
        f"{name} takes the gradient of {loss} itself, and what follows is about a gradient of that.\n"
        f"Name the loss to see what its backward keeps. Of the step as it is tells: jointcut doctor {name}"
    )


def predicted(cut: Cut, name: str) -> str:
    """Return a first answer of `jointcut explain`, by the model, to show while XLA compiles."""
    planner, plan, goal = cut.request.planner, cut.plan, cut.traced.options.goal
    peak_bytes = planner.candidate(planner.priced(plan)).predicted_bytes
    where = "" if goal is None else f" on {goal.name}"
    kept = f"{human_bytes(plan.bytes_saved)} are kept for the backward, in plain JAX {human_bytes(planner.most_bytes)}"
    text = f"{name}{where}: {kept}; temporaries of about {human_bytes(round(peak_bytes))} by the model, XLA's follow"
    return "\n".join(_wrapped(text))


def largest(found: Largest, facts: JSON) -> str:
    """Return the output of `jointcut largest`."""
    plan, target = facts["plan"], facts["target"]
    again = counted(plan["again_ops"], "operation")
    where = "" if target is None else f" on {target}"
    text = f"the step of {found.axis}={found.size:,}{where} is cut by {plan['strategy']}"
    return "\n".join(
        [str(found), *_wrapped(f"{text}: {human_bytes(plan['saved_bytes'])} saved, {again} computed again")]
    )


def _wrapped(text: str) -> Iterator[str]:
    """Yield the lines of a text, wrapped at `_WIDTH`."""
    line = ""
    for word in text.split(" "):
        if len(line) + 1 + len(word) > _WIDTH:
            yield line
            line = "   "
        line = f"{line} {word}" if line else word
    yield line


# -------------------------------------------------------------------------------------------------------- artefacts


def artefact(facts: JSON, everything: bool) -> str:
    """Return the output of `jointcut show`."""
    lists: list[tuple[str, Callable[[JSON], str]]] = [
        ("inputs", lambda a: f"{a['path']}  ({a['kind'].replace('_', ' ')})"),
        ("outputs", lambda a: f"{a['path']}" + f"  ({a['kind']})" * (a["kind"] != "output")),
        ("tangents", lambda a: f"the cotangent of {a['of']}"),
        ("gradients", lambda a: a["path"] + f", {a['part']}" * (a["part"] != "whole")),
    ]
    lines = list(_head(facts))
    for title, describe in lists:
        if facts[title]:
            lines += ["", title, *_arrays(facts[title], describe, everything)]
    if facts["residuals"]:
        lines += ["", *_residuals(facts["residuals"], everything)]
    lines += ["", f"files in {facts['folder']}, {facts['total_bytes']:,} bytes"]
    lines += [f"{file['bytes']:>14,}  {name}" for name, file in facts["files"].items()]
    listed = sum(file["bytes"] for file in facts["files"].values())
    lines.append(f"{facts['total_bytes'] - listed:>14,}  {SIGNATURE}")
    return "\n".join(lines)


def _head(facts: JSON) -> Iterator[str]:
    yield f"{facts['name']}, for {', '.join(facts['platforms'])}"
    yield f"made with {', '.join(f'{name} {number}' for name, number in sorted(facts['versions'].items()))}"
    if not facts["gradients"]:
        yield "the function alone: nothing is differentiated"
        return
    times = {1: "once", 2: "twice"}.get(facts["order"], f"{facts['order']} times")
    yield f"can be differentiated {times}, in argnums {facts['argnums']}"
    plan = facts["plan"]
    again = counted(len(plan["recomputed"]), "operation")
    saved = counted(sum(r["kind"] == "saved" for r in facts["residuals"]), "array")
    residuals = f"{facts['saved_bytes']:,} bytes in {saved} saved for the backward"
    yield f"cut by {plan['strategy']}: {residuals}, {again} computed again"
    if facts["sizes"]:
        yield f"cut for the sizes {', '.join(f'{name} = {size}' for name, size in facts['sizes'].items())}"
    for static in facts["statics"]:
        yield f"{static['path']} is always {static['value']}"


def _arrays(arrays: Sequence[JSON], describe: Callable[[JSON], str], everything: bool) -> Iterator[str]:
    for a in _first(arrays, everything):
        yield f"  {a['name']:<14}  {_tail(_type(a), 24):<24}  {_tail(describe(a), 56)}"
    yield from _rest(arrays, everything)


def _rest(arrays: Sequence[JSON], everything: bool) -> Iterator[str]:
    if len(arrays) > _SHOWN and not everything:
        yield f"  and {len(arrays) - _SHOWN} more: --all lists them"


def _type(array: JSON) -> str:
    return f"{array['dtype']}[{','.join(map(str, array['shape']))}]"


def _legend(reasons: Sequence[str]) -> Iterator[str]:
    for i, reason in enumerate(reasons):
        yield from _wrapped(f"why {i + 1}: {reason}")


def _residuals(residuals: Sequence[JSON], everything: bool) -> Iterator[str]:
    reasons = list(dict.fromkeys(r["reason"] for r in residuals))
    yield f"{'residuals':<42}  {'bytes':>14}  {'made by':<32}  {'why':>3}"
    for r in _first(residuals, everything):
        maker = f"{r['op']} at {_line(r['source'])}" if r["op"] else ""
        row = f"  {r['name']:<14}  {_tail(_type(r), 24):<24}  {r['bytes']:>14,}  {_tail(maker, 32):<32}"
        yield f"{row}  {reasons.index(r['reason']) + 1:>3}"
    yield from _rest(residuals, everything)
    yield from _legend(reasons)


def exported(facts: JSON) -> str:
    """Return the output of `jointcut export`."""
    folder, platforms = facts["folder"], ", ".join(facts["platforms"])
    files = f"{facts['total_bytes']:,} bytes in {counted(len(facts['files']) + 1, 'file')}"
    first = f"{facts['name']} is in {folder}, for {platforms}: {files}"
    return f"{first}\njointcut show {folder} tells what it takes and gives"


# ------------------------------------------------------------------------------------------------------------ cache


def cache(facts: JSON) -> str:
    """Return the output of `jointcut cache ls`."""
    entries = facts["entries"]
    lines = [f"{facts['folder']}: {_entries(len(entries))}, {facts['total_bytes']:,} bytes"]
    for e in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(e["last_used"]))
        lines.append(f"{e['bytes']:>14,}  {used}  {e['key'][:12]}  {e['label']}"[:_WIDTH].rstrip())
    return "\n".join(lines)


def cleared(facts: JSON) -> str:
    """Return the output of `jointcut cache clear`."""
    return f"{facts['folder']}: removed {_entries(facts['removed'])}, {facts['removed_bytes']:,} bytes"


def _entries(n: int) -> str:
    return f"{n:,} {'entry' if n == 1 else 'entries'}"


# ------------------------------------------------------------------------------------------------------------- texts


def _first(items: Sequence[Any], everything: bool) -> Iterable[Any]:
    return items if everything else items[:_SHOWN]


def _line(source: str) -> str:
    """Return file and line of `file:line (function)`; a path inside the current folder is relative to it."""
    return (source.rpartition(" (")[0] or source).removeprefix(f"{Path.cwd()}{os.sep}")
