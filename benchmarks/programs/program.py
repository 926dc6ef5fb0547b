"""Say what a program of the suite is: a loss, its arguments, and where a user could put `jax.checkpoint`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

Size = Literal["tiny", "small", "medium", "large"]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

SIZES: tuple[Size, ...] = ("tiny", "small", "medium", "large")

#: Where `jax.checkpoint` can go: around the loss, around each block, around the body of a scan.
PLACES = ("loss", "block", "body")


def identity(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a block or a body in nothing."""
    return function


@dataclass(frozen=True)
class Program:
    """One training step to be: `loss(parameters, *rest)`, differentiated by its parameters.

    The loss takes a keyword `block` or `body` for each place in `places`: a wrapper that it puts around each of its
    blocks, or around the body of its scan. With `has_aux` it returns `(loss, aux)`. `tolerance` bounds the relative
    difference `|g - plain| / |plain|` (Euclidean norm over the whole gradient tree) by dtype.
    """

    name: str
    title: str
    loss: Callable[..., Any]
    arguments: tuple[Any, ...]
    has_aux: bool = False
    places: tuple[str, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"float32": 1e-5, "bfloat16": 3e-2})

    def wrapped(self, place: str, wrap: Wrap) -> Callable[..., Any]:
        """The loss with a wrapper at one of `PLACES`; it must be the whole loss or one that the program has."""
        if place == "loss":
            return wrap(self.loss)
        if place not in self.places:
            raise ValueError(f"{self.name} has no {place}; it has {('loss', *self.places)}")
        return partial(self.loss, **{place: wrap})

    def cast(self, dtype: Any) -> "Program":
        """The same program with its float32 arguments in another dtype."""

        def leaf(x: Any) -> Any:
            return x.astype(dtype) if getattr(x, "dtype", None) == jnp.float32 else x

        return replace(self, arguments=jax.tree.map(leaf, self.arguments))

    @property
    def num_parameters(self) -> int:
        """How many numbers the loss is differentiated by."""
        return sum(p.size for p in jax.tree.leaves(self.arguments[0]))
