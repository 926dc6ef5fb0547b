"""Take the pullback of `jax.vjp` apart, and put it together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.partition.program.jax import abstract


@dataclass
class Residuals:
    """The leaves of the pullback of `jax.vjp`: arrays become results of the forward, references do not.

    A program cannot return a reference. `places` has an entry for each leaf: for a reference among the inputs its
    position (an integer), for a reference that the function closes over the reference itself, and for an array None.
    """

    tree: Any = None
    places: tuple[Any, ...] = ()

    def take(self, pull: Any, inputs: Sequence[Any]) -> list[Any]:
        """Take a pullback apart and return its arrays, in order."""
        leaves, self.tree = jax.tree.flatten(pull)
        self.places = tuple(_place(leaf, inputs) for leaf in leaves)
        return [leaf for leaf, place in zip(leaves, self.places, strict=True) if place is None]

    @property
    def references(self) -> list[int]:
        """Positions of the references among the inputs."""
        return [place for place in self.places if isinstance(place, int)]

    def pull(self, arrays: Sequence[Any], references: Sequence[Any]) -> Any:
        """Rebuild the pullback with other arrays and references."""
        a, r = iter(arrays), iter(references)
        leaves = (next(a) if p is None else next(r) if isinstance(p, int) else p for p in self.places)
        return self.tree.unflatten(leaves)


def _place(leaf: Any, inputs: Sequence[Any]) -> Any:
    if not abstract.is_reference(jax.typeof(leaf)):
        return None
    return next((i for i, x in enumerate(inputs) if x is leaf), leaf)
