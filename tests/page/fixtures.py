"""Data for pages, as large and as uneven as those of real programs, and the same in every run."""

from __future__ import annotations

import random
import re
from itertools import accumulate
from typing import Any

Section = dict[str, Any]

STEPS, BOUNDARY = 400, 210
MEGABYTE = 1e6
OPS = ("dot_general", "add", "mul", "exp", "reduce_sum", "broadcast_in_dim", "tanh", "div", "transpose", "sub")
LINES = (
    "gpt.py:122 (attention)",
    "gpt.py:140 (mlp)",
    "gpt.py:131 (gelu)",
    "gpt.py:98 (layer_norm)",
    "/home/someone/projects/language/models/transformer_with_a_long_name/blocks/attention.py:1204 (scaled_dot_product)",
    "gpt.py:77 (embed)",
    "gpt.py:201 (loss)",
    "gpt.py:188 (logits)",
    "everything else",
)
PLACE = re.compile(r"(.*?)([^/]*:\d+)( \(.+\))?")  # folder, file with line, function
MODULES = ("block/attention", "block/mlp", "block/norm", "embed", "head")
REASONS = (
    "It costs 4.2 ms to compute again, and 1.5 MB to keep.",
    "A matrix product; the cost model asks 31 ms for it, more than any budget here needs.",
    "Drawn at random: computing it again would draw it anew.",
    "Two later products read it, and what it is made of is no longer alive there.",
)


def without_folders(name: str) -> str:
    """A place as a legend tells it, where no other reads the same."""
    place = PLACE.fullmatch(name)
    return name if place is None else place[2] + (place[3] or "")


def page_data(*sections: Section) -> dict[str, Any]:
    """A page of these sections, or of one of each kind but the graph."""
    return {
        "format": 1,
        "title": "loss",
        "subtitle": "cut by min_cut; predicted for cpu; JAX 0.10.2",
        "totals": [
            {"label": "saved for the backward", "value": "47.2 MB", "detail": "23 arrays; plain JAX keeps 139.7 MB"},
            {"label": "recomputed", "value": "35 ops", "detail": "1.9 ms, none of them a matrix product"},
            {"label": "peak of the forward", "value": "58.1 MB", "detail": "at gpt.py:122 (attention)"},
            {"label": "peak of the backward", "value": "61.3 MB", "detail": "plain JAX: 160.4 MB"},
            {"label": "extra operations", "value": "0.4 %", "detail": "31.2 of 7,804 Mflop"},
        ],
        "sections": list(sections or (timeline(), pareto(), table(), diff())),
    }


def timeline(seed: int = 7) -> Section:
    """400 steps in nine groups, with plain JAX behind them and XLA's account across."""
    draw = random.Random(seed)
    shapes = [_hill(draw, 13.0 / (1 + 0.6 * place)) for place in range(len(LINES))]
    total = [round(sum(at), 1) for at in zip(*shapes, strict=True)]
    ghost = [3 * bytes_alive for bytes_alive in _hill(draw, 40.0, count=330, top=180)]
    return {
        "kind": "timeline",
        "id": "memory",
        "title": "Memory over a step",
        "lead": "What is alive while the step runs: it grows in the forward, and the backward takes it down again.",
        "steps": [_step(draw, index) for index in range(STEPS)],
        "boundary": BOUNDARY,
        "groupings": [_grouping("source line", LINES, shapes), _grouping("module", MODULES, _merged(shapes))],
        "total": total,
        "peak": _peak(total),
        "ghost": {"name": "plain JAX", "total": ghost, "boundary": 180, "peak": _peak(ghost)},
        "lines": [{"name": "XLA's account of the compiled step", "bytes": 1.06 * max(total)}],
        "note": "Arguments (12.1 MB) and results (12.1 MB) are alive throughout and are not drawn.",
    }


def _hill(draw: random.Random, height: float, count: int = STEPS, top: int = BOUNDARY) -> list[float]:
    """Bytes that rise in ragged steps to the boundary and fall again to nothing."""
    up = list(accumulate(draw.random() ** 3 for _ in range(top)))
    down = list(accumulate(draw.random() ** 3 for _ in range(count - top)))
    rise = [height * MEGABYTE * at / up[-1] for at in up]
    fall = [height * MEGABYTE * (1 - at / down[-1]) for at in down]
    ripple = [1 + 0.25 * draw.random() * (index % 11 == 0) for index in range(count)]
    return [round(bytes_alive * more) for bytes_alive, more in zip(rise + fall, ripple, strict=True)]


def _merged(shapes: list[list[float]]) -> list[list[float]]:
    """The same bytes in five groups."""
    parts = (shapes[0:3], shapes[3:5], shapes[5:7], shapes[7:8], shapes[8:9])
    return [[sum(at) for at in zip(*part, strict=True)] for part in parts]


def _grouping(name: str, names: tuple[str, ...], shapes: list[list[float]]) -> dict[str, Any]:
    return {"name": name, "groups": [{"name": n, "bytes": s} for n, s in zip(names, shapes, strict=True)]}


def _step(draw: random.Random, index: int) -> dict[str, str]:
    line = draw.randrange(len(LINES) - 1)
    return {
        "op": draw.choice(OPS),
        "side": "forward" if index < BOUNDARY else "backward",
        "source": LINES[line],
        "scope": draw.choice(MODULES),
        "loop": "6 steps" if draw.random() < 0.3 else "",
    }


def _peak(total: list[float]) -> dict[str, float]:
    step = max(range(len(total)), key=lambda index: total[index])
    return {"step": step, "bytes": total[step]}


def pareto(seed: int = 3) -> Section:
    """24 plans, four policies of `jax.checkpoint`, and plain JAX."""
    draw = random.Random(seed)
    points = [_point(draw, index) for index in range(24)]
    policies = ("everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
    marks = [
        {
            "name": f"jax.checkpoint, {name}",
            "peak_bytes": (128 - 26 * place) * MEGABYTE,
            "seconds": (0.9 + 3.1 * place) * 1e-3,
            "lines": [f"The whole loss under jax.checkpoint with the policy {name}."],
        }
        for place, name in enumerate(policies)
    ]
    return {
        "kind": "pareto",
        "id": "budgets",
        "title": "What other budgets would cost",
        "lead": "Each point is a plan; nothing within less memory was found to be faster.",
        "points": points,
        "chosen": 9,
        "marks": marks,
        "plain": {"peak_bytes": 139.7 * MEGABYTE, "seconds": 0.0},
    }


def _point(draw: random.Random, index: int) -> dict[str, Any]:
    peak_bytes = (118 - 4.1 * index + draw.random()) * MEGABYTE
    saved_bytes = 0.7 * peak_bytes - 9 * MEGABYTE
    return {
        "peak_bytes": peak_bytes,
        "seconds": 0.00012 * 1.19**index * (1 + 0.1 * draw.random()),
        "saved_bytes": saved_bytes,
        "strategy": "front" if index < 19 else "chain",
        "lines": [
            f"saves {24 - index} arrays, {saved_bytes / MEGABYTE:.1f} MB",
            f"recomputes {3 * index + 1} ops",
            f"10 % less memory takes {0.2 + 0.07 * index:.2f} ms more",
        ],
        "saved": table(rows=max(1, 24 - index), shown=6, seed=index),
    }


def table(rows: int = 57, shown: int = 12, seed: int = 5, **changed: Any) -> Section:
    """Saved values, the largest first, each with its line and its reason."""
    draw = random.Random(seed)
    sizes = sorted((draw.random() ** 4 * 12 for _ in range(rows)), reverse=True)
    cells, keys = [], []
    for place, size in enumerate(sizes):
        source, kind = draw.choice(LINES[:8]), f"float32[{2 ** draw.randrange(3, 8)},{2 ** draw.randrange(5, 11)}]"
        cells.append([f"{size:.1f} MB", kind, draw.choice(OPS), source, REASONS[place % len(REASONS)]])
        keys.append([size, kind, cells[-1][2], source, cells[-1][4]])
    columns = [
        {"name": "bytes", "align": "right", "sort": True},
        {"name": "type", "align": "left", "sort": True},
        {"name": "made by", "align": "left", "sort": True},
        {"name": "at", "align": "left", "sort": True},
        {"name": "why it is saved", "align": "left", "sort": False},
    ]
    section = {
        "kind": "table",
        "id": "saved",
        "title": "What is saved, and why",
        "lead": "The largest first. A row leads to the op that makes the value.",
        "columns": columns,
        "rows": cells,
        "keys": keys,
        "values": [[place] if place % 7 != 6 else None for place in range(rows)],
        "shown": shown,
    }
    return {**section, **changed}


def diff() -> Section:
    """Two plans, and what changes from one to the other."""
    return {
        "kind": "diff",
        "id": "change",
        "title": "Against the plan of yesterday",
        "lead": "",
        "before": {"title": "min_cut", "lines": ["saves 23 arrays, 47.2 MB", "peak 61.3 MB", "recomputes 35 ops"]},
        "after": {"title": "budget 50 MB", "lines": ["saves 19 arrays, 38.0 MB", "peak 49.8 MB", "recomputes 61 ops"]},
        "columns": [
            {"name": "bytes", "align": "right", "sort": False},
            {"name": "type", "align": "left", "sort": False},
            {"name": "at", "align": "left", "sort": False},
        ],
        "rows": [
            {"sign": "-", "cells": ["4.2 MB", "float32[16,128,512]", LINES[0]]},
            {"sign": "-", "cells": ["4.2 MB", "float32[16,128,512]", LINES[4]]},
            {"sign": "+", "cells": ["0.1 MB", "float32[16,128]", LINES[3]]},
        ],
    }
