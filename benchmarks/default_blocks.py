"""Weigh the default of a GPU or TPU where one array is large, with rows in blocks and without.

    python -m benchmarks.default_blocks                  # for an H100, which need not be here: two minutes
    python -m benchmarks.default_blocks --target v5e

Temporaries are XLA's account for the target, which may have less memory. Times are those of the model that chooses,
over plain JAX's: no such device is here to run them. Planning is the time to choose the plan, without XLA's.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from rich import box
from rich.table import Table

from benchmarks.below_floor import Case, head_case, short, struct
from benchmarks.measure import wide_console
from benchmarks.programs import gpt
from jointcut import aot


def cases() -> Iterator[Case]:
    """Linear layers with cross entropy, and GPTs with a large vocabulary."""
    yield head_case(4096, 50_257, 8192)
    yield head_case(4096, 50_257, 8192, jnp.bfloat16)
    yield head_case(2048, 128_256, 32_768, jnp.bfloat16)
    yield gpt_case(50_304, 12, 768, 16)
    yield gpt_case(128_256, 6, 1024, 32)


def gpt_case(words: int, layers: int, width: int, sequences: int) -> Case:
    """A GPT of bfloat16 in a scan, its words tied, over sequences of 1,024 tokens."""
    config = gpt.Config(layers=layers, width=width, heads=width // 64, context=1024, dropout=0.0)
    params = jax.eval_shape(lambda: gpt.init(jax.random.key(0), config)) | {"embed": struct(words, width)}
    half = jax.tree.map(lambda leaf: struct(*leaf.shape, dtype=jnp.bfloat16), params)

    def loss(params: Any, batch: Array) -> Array:
        return gpt.loss(params, batch, jax.random.key(1), config)

    batch = struct(sequences, 1025, dtype=jnp.int32)
    return Case(f"GPT, {layers} x {width}, {sequences} sequences, {words:,} words", loss, (half, batch), labels=words)


def rows(case: Case, target: str) -> Iterator[list[str]]:
    """The default plan without blocks and with them, weighed."""
    plain_s = 0.0
    for tiles in (False, True):
        traced = aot.function(case.loss, argnums=case.argnums, target=target, tiles=tiles).trace(*case.arguments)
        start = time.perf_counter()
        cut = traced.partition()
        planning_s = time.perf_counter() - start
        front, temp_bytes = cut.pareto(), taken(lambda cut=cut: cut.compile().activation_bytes)
        assert front.chosen is not None and front.plain is not None, "a training step has both"
        plain_s = plain_s or front.common_seconds + front.plain.seconds
        ratio = (front.common_seconds + front.chosen.seconds) / plain_s
        blocks = "; ".join(short(str(tile)) for tile in cut.plan.tiles) or ("none" if tiles else "forbidden")
        share = temp_bytes / taken(lambda traced=traced: traced.plain_memory.temp_bytes)
        yield [case.name, blocks, f"{temp_bytes / 1e9:.2f}", f"{share:.2f}", f"{ratio:.2f}", f"{planning_s:.1f} s"]


def taken(count: Callable[[], int]) -> int:
    """The temporaries of a step by XLA's account, if need be more than the target has."""
    try:
        return count()
    except aot.RoomError as error:
        return error.temp_bytes


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table of the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", default="h100", help="the device, which need not be here")
    given = parser.parse_args(argv)
    shown = Table(box=box.SIMPLE)
    for name in ("case", "rows in blocks", "temps GB", "÷ plain", "time ÷, predicted", "planning"):
        shown.add_column(name, justify="left" if name in ("case", "rows in blocks") else "right")
    for case in cases():
        for row in rows(case, given.target):
            shown.add_row(*row)
    wide_console(180).print(shown)


if __name__ == "__main__":
    main()
