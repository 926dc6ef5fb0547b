"""Weigh single steps of loops: cut and not cut, and with an array that the loop fills.

    python -m benchmarks.loops steps

A large step is cut like a program of its own; here it is also run as JAX derives it. Bytes are XLA's temporaries less
the checkpoints. The array that a loop fills has a gradient whose time should follow its rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from rich import box
from rich.table import Table

from benchmarks.branches import BRANCHES
from benchmarks.measure import Call, memory_of, time_for
from jointcut import aot
from jointcut.aot.loops.sweep import cutting

CHECKPOINTS, TRIPS = 8, 3


@dataclass(frozen=True)
class Step:
    """One comparison: bytes of a step, or none where only time counts, and seconds."""

    name: str
    ours_bytes: int
    other_bytes: int
    ours_s: float
    other_s: float

    @property
    def is_reached(self) -> bool:
        """Whether ours takes no more bytes; of a filled array, four times as many rows at most six times as long."""
        return self.ours_bytes < self.other_bytes if self.other_bytes else self.ours_s <= 6 * self.other_s


def blocks(i: Array, h: Array, w: Array) -> Array:
    """Four blocks of a network."""
    for _ in range(4):
        rest = h - h.mean(-1, keepdims=True)
        h = h + jax.nn.gelu(rest / jnp.sqrt(1e-5 + (rest**2).mean(-1, keepdims=True)) @ w) @ w.T
    return h


def switches(i: Array, h: Array, w: Array) -> Array:
    """One of eight unequal branches."""
    return lax.switch(i % 8, BRANCHES, h, w)


def steps(quick: bool) -> list[Step]:
    """All rows."""
    w = 0.05 * jax.random.normal(jax.random.key(0), (256, 256))
    return [
        compared("four blocks", blocks, jax.random.normal(jax.random.key(1), (512, 256)), w),
        compared("eight branches", switches, jax.random.normal(jax.random.key(2), (128, 256)), w),
        filled(1_000 if quick else 5_000),
    ]


def compared(name: str, body: Callable[..., Array], x: Array, w: Array) -> Step:
    """The gradient of a loop, its steps cut and not cut."""

    def program() -> Any:
        def loss(w: Array, x: Array, n: Array) -> Array:
            return jnp.mean(aot.fori_loop(0, n, lambda i, h: body(i, h, w), x, memory=CHECKPOINTS) ** 2)

        return jax.jit(jax.grad(loss)).lower(w, x, jnp.int32(TRIPS)).compile()

    ours = program()
    with uncut():
        other = program()
    seconds = time_for([partial(p, w, x, jnp.int32(TRIPS)) for p in (ours, other)], 2.0)
    rows = (CHECKPOINTS + 1) * x.nbytes
    return Step(name, memory_of(ours).temp - rows, memory_of(other).temp - rows, *seconds)


@contextmanager
def uncut() -> Iterator[None]:
    """Take no step for large."""
    least, cutting.LEAST_BYTES = cutting.LEAST_BYTES, 2**60
    try:
        yield
    finally:
        cutting.LEAST_BYTES = least


def filled(rows: int) -> Step:
    """The gradient of a scan that returns rows: of four times as many, and of so many."""

    def call(length: int) -> Call:
        def loss(h: Array, xs: Array) -> Array:
            return jnp.sum(aot.scan(lambda c, x: (jnp.tanh(c + x), c), h, xs, memory="sqrt")[1] ** 2)

        arguments = jnp.ones(8), jnp.full((length, 8), 0.1)
        return partial(jax.jit(jax.grad(loss)).lower(*arguments).compile(), *arguments)

    return Step(f"{4 * rows:,} rows beside {rows:,}", 0, 0, *time_for([call(4 * rows), call(rows)], 2.0))


def steps_table(rows: list[Step]) -> Table:
    """The rows for a terminal."""
    made = Table(title="Steps of loops, cut and not cut", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("step", "MB", "not cut", "ms", "beside"):
        made.add_column(name, justify="left" if name == "step" else "right")
    for r in rows:
        sizes = [f"{b / 1e6:.2f}" if b else "" for b in (r.ours_bytes, r.other_bytes)]
        made.add_row(r.name, *sizes, f"{1e3 * r.ours_s:.1f}", f"{1e3 * r.other_s:.1f}")
    return made
