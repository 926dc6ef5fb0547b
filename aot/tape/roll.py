"""Find the part of a backward that repeats, so that loops of all lengths share one program.

The nodes of a loop that ran in Python stand one block behind the other: the same ops, which read values of their own
block, hand cotangents to their own and to the next block, and add gradients to what lies outside. Such blocks are run
by one compiled loop, 16 at a time: its trip count is a number that it is given, and residuals are stacked as it runs.
So neither the program nor its memory depends on the length, and gradients are added in the same order.

Not found are blocks with hooks or packed residuals, and loops whose steps have parameters of their own or whose results
are all read at their end, such as by `jnp.stack`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.tape.nodes import Node
from jointcut.aot.tape.records import Record
from jointcut.aot.tape.sweep import Packed, Step, Sweep
from jointcut.aot.tape.walk import Loop, Structure

#: How many distances between equal nodes are tried as the length of a block.
MOST_PERIODS = 6

Edges = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Repeat:
    """`count` blocks of `period` nodes, from node `start` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The first node behind the blocks."""
        return self.start + self.period * self.count


@dataclass
class RolledSweep(Sweep):
    """A sweep with a part that repeats, of which `nodes` and `flat` leave out the blocks.

    Attributes:
        repeat: the blocks.
        block: the nodes of the first block.
        ends: for each edge of each of them: 0, the node from the block's start on, and its output; or 1, what lies
            outside, and its output.
        places: for each residual of each of them, its place among constants and then slots.
        consts: the residuals that all blocks read.
        slots: the residuals that differ between blocks: for each, one array for each block.
    """

    repeat: Repeat = Repeat(0, 0, 0)
    block: Sequence[Node] = ()
    ends: Sequence[Sequence[tuple[int, int, int]]] = ()
    places: Sequence[Sequence[int]] = ()
    consts: Sequence[Any] = ()
    slots: Sequence[Sequence[Any]] = ()

    @property
    def count(self) -> int:
        """The number of ops that it goes back through."""
        return len(self.nodes) + self.repeat.period * self.repeat.count

    @property
    def kept(self) -> Sequence[Any]:
        """The residuals, those of the blocks included."""
        return [*self.flat, *self.consts, *(x for slot in self.slots for x in slot)]

    def running(self, structure: Structure) -> list[Callable[[Sequence[Any]], list[Any]]]:
        """The hooks of this run, by number, and then its loop."""
        loop = structure.loop
        assert loop is not None, "the structure of another sweep"
        return [*self.called, lambda arrays: loop.run(self.consts, self.slots, self.repeat.count, arrays)]

    @property
    def loop(self) -> Loop:
        """The blocks as one loop, which holds no values."""
        period = self.repeat.period
        targets = list(dict.fromkeys((to, i) for ends in self.ends for kind, to, i in ends if kind))

        def edge(kind: int, to: int, i: int) -> tuple[int, int]:
            return (2 * period + targets.index((to, i)), 0) if kind else (to, i)

        steps = [
            Step(record_of(node), tuple(edge(*end) for end in ends), tuple(places), (), (), node.source)
            for node, ends, places in zip(self.block, self.ends, self.places, strict=True)
        ]
        types = tuple(map(jax.typeof, (*self.consts, *(slot[0] for slot in self.slots))))
        return Loop(self.repeat.start, len(self.called), Structure(steps, (), ()), tuple(targets), types)


def rolled(sweep: Sweep) -> Sweep:
    """The sweep with its largest part that repeats rolled up; itself if there is none."""
    edges = [[(sweep.numbers[parent], i) for parent, i in node.edges] for node in sweep.nodes]
    repeat = _found(sweep.nodes, edges)
    seeds = [sweep.numbers[node] for node, _ in sweep.seeds]
    if repeat is None or _is_entered([*seeds, *(n for row in edges[: repeat.start] for n, _ in row)], repeat):
        return sweep
    start, end, period = repeat.start, repeat.end, repeat.period
    outside, block = [*sweep.nodes[:start], *sweep.nodes[end:]], sweep.nodes[start : start + period]
    numbers = {node: i for i, node in enumerate((*outside, *block))}
    numbers.update((leaf, -1 - leaf.place) for leaf in sweep.leaves)
    ends = [[_end(edges, repeat, start + n, e) for e in range(len(edges[start + n]))] for n in range(period)]
    places, consts, slots = _residuals(sweep.nodes[start:end], period)
    made = RolledSweep(outside, sweep.seeds, sweep.leaves, [], (), numbers, repeat, block, ends, places, consts, slots)
    parts = ((record_of(node).id, tuple(row), p) for node, row, p in zip(block, ends, places, strict=True))
    made.key = (made._key(), start, tuple(parts), len(consts))
    return made


def structure_of(sweep: Sweep) -> Structure:
    """What the backward of a sweep does, without its values."""
    steps, leaf_hooks = sweep.steps()
    seeds = [(sweep.numbers[node], i) for node, i in sweep.seeds]
    return Structure(steps, leaf_hooks, seeds, sweep.loop if isinstance(sweep, RolledSweep) else None)


def record_of(node: Node) -> Record:
    """The record of a node that is no leaf."""
    assert node.record is not None, "leaves are no steps"
    return node.record


def _found(nodes: Sequence[Node], edges: Edges) -> Repeat | None:
    """The blocks that cover the most nodes."""
    kinds = [_kind(node) for node in nodes]
    best: Repeat | None = None
    for period in _periods(kinds):
        start = 0
        while start + 2 * period <= len(nodes):
            end = start
            while end + period < len(nodes) and kinds[end] == kinds[end + period] and _alike(edges, end, period):
                end += 1
            if end - start >= period and (best is None or end - start + period > best.end - best.start):
                best = _checked(edges, Repeat(start, period, (end - start) // period + 1)) or best
            start = end + 1
    return best


def _kind(node: Node) -> int:
    """Equal for nodes that may stand for each other; a node that may not is like no other."""
    fixed = node.hooks or any(type(x) is Packed for x in node.saved)
    return -1 - node.order if fixed else record_of(node).id


def _periods(kinds: Sequence[int]) -> list[int]:
    """The most frequent distances from a node to the next one of its kind."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i, kind in enumerate(kinds):
        if kind in last:
            distances[i - last[kind]] += 1
        last[kind] = i
    return [distance for distance, _ in distances.most_common(MOST_PERIODS)]


def _alike(edges: Edges, i: int, period: int) -> bool:
    """Whether the edges of a node and of its like in the next block end at the same place, or one block apart."""
    return all(
        a[1] == b[1] and (b[0] == a[0] or (a[0] >= 0 and b[0] - a[0] == period))
        for a, b in zip(edges[i], edges[i + period], strict=True)
    )


def _checked(edges: Edges, repeat: Repeat) -> Repeat | None:
    """The blocks, if no value of one goes farther than to the next, or to what lies outside of all."""
    start, period, end = repeat.start, repeat.period, repeat.end
    for i in range(start, start + period):
        for e, (to, _) in enumerate(edges[i]):
            ends = [edges[k][e][0] for k in range(i, end, period)]
            if ends[1] == to:
                if any(other != to for other in ends) or 0 <= to < end:
                    return None
            elif ends != list(range(to, to + len(ends) * period, period)) or to >= start + 2 * period:
                return None
    return repeat


def _is_entered(numbers: Sequence[int], repeat: Repeat) -> bool:
    """Whether something before the blocks reads another block than the first."""
    return any(repeat.start + repeat.period <= n < repeat.end for n in numbers)


def _end(edges: Edges, repeat: Repeat, i: int, e: int) -> tuple[int, int, int]:
    """Where an edge of the first block ends, see `RolledSweep.ends`."""
    (to, output), (later, _) = edges[i][e], edges[i + repeat.period][e]
    if later != to:
        return 0, to - repeat.start, output
    return 1, to - (repeat.end - repeat.start) if to >= 0 else to, output


def _residuals(nodes: Sequence[Node], period: int) -> tuple[list[tuple[int, ...]], list[Any], list[list[Any]]]:
    """Where each residual of a block lies, the residuals that are the same in all blocks, and those that are not."""
    kinds: dict[tuple[int, ...], list[Any]] = {}
    keys: list[list[tuple[int, ...]]] = []
    for n in range(period):
        rows = list(zip(*(node.saved for node in nodes[n::period]), strict=True))
        keys.append([tuple(map(id, row)) for row in rows])
        kinds.update(zip(keys[-1], map(list, rows), strict=True))
    consts = [key for key in kinds if len(set(key)) == 1]
    slots = [key for key in kinds if len(set(key)) > 1]
    place = {key: i for i, key in enumerate((*consts, *slots))}
    return [tuple(place[key] for key in row) for row in keys], [kinds[k][0] for k in consts], [kinds[k] for k in slots]
