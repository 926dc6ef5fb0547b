"""Say which ops each half runs, for the values that it must have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Graph, Op
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


@dataclass(frozen=True)
class Repeated:
    """What devices exchange once more for the backward.

    Attributes:
        kind: the collective, such as "all-reduce".
        op: the op that it is for: one that runs again, or one that needs an array whole.
        count, bytes: how many arrays, and their bytes on each device.
    """

    kind: str
    op: Op
    count: int
    bytes: int

    @property
    def where(self) -> str:
        """The op, with its line if that is known."""
        return f"{self.op.name} at {self.op.source}" if self.op.source else self.op.name


def repeated(graph: Graph, again: Iterable[int], loops: Iterable[int] = ()) -> tuple[list[Repeated], list[Repeated]]:
    """Return what devices exchange once more since ops run `again`, or the loops in segments do, and then the arrays
    that they gather once more.

    Each device keeps its part of an array, or computes it again. So the backward gathers it, where plain JAX keeps it
    whole; but in a loop plain JAX keeps parts, too.
    """
    runs, loops = Counter(again), {*loops}
    times = {op.id: runs[op.id] + (not loops.isdisjoint(graph.ancestors[graph.loop_of(op)])) for op in graph.ops}
    sums, whole = list[Repeated](), list[Repeated]()
    for move in graph.moves if any(times.values()) else ():
        op = graph.ops[move.op]
        late = [graph.ops[i] for i, _ in move.readers if graph.ops[i].origin is Side.BACKWARD]
        back = [*(graph.ops[i] for i, _ in move.readers if times[i]), *late]
        trips, is_as_jax = graph.trips[graph.loop_of(op)], bool(late) and graph.loop_of(op) not in graph.once
        if not move.readers and times[op.id]:
            sums.append(Repeated(move.kind, op, times[op.id] * trips, times[op.id] * trips * move.bytes))
        elif back and not is_as_jax:
            count = max(times[op.id], 1) * trips
            whole.append(Repeated(move.kind, back[0], count, count * move.bytes))
    for op in (op for op in graph.ops if op.name in COLLECTIVES and op.origin is Side.FORWARD and times[op.id]):
        count = times[op.id] * graph.trips[graph.loop_of(op)]
        sums.append(Repeated(op.name, op, count, count * sum(graph.values[v].bytes for v in op.outputs)))
    return sums, whole


def exchanged(graph: Graph, again: Iterable[int], loops: Iterable[int] = ()) -> list[str]:
    """A line for what ops that run `again`, or loops in segments, exchange once more, and one for what is gathered.

    The last words of each name the ops, those that exchange most bytes first.
    """
    sums, whole = repeated(graph, again, loops)
    lines = []
    for rows, verbs in ((sums, ("runs", "run")), (whole, ("reads", "read"))):
        kinds, where = Counter[str](), Counter[str]()
        for row in rows:
            kinds[row.kind] += row.count
            where[row.where] += row.bytes
        if not rows:
            continue
        what = " and ".join(counted(number, kind) for kind, number in sorted(kinds.items()))
        first = " and ".join(text for text, _ in where.most_common(2))
        rest = f" and {counted(len(where) - 2, 'line')} more" if len(where) > 2 else ""
        does = verbs[len(where) > 1]
        why = f"{does} again, which costs less than keeping its results"
        if rows is whole:
            why = f"{does} whole in the backward what each device keeps a part of"
        lines.append(f"devices exchange {human_bytes(where.total())} once more, in {what}: {first}{rest} {why}")
    return lines


def runs_forward(graph: Graph, sides: Sides, values: Iterable[int]) -> frozenset[int]:
    """The ops that the forward runs: for outputs, for effects, and to compute some values."""
    makers = [i for v in values if (i := graph.values[v].maker) is not None]
    return sides.forward.union(reached(makers, lambda i: () if i in sides.forward else graph.behind(i)))
