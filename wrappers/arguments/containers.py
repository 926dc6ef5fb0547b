"""Open array-like objects into arrays, and close them again.

A *container* is an object that stands for an array: a registered pytree class with `shape` and `dtype` or with
`__jax_array__` (a sparse `BCOO`, an int8 array with its scale, an `nnx.Param`), however deep they are nested. JAX opens
it by itself; what is ours is to say which arrays belong together, to name them as their class does, and to give the
gradient back in the container that belongs to it. An object with `__jax_array__` that is no pytree enters as its array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jaxprs import is_tracer
from jointcut.wrappers.arguments.paths import Place, part_names
from jointcut.wrappers.metadata.schemas import Meta, PlainTensorMeta, SubclassCreationMeta, plain_metas
from jointcut.wrappers.record import class_name

_STRUCTURES = (dict, list, tuple, type(None))
_KEPT: dict[str, tuple[str, ...]] = {  # by name, so that nobody imports jax.experimental.sparse for our sake
    "jax.experimental.sparse.bcoo:BCOO": ("indices",),
    "jax.experimental.sparse.bcsr:BCSR": ("indices", "indptr"),
    "jax.experimental.sparse.coo:COO": ("row", "col"),
    "jax.experimental.sparse.csr:CSR": ("indices", "indptr"),
    "jax.experimental.sparse.csr:CSC": ("indices", "indptr"),
}


def register_container(kind: type, *, structure: Sequence[str] = ()) -> None:
    """Name the parts of a container that say where its numbers stand and not what they are.

    They are the same in the gradient's container, as `jax.experimental.sparse.grad` has it for indices; integers that
    are not named here come back as `float0` zeros, as from `jax.vjp`. Raises `CallError` for a class that is no pytree.
    """
    if not isinstance(kind, type) or not jax.tree_util.default_registry.is_node(kind):
        cure = "Register it first, with jax.tree_util.register_dataclass or register_pytree_with_keys_class."
        raise CallError(message("register_container", f"was given {kind!r}, which is no pytree class.", cure))
    _KEPT[class_name(kind)] = tuple(structure)


# ----------------------------------------------------------------------------------------------------- opening


def needs_opening(leaf: Any) -> bool:
    """Whether a leaf is an object that JAX's transformations do not take, but that can give its array."""
    return hasattr(leaf, "__jax_array__") and not isinstance(leaf, jax.Array) and not is_tracer(leaf)


def opened(leaf: Any) -> Any:
    """The array of an object with `__jax_array__`, anything else as it is."""
    return leaf.__jax_array__() if needs_opening(leaf) else leaf


# --------------------------------------------------------------------------------------------------- describing


def metas(tree: Any, plains: Sequence[PlainTensorMeta]) -> tuple[Meta, ...]:
    """The plain arrays and containers of a tree; `plains` describe its flat leaves."""
    return tuple(meta for _, meta in _walk("", tree, list(plains), 0))


def _walk(name: str, tree: Any, plains: list[PlainTensorMeta], start: int) -> Iterator[tuple[str, Meta]]:
    """Outermost containers and plain arrays, with their names."""
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
    """Describe a container; what it holds that is a node is described as one too, whatever its class."""
    attrs, at = [], start
    for name, child in zip(part_names(tree), tree.children(), strict=True):
        data = child.node_data()
        part = plains[at] if data is None else _container(data[0], data[1], child, plains, at)
        attrs.append((name, part))
        at += child.num_leaves
    return SubclassCreationMeta(
        plains[start].unwrapped_idx if at > start else start, at - start, tuple(attrs), aux, kind
    )


def is_container_class(kind: type, tree: Any) -> bool:
    """Whether a node of a tree stands for an array: it has a shape and a dtype, or gives its array."""
    if issubclass(kind, _STRUCTURES):
        return False
    if hasattr(kind, "__jax_array__"):
        return True
    made = jax.tree.unflatten(tree, [Place() for _ in range(tree.num_leaves)])
    return all(name in dir(made) for name in ("shape", "dtype"))


# ----------------------------------------------------------------------------------------------------- gradients


def kept_structure(tree: Any) -> frozenset[int]:
    """Flat positions of the arrays that a gradient's container has in common with the argument's."""
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
    """Flat positions of the arrays of a tree that belong to a container."""
    owned = (meta for meta in _placed(tree) if isinstance(meta, SubclassCreationMeta))
    return frozenset(plain.unwrapped_idx for meta in owned for plain in plain_metas(meta))


def held_by(tree: Any, kind: type) -> list[int]:
    """Flat positions of the leaves of a tree below nodes of a class."""
    found: list[int] = []

    def walk(node: Any, start: int) -> None:
        data = node.node_data()
        if data is not None and issubclass(data[0], kind):
            found.extend(range(start, start + node.num_leaves))
            return
        for child in node.children():
            walk(child, start)
            start += child.num_leaves

    walk(tree, 0)
    return found


def _placed(tree: Any) -> tuple[Meta, ...]:
    return metas(tree, [PlainTensorMeta(i, (), np.dtype(bool)) for i in range(tree.num_leaves)])
