"""Choose the values that recomputed ops wait by: as few as hold all of these ops back.

A compiler starts an op when all operands are there, so one operand that waits is enough. A value that waits is another
value to the compiler. If it is sharded and must be whole for a product, the copy that the forward gathered does not
serve, and it is gathered once more. So an input, such as a weight, waits only for an op that would wait for nothing
else, and of the operands of a product the first that can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from jointcut.partition.plans.backend import is_input
from jointcut.partition.program.graph import Graph, Op
from jointcut.partition.program.primitives import PACKING, VIEWS


def waiting_roots(
    graph: Graph, ops: Iterable[tuple[Op, Collection[int]]], roots: Mapping[int, None], near: set[int]
) -> list[int]:
    """The `roots` that wait so that no op runs early, in their order.

    The ops are given in program order, each with the values that it reads; they start from `roots` and from values
    `near`, which were computed again just now. A part of a root is no reason to wait.
    """
    walk = _Walk(graph, {v: frozenset({v}) for v in roots}, set(near))
    for op, reads in ops:
        walk.follow(op, reads)
    return [v for v in roots if v in walk.chosen]


@dataclass(frozen=True)
class Whole:
    """The arrays that devices gather, since an op needs them whole.

    A compiler gathers one as soon as it is there. So a saved one waits for the first op that reads it whole, or else
    those of all layers would be whole together.

    Attributes:
        operands: these arrays by op.
        values: all of them, with the values that they are views of. Each is computed again at most once, and waits at
            most once: another value is gathered anew.
    """

    operands: Mapping[int, Collection[int]]
    values: Collection[int]

    @classmethod
    def of(cls, graph: Graph) -> Whole:
        """The arrays that devices gather on automatic axes, as far as that is foreseen."""
        operands: dict[int, list[int]] = {}
        for move in graph.moves:
            for op, v in move.readers:
                operands.setdefault(op, []).append(v)
        return cls(operands, {v for own in operands.values() for v in own for v in _views(graph, v)})

    def kept(self, graph: Graph, ops: Iterable[int], saved: Collection[int]) -> list[int]:
        """The saved values that some ops read whole, or of which they read a view whole."""
        views = (_views(graph, v) for op in ops for v in self.operands.get(op, ()))
        found = (next((v for v in chain if v in saved), None) for chain in views)
        return [v for v in dict.fromkeys(found) if v is not None]


def _views(graph: Graph, v: int) -> list[int]:
    """A value, the one that it is a view of, and so on."""
    chain = [v]
    while (maker := graph.maker_of(chain[-1])) is not None and maker.name in VIEWS:
        chain.append(maker.inputs[0])
    return chain


@dataclass
class _Walk:
    """The ops as they are passed: `views` are parts of roots, with these; values `late` wait or are made of such."""

    graph: Graph
    views: dict[int, frozenset[int]]
    late: set[int]
    chosen: set[int] = field(default_factory=set)

    def follow(self, op: Op, reads: Collection[int]) -> None:
        """Pass an op, and choose what it waits for."""
        is_late = any(v in self.late or not self.chosen.isdisjoint(self.views.get(v, ())) for v in reads)
        free = [v for v in reads if v in self.views and self.chosen.isdisjoint(self.views[v])]
        if op.name in VIEWS and not is_late and free:
            self.views.update(dict.fromkeys(op.outputs, frozenset().union(*(self.views[v] for v in free))))
            return
        computed = [v for v in free if not all(is_input(self.graph, root) for root in self.views[v])]
        if op.name in PACKING:
            taken = [] if is_late else (computed or free)[:1]
        else:
            taken = computed if is_late or computed else free
        self.chosen.update(v for view in taken for v in self.views[view])
        self.late.update(op.outputs)
