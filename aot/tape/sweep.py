"""Order the nodes of a tape for the backward, and tell its structure from its values.

Nodes run in the order of PyTorch's engine: the latest op first, and a leaf as soon as its gradient is complete. The
structure determines the program of the backward. It holds the kinds of ops, the values that they read, the hooks, and
the requested gradients. Residuals, scalars and arrays that the function closes over are inputs of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import jax

from jointcut.aot.hooks.hook import ISLAND, Place
from jointcut.aot.tape.nodes import Edge, Node
from jointcut.aot.tape.records import Record


@dataclass(frozen=True)
class Called:
    """A hook of a step: its place, its number among the hooks of the sweep, and the step of its partner.

    For a packed residual, `arrays` are the places of its packed arrays among the flat inputs. For a traced hook, `read`
    are the places of the arrays that it closes over.
    """

    place: Place
    number: int
    partner: int | None = None
    arrays: tuple[int, ...] = ()
    read: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Packed:
    """A residual in the form that a `pack` hook gave it: its `leaves`, and the place of the `unpack` hook."""

    leaves: tuple[Any, ...]
    place: Place

    def listed(self, flat: list[Any]) -> Any:
        """Add the arrays to the flat inputs of the backward, and return the key of the form."""
        if not self.place.is_traced:
            return "called back", self.place.types
        flat.extend((*self.leaves, *self.place.read))
        return self.place.key, len(flat)

    def called(self, known: dict[int, int], numbers: dict[int, int]) -> Called:
        """Return the unpacking hook for a step, without the arrays."""
        kept, read = (self.leaves, self.place.read) if self.place.is_traced else ((), ())
        arrays, others = (tuple(known[id(x)] for x in xs) for xs in (kept, read))
        return Called(self.place, numbers[id(self)], None, arrays, others)

    def __call__(self, flat: Sequence[Any]) -> list[Any]:
        """Unpack the residual from its own leaves; `flat` is not used."""
        del flat
        return self.place(self.leaves)


@dataclass(frozen=True)
class Step:
    """One node of the backward.

    Attributes:
        record: the kind of op.
        edges: the step and output to whose cotangent each gradient is added; leaf `n` is the step `-1 - n`.
        saved: for each residual, its place among the flat inputs, or the hook that unpacks it.
        hooks: the hooks before the backward of the op: first the hooks on its outputs, then the hooks of a call.
        after: the hooks after the backward of the op.
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
        """Return the step of a node, with its hooks in calling order."""
        assert node.record is not None, "leaves are no steps"
        before = sorted(
            (h for h in hooks if h.place.kind not in ("post_hook", ISLAND)), key=lambda h: h.place.kind == "pre_hook"
        )
        after = tuple(hook for hook in hooks if hook.place.kind in ("post_hook", ISLAND))
        return cls(node.record, edges, saved, tuple(before), after, node.source)


@dataclass
class Sweep:
    """The nodes that a backward visits, latest first.

    Attributes:
        nodes: the nodes, without leaves.
        seeds: the node and output of each cotangent.
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
        """Return the sweep from some outputs back to the leaves."""
        nodes = _reached(seeds)
        numbers = {node: i for i, node in enumerate(nodes)}
        numbers.update((leaf, -1 - leaf.place) for leaf in leaves)
        sweep = cls(nodes, tuple(seeds), leaves, [], (), numbers)
        sweep.key = sweep._key()
        return sweep

    def _key(self) -> tuple[Any, ...]:
        """List the residuals, and return the structure."""
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
            keys.append((place.key, self.numbers.get(partner_of(node, place)), len(self.flat) if read else None))
        return keys

    @property
    def count(self) -> int:
        """The number of ops that the sweep visits."""
        return len(self.nodes)

    @property
    def kept(self) -> Sequence[Any]:
        """The residuals, including those of islands."""
        return [*self.flat, *kept_by_islands(self.nodes, self.flat)]

    @property
    def called(self) -> list[Place | Packed]:
        """All hooks of the sweep: unpacking hooks, then hooks of nodes and leaves; the program calls them by number."""
        packed = [x for node in self.nodes for x in node.saved if type(x) is Packed]
        return [*packed, *(place for node in (*self.nodes, *self.leaves) for place in self._hooks(node))]

    def _hooks(self, node: Node) -> list[Place]:
        return [place for place in node.hooks if not place.hook.removed]

    def steps(self) -> tuple[list[Step], list[tuple[Called, ...]]]:
        """Return the structure as steps, and the hooks of each leaf; neither holds values."""
        known = {id(x): i for i, x in enumerate(self.flat)}
        numbers = {id(hook): i for i, hook in enumerate(self.called)}

        def called(node: Node) -> list[Called]:
            return [
                Called(
                    place.alone(),
                    numbers[id(place)],
                    self.numbers.get(partner_of(node, place)),
                    read=tuple(known[id(x)] for x in place.read) if place.is_traced else (),
                )
                for place in self._hooks(node)
            ]

        def step(node: Node) -> Step:
            edges = tuple((self.numbers[parent], i) for parent, i in node.edges)
            saved = tuple(x.called(known, numbers) if type(x) is Packed else known[id(x)] for x in node.saved)
            return Step.of(node, edges, saved, called(node))

        return [step(node) for node in self.nodes], [tuple(called(leaf)) for leaf in self.leaves]


def partner_of(node: Node, place: Place) -> Any:
    """Return the node whose cotangents a hook of a node gets besides its first arguments, or None."""
    return node if place.kind == ISLAND else place.partner


def kept_by_islands(nodes: Sequence[Node], others: Sequence[Any]) -> list[Any]:
    """Return the arrays that the islands among some nodes keep, each once, besides others."""
    islands = [place.hook.function for node in nodes for place in node.hooks if place.kind == ISLAND]
    arrays = [x for island in islands for x in getattr(island, "kept", ()) if isinstance(x, jax.Array)]
    known = set(map(id, others))
    return list({id(x): x for x in arrays if id(x) not in known}.values())


def _reached(seeds: Sequence[Edge]) -> list[Node]:
    """Return the nodes that lead to the outputs, latest first, without leaves."""
    found: set[Node] = set()
    todo = [node for node, _ in seeds]
    while todo:
        node = todo.pop()
        if node in found or node.record is None:
            continue
        found.add(node)
        todo.extend([edge[0] for edge in node.edges])
    return sorted(found, key=attrgetter("order"), reverse=True)
