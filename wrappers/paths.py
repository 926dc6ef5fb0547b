"""Say how the user reaches each part of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.tree_util import keystr, tree_flatten_with_path


@dataclass(frozen=True)
class Paths:
    """The paths of calls `(args, kwargs)` whose static arguments were set apart: `args[0]['w']`, `kwargs['mask']`.

    `dynamic` are the positions of the arguments that are left.
    """

    dynamic: Sequence[int]

    def leaves(self, tree: Any) -> list[str]:
        """Of each array of a call."""
        return [self._of(keys) for keys, _ in tree_flatten_with_path(tree)[0]]

    def nodes(self, tree: Any, wanted: Callable[[Any], bool]) -> list[tuple[str, Any]]:
        """Of each node for which `wanted` holds, with the node; what lies within such a node is not looked at."""
        found, _ = tree_flatten_with_path(tree, is_leaf=wanted)
        return [(self._of(keys), node) for keys, node in found if wanted(node)]

    def _of(self, keys: Any) -> str:
        head, *rest = keys
        if head.idx == 1:
            return "kwargs" + keystr(tuple(rest))
        return f"args[{self.dynamic[rest[0].idx]}]{keystr(tuple(rest[1:]))}"
