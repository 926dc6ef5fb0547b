"""Take writable objects apart into arrays, and write the new arrays back.

A Flax NNX module, its random streams, an `nnx.Optimizer` or a metric holds arrays and is written in place. A program
takes and returns arrays. So a call *takes apart* such an object: its arrays become leaves of a `Taken` node. The user's
function gets a new object, built from these arrays. The arrays that it writes there are further results, the *states*.
They are written to the caller's object after the program has run. An array that several objects share enters once, and
has one gradient.

Each library has an adapter, which is used only if that library is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.tree_util import GetAttrKey, SequenceKey

from jointcut.partition.errors import CallError, TraceError, message
from jointcut.partition.program.jaxprs import is_tracer
from jointcut.wrappers.arguments.paths import Paths

_CURE_STRUCTURE = (
    "Make what it adds before the first call (call the module once outside), take out again what it adds, or set "
    "attributes outside of the function."
)


# ------------------------------------------------------------------------------------------------------ adapters


class Adapter(Protocol):
    """How the objects of one library are taken apart, built and written."""

    def owns(self, x: Any) -> bool:
        """Whether this is such an object."""
        ...

    def keeps(self, x: Any) -> bool:
        """Whether this is a plain tree of arrays, which is not taken apart."""
        ...

    def split(self, objects: Sequence[Any]) -> tuple[Hashable, list[Any]]:
        """The form of some objects, without arrays, and a tree of arrays for each; a shared array is in the first."""
        ...

    def merge(self, form: Any, parts: Sequence[Any]) -> Sequence[Any]:
        """New objects of a form, with these arrays."""
        ...

    def update(self, objects: Sequence[Any], parts: Sequence[Any], written: Sequence[Any]) -> None:
        """Write to the objects the arrays of `parts` that are marked in `written`."""
        ...

    def differences(self, old: Any, new: Any) -> list[str]:
        """The names of what differs between two forms."""
        ...

    def ends(self, x: Any) -> list[tuple[str, Any]]:
        """The writable parts of an object, with their paths from the object, such as `.bn.mean`."""
        ...


@jax.tree_util.register_pytree_with_keys_class
class ObjectNode:
    """A node of an object's tree: attributes or items, by name."""

    def __init__(self, names: tuple[Any, ...], children: tuple[Any, ...]) -> None:
        """Name the children."""
        self.names, self.children = names, children

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        """Attributes and positions as the keys by which a user reaches them."""
        keys = [SequenceKey(n) if isinstance(n, int) else GetAttrKey(str(n)) for n in self.names]
        return list(zip(keys, self.children, strict=True)), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[Any, ...], children: Any) -> ObjectNode:
        """The same node with other children."""
        return cls(names, tuple(children))

    @classmethod
    def of(cls, tree: Any) -> Any:
        """Nested mappings as parts; everything else as it is."""
        if not isinstance(tree, Mapping):
            return tree
        return cls(tuple(tree), tuple(map(cls.of, tree.values())))

    def items(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """The path and value of everything below this node that is not a `ObjectNode`."""
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
        """An `nnx.State` is a tree of arrays, as for `jax.jit`."""
        return isinstance(x, self.nnx.State)

    def split(self, objects: Sequence[Any]) -> tuple[Hashable, list[Any]]:
        """As `nnx.split` of all objects together, which finds what they share."""
        form, state = self.nnx.split(tuple(objects))
        return form, [ObjectNode.of(dict(state).get(i, {})) for i in range(len(objects))]

    def merge(self, form: Any, parts: Sequence[Any]) -> Sequence[Any]:
        """As `nnx.merge`."""
        return self.nnx.merge(form, self._state(dict(self._items(parts))))

    def update(self, objects: Sequence[Any], parts: Sequence[Any], written: Sequence[Any]) -> None:
        """As `nnx.update`, which refuses an object of another trace."""
        flags = (any(jax.tree.leaves(flag)) for _, flag in self._items(written))
        ends = {path: end for (path, end), on in zip(self._items(parts), flags, strict=True) if on}
        self._refuse_foreign(objects, ends)
        self.nnx.update(tuple(objects), self._state(ends))

    def differences(self, old: Any, new: Any) -> list[str]:
        """The names of attributes that are in one form only, or differ."""
        before, after = ([(str(name), repr(value)) for name, value in form.attributes] for form in (old, new))
        changed = [name for name, value in after if (name, value) not in before]
        gone = [name for name, value in before if (name, value) not in after]
        return list(dict.fromkeys(name for name in (*changed, *gone) if not name.startswith("_pytree__")))

    def ends(self, x: Any) -> list[tuple[str, Any]]:
        """Its variables."""
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

    def _refuse_foreign(self, objects: Sequence[Any], ends: Mapping[tuple[Any, ...], Any]) -> None:
        """Raise `_Foreign` for a variable that was made outside of the current transformation."""
        _, state = self.nnx.split(tuple(objects))
        live = dict(self._items([ObjectNode.of(dict(state).get(i, {})) for i in range(len(objects))]))
        for path in ends:
            if not getattr(live[path], "_can_update", True):
                raise _Foreign(path[0], _way(path[1:]))


def _way(path: Sequence[Any]) -> str:
    return "".join(f"[{n}]" if isinstance(n, int) else f".{n}" for n in path)


class _Foreign(Exception):
    """A variable that must not be written here: the position of its object, and its path."""


_nnx: list[NnxObjects] = []


def _adapters() -> Sequence[Adapter]:
    """The adapters of the imported libraries."""
    if not _nnx and (nnx := sys.modules.get("flax.nnx")) is not None and hasattr(nnx, "State"):
        _nnx.append(NnxObjects(nnx))
    return _nnx


# -------------------------------------------------------------------------------------------------------- taking


@dataclass(frozen=True)
class _Form:
    """The common form of all objects of one adapter in a call; only the first object has it."""

    place: int
    form: Any


@jax.tree_util.register_pytree_with_keys_class
class Taken:
    """An object that was taken apart: its arrays, and its form without them."""

    def __init__(self, part: Any, form: _Form) -> None:
        """Made by `taken_apart`."""
        self.part, self.form = part, form

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], _Form]:
        """One child, whose key is not shown."""
        return [(_Hidden(), self.part)], self.form

    @classmethod
    def tree_unflatten(cls, form: _Form, children: Any) -> Taken:
        """The same object with other arrays."""
        return cls(children[0], form)


@dataclass(frozen=True)
class _Hidden:
    """A key that is not shown in a path."""

    def __str__(self) -> str:
        return ""


def is_owned(x: Any) -> bool:
    """Whether this is an object that can be written."""
    return any(a.owns(x) for a in _adapters())


def put(x: Any, array: Any) -> None:
    """Write an array to a variable, an object that holds one array."""
    for adapter in _adapters():
        if adapter.owns(x):
            _, (part,) = adapter.split((x,))
            adapter.update((x,), [jax.tree.map(lambda _: array, part)], [jax.tree.map(lambda _: True, part)])


@dataclass(frozen=True)
class LiveObjects:
    """The objects of one adapter in a call, in order."""

    adapter: Adapter
    objects: tuple[Any, ...]

    def shared(self) -> tuple[tuple[int, str], tuple[int, str]] | None:
        """The first variable that two objects share: for each, its number and the path of the variable."""
        known: dict[int, tuple[int, str]] = {}
        for k, x in enumerate(self.objects):
            mine = self.adapter.ends(x)
            for way, end in mine:
                if id(end) in known:
                    return known[id(end)], (k, way)
            known |= {id(end): (k, way) for way, end in mine}
        return None


def taken_apart(tree: Any) -> tuple[Any, tuple[LiveObjects, ...]]:
    """The tree with each writable object replaced by a `Taken`, and these objects."""
    adapters = _adapters()
    if not adapters:
        return tree, ()

    def stops(x: Any) -> bool:
        return any(a.owns(x) or a.keeps(x) for a in adapters)

    leaves, structure = jax.tree.flatten(tree, is_leaf=stops)
    live = []
    for adapter in adapters:
        places = [i for i, leaf in enumerate(leaves) if adapter.owns(leaf)]
        if not places:
            continue
        objects = tuple(leaves[i] for i in places)
        form, parts = adapter.split(objects)
        for k, (i, part) in enumerate(zip(places, parts, strict=True)):
            leaves[i] = Taken(part, _Form(k, form if k == 0 else None))
        live.append(LiveObjects(adapter, objects))
    return (jax.tree.unflatten(structure, leaves), tuple(live)) if live else (tree, ())


def built(tree: Any) -> tuple[Any, tuple[LiveObjects, ...]]:
    """The tree with each `Taken` replaced by a new object, and these objects."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_taken)
    places = [i for i, leaf in enumerate(leaves) if _is_taken(leaf)]
    if not places:
        return tree, ()
    (adapter,) = _adapters()
    nodes = [leaves[i] for i in places]
    objects = tuple(adapter.merge(nodes[0].form.form, [node.part for node in nodes]))
    for i, new in zip(places, objects, strict=True):
        leaves[i] = new
    return jax.tree.unflatten(structure, leaves), (LiveObjects(adapter, objects),)


def is_known(x: Any) -> bool:
    """Whether a library with an adapter handles this: it is written back, or is a plain tree of arrays."""
    return any(a.owns(x) or a.keeps(x) for a in _adapters())


def stand_in(tree: Any) -> bool:
    """Whether a tree holds objects that were taken apart."""
    return any(map(_is_taken, jax.tree.leaves(tree, is_leaf=_is_taken)))


def paths_of(tree: Any, paths: Paths) -> list[str]:
    """The paths of the objects of a call that were taken apart."""
    return [path for path, _ in paths.nodes(tree, _is_taken)]


def inside(tree: Any) -> list[Any]:
    """The leaves in objects that were taken apart."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_taken)
    return [leaf for node in nodes if _is_taken(node) for leaf in jax.tree.leaves(node)]


def tree_of_arrays(tree: Any) -> Any:
    """The tree with each object that was taken apart replaced by the tree of its arrays."""
    whole = jax.tree.unflatten(tree, range(tree.num_leaves))
    return jax.tree.structure(jax.tree.map(lambda x: x.part if _is_taken(x) else x, whole, is_leaf=_is_taken))


def _is_taken(x: Any) -> bool:
    return isinstance(x, Taken)


# ------------------------------------------------------------------------------------------------------- writing


def states(given: Sequence[Any], tree: Any, live: Sequence[LiveObjects], paths: Paths) -> dict[int, Any]:
    """The arrays that a function wrote to objects, by flat position in the call.

    `tree` is the call with `Taken` nodes, `given` are the arrays that the objects were built from. Raises `TraceError`
    if an object changed in more than its arrays, or if an array has another shape or dtype.
    """
    parts: list[Any] = []
    nodes = paths.nodes(tree, _is_taken)
    for group in live:
        form, now = group.adapter.split(group.objects)
        path, first = nodes[0]
        if form != first.form.form:
            names = ", ".join(group.adapter.differences(first.form.form, form)) or "its structure"
            what = f"was changed in more than its arrays while the function ran: {names}."
            raise TraceError(message(path, what, _CURE_STRUCTURE))
        parts.extend(now)
    fresh = iter(parts)
    after = jax.tree.map(lambda n: Taken(next(fresh), n.form) if _is_taken(n) else n, tree, is_leaf=_is_taken)
    written: dict[int, Any] = {}
    for i, (new, old) in enumerate(zip(jax.tree.leaves(after), given, strict=True)):
        if new is old:
            continue
        want, got = jax.typeof(old), jax.typeof(new)
        if want.shape != got.shape or want.dtype != got.dtype:
            what = f"is {want.str_short()}, and the function writes {got.str_short()} there."
            cure = "Keep its shape and dtype: a compiled program is made for them."
            raise TraceError(message(paths.leaves(after)[i], what, cure))
        written[i] = new
    return written


def write(live: Sequence[LiveObjects], tree: Any, written: Any, paths: Paths) -> None:
    """Write new arrays to the caller's objects.

    `tree` is the call with `Taken` nodes and all arrays, `written` the same tree of flags: whether each array is new.
    Raises `CallError` for an object that must not be written inside the current transformation.
    """
    parts, flags = ([node.part for _, node in paths.nodes(t, _is_taken)] for t in (tree, written))
    for group in live:
        try:
            group.adapter.update(group.objects, parts, flags)
        except _Foreign as error:
            place, name = error.args
            what = "is written by the function, but was made outside of the transformation that calls it."
            cure = (
                "Use Flax's own transformation (nnx.grad, nnx.vmap, nnx.scan, nnx.jit), which hands it in and out, or "
                "pass it as an argument of the function that is transformed."
            )
            raise CallError(message(paths.nodes(tree, _is_taken)[place][0] + name, what, cure)) from None
