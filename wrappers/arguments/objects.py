"""Take objects that can be written apart into their arrays, and write back what became of them.

A Flax NNX module, its random streams, an `nnx.Optimizer` or a metric holds arrays and is written in place. A program
takes arrays and gives arrays. So at a call such an object is *taken apart*: its arrays enter as leaves of a `Taken`
node, the user's function gets an object of its own, built from them, and what the function wrote there leaves the
program as further results, its *states*, which are written to the caller's object once, after the program has run.
An array that several objects share enters once, and its gradient is one.

Each library has an adapter, which is asked only where somebody has imported that library.
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
        """Whether this is such an object, as a whole."""
        ...

    def keeps(self, x: Any) -> bool:
        """Whether this is a plain tree of arrays, although it holds what could be taken apart."""
        ...

    def split(self, objects: Sequence[Any]) -> tuple[Hashable, list[Any]]:
        """The form of some objects, without arrays, and a tree of arrays for each: what they share is in the first."""
        ...

    def merge(self, form: Any, parts: Sequence[Any]) -> Sequence[Any]:
        """New objects of a form, holding these arrays."""
        ...

    def update(self, objects: Sequence[Any], parts: Sequence[Any], written: Sequence[Any]) -> None:
        """Write to the objects those arrays of `parts` whose place in `written` says so."""
        ...

    def differences(self, old: Any, new: Any) -> list[str]:
        """How two forms differ, in words."""
        ...

    def ends(self, x: Any) -> list[tuple[str, Any]]:
        """The parts of an object that can be written, with the way there from the object: `.bn.mean`."""
        ...


@jax.tree_util.register_pytree_with_keys_class
class Part:
    """A node of an object's tree: attributes or items, by name."""

    def __init__(self, names: tuple[Any, ...], children: tuple[Any, ...]) -> None:
        """Name the children."""
        self.names, self.children = names, children

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        """Attributes and positions as the keys by which a user reaches them."""
        keys = [SequenceKey(n) if isinstance(n, int) else GetAttrKey(str(n)) for n in self.names]
        return list(zip(keys, self.children, strict=True)), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[Any, ...], children: Any) -> Part:
        """The same node with other children."""
        return cls(names, tuple(children))

    @classmethod
    def of(cls, tree: Any) -> Any:
        """Nested mappings as parts; everything else as it is."""
        if not isinstance(tree, Mapping):
            return tree
        return cls(tuple(tree), tuple(map(cls.of, tree.values())))

    def items(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Every end below this node with its path."""
        for name, child in zip(self.names, self.children, strict=True):
            if isinstance(child, Part):
                yield from (((name, *path), end) for path, end in child.items())
            else:
                yield (name,), child


class NnxObjects:
    """Graph nodes of Flax NNX: modules, variables, streams, optimisers, metrics."""

    def __init__(self, nnx: Any) -> None:
        """`nnx` is the library, imported by whoever made the object."""
        self.nnx = nnx

    def owns(self, x: Any) -> bool:
        """Whether it is a node of NNX's graphs; a `jax.Ref` is JAX's own."""
        return self.nnx.graph.is_graph_node(x) and not isinstance(x, jax.Ref) and not is_tracer(x)

    def keeps(self, x: Any) -> bool:
        """An `nnx.State` is a tree of arrays, as for `jax.jit`."""
        return isinstance(x, self.nnx.State)

    def split(self, objects: Sequence[Any]) -> tuple[Hashable, list[Any]]:
        """As `nnx.split` of all of them together, so that what they share is known."""
        form, state = self.nnx.split(tuple(objects))
        return form, [Part.of(dict(state).get(i, {})) for i in range(len(objects))]

    def merge(self, form: Any, parts: Sequence[Any]) -> Sequence[Any]:
        """As `nnx.merge`."""
        return self.nnx.merge(form, self._state(dict(self._items(parts))))

    def update(self, objects: Sequence[Any], parts: Sequence[Any], written: Sequence[Any]) -> None:
        """As `nnx.update`, which refuses an object of another trace."""
        told = (any(jax.tree.leaves(flag)) for _, flag in self._items(written))
        ends = {path: end for (path, end), on in zip(self._items(parts), told, strict=True) if on}
        self._refuse_foreign(objects, ends)
        self.nnx.update(tuple(objects), self._state(ends))

    def differences(self, old: Any, new: Any) -> list[str]:
        """The attributes that one form has and the other has not, or has otherwise."""
        before, after = ([(str(name), repr(what)) for name, what in form.attributes] for form in (old, new))
        changed = [name for name, what in after if (name, what) not in before]
        gone = [name for name, what in before if (name, what) not in after]
        return list(dict.fromkeys(name for name in (*changed, *gone) if not name.startswith("_pytree__")))

    def ends(self, x: Any) -> list[tuple[str, Any]]:
        """Its variables."""
        _, (part,) = self.split((x,))
        return [(_way(path[1:]), end) for path, end in self._items([part])]

    def _items(self, parts: Sequence[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        for i, part in enumerate(parts):
            if isinstance(part, Part):
                yield from (((i, *path), end) for path, end in part.items())
            else:
                yield (i,), part

    def _state(self, ends: Mapping[tuple[Any, ...], Any]) -> Any:
        return self.nnx.from_flat_state(ends) if ends else self.nnx.State({})

    def _refuse_foreign(self, objects: Sequence[Any], ends: Mapping[tuple[Any, ...], Any]) -> None:
        """Raise `CallError` for a variable that was made outside of the transformation that is under way."""
        _, state = self.nnx.split(tuple(objects))
        live = dict(self._items([Part.of(dict(state).get(i, {})) for i in range(len(objects))]))
        for path in ends:
            if not getattr(live[path], "_can_update", True):
                raise _Foreign(path[0], _way(path[1:]))


def _way(path: Sequence[Any]) -> str:
    return "".join(f"[{n}]" if isinstance(n, int) else f".{n}" for n in path)


class _Foreign(Exception):
    """An end of an object, by its place and path, that must not be written here."""


_nnx: list[NnxObjects] = []


def _adapters() -> Sequence[Adapter]:
    """The adapters of the libraries that somebody has imported."""
    if not _nnx and (found := sys.modules.get("flax.nnx")) is not None and hasattr(found, "State"):
        _nnx.append(NnxObjects(found))
    return _nnx


# -------------------------------------------------------------------------------------------------------- taking


@dataclass(frozen=True)
class _Form:
    """The common form of all objects of one adapter in a call; it stands in the first of them alone."""

    place: int
    form: Any


@jax.tree_util.register_pytree_with_keys_class
class Taken:
    """An object that was taken apart: its arrays, and what the object is without them."""

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
    """A key that leaves no trace in a path."""

    def __str__(self) -> str:
        return ""


def is_owned(x: Any) -> bool:
    """Whether this is an object that can be written, as a whole."""
    return any(a.owns(x) for a in _adapters())


def put(x: Any, array: Any) -> None:
    """Write an array to an object that holds one: a variable."""
    for adapter in _adapters():
        if adapter.owns(x):
            _, (part,) = adapter.split((x,))
            adapter.update((x,), [jax.tree.map(lambda _: array, part)], [jax.tree.map(lambda _: True, part)])


@dataclass(frozen=True)
class Live:
    """The objects of a call, of one adapter, in order."""

    adapter: Adapter
    objects: tuple[Any, ...]

    def shared(self) -> tuple[tuple[int, str], tuple[int, str]] | None:
        """The first end that two objects have in common: in each its number and the way there."""
        known: dict[int, tuple[int, str]] = {}
        for k, x in enumerate(self.objects):
            mine = self.adapter.ends(x)
            for way, end in mine:
                if id(end) in known:
                    return known[id(end)], (k, way)
            known |= {id(end): (k, way) for way, end in mine}
        return None


def taken_apart(tree: Any) -> tuple[Any, tuple[Live, ...]]:
    """A tree with a `Taken` in the place of each object that can be written, and these objects."""
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
        live.append(Live(adapter, objects))
    return (jax.tree.unflatten(structure, leaves), tuple(live)) if live else (tree, ())


def built(tree: Any) -> tuple[Any, tuple[Live, ...]]:
    """The tree with new objects in the place of what `taken_apart` put there, and these objects."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_taken)
    places = [i for i, leaf in enumerate(leaves) if _is_taken(leaf)]
    if not places:
        return tree, ()
    (adapter,) = _adapters()
    found = [leaves[i] for i in places]
    objects = tuple(adapter.merge(found[0].form.form, [taken.part for taken in found]))
    for i, made in zip(places, objects, strict=True):
        leaves[i] = made
    return jax.tree.unflatten(structure, leaves), (Live(adapter, objects),)


def is_known(x: Any) -> bool:
    """Whether some library's objects look like this: they are written back, or are plain trees of arrays."""
    return any(a.owns(x) or a.keeps(x) for a in _adapters())


def stand_in(tree: Any) -> bool:
    """Whether a tree holds objects that were taken apart."""
    return any(map(_is_taken, jax.tree.leaves(tree, is_leaf=_is_taken)))


def paths_of(tree: Any, paths: Paths) -> list[str]:
    """The paths of the objects of a call that were taken apart."""
    return [path for path, _ in paths.nodes(tree, _is_taken)]


def inside(tree: Any) -> list[Any]:
    """The leaves of a tree that belong to objects which were taken apart."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_taken)
    return [leaf for node in nodes if _is_taken(node) for leaf in jax.tree.leaves(node)]


def tree_of_arrays(tree: Any) -> Any:
    """A tree with that of its arrays in the place of each object that was taken apart."""
    whole = jax.tree.unflatten(tree, range(tree.num_leaves))
    return jax.tree.structure(jax.tree.map(lambda x: x.part if _is_taken(x) else x, whole, is_leaf=_is_taken))


def _is_taken(x: Any) -> bool:
    return isinstance(x, Taken)


# ------------------------------------------------------------------------------------------------------- writing


def states(given: Sequence[Any], tree: Any, live: Sequence[Live], paths: Paths) -> dict[int, Any]:
    """The arrays that a function wrote to objects, by their flat positions in a call.

    `tree` is the call's tree of `Taken` nodes, `given` the arrays that the objects were built from. Raises `TraceError`
    where an object came to hold other things than before, or an array of another shape or dtype.
    """
    parts: list[Any] = []
    nodes = paths.nodes(tree, _is_taken)
    for group in live:
        form, now = group.adapter.split(group.objects)
        where, first = nodes[0]
        if form != first.form.form:
            names = ", ".join(group.adapter.differences(first.form.form, form)) or "its structure"
            what = f"was changed in more than its arrays while the function ran: {names}."
            raise TraceError(message(where, what, _CURE_STRUCTURE))
        parts.extend(now)
    fresh = iter(parts)
    again = jax.tree.map(lambda n: Taken(next(fresh), n.form) if _is_taken(n) else n, tree, is_leaf=_is_taken)
    found: dict[int, Any] = {}
    for i, (new, old) in enumerate(zip(jax.tree.leaves(again), given, strict=True)):
        if new is old:
            continue
        want, got = jax.typeof(old), jax.typeof(new)
        if want.shape != got.shape or want.dtype != got.dtype:
            what = f"is {want.str_short()}, and the function writes {got.str_short()} there."
            cure = "Keep its shape and dtype: a compiled program is made for them."
            raise TraceError(message(paths.leaves(again)[i], what, cure))
        found[i] = new
    return found


def write(live: Sequence[Live], tree: Any, written: Any, paths: Paths) -> None:
    """Write new arrays to the caller's objects.

    `tree` and `written` are the call's tree of `Taken` nodes, with all arrays and with whether each is new. Raises
    `CallError` for an object that the transformation under way must not write.
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
