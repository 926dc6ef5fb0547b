"""Peel a network: find the nodes that leave the minimum cut as the price of a second rises.

A cut costs its bytes, plus the seconds of the arcs that it severs at the source, at some price in bytes for a second.
Only these arcs cost more when the price rises, so the sink sides of minimum cuts shrink: the cuts are nested (Gallo,
Grigoriadis, Tarjan 1989), and one rank per node describes all of them. They are found by the recursion of Eisner and
Severance (1976). It takes the price at which two cuts cost the same. A cheaper cut at that price lies between them and
splits the network in two; if there is none, the two are neighbours on the lower convex hull of (bytes, seconds).

Every minimum cut is exact, in Python's own integers: scipy's solver holds 32 bits, and for most of the small networks a
call takes longer than the solution. The cut comes from a preflow (Karzanov 1974), which is pushed in waves along exact
distances to the sink. A wave moves little along a chain of layers that is full up to its end. There, distances rise
node by node instead (Goldberg and Tarjan 1988).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order

from jointcut.partition.search.network import INFINITE, SINK, SOURCE, Network, refuse_infinite

#: The number of waves; after them the remaining excess is pushed node by node.
_WAVES = 2


@dataclass(frozen=True)
class Layer:
    """The nodes between two nested cuts; all other nodes are merged into the source or the sink.

    `tails` and `heads` are positions in `nodes`. `from_source` and `to_sink` are bytes by node, `ticks` the ticks of
    the arcs from the source.
    """

    nodes: np.ndarray
    tails: np.ndarray
    heads: np.ndarray
    capacities: np.ndarray
    from_source: np.ndarray
    ticks: np.ndarray
    to_sink: np.ndarray


def peel(net: Network, ticks: np.ndarray) -> np.ndarray:
    """Return, for each node, how many cuts of the hull have it on the sink's side; these are the first cuts.

    `ticks` are the seconds of each arc in a unit that makes them integers (int64). The first cut has the fewest ticks
    among the cuts of fewest bytes; the last cut has the fewest bytes among the cuts of fewest ticks. Between them are
    the corners of the hull, and points on its edges where parts that do not touch leave at the same price. Raises
    `PlanError` where every cut is infinite: two rules contradict each other along some path.
    """
    tied = net.capacities >= INFINITE
    early = _reached(net.num_nodes, net.tails[tied], net.heads[tied], SOURCE)
    late = _reached(net.num_nodes, net.heads[tied], net.tails[tied], SINK)
    if (early & late).any():
        refuse_infinite(net)
    costs = net.capacities + ticks > 0
    loose = ~early  # nodes that no cut has to pay for, such as inputs: they would only tie parts together
    loose[net.heads[costs]] = False
    part = between(net, ticks, ~early, late | loose)
    part = _split(part, _sink_side(part, 1, 0))[1]
    dearest = int(net.capacities[~tied].sum()) + 1  # at this price one tick costs more than the bytes of any cut
    part, rest = _split(part, _sink_side(part, 1, dearest))
    ranks = np.zeros(net.num_nodes, np.int64)
    cuts = 1
    for nodes in _steps(part, net.places):
        ranks[nodes] = cuts
        cuts += 1
    ranks[rest.nodes] = cuts
    ranks[late] = cuts
    needed = costs & loose[net.tails]
    np.maximum.at(ranks, net.tails[needed], ranks[net.heads[needed]])
    return ranks


def _reached(num_nodes: int, tails: np.ndarray, heads: np.ndarray, root: int) -> np.ndarray:
    """Which nodes lie on a path from the root, itself included."""
    arcs = csr_array((np.ones(len(tails), np.int32), (tails, heads)), shape=(num_nodes, num_nodes))
    reached = np.zeros(num_nodes, bool)
    reached[breadth_first_order(arcs, root, return_predecessors=False)] = True
    return reached


def between(net: Network, ticks: np.ndarray, upper: np.ndarray, lower: np.ndarray) -> Layer:
    """The part between the sink sides of two finite cuts, where `upper` contains `lower`."""
    free = upper & ~lower
    nodes = np.flatnonzero(free)
    local = np.full(net.num_nodes, -1)
    local[nodes] = np.arange(len(nodes))
    tails, heads, capacities = local[net.tails], local[net.heads], net.capacities
    inside = (tails >= 0) & (heads >= 0) & (capacities > 0)
    entering = (heads >= 0) & ~upper[net.tails]
    leaving = (tails >= 0) & lower[net.heads]
    from_source, own_ticks, to_sink = np.zeros((3, len(nodes)), np.int64)
    np.add.at(from_source, heads[entering], capacities[entering])
    np.add.at(own_ticks, heads[entering], ticks[entering])
    np.add.at(to_sink, tails[leaving], capacities[leaving])
    return Layer(nodes, tails[inside], heads[inside], capacities[inside], from_source, own_ticks, to_sink)


def _split(part: Layer, side: np.ndarray) -> tuple[Layer, Layer]:
    """Split a part at a sink side: return the nodes outside it, and the nodes of the side itself."""
    tail_in, head_in = side[part.tails], side[part.heads]
    cut = head_in & ~tail_in
    from_source, to_sink = part.from_source.copy(), part.to_sink.copy()
    np.add.at(from_source, part.heads[cut], part.capacities[cut])
    np.add.at(to_sink, part.tails[cut], part.capacities[cut])
    return (
        _restricted(part, ~side, ~(tail_in | head_in), part.from_source, to_sink),
        _restricted(part, side, tail_in & head_in, from_source, part.to_sink),
    )


def _restricted(part: Layer, kept: np.ndarray, arcs: np.ndarray, from_source: np.ndarray, to_sink: np.ndarray) -> Layer:
    local = np.cumsum(kept) - 1
    tails, heads, capacities = local[part.tails[arcs]], local[part.heads[arcs]], part.capacities[arcs]
    return Layer(part.nodes[kept], tails, heads, capacities, from_source[kept], part.ticks[kept], to_sink[kept])


def _steps(root: Layer, places: np.ndarray) -> Iterator[np.ndarray]:
    """The nodes that leave the sink's side from one cut of the hull to the next."""
    waiting = [root]
    while waiting:
        part = waiting.pop()
        rise, fall = int(part.to_sink.sum() - part.from_source.sum()), int(part.ticks.sum())
        unit = math.gcd(rise, fall)
        side = _sink_side(part, fall // unit, rise // unit) if len(part.nodes) > 1 else np.zeros(1, bool)
        if side.any():
            waiting += reversed(_split(part, side))
        else:
            yield from _independent(part, places)


def _sink_side(part: Layer, byte_weight: int, tick_weight: int) -> np.ndarray:
    """The sink side of least weight; of several, the smallest."""
    flow = _preflow(part, byte_weight, tick_weight)
    waves = 0
    while True:
        distance, order = flow.distances()
        if not flow.run_down(distance, order):
            return np.array(distance, np.int64) > 0
        waves += 1
        if waves > _WAVES:
            flow.find_ways(distance, order)


@dataclass(frozen=True)
class _Preflow:
    """A preflow through a part, in exact integers: a node may receive more than it passes on.

    A node holds `excess`, or it can still pass `room` to the sink. `arcs` lists the arcs of each node: arc 2k at its
    tail, and the same arc reversed, 2k + 1, at its head. An arc leads to `heads[arc]`, with `free[arc]` capacity left.
    """

    excess: list[int]
    room: list[int]
    heads: list[int]
    free: list[int]
    arcs: list[list[int]]

    def distances(self) -> tuple[list[int], list[int]]:
        """Each node's distance to the sink along free arcs, 0 if there is no path; and the nodes with one, in order."""
        heads, free, arcs = self.heads, self.free, self.arcs
        order = [v for v, may in enumerate(self.room) if may]
        distance = [1 if may else 0 for may in self.room]
        for v in order:
            further = distance[v] + 1
            for arc in arcs[v]:
                tail = heads[arc]
                if not distance[tail] and free[arc ^ 1]:
                    distance[tail] = further
                    order.append(tail)
        return distance, order

    def run_down(self, distance: Sequence[int], order: Sequence[int]) -> bool:
        """Push all excess towards the sink, in one wave along the distances; return whether there was any."""
        excess, moved = self.excess, False
        for v in reversed(order):
            if excess[v]:
                self.push(v, distance)
                moved = True
        return moved

    def find_ways(self, distance: list[int], order: Sequence[int]) -> None:
        """Push the excess that a wave has left; a node's distance rises until a free arc leads down from it.

        Excess without a path to the sink would rise for long. So the work here is limited to the work of computing new
        distances.
        """
        heads, free, arcs, excess = self.heads, self.free, self.arcs, self.excess
        waiting = deque(v for v in reversed(order) if excess[v])
        work = len(heads) // 2
        while waiting and work > 0:
            v = waiting.popleft()
            while excess[v]:
                work -= len(arcs[v])
                below = min((d for arc in arcs[v] if free[arc] and (d := distance[heads[arc]])), default=-1)
                distance[v] = below + 1
                if not distance[v]:
                    break
                waiting += self.push(v, distance)

    def push(self, v: int, distance: Sequence[int]) -> list[int]:
        """Push a node's excess one step nearer to the sink; return the nodes that had no excess before."""
        heads, free, excess, room = self.heads, self.free, self.excess, self.room
        reached: list[int] = []
        left, below = excess[v], distance[v] - 1
        for arc in self.arcs[v] if below else ():
            head, pushed = heads[arc], free[arc]
            if pushed and distance[head] == below:
                if pushed > left:
                    pushed = left
                free[arc] -= pushed
                free[arc ^ 1] += pushed
                left -= pushed
                if room[head]:
                    handed = min(pushed, room[head])
                    room[head] -= handed
                    pushed -= handed
                if pushed:
                    if not excess[head]:
                        reached.append(head)
                    excess[head] += pushed
                if not left:
                    break
        excess[v] = left
        return reached


def _preflow(part: Layer, byte_weight: int, tick_weight: int) -> _Preflow:
    """The first preflow: each node has received all that the source gives, and passed on all that the sink takes."""
    supply = zip(part.from_source.tolist(), part.ticks.tolist(), strict=True)
    given = [byte_weight * b + tick_weight * t for b, t in supply]
    taken = [byte_weight * b for b in part.to_sink.tolist()]
    passed = [has if has < may else may for has, may in zip(given, taken, strict=True)]
    excess = [has - both for has, both in zip(given, passed, strict=True)]
    room = [may - both for may, both in zip(taken, passed, strict=True)]
    unbounded = sum(excess) + 1
    capacities = [unbounded if c >= INFINITE else byte_weight * c for c in part.capacities.tolist()]
    free = [c for forth in capacities for c in (forth, 0)]
    arcs: list[list[int]] = [[] for _ in excess]
    for arc, tail in enumerate(np.stack((part.tails, part.heads), 1).ravel().tolist()):
        arcs[tail].append(arc)
    return _Preflow(excess, room, np.stack((part.heads, part.tails), 1).ravel().tolist(), free, arcs)


def _independent(part: Layer, places: np.ndarray) -> list[np.ndarray]:
    """The connected pieces of a part, the last in the program first; all have the same price of a second."""
    root = list(range(len(part.nodes)))
    for tail, head in zip(part.tails.tolist(), part.heads.tolist(), strict=True):
        while root[tail] != tail:
            root[tail] = tail = root[root[tail]]
        while root[head] != head:
            root[head] = head = root[root[head]]
        root[max(tail, head)] = min(tail, head)
    for v, above in enumerate(root):
        root[v] = root[above]
    labels = np.array(root)
    order = np.argsort(labels, kind="stable")
    pieces = np.split(part.nodes[order], np.flatnonzero(np.diff(labels[order])) + 1)
    return sorted((piece for piece in pieces if len(piece)), key=lambda piece: -int(places[piece].max()))
