"""Say which ops each half runs, for the values that it must have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.sides import Sides


@dataclass(frozen=True)
class Needed:
    """The ops that the backward runs to get values of the forward, and the values that it gets from them."""

    ops: frozenset[int]
    values: frozenset[int]


def needed(problem: Problem, saved: frozenset[int]) -> Needed:
    """Return the ops of the forward that the backward must run if these values are saved."""
    graph = problem.graph
    ops: set[int] = set()
    seen = set(saved)
    stack = [v for v in problem.sides.wanted if v not in seen]
    while stack:
        v = stack.pop()
        maker = graph.values[v].maker
        if v in seen or maker is None:
            continue
        seen.add(v)
        if maker not in ops:
            ops.add(maker)
            stack.extend(v for v in graph.ops[maker].inputs if v not in seen)
    return Needed(frozenset(ops), frozenset(seen - saved))


def runs_forward(graph: Graph, sides: Sides, values: Iterable[int]) -> frozenset[int]:
    """The ops that the forward runs: those that outputs and effects need, and those that compute some values."""
    ops = set(sides.forward)
    makers = list({graph.values[v].maker for v in values} - ops)
    while makers:
        maker = makers.pop()
        if maker is None or maker in ops:
            continue
        ops.add(maker)
        makers += [graph.values[v].maker for v in graph.ops[maker].inputs]
        makers.append(graph.regions[graph.ops[maker].region].holder)
    return frozenset(ops)
