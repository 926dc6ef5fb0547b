"""Refuse a function that writes to a copy of an object.

A traced function gets objects that are built anew from their arrays. Writes to objects that `arguments.objects` knows
are repeated on the caller's objects. Writes to any other registered pytree class would be lost. (Dicts and lists are
exempt: a function that calls `batch.pop("labels")` works on its own copy under `jax.jit` as well.)
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
    """The copies that a function gets, as they were before it ran: path, object, leaves and structure of each."""

    copies: tuple[tuple[str, Any, list[Any], Any], ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Copies:
        """The copies among these arguments."""
        nodes = Paths(range(len(args))).nodes((tuple(args), dict(kwargs)), _is_copy)
        copies = [(path, node, *jax.tree.flatten(node)) for path, node in nodes]
        return cls(tuple(copy for copy in copies if _same(copy[2], jax.tree.leaves(copy[1]))))

    def refuse_written(self) -> None:
        """Raise `TraceError` for the first copy that has changed."""
        for path, node, leaves, structure in self.copies:
            now, tree = jax.tree.flatten(node)
            if tree != structure or not _same(leaves, now):
                what = f"is a {type(node).__name__}, which the function writes: that would be lost after the call."
                cure = "Return the new object, as aux with has_aux=True, and put it in the place of the old one."
                raise TraceError(message(path, what, cure))


def _same(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the same objects; some classes make new ones for each flattening."""
    return len(leaves) == len(others) and all(a is b for a, b in zip(leaves, others, strict=True))


def _is_copy(x: Any) -> bool:
    """Whether an object is rebuilt by JAX and could be written, without being known to `objects`."""
    if x is None or isinstance(x, Mapping | list | tuple) or objects.is_known(x):
        return False
    return not hasattr(x, "dtype") and jax.tree_util.default_registry.is_node(type(x))
