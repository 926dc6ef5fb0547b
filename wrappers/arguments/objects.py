"""Take writable objects apart into arrays, and write the new arrays back.

A Flax NNX module, its random streams, an `nnx.Optimizer` or a metric holds arrays and is written in place. A program
takes and returns arrays. So a call *takes apart* such an object: its arrays become leaves of a `Taken` node. The user's
function gets a new object, built from these arrays. The arrays that the function writes to it are further results, the
*states*. They are written to the caller's object after the program has run. If the function adds or removes parts, all
arrays of the objects are results, and the caller's objects are refilled. An array that several objects share enters
once, and has one gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from jointcut.partition.errors import CallError, TraceError, message
from jointcut.wrappers.arguments.adapters import Adapter, Foreign, adapters
from jointcut.wrappers.arguments.paths import Paths

# -------------------------------------------------------------------------------------------------------- taking


@dataclass(frozen=True)
class _CommonForm:
    """The common form of all objects of one adapter in a call; only the first object has it."""

    place: int
    form: Any


@jax.tree_util.register_pytree_with_keys_class
class Taken:
    """An object that was taken apart: its arrays, and its form without them."""

    def __init__(self, part: Any, form: _CommonForm) -> None:
        """Call `taken_apart` instead."""
        self.part, self.form = part, form

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], _CommonForm]:
        """Return one child, whose key is not shown."""
        return [(_Hidden(), self.part)], self.form

    @classmethod
    def tree_unflatten(cls, form: _CommonForm, children: Any) -> Taken:
        """Return the same object with other arrays."""
        return cls(children[0], form)


@dataclass(frozen=True)
class _Hidden:
    """A key that is not shown in a path."""

    def __str__(self) -> str:
        return ""


def is_owned(x: Any) -> bool:
    """Whether this is an object that can be written."""
    return any(a.owns(x) for a in adapters())


def put(x: Any, array: Any) -> None:
    """Write an array to a variable, an object that holds one array."""
    for adapter in adapters():
        if adapter.owns(x):
            _, (part,) = adapter.split((x,))
            adapter.update((x,), [jax.tree.map(lambda _: array, part)], [jax.tree.map(lambda _: True, part)])


@dataclass(frozen=True)
class LiveObjects:
    """The objects of one adapter in a call, in order, and the numbered parts of newly built objects."""

    adapter: Adapter
    objects: tuple[Any, ...]
    numbered: Any = None

    def shared(self) -> tuple[tuple[int, str], tuple[int, str]] | None:
        """Return the first variable that two objects share: each object's number, and the variable's path in it."""
        known: dict[int, tuple[int, str]] = {}
        for k, x in enumerate(self.objects):
            mine = self.adapter.ends(x)
            for way, end in mine:
                if id(end) in known:
                    return known[id(end)], (k, way)
            known |= {id(end): (k, way) for way, end in mine}
        return None


def taken_apart(tree: Any) -> tuple[Any, tuple[LiveObjects, ...]]:
    """Return the tree with each writable object replaced by a `Taken`, and the objects."""
    known = adapters()
    if not known:
        return tree, ()

    def stops(x: Any) -> bool:
        return any(a.owns(x) or a.keeps(x) for a in known)

    leaves, structure = jax.tree.flatten(tree, is_leaf=stops)
    live = []
    for adapter in known:
        places = [i for i, leaf in enumerate(leaves) if adapter.owns(leaf)]
        if not places:
            continue
        objects = tuple(leaves[i] for i in places)
        form, parts = adapter.split(objects)
        for k, (i, part) in enumerate(zip(places, parts, strict=True)):
            leaves[i] = Taken(part, _CommonForm(k, form if k == 0 else None))
        live.append(LiveObjects(adapter, objects))
    return (jax.tree.unflatten(structure, leaves), tuple(live)) if live else (tree, ())


def built(tree: Any) -> tuple[Any, tuple[LiveObjects, ...]]:
    """Return the tree with each `Taken` replaced by a new object, and the new objects."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_taken)
    places = [i for i, leaf in enumerate(leaves) if _is_taken(leaf)]
    if not places:
        return tree, ()
    (adapter,) = adapters()
    nodes = [leaves[i] for i in places]
    objects = tuple(adapter.merge(nodes[0].form.form, [node.part for node in nodes]))
    for i, new in zip(places, objects, strict=True):
        leaves[i] = new
    return jax.tree.unflatten(structure, leaves), (LiveObjects(adapter, objects, adapter.numbered(objects)),)


def is_known(x: Any) -> bool:
    """Whether a library with an adapter handles an object: it is written back, or is a plain tree of arrays."""
    return any(a.owns(x) or a.keeps(x) for a in adapters())


def stand_in(tree: Any) -> bool:
    """Whether a tree holds objects that were taken apart."""
    return any(map(_is_taken, jax.tree.leaves(tree, is_leaf=_is_taken)))


def paths_of(tree: Any, paths: Paths) -> list[str]:
    """Return the paths of the objects of a call that were taken apart."""
    return [path for path, _ in paths.nodes(tree, _is_taken)]


def inside(tree: Any) -> list[Any]:
    """Return the leaves in objects that were taken apart."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_taken)
    return [leaf for node in nodes if _is_taken(node) for leaf in jax.tree.leaves(node)]


def tree_of_arrays(tree: Any) -> Any:
    """Return the tree with each object that was taken apart replaced by the tree of its arrays."""
    whole = jax.tree.unflatten(tree, range(tree.num_leaves))
    return jax.tree.structure(jax.tree.map(lambda x: x.part if _is_taken(x) else x, whole, is_leaf=_is_taken))


def _is_taken(x: Any) -> bool:
    return isinstance(x, Taken)


# ------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Grown:
    """The new form and tree of arrays of the objects of a call, after a function changed their structure.

    `paths` are the user's paths of the arrays.
    """

    form: Any
    tree: Any
    paths: tuple[str, ...]


def grown(tree: Any, live: Sequence[LiveObjects], paths: Paths) -> tuple[Grown, list[Any]] | None:
    """Return the new structure of objects, with their arrays; None if a function changed only arrays.

    `tree` is the call with `Taken` nodes.
    """
    nodes = paths.nodes(tree, _is_taken)
    for group in live:
        form, parts = group.adapter.split(group.objects)
        leaves, structure = tree_flatten_with_path(parts)
        if form != nodes[0][1].form.form or structure != jax.tree.structure([node.part for _, node in nodes]):
            names = tuple(nodes[keys[0].idx][0] + keystr(keys[1:]) for keys, _ in leaves)
            since = group.adapter.form_since(group.objects, group.numbered)
            return Grown(since, structure, names), [leaf for _, leaf in leaves]
    return None


def states(given: Sequence[Any], tree: Any, live: Sequence[LiveObjects], paths: Paths) -> dict[int, Any]:
    """Return the arrays that a function wrote to objects, by flat position in the call.

    `tree` is the call with `Taken` nodes, `given` are the arrays that the objects were built from. Raises `TraceError`
    if an array has another shape or dtype.
    """
    fresh = iter([part for group in live for part in group.adapter.split(group.objects)[1]])
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

    `tree` is the call with `Taken` nodes and all arrays; `written` is the same tree with flags: whether each array is
    new. Raises `CallError` for an object that must not be written inside the current transformation.
    """
    parts, flags = ([node.part for _, node in paths.nodes(t, _is_taken)] for t in (tree, written))
    for group in live:
        with _refusing_foreign(tree, paths):
            group.adapter.update(group.objects, parts, flags)


def refill(live: Sequence[LiveObjects], tree: Any, form: Grown, arrays: Sequence[Any], paths: Paths) -> None:
    """Fill the caller's objects with their new structure and arrays; raises like `write`."""
    for group in live:
        with _refusing_foreign(tree, paths):
            group.adapter.refill(group.objects, form.form, jax.tree.unflatten(form.tree, arrays))


@contextmanager
def _refusing_foreign(tree: Any, paths: Paths) -> Iterator[None]:
    try:
        yield
    except Foreign as error:
        place, name = error.args
        what = "is written by the function, but was made outside of the transformation that calls it."
        cure = (
            "Use Flax's own transformation (nnx.grad, nnx.vmap, nnx.scan, nnx.jit), which hands it in and out, or "
            "pass it as an argument of the function that is transformed."
        )
        raise CallError(message(paths.nodes(tree, _is_taken)[place][0] + name, what, cure)) from None
