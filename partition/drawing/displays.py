"""Show graphs, plans and the differences between two plans in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.drawing.picture import JSON, graph_view, reason, short, times, type_of
from jointcut.partition.figures import counted, human_bytes, per_device
from jointcut.partition.plans.loops_told import in_segments
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.plandiff import PlanDiff
from jointcut.partition.plans.saved import Saved, grouped
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.notebook import Bundle, told
from jointcut.partition.program.outline import PSEUDO

_SAVED_COLUMNS = ("bytes", "array", "made by", "source line", "why it is saved")


def graph_page(title: str, subtitle: str, graph: Graph, plan: Plan | None = None) -> JSON:
    """The data of a page with the graph, the cut of a plan drawn through it, and the values that the plan saves."""
    heading = "The graph and the cut" if plan else "The joint program"
    sections: list[JSON] = [graph_view(graph, plan, root=title, id="graph", title=heading, lead="")]
    if plan is not None and plan.saved:
        sections.append({"kind": "table", "id": "saved", "title": "Saved for the backward", "lead": "", **table(plan)})
    return {**_page(title, subtitle.strip("<>"), sections), "per": per_device(graph.devices)}


def table(plan: Plan, shown: int = 12) -> JSON:
    """The values that a plan saves as a table of a page: a row for each group that reads the same, largest first."""
    rows = grouped(replace(s, reason=s.why) for s in plan.saved)
    names = f"bytes{plan.per}", *_SAVED_COLUMNS[1:]
    columns = [{"name": n, "align": "left" if place else "right", "sort": True} for place, n in enumerate(names)]
    cells = [_cells(s) for s in rows]
    keys = [[_size(own), *texts[1:]] for own, texts in zip(rows, cells, strict=True)]
    return {"columns": columns, "rows": cells, "keys": keys, "values": None, "shown": shown}


def _cells(alike: Sequence[Saved]) -> list[str]:
    saved = alike[0]
    array = type_of(saved.dtype, saved.shape, saved.copies)
    return [times(alike) + human_bytes(saved.bytes), array, saved.op, short(saved.source), reason(alike)]


def _size(alike: Sequence[Saved]) -> int:
    return sum(s.bytes for s in alike)


def _page(title: str, subtitle: str, sections: Sequence[JSON]) -> JSON:
    return {"format": 1, "title": title, "subtitle": subtitle, "totals": [], "sections": list(sections)}


def _bundle(text: str, data: JSON) -> Bundle:
    return {"text/plain": text, "text/html": framed(page(data))}


@told.register
def _graph(shown: Graph) -> Bundle:
    real = sum(op.name not in PSEUDO for op in shown.ops)
    loops = len(shown.loops) - 1
    text = f"<Graph: {counted(real, 'op')}, {counted(len(shown.values), 'value')}, {counted(loops, 'loop')}>"
    return _bundle(text, graph_page("Joint program", text, shown))


@told.register
def _plan(shown: Plan) -> Bundle:
    first, *rest = shown.summary()
    lead = "; ".join(rest)
    saved = {"kind": "table", "id": "saved", "title": "Saved for the backward", "lead": lead, **table(shown)}
    return _bundle(str(shown), _page("Plan", first, [saved]))


@told.register
def _difference(shown: PlanDiff) -> Bundle:
    signed = [("-", own) for own in grouped(shown.saved_only_before)]
    signed += [("+", own) for own in grouped(shown.saved_only_after)]
    rows: list[dict[str, Any]] = [
        {"sign": sign, "cells": _cells(own)} for sign, own in sorted(signed, key=lambda pair: -_size(pair[1]))
    ]
    totals, *_ = str(shown).splitlines()
    before, after = (
        {"title": name, "lines": lines} for name, lines in zip(shown.strategies, _sides(shown), strict=True)
    )
    columns = [{"name": name, "align": "right" if name == "bytes" else "left"} for name in _SAVED_COLUMNS]
    section = {"kind": "diff", "id": "diff", "title": "What changes", "lead": "", "columns": columns, "rows": rows}
    return _bundle(str(shown), _page("Two plans", totals, [{**section, "before": before, "after": after}]))


def _sides(shown: PlanDiff) -> tuple[list[str], list[str]]:
    """Lines about decisions of the plan before only, and lines about decisions of the plan after only."""
    sides = (
        (shown.saved_only_before, shown.recomputed_only_before, shown.segments_only_before),
        (shown.saved_only_after, shown.recomputed_only_after, shown.segments_only_after),
    )
    first, second = (
        [
            f"{counted(len(saved), 'array')} that only this one saves, {human_bytes(sum(s.bytes for s in saved))}",
            f"{counted(len(again), 'op')} that only this one computes again",
            *in_segments(loops),
        ]
        for saved, again, loops in sides
    )
    return first, second
