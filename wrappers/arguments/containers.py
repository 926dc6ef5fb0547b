"""Find array-like objects and the arrays that belong to them.

A *container* is an object that acts as an array: its class is a registered pytree with `shape` and `dtype`, or with
`__jax_array__` (a sparse `BCOO`, an int8 array with its scale, an `nnx.Param`). Containers can be nested. JAX flattens
them itself. This file finds the arrays that belong together, the names that their class gives them, and the arrays that
a gradient keeps. An object with `__jax_array__` that is not a pytree enters as its array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def metas(tree: Any, plains: Sequence[PlainTensorMeta]) -> tuple[Meta, ...]:
    """Return the plain arrays and containers of a tree; `plains` describe its flat leaves."""
    return tuple(meta for _, meta in _walk("", tree, list(plains), 0))


def _walk(name: str, tree: Any, plains: list[PlainTensorMeta], start: int) -> Iterator[tuple[str, Meta]]:
    """Yield outermost containers and plain arrays, with their names."""
    data = tree.node_data()
    if data is None:
        yield name, plains[start]
        return
    kind, aux = data
    if class_name(kind) in _KEPT or is_container_class(kind, tree):
        yield name, _container(kind, aux, tree, plains, start)
        return
    for child in tree.children():
        yield from _walk(name, child, plains, start)
        start += child.num_leaves


def _container(kind: type, aux: Any, tree: Any, plains: list[PlainTensorMeta], start: int) -> SubclassCreationMeta:
    """Describe a container; inner nodes are described as containers too, whatever their class."""
    attrs, position = [], start
    for name, child in zip(part_names(tree), tree.children(), strict=True):
        data = child.node_data()
        part = plains[position] if data is None else _container(data[0], data[1], child, plains, position)
        attrs.append((name, part))
        position += child.num_leaves
    first = plains[start].unwrapped_idx if tree.num_leaves else start
    return SubclassCreationMeta(first, tree.num_leaves, tuple(attrs), aux, kind)


def is_container_class(kind: type, tree: Any) -> bool:
    """Whether a node acts as an array: it has `shape` and `dtype`, or `__jax_array__`."""
    if issubclass(kind, _STRUCTURES):
        return False
    if hasattr(kind, "__jax_array__"):
        return True
    node = jax.tree.unflatten(tree, [Marker() for _ in range(tree.num_leaves)])
    return all(name in dir(node) for name in ("shape", "dtype"))


# ----------------------------------------------------------------------------------------------------- gradients


def kept_structure(tree: Any) -> frozenset[int]:
    """Return the flat positions of the arrays that are the same in an argument and its gradient."""
    return frozenset(i for meta in _placed(tree) for i in _structure(meta))


def _structure(meta: Meta) -> Iterator[int]:
    if isinstance(meta, PlainTensorMeta):
        return
    names = _KEPT.get(class_name(meta.original_subclass_type), ())
    for name, part in meta.attrs:
        if name in names:
            yield from (plain.unwrapped_idx for plain in plain_metas(part))
        else:
            yield from _structure(part)


def inside(tree: Any) -> frozenset[int]:
    """Return the flat positions of the arrays in containers of a tree."""
    found = (meta for meta in _placed(tree) if isinstance(meta, SubclassCreationMeta))
    return frozenset(plain.unwrapped_idx for meta in found for plain in plain_metas(meta))


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


def _placed(tree: Any) -> tuple[Meta, ...]:
    return metas(tree, [PlainTensorMeta(i, (), np.dtype(bool)) for i in range(tree.num_leaves)])
