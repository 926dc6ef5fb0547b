"""Write random loops that run as often as each lane says, and the same loops written out in Python.

    print(looped(7).text)

Carries are small or larger than a page, counters are whole numbers of 8 to 32 bits or floats, buffers are written in
ways that can be undone and in ways that cannot, and some bodies have no finite slope once the last trip is over. The
same seed gives the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut import aot

#: A body: what the carry `h` becomes in the trip `i` of `n`. All but the first two are for `i < n` alone.
BODIES = (
    "jnp.sin(h * w) + 0.1",
    "jnp.tanh(h) * w + 0.1 * jnp.mean(h)",
    "jnp.sin(h) + w * jnp.log(jnp.float32(n - i))",
    "jnp.sin(h) + w / jnp.float32(n - i)",
    "jnp.sin(h) + w * jnp.sqrt(jnp.float32(n - i))",
)
#: Index types, first indexes, steps and modes of a buffer of some rows: most wrap around, leave the buffer or repeat.
INDEXES = ("int8", "uint8", "int16", "int32")
WRITES = (
    "b.at[k].set(h[0])",
    "b.at[k].add(h[0])",
    "b.at[k].set(h[0], mode='drop')",
    "b.at[k].set(h[0], mode='clip')",
    "lax.dynamic_update_index_in_dim(b, h[0], k, 0)",
    "b.at[k].set(h[0] + b[k - 1])",
)
#: How a loop is called, by name; `most` is a bound on its trips, `few` bytes that hold a checkpoint or some.
WAYS = (
    "lax.while_loop(test, body, start)",
    "lax.while_loop(test, body, start)",
    "lax.fori_loop(0, n, lambda i, c: body((i, *c[1:])), start)",
    "aot.while_loop(test, body, start)",
    "aot.while_loop(test, body, start, memory=few)",
    "aot.while_loop(test, body, start, max_trips=most)",
)


@dataclass(frozen=True)
class Looped:
    """One random loop: its text, the function that the text defines, and the numbers that it is called with."""

    seed: int
    text: str
    loss: Callable[..., Any] = field(repr=False)
    lanes: int
    size: int
    most: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """A weight, a row for each lane, and how often each lane runs: never, in some."""
        draws = np.random.default_rng(self.seed)
        rows = draws.uniform(-1, 1, (self.lanes, self.size)).astype(np.float32)
        trips = draws.integers(0, self.most + 1, self.lanes).astype(np.int32)
        return jnp.float32(draws.uniform(0.3, 1)), jnp.asarray(rows), jnp.asarray(trips)


def looped(seed: int) -> Looped:
    """The loop of a seed."""
    draws = random.Random(seed)
    lanes, size, most = draws.choice((1, 2, 17)), draws.choice((1, 3, 1024)), draws.choice((2, 8, 40))
    buffer = draws.random() < 0.5
    if buffer:
        lanes, size, most = min(lanes, 2), min(size, 3), draws.choice((8, 40, 300, 300))
    counter = draws.choice(("0", "0", "jnp.float32(0)"))
    way = draws.choice(WAYS)
    counter = "0" if "fori_loop" in way else counter
    few = "1kB" if size < 1024 else "9kB"
    lines = [
        f"most, few = {most}, {few!r}",
        *(_buffered(draws) if buffer else _unbuffered(draws, counter)),
        f"c = {way}",
    ]
    lines.append("return jnp.sum(jnp.cos(c[1])) + jnp.sum(jnp.sin(c[-1]))")
    text = "def loss(w, x, n):\n" + "".join(f"    {line}\n" for line in lines)
    return Looped(seed, text, _made(text), lanes, size, most)


def _unbuffered(draws: random.Random, counter: str) -> list[str]:
    bound = ["n = jnp.float32(n)"] if "float" in counter else []
    return [*bound, "test = lambda c: c[0] < n", f"start = ({counter}, x)", *_body(draws.choice(BODIES))]


def _body(update: str) -> list[str]:
    return ["def body(c):", "    i, h = c", f"    return i + 1, {update}"]


def _buffered(draws: random.Random) -> list[str]:
    kind, rows = draws.choice(INDEXES), draws.choice((5, 40, 100))
    first, step = draws.choice((0, 0, 0, -3, rows - 1, 250 % rows)), draws.choice((1, 1, 1, 2, -1))
    if kind == "uint8":
        first, step = first % 256, step % 256
    return [
        "test = lambda c: c[0] < n",
        f"start = (0, x, jnp.{kind}({first}), jnp.zeros({rows}))",
        "def body(c):",
        "    i, h, k, b = c",
        f"    return i + 1, {draws.choice(BODIES)}, k + jnp.{kind}({step}), {draws.choice(WRITES)}",
    ]


def _made(text: str) -> Callable[..., Any]:
    names: dict[str, Any] = {"jnp": jnp, "lax": lax, "aot": aot}
    exec(compile(text, "<random loop>", "exec"), names)
    return names["loss"]


def written_out(made: Looped) -> Callable[..., Any]:
    """The same loop for one lane, run by Python: what any derivative of it is compared with."""

    def run(test: Any, body: Any, start: Any, **_: Any) -> Any:
        carry = start
        while bool(test(carry)):
            carry = body(carry)
        return carry

    def fori(first: Any, last: Any, body: Any, start: Any) -> Any:
        carry = start
        for i in range(int(first), int(last)):
            carry = body(i, carry)
        return carry

    class Plain:
        """JAX's loops, and ours, by Python."""

        while_loop, fori_loop = staticmethod(run), staticmethod(fori)
        dynamic_update_index_in_dim = staticmethod(lax.dynamic_update_index_in_dim)

    names: dict[str, Any] = {"jnp": jnp, "lax": Plain, "aot": Plain}
    exec(compile(made.text, "<random loop, written out>", "exec"), names)
    return names["loss"]
