"""Order the nodes of a tape for the backward, and tell its structure from its values.

Nodes run in the order of PyTorch's engine: the latest op first, and a leaf as soon as its gradient is complete. The
structure is what the backward's program depends on: which kind of op reads which values, the hooks, and what is asked
for. Residuals, scalars and arrays that the function closes over are the program's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from jointcut.aot.hooks.hook import Place
from jointcut.aot.tape.nodes import Edge, Node
from jointcut.aot.tape.records import Record


@dataclass(frozen=True)
class Called:
    """A hook of a step: its place, its number among the hooks of the sweep, and the step of its partner.

    For a residual that was packed, `arrays` are the places of what was kept among the flat inputs. For a hook that is
    traced, `read` are the places of the arrays that it closes over.
    """

    place: Place
    number: int
    partner: int | None = None
    arrays: tuple[int, ...] = ()
    read: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Packed:
    """A residual in the form that a `pack` hook gave it: its `leaves`, and where they are unpacked."""

    leaves: tuple[Any, ...]
    place: Place

    def listed(self, flat: list[Any]) -> Any:
        """Add the arrays to the flat inputs of the backward, and return the key of the form."""
        if not self.place.is_traced:
            return "called back", self.place.types
        flat.extend((*self.leaves, *self.place.read))
        return self.place.key, len(flat)

    def called(self, known: dict[int, int], numbers: dict[int, int]) -> Called:
        """The unpacking for a step, without the arrays."""
        kept, read = (self.leaves, self.place.read) if self.place.is_traced else ((), ())
        arrays, others = (tuple(known[id(x)] for x in xs) for xs in (kept, read))
        return Called(self.place, numbers[id(self)], None, arrays, others)

    def __call__(self, flat: Sequence[Any]) -> list[Any]:
        """Unpack it; the arguments are its own."""
        del flat
        return self.place(self.leaves)


@dataclass(frozen=True)
class Step:
    """One node of the backward.

    Attributes:
        record: the kind of op.
        edges: the step and output of which each gradient is a part; leaf `n` is the step `-1 - n`.
        saved: places of the residuals among the flat inputs, or how they are unpacked.
        hooks: what is called before the backward of the op: the hooks on its outputs, then those of a call.
        after: what is called after it.
        source: the user's line.
    """

    record: Record
    edges: tuple[tuple[int, int], ...]
    saved: tuple[int | Called, ...]
    hooks: tuple[Called, ...]
    after: tuple[Called, ...]
    source: Any = field(repr=False)

    @classmethod
    def of(
        cls,
        node: Node,
        edges: tuple[tuple[int, int], ...],
        saved: tuple[int | Called, ...],
        hooks: Sequence[Called],
    ) -> Step:
        """The step of a node, with its hooks in the order in which they are called."""
        assert node.record is not None, "leaves are no steps"
        before = sorted((h for h in hooks if h.place.kind != "post_hook"), key=lambda h: h.place.kind == "pre_hook")
        after = tuple(hook for hook in hooks if hook.place.kind == "post_hook")
        return cls(node.record, edges, saved, tuple(before), after, node.source)


@dataclass
class Sweep:
    """The nodes that a backward visits, latest first.

    Attributes:
        nodes: the nodes, without leaves.
        seeds: for each cotangent, the node and place of its output.
        leaves: the differentiated arrays, in order.
        flat: the residuals, each array once.
        key: the structure.
    """

    nodes: list[Node]
    seeds: tuple[Edge, ...]
    leaves: Sequence[Node]
    flat: list[Any]
    key: tuple[Any, ...]
    numbers: dict[Node, int] = field(repr=False)

    @classmethod
    def of(cls, seeds: Sequence[Edge], leaves: Sequence[Node]) -> Sweep:
        """The sweep from some outputs back to the leaves."""
        nodes = _reached(seeds)
        numbers = {node: i for i, node in enumerate(nodes)}
        numbers.update((leaf, -1 - leaf.place) for leaf in leaves)
        sweep = cls(nodes, tuple(seeds), leaves, [], (), numbers)
        sweep.key = sweep._key()
        return sweep

    def _key(self) -> tuple[Any, ...]:
        """The structure, as it is found while the residuals are listed."""
        flat, numbers, known, parts = self.flat, self.numbers, dict[int, int](), list[Any]()
        for node in self.nodes:
            part: list[Any] = [node.record.id]  # pyright: ignore[reportOptionalMemberAccess]
            for parent, i in node.edges:
                part.append(numbers[parent])
                part.append(i)
            for x in node.saved:
                if type(x) is Packed:
                    part.append(x.listed(flat))
                    continue
                place = known.get(id(x))
                if place is None:
                    place = known[id(x)] = len(flat)
                    flat.append(x)
                part.append(place)
            if node.hooks:
                part.append(tuple(self._hook_keys(node)))
            parts.append(tuple(part))
        hooked = [(leaf.place, *self._hook_keys(leaf)) for leaf in self.leaves if leaf.hooks]
        seeds = ((numbers[node], i) for node, i in self.seeds)
        return (*parts, tuple(seeds), *hooked)

    def _hook_keys(self, node: Node) -> list[Any]:
        keys: list[Any] = []
        for place in self._hooks(node):
            read = place.read if place.is_traced else ()
            self.flat.extend(read)
            keys.append((place.key, self.numbers.get(place.partner), len(self.flat) if read else None))
        return keys

    @property
    def count(self) -> int:
        """The number of ops that it goes back through."""
        return len(self.nodes)

    @property
    def kept(self) -> Sequence[Any]:
        """The residuals."""
        return self.flat

    @property
    def called(self) -> list[Place | Packed]:
        """All hooks of the sweep, those of the nodes and then of the leaves; the program calls them by number."""
        packed = [x for node in self.nodes for x in node.saved if type(x) is Packed]
        return [*packed, *(place for node in (*self.nodes, *self.leaves) for place in self._hooks(node))]

    def _hooks(self, node: Node) -> list[Place]:
        return [place for place in node.hooks if not place.hook.removed]

    def steps(self) -> tuple[list[Step], list[tuple[Called, ...]]]:
        """The structure as steps, and the hooks of each leaf, which hold no values."""
        known = {id(x): i for i, x in enumerate(self.flat)}
        numbers = {id(hook): i for i, hook in enumerate(self.called)}

        def called(node: Node) -> list[Called]:
            return [
                Called(
                    replace(place, partner=None),
                    numbers[id(place)],
                    self.numbers.get(place.partner),
                    read=tuple(known[id(x)] for x in place.read) if place.is_traced else (),
                )
                for place in self._hooks(node)
            ]

        def step(node: Node) -> Step:
            edges = tuple((self.numbers[parent], i) for parent, i in node.edges)
            saved = tuple(x.called(known, numbers) if type(x) is Packed else known[id(x)] for x in node.saved)
            return Step.of(node, edges, saved, called(node))

        return [step(node) for node in self.nodes], [tuple(called(leaf)) for leaf in self.leaves]


def _reached(seeds: Sequence[Edge]) -> list[Node]:
    """The nodes that lead to the outputs, latest first, without leaves."""
    found: set[Node] = set()
    todo = [node for node, _ in seeds]
    while todo:
        node = todo.pop()
        if node in found or node.record is None:
            continue
        found.add(node)
        todo.extend([edge[0] for edge in node.edges])
    return sorted(found, key=attrgetter("order"), reverse=True)
