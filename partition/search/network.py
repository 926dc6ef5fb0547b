"""Turn values, prices and rules into a flow network.

Every value of the forward becomes two nodes, *in* and *out*, and an arc from in to out that costs its bytes. A value is
saved if the cut severs that arc: in on the source's side, out on the sink's. With both nodes on the sink's side, the
backward computes the value. An infinite arc from the source forbids recomputing. An infinite price forbids saving. An
infinite arc to the sink says that the backward reads the value. An op with several results gets a node of its own, so
that all its results are computed together. The construction is the one in PyTorch's `solve_min_cut`, without its
distance weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order

from jointcut.partition.errors import PlanError, message
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.rules import Verdict, rerunnable
from jointcut.partition.program.graph import OPEN, Graph

SOURCE, SINK = 0, 1

#: A capacity above any sum of finite capacities.
INFINITE = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Network:
    """Arcs `tail -> head` with exact integer capacities; `value_in[v]` is the in-node of value v, or -1.

    `capacities` (int64) are bytes, `INFINITE` where an arc may not be cut. `seconds` (float64) is the time that cutting
    an arc adds to the backward: nonzero only on arcs from the source, whose capacity in bytes is then 0.
    `places[node]` is the node's place in program order (int64), whatever its number. `where` describes a value, by id.
    """

    num_nodes: int
    tails: np.ndarray
    heads: np.ndarray
    capacities: np.ndarray
    value_in: np.ndarray
    seconds: np.ndarray
    places: np.ndarray
    where: Callable[[int], str] = "value {}".format


def network(problem: Problem) -> Network:
    """Build the flow network of a problem.

    Where ops have prices in seconds, these replace the rules of cost. Raises `PlanError` where the backward reads a
    value that may be neither saved nor recomputed.
    """
    graph, sides, seconds = problem.graph, problem.sides, problem.weighed
    value_in = np.full(len(graph.values), -1, np.int64)
    early = [v.id for v in graph.values if not sides.is_late(v.id)]
    value_in[early] = 2 + 2 * np.arange(len(early))
    arcs: list[tuple[int, int, int, float]] = []
    places = [-1, 2 * len(graph.ops)]  # the source before all ops, the sink after them
    for v in early:
        node, verdict = int(value_in[v]), problem.verdicts[v]
        places += 2 * [_place(graph.values[v].maker)]
        forbidden = verdict.not_recomputed and not (seconds and verdict.is_costly)
        if verdict.not_saved and forbidden and v in sides.wanted:
            _refuse(graph, v, verdict)
        arcs.append((node, node + 1, INFINITE if verdict.not_saved else int(problem.prices[v]), 0.0))
        if forbidden:
            arcs.append((SOURCE, node, INFINITE, 0.0))
        if v in sides.wanted:
            arcs.append((node + 1, SINK, INFINITE, 0.0))
    again = rerunnable(graph) if seconds else frozenset[int]()
    for op in graph.ops:
        if op.id in sides.backward or (op.name in OPEN and op.id not in again):
            continue
        targets = [int(value_in[v]) for v in op.outputs]
        node = targets[0] if len(targets) == 1 else len(places)
        if len(targets) != 1:
            places.append(2 * op.id)
            arcs.extend((node, t, INFINITE, 0.0) for t in targets)
        arcs.extend((int(value_in[v]) + 1, node, INFINITE, 0.0) for v in op.inputs)
        if seconds and seconds[op.id] > 0:
            arcs.append((SOURCE, node, 0, seconds[op.id]))
    columns = list(zip(*arcs, strict=True)) or [()] * 4
    tails, heads, capacities = (np.array(column, np.int64) for column in columns[:3])
    seconds_cut, all_places = np.array(columns[3], np.float64), np.array(places, np.int64)
    return Network(len(places), tails, heads, capacities, value_in, seconds_cut, all_places, graph.where)


def _place(maker: int | None) -> int:
    return -1 if maker is None else 2 * maker + 1


def refuse_infinite(net: Network) -> NoReturn:
    """Raise `PlanError` for a network whose every cut is infinite, naming the ends of a path that no cut may sever."""
    tied = net.capacities >= INFINITE
    arcs = coo_array((np.ones(tied.sum()), (net.tails[tied], net.heads[tied])), (net.num_nodes, net.num_nodes))
    _, before = breadth_first_order(csr_array(arcs), SOURCE, return_predecessors=True)
    value_of = {int(node): v for v, node in enumerate(net.value_in) if node >= 0}
    path, node = [], SINK
    while node != SOURCE:
        node = int(before[node])
        path += [value_of[node]] if node in value_of else []
    if not path:
        raise PlanError(message("The cut", "is infinite: rules forbid every choice.", "Lift one of the rules."))
    last, first = path[0], path[-1]
    what = f"may not be recomputed, and nothing from it to {net.where(last)}, which the backward reads, may be saved."
    what = "may be neither saved nor recomputed, and the backward reads it." if first == last else what
    raise PlanError(message(net.where(first), what, "Lift one of the rules."))


def _refuse(graph: Graph, v: int, verdict: Verdict) -> None:
    raise PlanError(
        message(
            graph.where(v),
            f"may not be saved ({verdict.not_saved}) and may not be recomputed ({verdict.not_recomputed}).",
            "Lift one of the two rules.",
        )
    )
