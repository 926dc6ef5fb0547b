"""Write random modules of Flax NNX whose objects change while they are called: numbers, structure, random streams.

    print(grown(7).text)

Each is a class with one call. What a call does to the object is compared with the same call under `nnx.value_and_grad`.
The same seed gives the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

#: What a call may do, a line each; `h` is a vector of 3.
LINES = (
    "self.sow(nnx.Intermediate, 'hidden', h)",
    "self.sow(nnx.Intermediate, 'hidden', 2 * h)",
    "self.sow(nnx.Intermediate, 'average', jnp.mean(h))",
    "self.count[...] = self.count[...] + 1",
    "self.mean[...] = 0.9 * self.mean[...] + 0.1 * h",
    "h = self.dropout(h)",
    "h = jnp.tanh(self.linear(h))",
    "h = h + self.mean[...]",
    "h = h + jax.random.normal(self.rngs.noise(), 3)",
    "self.last = nnx.Intermediate(h)",
    "h = self.norm(h[None])[0]",
)


@dataclass(frozen=True)
class Grown:
    """One random module: the text of its class, and how to make one."""

    seed: int
    text: str
    new: Callable[[], nnx.Module] = field(repr=False)


def grown(seed: int) -> Grown:
    """The module of a seed."""
    draws = random.Random(seed)
    lines = draws.choices(LINES, k=draws.randint(2, 6))
    text = _HEAD + "".join(f"        {line}\n" for line in [*lines, "return jnp.sum(jnp.sin(h))"])
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "nnx": nnx}
    exec(compile(text, f"<random module {seed}>", "exec"), names)
    return Grown(seed, text, lambda: names["Module"](nnx.Rngs(seed, noise=1, dropout=2)))


_HEAD = """\
class Module(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(3, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
        self.count, self.mean = nnx.BatchStat(jnp.array(0)), nnx.BatchStat(jnp.zeros(3))
        self.dropout, self.rngs = nnx.Dropout(0.5, rngs=rngs), rngs

    def __call__(self, x):
        h = jnp.tanh(self.linear(x))
"""


def loss(module: Any, x: Any) -> Any:
    """The number that a call returns."""
    return module(x)
