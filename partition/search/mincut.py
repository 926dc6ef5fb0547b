"""Find the cheapest set of values to save.

Minimum cut by maximum flow, exact for integer capacities up to 2**60. scipy's solver holds 32 bits and silently
truncates wider integers. So it runs in several rounds, on capacities in coarse units first. Each round augments the
flow in the residual network of the round before, in a unit in which the rest fits 32 bits, until the unit is one byte.
In the end the flow equals the cut's weight, which proves that both are optimal. Of several cheapest cuts, the one
nearest to the backward is taken: it recomputes least, and it is unique, hence the same in every process.

Flow algorithm: Dinic (1970), as in `scipy.sparse.csgraph.maximum_flow`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jointcut.partition.plans.asjax import residuals_of_jax, sources
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import PREFERRED, Problem, as_problem
from jointcut.partition.prices.rules import CheckpointPolicy, Verdict, packed
from jointcut.partition.program.graph import TOP, Graph, Value
from jointcut.partition.program.primitives import FUSED
from jointcut.partition.search.network import INFINITE, SINK, SOURCE, Network, network, refuse_infinite

_WORD = 2**30 - 1  # scipy holds 32 bits, and a residual arc holds the sum of the flows in both directions


@dataclass(frozen=True)
class MinimumCut:
    """A minimum cut: the arcs it severs, their weight, and a flow of the same value as its proof."""

    severed: tuple[int, ...]
    weight: int
    flow: int


def minimum_cut(net: Network) -> MinimumCut:
    """Return the minimum cut of a network that lies nearest to its sink.

    Raises `PlanError` where every cut is infinite: two rules contradict each other along some path.
    """
    residual, flow = _saturated(net)
    if flow >= INFINITE:
        refuse_infinite(net)
    sink_side = _reaching_sink(residual)
    severed = np.flatnonzero(~sink_side[net.tails] & sink_side[net.heads])
    weight = int(net.capacities[severed].sum())
    assert weight == flow, f"a cut of {weight} bytes under a flow of {flow} bytes"
    return MinimumCut(tuple(severed.tolist()), weight, flow)


def _saturated(net: Network) -> tuple[csr_array, int]:
    """Push flow until none fits; return the residual capacities and the value of the flow."""
    shape = (net.num_nodes, net.num_nodes)
    residual = csr_array(coo_array((net.capacities, (net.tails, net.heads)), shape=shape))
    residual.sum_duplicates()
    finite = net.capacities[net.capacities < INFINITE]
    bound = int(finite.sum()) + 1  # no finite cut is wider, so a wider arc is as good as infinite
    unit = _unit(bound)
    total = 0
    while True:
        words = residual.copy()  # eliminate_zeros below edits the index arrays in place
        words.data = (np.minimum(residual.data, bound) // unit).astype(np.int32)
        words.eliminate_zeros()
        pushed = maximum_flow(words, SOURCE, SINK)
        if int(pushed.flow_value) * unit >= bound:
            return residual, INFINITE
        total += int(pushed.flow_value) * unit
        step = csr_array(pushed.flow).astype(np.int64)
        step.data *= unit
        residual = csr_array(residual - step)
        residual.eliminate_zeros()
        if unit == 1:
            return residual, total
        crossing = _reaching_sink(csr_array(words - csr_array(pushed.flow)))
        open_arcs = int(np.count_nonzero(~crossing[net.tails] & crossing[net.heads]))
        bound = open_arcs * unit + 1  # more than the flow that the coarser unit has left
        unit = min(_unit(bound), unit // 2)


def _unit(bound: int) -> int:
    return max(1, -(-bound // _WORD))


def _reaching_sink(residual: csr_array) -> np.ndarray:
    """Which nodes have a path of free capacity to the sink."""
    backwards = csr_array(residual.T).copy()
    backwards.data = (backwards.data > 0).astype(np.int8)
    backwards.eliminate_zeros()
    order = breadth_first_order(backwards, SINK, directed=True, return_predecessors=False)
    reached = np.zeros(backwards.indptr.size - 1, bool)
    reached[order] = True
    return reached


def min_cut(program: Graph | Problem) -> Plan:
    """Return the plan that saves fewest bytes and recomputes nothing heavy; prices in seconds play no part.

    No value that is preferred saved is recomputed. A value that is preferred recomputed counts `PREFERRED` times its
    bytes.
    """
    problem = as_problem(program)
    net, unit, cut = _cut(problem)
    bound = cut.flow // unit if not problem.preferences else _bound(problem.without_preferences)
    value_of = {int(node): v for v, node in enumerate(net.value_in) if node >= 0}
    saved = [value_of[int(net.tails[arc])] for arc in cut.severed]
    reasons = {v: _why(problem.verdicts[v]) for v in saved}
    return Plan.of(problem, saved, strategy="min_cut", reasons=reasons, bound_bytes=bound)


def _cut(problem: Problem) -> tuple[Network, int, MinimumCut]:
    unit, ranked = with_ties(problem)
    net = network(replace(problem, prices=ranked, seconds=()))
    return net, unit, minimum_cut(net)


def _bound(problem: Problem) -> int:
    _, unit, cut = _cut(problem)
    return cut.flow // unit


def with_ties(problem: Problem) -> tuple[int, tuple[int, ...]]:
    """Return `unit`, and prices that decide between equal cuts: `unit` times the bytes, plus one for some values.

    XLA fuses a light elementwise op into its readers. If its result is saved, the result must be written in addition to
    its operand (a product, for example), which is written anyway. So the operand is saved, and the op runs again,
    fused. In a loop this is different: either of them must be written into a stack.
    """
    graph, prices = problem.graph, _preferred(problem)
    fused = [bool(price) and _is_fused(graph, value) for price, value in zip(prices, graph.values, strict=True)]
    unit = 1 << sum(fused).bit_length()
    if sum(prices) >= INFINITE // unit:
        return 1, prices
    return unit, tuple(price * unit + more for price, more in zip(prices, fused, strict=True))


def _preferred(problem: Problem) -> tuple[int, ...]:
    """The bytes of each value; `PREFERRED` times the bytes if it is preferred recomputed."""
    prices = list(problem.prices)
    for c in problem.preferences:
        if c.demand is CheckpointPolicy.PREFER_RECOMPUTE:
            prices[c.value] *= PREFERRED
    return tuple(prices)


def _is_fused(graph: Graph, value: Value) -> bool:
    return value.loop == TOP and value.maker is not None and graph.ops[value.maker].name in FUSED


def _why(verdict: Verdict) -> str:
    if verdict.not_recomputed:
        return f"not recomputed: {verdict.not_recomputed}"
    return "no larger than what it would be recomputed from"


def save_all(program: Graph | Problem) -> Plan:
    """Return the plan of JAX itself, which saves every forward value that an equation of the backward reads.

    If a value must be recomputed, the plan saves the values from which the backward computes it.
    """
    problem = as_problem(program)
    told = {c.value: c.reason for c in problem.constraints if c.demand.is_must_keep}
    instead = {source: told[v] for source, v in packed(problem.graph, told).items() if source in problem.sides.wanted}
    told |= instead
    kept = saveable(problem, residuals_of_jax(problem), instead) | (problem.sides.wanted & told.keys())
    reasons = {v: f"not recomputed: {told[v]}" if v in told else "the backward reads it" for v in kept}
    strategy = f"save_all{', but for what must not be' * (kept != residuals_of_jax(problem))}"
    return Plan.of(problem, reasons, strategy=strategy, reasons=reasons)


def saveable(problem: Problem, wanted: frozenset[int], instead: Collection[int] = ()) -> frozenset[int]:
    """The wanted values of the forward; a value that must be recomputed is replaced by its nearest sources.

    So is one that is read from a value that is kept `instead` of another, such as a mask from its bits.
    """
    graph = problem.graph
    out = {c.value for c in problem.constraints if c.demand is CheckpointPolicy.MUST_RECOMPUTE}
    out.update(v for source in instead for op in graph.consumers[source] for v in graph.ops[op].outputs)
    return sources(graph, wanted, out.__contains__)


#: The strategies that need no prices of time, by name.
STRATEGIES: dict[str, Callable[[Graph | Problem], Plan]] = {"min_cut": min_cut, "save_all": save_all}
