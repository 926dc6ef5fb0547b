"""Find the part of a backward that repeats, so that loops of all lengths share one program.

A loop that ran in Python leaves equal blocks of nodes, one after the other. The ops of a block read values of their own
block, pass cotangents to their own and to the next block, and add gradients to values outside. One compiled loop runs
such blocks, 16 at a time. Its trip count is an argument, and it stacks residuals while it runs. So neither the program
nor its memory depends on the length, and gradients are added in the same order.

Blocks may have hooks. Traced hooks are part of the loop; with other hooks the loop runs block by block. A block may
have parameters of its own, whose gradients the loop returns. Its results may be read outside of the loop, such as by
`jnp.stack`; then the op that reads them depends on the length. Blocks with packed residuals are not found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.hooks.hook import Place
from jointcut.aot.tape.loop import BlockLoop
from jointcut.aot.tape.nodes import Node
from jointcut.aot.tape.records import Record
from jointcut.aot.tape.sweep import Called, Packed, Step, Sweep, kept_by_islands, partner_of
from jointcut.aot.tape.walk import Structure

#: The number of distances between equal nodes that are tried as the length of a block.
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
        """The first node after the blocks."""
        return self.start + self.period * self.count


@dataclass
class RolledSweep(Sweep):
    """A sweep with a part that repeats; `nodes` and `flat` leave out its blocks.

    Attributes:
        repeat: the blocks.
        blocks: the nodes of each block.
        ends: the end of each edge of each node of the first block. It is 0, the node counted from the block's start,
            and its output; or 1, a node or leaf outside, and its output; or 2 and the number of the block's own leaf.
        places: for each residual of each of these nodes, its place among constants and then slots.
        consts: the residuals that all blocks read.
        slots: the residuals that differ between blocks, each with one array for each block.
        owns: for each leaf of a block's own, the places of its leaves in all blocks.
        own: the gradients of the blocks' own leaves, once the loop has run.
    """

    repeat: Repeat = Repeat(0, 0, 0)
    blocks: Sequence[Sequence[Node]] = ()
    ends: Sequence[Sequence[tuple[int, int, int]]] = ()
    places: Sequence[Sequence[int]] = ()
    consts: Sequence[Any] = ()
    slots: Sequence[Sequence[Any]] = ()
    owns: Sequence[Sequence[int]] = ()
    own: dict[int, Any] = field(default_factory=dict)

    @property
    def block(self) -> Sequence[Node]:
        """The nodes of the first block."""
        return self.blocks[0]

    @property
    def count(self) -> int:
        """The number of ops that the sweep visits."""
        return len(self.nodes) + self.repeat.period * self.repeat.count

    @property
    def kept(self) -> Sequence[Any]:
        """The residuals, including the residuals of the blocks."""
        nodes = [*self.nodes, *(node for block in self.blocks for node in block)]
        arrays = [*self.flat, *self.consts, *(x for slot in self.slots for x in slot)]
        return [*arrays, *kept_by_islands(nodes, arrays)]

    @property
    def inner(self) -> list[Place]:
        """The hooks of the first block."""
        return [place for node in self.block for place in self._hooks(node)]

    def running(self, structure: Structure) -> list[Callable[[Sequence[Any]], list[Any]]]:
        """Return the hooks of this run, by number, and then its loop, which notes the gradients of own leaves."""
        loop = structure.loop
        assert loop is not None, "the structure of another sweep"
        hooks = [[place for node in block for place in self._hooks(node)] for block in self.blocks]

        def run(arrays: Sequence[Any]) -> list[Any]:
            results, own = loop.run(self.consts, self.slots, hooks, arrays)
            self.own.clear()
            for k, gradients in enumerate(own):
                for n, gradient in zip(loop.owned, gradients, strict=True):
                    place = self.owns[n][k]
                    self.own[place] = self.own[place] + gradient if place in self.own else gradient
            return results

        return [*self.called, run]

    @property
    def loop(self) -> BlockLoop:
        """The blocks as one loop without values."""
        period = self.repeat.period
        targets = list(dict.fromkeys((to, i) for ends in self.ends for kind, to, i in ends if kind == 1))

        def edge(kind: int, to: int, i: int) -> tuple[int, int]:
            if kind == 2:
                return 2 * period + len(targets) + to, 0
            return (2 * period + targets.index((to, i)), 0) if kind else (to, i)

        numbers = {id(place): i for i, place in enumerate(self.inner)}
        at = {node: n for n, node in enumerate(self.block)}

        def called(node: Node, place: Place, read: Sequence[int]) -> Called:
            partner = at.get(partner_of(node, place))
            return Called(place.alone(), numbers[id(place)], partner, read=tuple(read))

        steps = []
        for node, ends, places in zip(self.block, self.ends, self.places, strict=True):
            left = iter(places)
            saved = tuple(next(left) for _ in node.saved)
            hooks = [called(node, place, [next(left) for _ in read_by(place)]) for place in self._hooks(node)]
            steps.append(Step.of(node, tuple(edge(*end) for end in ends), saved, hooks))
        types = tuple(map(jax.typeof, (*self.consts, *(slot[0] for slot in self.slots))))
        return BlockLoop(
            self.repeat.start, len(self.called), Structure(steps, (), ()), tuple(targets), types, self.repeat.count
        )


def rolled(sweep: Sweep, owns: bool = True) -> Sweep:
    """Return the sweep with its largest repeating part rolled up; return the sweep itself if no part repeats.

    With `owns`, blocks may have leaves of their own.
    """
    edges = [[(sweep.numbers[parent], i) for parent, i in node.edges] for node in sweep.nodes]
    finder = _Finder(sweep, edges, _own_spans(sweep, edges) if owns else {})
    repeat = finder.found()
    if repeat is None:
        return sweep
    start, end, period = repeat.start, repeat.end, repeat.period
    outside = [*sweep.nodes[:start], *sweep.nodes[end:]]
    blocks = [sweep.nodes[i : i + period] for i in range(start, end, period)]
    numbers = {node: i for i, node in enumerate((*outside, *sweep.nodes[start:end]))}
    numbers.update((leaf, -1 - leaf.place) for leaf in sweep.leaves)
    owned: dict[tuple[int, ...], int] = {}
    ends = [[finder.end(repeat, start + n, e, owned) for e in range(len(edges[start + n]))] for n in range(period)]
    places, consts, slots = _residuals(sweep, blocks)
    parts = outside, sweep.seeds, sweep.leaves, [], (), numbers
    made = RolledSweep(*parts, repeat, blocks, ends, places, consts, slots, list(owned))
    block = ((finder.kinds[start + n], tuple(row), p) for n, (row, p) in enumerate(zip(ends, places, strict=True)))
    read = [*(sweep.numbers[node] for node, _ in sweep.seeds), *(n for row in edges[:start] for n, _ in row)]
    is_entered = any(start + period <= n < end for n in read)
    made.key = (made._key(), start, tuple(block), len(consts), repeat.count if is_entered else 0)
    return made


def structure_of(sweep: Sweep) -> Structure:
    """Return the structure of a sweep, which holds no values."""
    steps, leaf_hooks = sweep.steps()
    seeds = [(sweep.numbers[node], i) for node, i in sweep.seeds]
    return Structure(steps, leaf_hooks, seeds, sweep.loop if isinstance(sweep, RolledSweep) else None)


def record_of(node: Node) -> Record:
    """Return the record of a node that is not a leaf."""
    assert node.record is not None, "leaves are no steps"
    return node.record


def read_by(place: Place) -> tuple[Any, ...]:
    """Return the arrays that a hook reads as inputs of the program."""
    return place.read if place.is_traced else ()


def _own_spans(sweep: Sweep, edges: Edges) -> dict[int, tuple[int, int]]:
    """Map each leaf that a block may own to the first and the last node that reads it."""
    spans: dict[int, tuple[int, int]] = {}
    for i, row in enumerate(edges):
        for to, _ in row:
            if to < 0:
                spans[to] = spans.get(to, (i, i))[0], i
    taken = {sweep.numbers[node] for node, _ in sweep.seeds}
    taken.update(sweep.numbers[leaf] for leaf in sweep.leaves if leaf.hooks)
    return {leaf: span for leaf, span in spans.items() if leaf not in taken}


class _Finder:
    """Find the blocks of a sweep; `spans` is the result of `_own_spans`."""

    def __init__(self, sweep: Sweep, edges: Edges, spans: dict[int, tuple[int, int]]) -> None:
        """Name the kind of each node."""
        self.sweep, self.edges, self.spans = sweep, edges, spans
        self.kinds = [self.kind(i, node) for i, node in enumerate(sweep.nodes)]

    def kind(self, i: int, node: Node) -> Any:
        """Return a key that is equal for nodes that may replace each other; other nodes get a key of their own."""
        if any(type(x) is Packed for x in node.saved):
            return -1 - node.order
        numbers = self.sweep.numbers
        pairs = [(h.key, partner_of(node, h)) for h in self.sweep._hooks(node)]
        hooks = [(key, None if partner is None else numbers[partner] - i) for key, partner in pairs]
        return (record_of(node).id, *hooks) if hooks else record_of(node).id

    def found(self) -> Repeat | None:
        """Return the blocks that cover the most nodes."""
        count, best = len(self.kinds), None
        for period in _periods(self.kinds):
            start = 0
            while start + 2 * period <= count:
                end = start
                while end + period < count and self.is_alike(end, period):
                    end += 1
                if end - start >= period and (best is None or end - start + period > best.end - best.start):
                    best = self.checked(Repeat(start, period, (end - start) // period + 1)) or best
                start = end + 1
        return best

    def is_alike(self, i: int, period: int) -> bool:
        """Whether node `i` and the node `period` later are of one kind, and their edges end alike."""
        pairs = zip(self.edges[i], self.edges[i + period], strict=True)
        return self.kinds[i] == self.kinds[i + period] and all(
            a[1] == b[1] and (b[0] == a[0] or (a[0] >= 0 and b[0] - a[0] == period) or self.are_own(a[0], b[0], period))
            for a, b in pairs
        )

    def are_own(self, a: int, b: int, period: int) -> bool:
        """Whether two leaves may each belong to one block."""
        return all(leaf in self.spans and self.spans[leaf][1] - self.spans[leaf][0] < period for leaf in (a, b))

    def checked(self, repeat: Repeat) -> Repeat | None:
        """Return the blocks, or None unless each edge ends in its block, the next one, an own leaf, or outside."""
        start, period, end = repeat.start, repeat.period, repeat.end
        partners = (h.partner for node in self.sweep.nodes[start : start + period] for h in self.sweep._hooks(node))
        if any(h is not None and not start <= self.sweep.numbers[h] < start + period for h in partners):
            return None
        for i in range(start, start + period):
            for e, (to, _) in enumerate(self.edges[i]):
                ends = [self.edges[k][e][0] for k in range(i, end, period)]
                if ends[1] == to:
                    if any(other != to for other in ends) or 0 <= to < end:
                        return None
                elif to < 0:
                    blocks = (range(k, k + period) for k in range(start, end, period))
                    if not all(
                        leaf in self.spans and {*self.spans[leaf]} <= {*block}
                        for leaf, block in zip(ends, blocks, strict=True)
                    ):
                        return None
                elif ends != list(range(to, to + len(ends) * period, period)) or to >= start + 2 * period:
                    return None
        return repeat

    def end(self, repeat: Repeat, i: int, e: int, owned: dict[tuple[int, ...], int]) -> tuple[int, int, int]:
        """Return the end of an edge of the first block, as in `RolledSweep.ends`; `owned` holds own leaves."""
        (to, output), (later, _) = self.edges[i][e], self.edges[i + repeat.period][e]
        if later == to:
            return 1, to - (repeat.end - repeat.start) if to >= 0 else to, output
        if to >= 0:
            return 0, to - repeat.start, output
        places = tuple(-1 - self.edges[k][e][0] for k in range(i, repeat.end, repeat.period))
        return 2, owned.setdefault(places, len(owned)), output


def _periods(kinds: Sequence[Any]) -> list[int]:
    """Return the most frequent distances from a node to the next node of its kind."""
    last: dict[Any, int] = {}
    distances: Counter[int] = Counter()
    for i, kind in enumerate(kinds):
        if kind in last:
            distances[i - last[kind]] += 1
        last[kind] = i
    return [distance for distance, _ in distances.most_common(MOST_PERIODS)]


def _residuals(
    sweep: Sweep, blocks: Sequence[Sequence[Node]]
) -> tuple[list[tuple[int, ...]], list[Any], list[list[Any]]]:
    """Return the place of each residual of a block, the residuals that all blocks share, and the other residuals.

    The residuals of a node are followed by the arrays that its hooks read.
    """
    kinds: dict[tuple[int, ...], list[Any]] = {}
    keys: list[list[tuple[int, ...]]] = []
    for nodes in zip(*blocks, strict=True):
        read = [[*node.saved, *(x for place in sweep._hooks(node) for x in read_by(place))] for node in nodes]
        rows = list(zip(*read, strict=True))
        keys.append([tuple(map(id, row)) for row in rows])
        kinds.update(zip(keys[-1], map(list, rows), strict=True))
    consts = [key for key in kinds if len(set(key)) == 1]
    slots = [key for key in kinds if len(set(key)) > 1]
    place = {key: i for i, key in enumerate((*consts, *slots))}
    return [tuple(place[key] for key in row) for row in keys], [kinds[k][0] for k in consts], [kinds[k] for k in slots]
