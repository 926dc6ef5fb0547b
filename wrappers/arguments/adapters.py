"""Take apart, build, write and refill the writable objects of each library.

Each library has an adapter, which is used only if that library is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.tree_util import GetAttrKey, SequenceKey

from jointcut.partition.program.jax.runtime import is_tracer


class Adapter(Protocol):
    """The functions that take apart, build and write the objects of one library."""

    def owns(self, x: Any) -> bool:
        """Whether this is such an object."""
        ...

    def keeps(self, x: Any) -> bool:
        """Whether this is a plain tree of arrays, which is not taken apart."""
        ...

    def split(self, objects: Sequence[Any]) -> tuple[Hashable, list[Any]]:
        """Return the form of some objects, and a tree of arrays for each; a shared array is in the first tree."""
        ...

    def merge(self, form: Any, parts: Sequence[Any]) -> Sequence[Any]:
        """Return new objects of a form, with these arrays."""
        ...

    def update(self, objects: Sequence[Any], parts: Sequence[Any], written: Sequence[Any]) -> None:
        """Write to the objects the arrays of `parts` that are marked in `written`."""
        ...

    def numbered(self, objects: Sequence[Any]) -> Any:
        """Return the parts of objects with numbers; objects of one form give equal numbers to matching parts."""
        ...

    def form_since(self, objects: Sequence[Any], numbered: Any) -> Any:
        """Return the form of objects, with the number that each part had in `numbered`."""
        ...

    def refill(self, objects: Sequence[Any], form: Any, parts: Sequence[Any]) -> None:
        """Give objects a form of `form_since`, with these arrays; parts with a number stay the same Python objects."""
        ...

    def ends(self, x: Any) -> list[tuple[str, Any]]:
        """Return the writable parts of an object, with their paths from the object, such as `.bn.mean`."""
        ...


@jax.tree_util.register_pytree_with_keys_class
class ObjectNode:
    """A node of an object's tree: attributes or items, by name."""

    def __init__(self, names: tuple[Any, ...], children: tuple[Any, ...]) -> None:
        """Name the children."""
        self.names, self.children = names, children

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        """Return the children with the keys by which a user reaches them: attributes or positions."""
        keys = [SequenceKey(n) if isinstance(n, int) else GetAttrKey(str(n)) for n in self.names]
        return list(zip(keys, self.children, strict=True)), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[Any, ...], children: Any) -> ObjectNode:
        """Return the same node with other children."""
        return cls(names, tuple(children))

    @classmethod
    def of(cls, tree: Any) -> Any:
        """Return nested mappings as nodes; return any other tree unchanged."""
        if not isinstance(tree, Mapping):
            return tree
        return cls(tuple(tree), tuple(map(cls.of, tree.values())))

    def items(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yield the path and value of everything below this node that is not an `ObjectNode`."""
        for name, child in zip(self.names, self.children, strict=True):
            if isinstance(child, ObjectNode):
                yield from (((name, *path), end) for path, end in child.items())
            else:
                yield (name,), child


class NnxObjects:
    """Graph nodes of Flax NNX: modules, variables, streams, optimisers, metrics."""

    def __init__(self, nnx: Any) -> None:
        """`nnx` is the imported library."""
        self.nnx = nnx

    def owns(self, x: Any) -> bool:
        """Whether it is a node of an NNX graph, and not a `jax.Ref`."""
        return self.nnx.graph.is_graph_node(x) and not isinstance(x, jax.Ref) and not is_tracer(x)

    def keeps(self, x: Any) -> bool:
        """Whether it is an `nnx.State`, a tree of arrays, as for `jax.jit`."""
        return isinstance(x, self.nnx.State)

    def split(self, objects: Sequence[Any]) -> tuple[Hashable, list[Any]]:
        """Split all objects together, like `nnx.split`, which finds their shared parts."""
        form, state = self.nnx.split(tuple(objects))
        return form, [ObjectNode.of(dict(state).get(i, {})) for i in range(len(objects))]

    def merge(self, form: Any, parts: Sequence[Any]) -> Sequence[Any]:
        """Build objects like `nnx.merge`."""
        return self.nnx.merge(form, self._state(dict(self._items(parts))))

    def update(self, objects: Sequence[Any], parts: Sequence[Any], written: Sequence[Any]) -> None:
        """Update objects like `nnx.update`, which refuses an object of another trace."""
        flags = (any(jax.tree.leaves(flag)) for _, flag in self._items(written))
        ends = {path: end for (path, end), on in zip(self._items(parts), flags, strict=True) if on}
        self._refuse_foreign(objects, ends.keys())
        self.nnx.update(tuple(objects), self._state(ends))

    def numbered(self, objects: Sequence[Any]) -> Any:
        """Number the parts in the order of `nnx.split`."""
        numbers = self.nnx.graph.RefMap()
        self.nnx.graph.flatten(tuple(objects), ref_index=numbers)
        return numbers

    def form_since(self, objects: Sequence[Any], numbered: Any) -> Any:
        """Return the form like `nnx.jit` does for its arguments."""
        return self.nnx.graph.flatten(tuple(objects), ref_outer_index=numbered)[0]

    def refill(self, objects: Sequence[Any], form: Any, parts: Sequence[Any]) -> None:
        """Refill the objects like `nnx.jit` does with its arguments."""
        self._refuse_foreign(objects, None)
        known = {number: part for part, number in self.numbered(objects).items()}
        self.nnx.graph.unflatten(form, self._state(dict(self._items(parts))), outer_index_outer_ref=known)

    def ends(self, x: Any) -> list[tuple[str, Any]]:
        """Return the variables of an object."""
        _, (part,) = self.split((x,))
        return [(_way(path[1:]), end) for path, end in self._items([part])]

    def _items(self, parts: Sequence[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        for i, part in enumerate(parts):
            if isinstance(part, ObjectNode):
                yield from (((i, *path), end) for path, end in part.items())
            else:
                yield (i,), part

    def _state(self, ends: Mapping[tuple[Any, ...], Any]) -> Any:
        return self.nnx.from_flat_state(ends) if ends else self.nnx.State({})

    def _refuse_foreign(self, objects: Sequence[Any], paths: Collection[tuple[Any, ...]] | None) -> None:
        """Raise `Foreign` for a variable from outside of the current transformation; `paths` limits the variables."""
        _, state = self.nnx.split(tuple(objects))
        live = dict(self._items([ObjectNode.of(dict(state).get(i, {})) for i in range(len(objects))]))
        for path in live if paths is None else paths:
            if not getattr(live[path], "_can_update", True):
                raise Foreign(path[0], _way(path[1:]))


def _way(path: Sequence[Any]) -> str:
    return "".join(f"[{n}]" if isinstance(n, int) else f".{n}" for n in path)


class Foreign(Exception):
    """A variable that must not be written here: the position of its object, and its path."""


_nnx: list[NnxObjects] = []


def adapters() -> Sequence[Adapter]:
    """Return the adapters of the imported libraries."""
    if not _nnx and (nnx := sys.modules.get("flax.nnx")) is not None and hasattr(nnx, "State"):
        _nnx.append(NnxObjects(nnx))
    return _nnx
