"""Name the parts of a call as the user reaches them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import FlattenedIndexKey, GetAttrKey, keystr, tree_flatten_with_path


@dataclass(frozen=True)
class Paths:
    """Paths in calls `(args, kwargs)` without their static arguments: `args[0]['w']`, `kwargs['mask']`.

    `dynamic` are the original positions of the arguments that are not static.
    """

    dynamic: Sequence[int]

    def leaves(self, tree: Any) -> list[str]:
        """Return the path of each leaf of a call."""
        return [self._of(keys) for keys in leaf_keys(tree)]

    def nodes(self, tree: Any, wanted: Callable[[Any], bool]) -> list[tuple[str, Any]]:
        """Return path and node of each node for which `wanted` is true; such a node is not searched further."""
        nodes, _ = tree_flatten_with_path(tree, is_leaf=wanted)
        return [(self._of(keys), node) for keys, node in nodes if wanted(node)]

    def _of(self, keys: Any) -> str:
        head, *rest = keys
        if head.idx == 1:
            return "kwargs" + keystr(tuple(rest))
        return f"args[{self.dynamic[rest[0].idx]}]{keystr(tuple(rest[1:]))}"


def tree_paths(name: str, tree: Any) -> tuple[str, ...]:
    """Return the path of each leaf of a tree, such as `result['loss']`."""
    return tuple(name + keystr(keys) for keys in leaf_keys(jax.tree.unflatten(tree, range(tree.num_leaves))))


def leaf_keys(tree: Any) -> list[tuple[Any, ...]]:
    """Return the keys of each leaf; if a class gives JAX only a number, like `BCOO`, use the attribute name."""
    leaves, structure = tree_flatten_with_path(tree)
    named = [list(keys) for keys, _ in leaves]

    def walk(node: Any, start: int, depth: int) -> None:
        if node.node_data() is None or node.num_leaves == 0:
            return
        children = node.children()
        names = part_names(node) if isinstance(named[start][depth], FlattenedIndexKey) else [""] * len(children)
        for name, child in zip(names, children, strict=True):
            for keys in named[start : start + child.num_leaves]:
                keys[depth] = GetAttrKey(name) if name.isidentifier() else keys[depth]
            walk(child, start, depth + 1)
            start += child.num_leaves

    if any(isinstance(key, FlattenedIndexKey) for keys in named for key in keys):
        walk(structure, 0, 0)
    return [tuple(keys) for keys in named]


class Marker:
    """A distinct object in the place of a leaf, to find the leaf's attribute."""


def part_names(tree: Any) -> list[str]:
    """Return the name of each child of a node in its class: attribute, key or position."""
    leaf = jax.tree.structure(0)
    places = [Marker() for _ in tree.children()]
    registry = jax.tree_util.default_registry
    one_level = jax.tree_util.PyTreeDef.from_node_data_and_children(registry, tree.node_data(), [leaf] * len(places))
    node = jax.tree.unflatten(one_level, places)
    children, _ = tree_flatten_with_path(node)
    attributes = {id(value): name for name, value in getattr(node, "__dict__", {}).items()}
    return [_part_name(path[0], attributes.get(id(place))) for path, place in children]


def _part_name(key: Any, attribute: str | None) -> str:
    for field in ("name", "idx"):
        if hasattr(key, field):
            return str(getattr(key, field))
    if attribute is not None:
        return attribute
    return str(getattr(key, "key", key))
