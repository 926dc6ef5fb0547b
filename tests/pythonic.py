"""Random small functions in Python: branches, loops, sizes, a module's state and references, drawn from a seed.

A function takes weights, a module, an array of rows, and a maker of references. It is a list of steps, each a few lines
as a user writes them. Steps that decide by values read them as Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jointcut import aot

WIDTH = 4


class Box:
    """What a `jax.Ref` is, without one, which JAX differentiates."""

    def __init__(self, x):
        self.x = x

    def __getitem__(self, at):
        return self.x[at]

    def __setitem__(self, at, x):
        self.x = self.x.at[at].set(x)


@dataclass(frozen=True)
class Given:
    """What the steps of one call read: weights, a module, how to make a reference, and how to read a number."""

    w: Any
    b: Any
    norm: Any
    new_ref: Callable[[Any], Any]
    number: Callable[[Any], float]


def in_grad(x):
    """A number inside eager `jax.grad`, where `float` of a value that is differentiated is refused."""
    return float(lax.stop_gradient(x))


def dense(g, h, a):
    return jnp.tanh(h @ g.w + g.b)


def mixed(g, h, a):
    return jax.nn.softmax(h @ h.T / 2, axis=-1) @ (a * h)


def centred(g, h, a):
    return jnp.sin(h - h.mean(0) + jnp.sum(h * g.b) / h.shape[0])


def moved(g, h, a):
    return jnp.concatenate([h[1:], h[:1]]) * a + jnp.cumsum(h, axis=0)[::-1] / (1 + h.shape[0])


def sorted_rows(g, h, a):
    return jnp.sort(h * g.b, axis=0) + a


def jitted(g, h, a):
    return jax.jit(lambda h, w: jnp.cos(h @ w) * h)(h, g.w)


def cut(g, h, a):
    return _cut(g.w, h)


@aot.function
def _cut(w, h):
    return jnp.tanh(jnp.sin(h @ w) - h)


def normal(g, h, a):
    return jnp.tanh(g.norm(h))


def branch(g, h, a):
    if g.number(jnp.mean(h)) > a - 1:
        return jnp.sin(h @ g.w)
    return jnp.cos(h) * g.b


def until(g, h, a):
    while g.number(jnp.max(jnp.abs(h))) > a:
        h = jnp.sin(h @ g.w) / 2
    return h


def repeated(g, h, a):
    for i in range(1 + int(8 * abs(g.number(h[0, 0]))) % 3):
        h = jnp.tanh(h @ g.w + i * g.b)
    return h


def for_each_row(g, h, a):
    total = jnp.zeros(WIDTH)
    for i in range(h.shape[0]):
        total = jnp.tanh(total + h[i] @ g.w)
    return h * total


def scanned(g, h, a):
    last, every = lax.scan(lambda c, y: (jnp.tanh(c @ g.w + y), c * y), jnp.zeros(WIDTH), h)
    return every + last


def our_scan(g, h, a):
    return aot.scan(lambda c, i: (jnp.sin(c @ g.w + i / 4), None), h, jnp.arange(3.0))[0]


def our_while(g, h, a):
    def goes_on(c):
        return (jnp.max(jnp.abs(c[1])) > a) & (c[0] < 4)

    return aot.while_loop(goes_on, lambda c: (c[0] + 1, jnp.sin(c[1] @ g.w) * 0.8), (0, h))[1]


def our_fori(g, h, a):
    return aot.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ g.w) * (1 + i).astype(h.dtype), h)


def counted(g, h, a):
    ref = g.new_ref(jnp.zeros(WIDTH))
    for scale in (1.0, a):
        ref[...] = ref[...] + jnp.tanh(scale * g.b)
    ref[0] = 2 * ref[1] + jnp.mean(h)
    return h * ref[...]


def kept(g, h, a):
    ref = g.new_ref(h)
    ref[0] = ref[0] * a
    return jnp.sin(ref[...] @ g.w)


STEPS = (dense, mixed, centred, moved, sorted_rows, jitted, cut, normal, branch, until, repeated, for_each_row, scanned)
STEPS += (our_scan, our_while, our_fori, counted, kept)

#: Steps that decide by values, which no trace has.
DECIDING = frozenset({branch, until, repeated})

#: Steps that need a size as a number, or hold an array of rows in a reference.
NEEDING = {for_each_row, kept}


@dataclass(frozen=True)
class Drawn:
    """One random function: its steps, each with a number."""

    steps: Sequence[tuple[Callable[..., Any], float]]

    @classmethod
    def of(cls, seed: int, without: frozenset[Any] = frozenset()) -> Drawn:
        """Draw the function of a seed, without some of the steps."""
        rng, steps = np.random.default_rng(seed), [step for step in STEPS if step not in without]
        chosen = rng.choice(len(steps), int(rng.integers(3, 6)), replace=False)
        return cls([(steps[i], float(rng.uniform(0.4, 0.9))) for i in chosen])

    def __call__(
        self,
        params: Any,
        norm: Any,
        x: Any,
        new_ref: Callable[[Any], Any] = jax.new_ref,
        number: Callable[[Any], float] = float,
    ) -> Any:
        """Return the loss."""
        given = Given(params["w"], params["b"], norm, new_ref, number)
        for step, a in self.steps:
            x = step(given, x, a)
        return jnp.mean(x**2) + jnp.mean(params["w"] ** 2)

    def __str__(self) -> str:
        """Name the steps."""
        return ", ".join(f"{step.__name__}({a:.2f})" for step, a in self.steps)

    @property
    def has_names(self) -> bool:
        """Whether it can run with names for sizes."""
        return not NEEDING.intersection(step for step, _ in self.steps)


def module() -> Any:
    """Return a module with statistics; rows that are almost equal stay so."""
    return nnx.BatchNorm(WIDTH, epsilon=0.5, rngs=nnx.Rngs(0))


def params(seed: int) -> Any:
    """Return weights."""
    rng = np.random.default_rng([1, seed])
    return {"w": jnp.asarray(rng.standard_normal((WIDTH, WIDTH)), jnp.float32), "b": rows(1, seed)[0]}


def rows(count: int, seed: int) -> Any:
    """Return an array of so many rows."""
    return jnp.asarray(np.random.default_rng([2, seed, count]).standard_normal((count, WIDTH)), jnp.float32)
