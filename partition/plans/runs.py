"""Say which ops each half runs, for the values that it must have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.primitives import COLLECTIVES
from jointcut.partition.program.roles import Side
from jointcut.partition.program.sides import Sides, reached


@dataclass(frozen=True)
class Needed:
    """The ops that the backward runs to get values of the forward, and the values that it gets from them."""

    ops: frozenset[int]
    values: frozenset[int]


def needed(problem: Problem, saved: frozenset[int]) -> Needed:
    """Return the ops of the forward that the backward must run if these values are saved."""
    graph = problem.graph
    met = reached(problem.sides.wanted, lambda v: () if v in saved else graph.made_from(v))
    values = frozenset(v for v in met if v not in saved and graph.values[v].maker is not None)
    return Needed(frozenset(i for v in values if (i := graph.values[v].maker) is not None), values)


def exchanged(graph: Graph, again: Iterable[int], loops: Iterable[int] = ()) -> list[str]:
    """A line for what devices exchange once more since ops run `again`, or the loops in segments do; or none.

    The last words name the ops, those that exchange most bytes first.
    """
    runs, loops = Counter(again), {*loops}
    times = {op.id: runs[op.id] + (not loops.isdisjoint(graph.ancestors[graph.loop_of(op)])) for op in graph.ops}
    kinds, where = Counter[str](), Counter[str]()
    moved = [(move.kind, graph.ops[move.op], move.bytes) for move in graph.moves]
    own = (op for op in graph.ops if op.name in COLLECTIVES and times[op.id])
    moved += [(op.name, op, sum(graph.values[v].bytes for v in op.outputs)) for op in own]
    for kind, op, size in moved:
        trips = times[op.id] * graph.trips[graph.loop_of(op)]
        if op.origin is Side.FORWARD and trips:
            kinds[kind] += trips
            where[f"{op.name} at {op.source}" if op.source else op.name] += trips * size
    if not kinds:
        return []
    what = " and ".join(counted(number, kind) for kind, number in sorted(kinds.items()))
    first = " and ".join(text for text, _ in where.most_common(2))
    rest = f" and {counted(len(where) - 2, 'line')} more" if len(where) > 2 else ""
    why = f"{first}{rest} {'runs' if len(where) == 1 else 'run'} again, which costs less than keeping its results"
    return [f"devices exchange {human_bytes(where.total())} once more, in {what}: {why}"]


def runs_forward(graph: Graph, sides: Sides, values: Iterable[int]) -> frozenset[int]:
    """The ops that the forward runs: for outputs, for effects, and to compute some values."""
    makers = [i for v in values if (i := graph.values[v].maker) is not None]
    return sides.forward.union(reached(makers, lambda i: () if i in sides.forward else graph.behind(i)))
