"""Find array-like objects and the arrays that belong to them.

A *container* is an object that acts as an array: its class is a registered pytree with `shape` and `dtype`, or with
`__jax_array__` (a sparse `BCOO`, an int8 array with its scale, an `nnx.Param`). Containers can be nested. JAX flattens
them itself. This file finds the arrays that belong together, the names that their class gives them, and the arrays that
a gradient keeps. An object with `__jax_array__` that is not a pytree enters as its array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jax.runtime import is_tracer
from jointcut.wrappers.arguments.paths import Marker, part_names
from jointcut.wrappers.metadata.schemas import Meta, PlainTensorMeta, SubclassCreationMeta, plain_metas
from jointcut.wrappers.record import class_name

_STRUCTURES = (dict, list, tuple, type(None))
_KEPT: dict[str, tuple[str, ...]] = {  # by name, so that jax.experimental.sparse is not imported
    "jax.experimental.sparse.bcoo:BCOO": ("indices",),
    "jax.experimental.sparse.bcsr:BCSR": ("indices", "indptr"),
    "jax.experimental.sparse.coo:COO": ("row", "col"),
    "jax.experimental.sparse.csr:CSR": ("indices", "indptr"),
    "jax.experimental.sparse.csr:CSC": ("indices", "indptr"),
}


def register_container(kind: type, *, structure: Sequence[str] = ()) -> None:
    """Name the parts of a container that are positions and not values, such as indices.

    A gradient's container has the same positions, as in `jax.experimental.sparse.grad`. The gradient of other integers
    is a `float0` zero, as in `jax.vjp`. Raises `CallError` for a class that is not a pytree.
    """
    if not isinstance(kind, type) or not jax.tree_util.default_registry.is_node(kind):
        cure = "Register it first, with jax.tree_util.register_dataclass or register_pytree_with_keys_class."
        raise CallError(message("register_container", f"was given {kind!r}, which is no pytree class.", cure))
    _KEPT[class_name(kind)] = tuple(structure)


# ----------------------------------------------------------------------------------------------------- opening


def needs_opening(leaf: Any) -> bool:
    """Whether a leaf is an object with `__jax_array__`, which JAX's transformations do not take."""
    return hasattr(leaf, "__jax_array__") and not isinstance(leaf, jax.Array) and not is_tracer(leaf)


def opened(leaf: Any) -> Any:
    """Return the array of an object with `__jax_array__`; return any other leaf unchanged."""
    return leaf.__jax_array__() if needs_opening(leaf) else leaf


# --------------------------------------------------------------------------------------------------- describing


@dataclass(frozen=True)
class Described:
    """A tree of arrays, and the records of its plain arrays and containers, with which it is built."""

    tree: Any
    metas: tuple[Meta, ...]

    @classmethod
    def of(cls, tree: Any, leaves: Sequence[Meta]) -> Described:
        """Describe a tree by the records of its leaves; a leaf may be a container itself."""
        return cls(tree, tuple(_walk(tree, list(leaves), 0)))

    def built(self, arrays: Sequence[Any]) -> Any:
        """Build the tree from flat arrays."""
        if self._is_plain:
            return jax.tree.unflatten(self.tree, arrays[: len(self.metas)])
        return jax.tree.unflatten(self._outer, [meta.creation_fn(arrays) for meta in self.metas])

    @cached_property
    def _is_plain(self) -> bool:
        """Whether the leaves are the first flat arrays, in order."""
        plain = (isinstance(meta, PlainTensorMeta) and meta.unwrapped_idx == i for i, meta in enumerate(self.metas))
        return all(plain)

    @cached_property
    def _outer(self) -> Any:
        """The tree with a leaf for each container."""
        return _outer(self.tree)

    @cached_property
    def kept(self) -> frozenset[int]:
        """The flat positions of the arrays that are the same in an argument and its gradient."""
        return frozenset(i for meta in self.metas for i in _structure(meta))

    @cached_property
    def inside(self) -> frozenset[int]:
        """The flat positions of the arrays in containers."""
        return frozenset(i for meta in self.metas if isinstance(meta, SubclassCreationMeta) for i in _positions(meta))


def placed(tree: Any) -> Described:
    """Describe a tree whose leaves have positions and no types."""
    return Described.of(tree, [PlainTensorMeta(i, (), np.dtype(bool)) for i in range(tree.num_leaves)])


def _walk(tree: Any, leaves: list[Meta], start: int) -> Iterator[Meta]:
    """Yield outermost containers and plain arrays."""
    data = tree.node_data()
    if data is None:
        yield leaves[start]
    elif _is_container(data[0], tree):
        yield _container(tree, leaves, start)
    else:
        for child in tree.children():
            yield from _walk(child, leaves, start)
            start += child.num_leaves


def _outer(tree: Any) -> Any:
    data = tree.node_data()
    if data is None or _is_container(data[0], tree):
        return jax.tree.structure(0)
    registry, children = jax.tree_util.default_registry, list(map(_outer, tree.children()))
    return jax.tree_util.PyTreeDef.from_node_data_and_children(registry, data, children)


def _container(tree: Any, leaves: list[Meta], start: int) -> SubclassCreationMeta:
    """Describe a container; inner nodes are described as containers too, whatever their class."""
    attrs, (kind, aux) = [], tree.node_data()
    for name, child in zip(part_names(tree), tree.children(), strict=True):
        part = leaves[start] if child.node_data() is None else _container(child, leaves, start)
        attrs.append((name, part))
        start += child.num_leaves
    return SubclassCreationMeta.of(kind, aux, attrs)


def _is_container(kind: type, tree: Any) -> bool:
    return class_name(kind) in _KEPT or is_container_class(kind, tree)


def is_container_class(kind: type, tree: Any) -> bool:
    """Whether a node acts as an array: it has `shape` and `dtype`, or `__jax_array__`."""
    if issubclass(kind, _STRUCTURES):
        return False
    if hasattr(kind, "__jax_array__"):
        return True
    node = jax.tree.unflatten(tree, [Marker() for _ in range(tree.num_leaves)])
    return all(name in dir(node) for name in ("shape", "dtype"))


# ----------------------------------------------------------------------------------------------------- gradients


def _structure(meta: Meta) -> Iterator[int]:
    if isinstance(meta, PlainTensorMeta):
        return
    names = _KEPT.get(class_name(meta.original_subclass_type), ())
    for name, part in meta.attrs:
        if name in names:
            yield from _positions(part)
        else:
            yield from _structure(part)


def _positions(meta: Meta) -> Iterator[int]:
    return (plain.unwrapped_idx for plain in plain_metas(meta) if plain.unwrapped_idx is not None)


def held_by(tree: Any, kind: type) -> list[int]:
    """Return the flat positions of the leaves below nodes of a class."""
    positions: list[int] = []

    def walk(node: Any, start: int) -> None:
        data = node.node_data()
        if data is not None and issubclass(data[0], kind):
            positions.extend(range(start, start + node.num_leaves))
            return
        for child in node.children():
            walk(child, start)
            start += child.num_leaves

    walk(tree, 0)
    return positions
