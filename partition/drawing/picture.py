"""Give a notebook the numbers and shapes to draw.

Each function returns one section of a page (see `page`) as plain JSON: the memory over a step, and the graph with the
cut drawn through it. The lists are columns, so that a program of thousands of ops stays a small file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from jointcut.partition.lower.memory.lifetimes import Lifetime, Lifetimes, Moment
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.runs import runs_forward
from jointcut.partition.program.graph import Graph, Op, Value
from jointcut.partition.program.outline import PSEUDO, outline
from jointcut.partition.program.places import Name, names
from jointcut.partition.program.sides import classify

JSON = dict[str, Any]

_MOST_STEPS = 1_200  # of a timeline; a longer one is thinned out
_MOST_ALIVE = 12  # arrays that are listed at the peak
_MOST_GROUPS = 8  # groups that have a colour of their own
_LEAST_SHARE = 0.02  # of bytes times steps; a smaller group does not count towards `_MOST_GROUPS`
_REST = "everything else"


# ------------------------------------------------------------------------------------------------------- texts


def short(line: str) -> str:
    """A `file:line (function)` with the file's own folder and none above.

    >>> short("/home/me/train/model.py:40 (loss)"), short("In[3]:7 (loss)")
    ('train/model.py:40 (loss)', 'In[3]:7 (loss)')
    """
    path, colon, rest = line.partition(":")
    return f"{'/'.join(Path(path).parts[-2:])}{colon}{rest}"


def file_and_line(line: str) -> str:
    """The file and the line of a `file:line (function)`, without folders.

    >>> file_and_line("/home/me/train/model.py:40 (loss)")
    'model.py:40'
    """
    return short(line).rpartition("/")[2].partition(" (")[0]


def shared(paths: Iterable[Sequence[str]]) -> int:
    """How many leading names all paths share; the last name of a path does not count, nor do empty paths.

    >>> shared([("loss", "apply", "norm"), ("loss", "apply", "step", "block"), ()])
    2
    """
    known = [path for path in paths if path]
    levels = zip(*(path[:-1] for path in known), strict=False)
    return sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))


def type_of(dtype: str, shape: Sequence[int], copies: int = 1) -> str:
    """An array's type as people read it: `6 × float32[8,128]` for an array in a loop of six steps."""
    return f"{copies} × " * (copies > 1) + f"{dtype}[{','.join(map(str, shape))}]"


def times(rows: Sequence[Any]) -> str:
    """The text before the figure of one row, where several rows read the same.

    >>> times(["a", "b"]), times(["a"])
    ('2 × ', '')
    """
    return f"{len(rows)} × " if len(rows) > 1 else ""


def reason(rows: Sequence[Any]) -> str:
    """The reason of rows that read the same, in the words of the first."""
    first: str = rows[0].reason
    return first if all(row.reason == first for row in rows) else f"for the first: {first}"


# ---------------------------------------------------------------------------------------------------- timeline


def timeline(ours: Lifetimes, ghost: tuple[str, Lifetimes] | None = None, **more: Any) -> JSON:
    """The memory over a step by source line and by module, and the total of another plan (`ghost`: name and lifetimes).

    `more` are further keys of the section, such as its title.
    """
    kept = _kept(ours)
    paths = [_text(path) for path in names([m.place for m in ours.moments])]
    chosen = [ours.moments[i] for i in kept]
    return {
        "kind": "timeline",
        "steps": [_step(m, path) for m, path in zip(chosen, (paths[i] for i in kept), strict=True)],
        "boundary": int(np.searchsorted(kept, ours.boundary)),
        "groupings": [
            {"name": "source line", "groups": _groups(ours, kept, [_line(b) for b in ours.buffers])},
            {"name": "module", "groups": _groups(ours, kept, _modules(ours))},
        ],
        "total": [ours.totals[i] for i in kept],
        "peak": {"step": kept.index(ours.peak), "bytes": max(ours.totals), "arrays": _alive(ours)} if kept else None,
        "ghost": None if ghost is None else _ghost(*ghost),
        **more,
    }


def _alive(row: Lifetimes) -> list[JSON]:
    """The largest arrays at the peak; arrays of one type, op and line count as one."""
    sizes: dict[tuple[str, str, str], int] = defaultdict(int)
    for b in row.alive(row.peak):
        sizes[b.type, b.op, short(b.place.line)] += b.bytes
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_MOST_ALIVE]
    return [{"bytes": size, "type": type_, "op": op, "source": line} for (type_, op, line), size in largest]


def _step(moment: Moment, path: str) -> JSON:
    trips = f"{moment.trips} steps" if moment.trips > 1 else ""
    side, line = moment.side.value, short(moment.place.line)
    return {"op": moment.op, "side": side, "source": line, "scope": path, "loop": trips}


def _ghost(name: str, other: Lifetimes) -> JSON:
    kept = _kept(other)
    total = [other.totals[i] for i in kept]
    peak = {"step": kept.index(other.peak), "bytes": max(total)} if kept else None
    return {"name": name, "total": total, "boundary": int(np.searchsorted(kept, other.boundary)), "peak": peak}


def _kept(row: Lifetimes) -> list[int]:
    """The steps that are drawn: in each run of neighbours the step with the most bytes, so that the peak stays."""
    count = len(row.moments)
    if count <= _MOST_STEPS:
        return list(range(count))
    halves = ((0, row.boundary), (row.boundary, count))
    steps: list[int] = []
    for start, end in halves:
        share = max(1, _MOST_STEPS * (end - start) // count)
        for part in np.array_split(np.arange(start, end), min(share, end - start) or 1):
            if part.size:
                steps.append(max(part.tolist(), key=lambda i: (row.totals[i], -i)))
    return steps


def _groups(row: Lifetimes, kept: Sequence[int], keys: Sequence[str]) -> list[JSON]:
    """Bytes by group at the steps that are drawn: the groups largest at the peak and on average, then the rest."""
    members: dict[str, list[Lifetime]] = defaultdict(list)
    for buffer, key in zip(row.buffers, keys, strict=True):
        members[key].append(buffer)
    series = {key: np.asarray(row.bytes_of(own))[list(kept)] for key, own in members.items()}
    at = kept.index(row.peak) if kept else 0
    weight = {key: int(own[at]) + (int(own.sum()) // len(own) if len(own) else 0) for key, own in series.items()}
    order = sorted(series, key=lambda key: (-weight[key], key))
    shown = order if len(order) <= _MOST_GROUPS + 1 else order[:_MOST_GROUPS]
    groups = [{"name": key, "bytes": series[key].tolist()} for key in shown]
    if rest := order[len(shown) :]:
        groups.append({"name": _REST, "bytes": np.sum([series[key] for key in rest], axis=0).tolist()})
    return groups


def _line(buffer: Lifetime) -> str:
    return short(buffer.place.line) or "no source line known"


def _modules(row: Lifetimes) -> list[str]:
    """The module path of each buffer, as deep as there are colours for; the largest group is divided first."""
    paths = [tuple(name.text for name in path) for path in names([b.place for b in row.buffers])]
    weight = [b.bytes * (b.last - b.first + 1) for b in row.buffers]
    members: dict[tuple[str, ...], list[int]] = {(): list(range(len(paths)))}
    depth_of: dict[tuple[str, ...], int] = {(): 0}  # of the groups that may have parts
    least = _LEAST_SHARE * sum(weight)
    while depth_of:
        largest = max(depth_of, key=lambda g: (sum(weight[i] for i in members[g]), g))
        depth = depth_of.pop(largest) + 1
        parts: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i in members[largest]:
            parts[paths[i][:depth]].append(i)
        others = [own for g, own in members.items() if g != largest]
        if sum(sum(weight[i] for i in own) >= least for own in (*others, *parts.values())) > _MOST_GROUPS:
            continue
        del members[largest]
        for part, own in parts.items():
            members.setdefault(part, []).extend(own)
        depth_of.update((part, depth) for part, own in parts.items() if any(len(paths[i]) > depth for i in own))
    return _named(members, len(paths))


def _named(members: Mapping[tuple[str, ...], Sequence[int]], count: int) -> list[str]:
    """The group of each buffer, without the names that all groups begin with."""
    start = shared(members)
    group_of = [""] * count
    for group, own in members.items():
        for i in own:
            group_of[i] = "/".join(group[start:]) or "no module known"
    return group_of


def _text(path: Iterable[Name]) -> str:
    return "/".join(name.text for name in path)


# ------------------------------------------------------------------------------------------------------- graph


def graph_view(
    graph: Graph, plan: Plan | None, seconds: Sequence[float] | None = None, root: str = "program", **more: Any
) -> JSON:
    """The ops by scope and half, and the values handed on; without a plan nothing is saved or run twice.

    `seconds` prices each op, `root` names the scope around all others; `more` are further keys of the section.
    """
    return {"kind": "graph", "cut": plan is not None, **_View(graph, plan, seconds).section(root), **more}


class _View:
    """The nodes of a graph view: an op of the forward, an op that runs again, or an op of the backward."""

    def __init__(self, graph: Graph, plan: Plan | None, seconds: Sequence[float] | None) -> None:
        self.graph, self.plan = graph, plan
        sides = classify(graph)
        again = frozenset() if plan is None else frozenset(plan.recomputed)
        deferred = frozenset() if plan is None else frozenset(plan.deferred)
        if plan is None:
            forward = frozenset(op.id for op in graph.ops) - sides.backward
        else:
            forward = runs_forward(graph, sides, plan.values)
        self.seconds = seconds
        roles: dict[str, Callable[[int], bool]] = {
            "forward": lambda i: i in forward,
            "recomputed": lambda i: i in again,
            "backward": lambda i: i in sides.backward or i in deferred,
        }
        ops = sorted((op for op in graph.ops if op.name not in PSEUDO), key=self._turn)
        self.nodes = [(op.id, role) for role, runs in roles.items() for op in ops if runs(op.id)]
        self.early = {op: n for n, (op, role) in enumerate(self.nodes) if role == "forward"}
        self.late = {op: n for n, (op, role) in enumerate(self.nodes) if role != "forward"}

    def _turn(self, op: Op) -> tuple[int, ...]:
        """A sort key for when an op runs: its id; for an op in a loop's body, right after the loop."""
        scan = self.graph.regions[op.region].holder
        return (op.id,) if scan is None else (*self._turn(self.graph.ops[scan]), op.id)

    def section(self, root: str) -> JSON:
        """The section without its kind."""
        graph = self.graph
        tree = outline(graph, root)
        lines = [short(line) for line in tree.lines]
        sources = list(dict.fromkeys(["", *lines]))
        at = {line: i for i, line in enumerate(sources)}
        texts = list(dict.fromkeys(s.why for s in self.plan.saved)) if self.plan else []
        scopes = [{"parent": s.parent, "name": s.name, "kind": s.kind, "detail": s.detail} for s in tree.scopes]
        nodes = {
            "name": [graph.ops[op].name for op, _ in self.nodes],
            "scope": [tree.scope_of[op] for op, _ in self.nodes],
            "role": [role for _, role in self.nodes],
            "source": [at[lines[op]] for op, _ in self.nodes],
            "seconds": [0.0 if self.seconds is None else float(f"{self.seconds[op]:.3g}") for op, _ in self.nodes],
        }
        read, edges, arguments = self._edges()
        places = {v: i for i, v in enumerate(read)}
        return {
            "scopes": scopes,
            "nodes": nodes,
            "values": self._values([graph.values[v] for v in read], lines, at, texts),
            "edges": {name: [places[x] if name == "value" else x for x in column] for name, column in edges.items()},
            "arguments": arguments,
            "sources": sources,
            "texts": texts,
        }

    def _edges(self) -> tuple[list[int], dict[str, list[int]], JSON]:
        """The values that are handed on, the edges by columns, and the arguments that nodes read."""
        edges: dict[str, list[int]] = {"from": [], "to": [], "value": []}
        arguments: dict[str, list[str]] = defaultdict(list)
        saved = frozenset() if self.plan is None else frozenset(self.plan.values)
        for n, (op, role) in enumerate(self.nodes):
            for v in dict.fromkeys(map(self.graph.whole, self.graph.ops[op].inputs)):
                value = self.graph.values[v]
                if value.maker is None:
                    arguments[str(n)].append(value.label or "cotangent")
                elif (maker := self._maker(value, role, saved)) is not None:
                    edges["from"].append(maker)
                    edges["to"].append(n)
                    edges["value"].append(v)
        return sorted({*edges["value"], *saved}), edges, dict(arguments)

    def _maker(self, value: Value, role: str, saved: frozenset[int]) -> int | None:
        """The node from which a reader gets a value; if the value is not saved, the node in the reader's own half."""
        assert value.maker is not None
        if role == "forward" or value.id in saved or value.maker not in self.late:
            return self.early.get(value.maker)
        return self.late[value.maker]

    def _values(self, values: Sequence[Value], lines: Sequence[str], at: Mapping[str, int], texts: list[str]) -> JSON:
        reasons = {} if self.plan is None else {s.value: s.why for s in self.plan.saved}
        makers = [v.maker for v in values]
        nodes = [-1 if m is None else self.early.get(m, self.late.get(m, -1)) for m in makers]
        sizes = {} if self.plan is None else {s.value: s.bytes for s in self.plan.saved}
        types = [type_of(v.dtype, v.shape, v.copies) for v in values]
        return {
            "id": [v.id for v in values],
            "type": [
                f"{t}, {v.label}" if v.label and v.maker is not None else t for t, v in zip(types, values, strict=True)
            ],
            "bytes": [sizes.get(v.id, v.saved_bytes) for v in values],
            "node": nodes,
            "label": [v.label if v.maker is None else "" for v in values],
            "saved": [v.id in reasons for v in values],
            "reason": [texts.index(reasons[v.id]) if v.id in reasons else -1 for v in values],
            "source": [0 if m is None else at[lines[m]] for m in makers],
        }
