"""Look for a cut that is better than the front's by an integer program.

A front's choice for a budget is the best of the cuts that it tries. `scipy.optimize.milp` (HiGHS) looks further, for
some seconds and for this budget alone. If it ends before the time is up, its answer is the same in every run; and if at
most `MOST_OPEN` nodes lie between the first choice of the front and the last, no cut between them is better.
"""

from __future__ import annotations

import time
from bisect import bisect_right

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from jointcut.partition.search.front import Choice, Front
from jointcut.partition.search.network import INFINITE
from jointcut.partition.search.peel import Layer, between

#: An integer program decides on at most so many nodes.
MOST_OPEN = 1500

#: The largest cost in an integer program. HiGHS ignores differences below 1e-6.
LARGEST_COST = 1024.0


def polished(whole: Front, budget_bytes: int, seconds: float) -> Choice | None:
    """The front's choice, or a better one that is found between two cuts of the hull in about so many seconds."""
    choice = whole.best(budget_bytes)
    if choice is None:
        return None
    k = bisect_right(whole.choices, budget_bytes, key=lambda c: c.bytes) - 1
    if k == whole.last or seconds <= 0 or choice.seconds <= whole.bound_seconds(budget_bytes):
        return choice
    begin = time.monotonic()
    spans = list(dict.fromkeys([(k, k + 1), widest(whole, k)]))
    for number, (first, last) in enumerate(spans, start=1):
        found = solved(whole, first, last, budget_bytes, begin + seconds * number / len(spans))
        if found is not None and found.seconds < choice.seconds:
            choice = found
    return choice


def widest(whole: Front, k: int) -> tuple[int, int]:
    """Two cuts of the hull, as far around cuts k and k + 1 as an integer program can reach."""
    nodes = np.cumsum(np.bincount(whole.ranks))
    width = np.arange(whole.last + 1)
    first, last = np.maximum(k - width, 0), np.minimum(k + 1 + width, whole.last)
    widest = max(int(np.searchsorted(nodes[last] - nodes[first], MOST_OPEN, "right")) - 1, 0)
    return int(first[widest]), int(last[widest])


def solved(whole: Front, first: int, last: int, budget_bytes: int, deadline: float) -> Choice | None:
    """The best cut between two of the hull, by integer program; None where it finds none before the deadline.

    The program's budget is in floating point: where a solution exceeds the real budget, the program's is lowered.
    """
    part = between(whole.net, whole.ticks, whole.ranks > first, whole.ranks > last)
    if not part.ticks.any():
        return None
    costs, arcs, row = program(part)
    scale = 1 / np.abs(row).max()
    room = budget_bytes - whole.choices[last].bytes
    lowered = 0
    is_node = np.arange(len(costs)) < len(part.nodes)
    while (left := deadline - time.monotonic()) > 0:
        limits = [LinearConstraint(arcs, ub=0.0), LinearConstraint(row * scale, ub=room * scale)]
        options = {"time_limit": left, "mip_rel_gap": 0.0}
        result = milp(costs, integrality=np.ones(len(costs)), bounds=Bounds(0, 1), constraints=limits, options=options)
        if result.x is None:
            return None
        sink_side = whole.ranks > last
        sink_side[part.nodes[result.x[is_node] > 0.5]] = True
        solution = measured(whole, sink_side)
        if solution is None or solution.bytes <= budget_bytes:
            return solution
        lowered = max(solution.bytes - budget_bytes, 2 * lowered)
        room -= lowered
    return None


def program(part: Layer) -> tuple[np.ndarray, csr_array, np.ndarray]:
    """The costs of all variables, the rows that may not exceed 0, and the row of bytes.

    One variable for each node, 1 on the sink's side, and one for each finite arc, 1 if it is severed.
    """
    (priced,) = np.nonzero(part.capacities < INFINITE)
    nodes, arcs, columns = len(part.nodes), np.arange(len(part.tails)), len(part.nodes) + np.arange(len(priced))
    entries = np.concatenate([np.ones(len(arcs)), -np.ones(len(arcs) + len(priced))])
    places = np.concatenate([arcs, arcs, priced]), np.concatenate([part.heads, part.tails, columns])
    rows = csr_array((entries, places), shape=(len(arcs), nodes + len(priced)))
    bytes_row = np.concatenate([part.from_source - part.to_sink, part.capacities[priced]]).astype(np.float64)
    costs = np.concatenate([part.ticks, np.zeros(len(priced))])
    return costs * (LARGEST_COST / costs.max()), rows, bytes_row


def measured(whole: Front, sink_side: np.ndarray) -> Choice | None:
    """The choice of a given sink side (bool); None where that severs an infinite arc."""
    net = whole.net
    severed = net.capacities[sink_side[net.heads] & ~sink_side[net.tails]]
    if (severed >= INFINITE).any():
        return None
    ticks = int(whole.ticks[sink_side[net.heads]].sum())
    return Choice(int(severed.sum()), ticks * whole.tick_seconds, sink_side.astype(np.int64))
