"""Compare linear cross entropy with the plain loss: `python -m benchmarks.derivatives.vocabulary [--words N ...]`.

Loss and gradients of 2,048 tokens of 256 numbers are compiled both ways. Memory is what XLA needs beside inputs and
outputs. The two run in turn, ours after plain, and the least time of each counts. The busier the machine, the less the
times say; the memory does not change.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jointcut.aot.derivatives import linear_cross_entropy


def plain(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss as it is written without a care."""
    logp = jax.nn.log_softmax(hidden @ weight.T)
    return -jnp.take_along_axis(logp, labels[:, None], 1).mean()


def measure(tokens: int, width: int, words: int, rounds: int) -> tuple[list[float], list[int], float]:
    """Least seconds and bytes, plain and ours, and the largest relative difference of their gradients."""
    source = np.random.RandomState(0)
    hidden = jnp.asarray(source.standard_normal((tokens, width)), jnp.float32)
    weight = jnp.asarray(source.standard_normal((words, width)) / np.sqrt(width), jnp.float32)
    inputs = (hidden, weight, jnp.asarray(source.randint(0, words, tokens)))
    compiled = [_compiled(function, inputs) for function in (plain, linear_cross_entropy)]
    grads = [run(*inputs)[1] for run in compiled]
    off = max(float(jnp.abs(a - b).max() / jnp.abs(a).max()) for a, b in zip(*grads, strict=True))
    seconds = [float("inf"), float("inf")]
    for _ in range(rounds):
        for which, run in enumerate(compiled):
            start = time.perf_counter()
            jax.block_until_ready(run(*inputs))
            seconds[which] = min(seconds[which], time.perf_counter() - start)
    return seconds, [run.memory_analysis().temp_size_in_bytes for run in compiled], off


def _compiled(function: Callable[..., jax.Array], inputs: Sequence[jax.Array]) -> Any:
    return jax.jit(jax.value_and_grad(function, (0, 1))).lower(*inputs).compile()


def main() -> None:
    """Print a table with a row for each vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, nargs="*", default=[16_000, 32_000, 64_000, 128_000])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    table = Table(title=f"Linear cross entropy, {chosen.tokens:,} tokens of {chosen.width} numbers, float32")
    for name in ("words", "plain MB", "ours MB", "plain s", "ours s", "ours / plain", "gradients off by"):
        table.add_column(name, justify="right")
    for words in chosen.words:
        (slow, ours), (most, least), off = measure(chosen.tokens, chosen.width, words, chosen.rounds)
        sizes = (f"{most / 1e6:,.1f}", f"{least / 1e6:,.1f}")
        table.add_row(f"{words:,}", *sizes, f"{slow:.3f}", f"{ours:.3f}", f"{ours / slow:.2f}", f"{off:.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
