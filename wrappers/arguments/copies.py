"""Refuse a function that writes to an object of which it got a copy.

The objects among a traced function's arguments are built anew from their arrays. What `wrappers.objects` knows is
written back after the call; what is written to any other class that is registered as a pytree would be lost. (Dicts and
lists are no such classes: a function that takes `batch.pop("labels")` works on its own copy under `jax.jit` as well.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.partition.errors import TraceError, message
from jointcut.wrappers.arguments import objects
from jointcut.wrappers.arguments.paths import Paths


@dataclass(frozen=True)
class Copies:
    """The copies that a function gets, as they were before it ran."""

    found: tuple[tuple[str, Any, list[Any], Any], ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Copies:
        """Those among some arguments."""
        nodes = Paths(range(len(args))).nodes((tuple(args), dict(kwargs)), _is_copy)
        found = [(path, node, *jax.tree.flatten(node)) for path, node in nodes]
        return cls(tuple(copy for copy in found if _same(copy[2], jax.tree.leaves(copy[1]))))

    def refuse_written(self) -> None:
        """Raise `TraceError` for the first that is not as it was."""
        for path, node, leaves, structure in self.found:
            now, tree = jax.tree.flatten(node)
            if tree != structure or not _same(leaves, now):
                what = f"is a {type(node).__name__}, which the function writes: that would be lost after the call."
                cure = "Return the new object, as aux with has_aux=True, and put it in the place of the old one."
                raise TraceError(message(path, what, cure))


def _same(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the very same objects: a class may make new ones each time that it is asked."""
    return len(leaves) == len(others) and all(a is b for a, b in zip(leaves, others, strict=True))


def _is_copy(x: Any) -> bool:
    """Whether JAX builds an object of a class of its own, to which something could be written."""
    if x is None or isinstance(x, Mapping | list | tuple) or objects.is_known(x):
        return False
    return not hasattr(x, "dtype") and jax.tree_util.default_registry.is_node(type(x))
