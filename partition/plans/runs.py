"""Say which ops each half runs, for the values that it must have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Graph
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


def runs_forward(graph: Graph, sides: Sides, values: Iterable[int]) -> frozenset[int]:
    """The ops that the forward runs: for outputs, for effects, and to compute some values."""
    makers = [i for v in values if (i := graph.values[v].maker) is not None]
    return sides.forward.union(reached(makers, lambda i: () if i in sides.forward else graph.behind(i)))
