"""Weigh and time steps whose gradients are sums over many layers, or over many uses of one matrix.

    python -m benchmarks.sums           # a minute on two cores
    python -m benchmarks.sums --rounds 4

The cotangents of a value are added up. On a CPU, XLA adds elementwise results in the loop that reads the sum: it holds
all of them until then, and where several loops read a sum, each computes it. jointcut writes such sums as they come.

The programs are a recurrence and a network of layers with the same matrices, both written out step by step, and a deep
residual network with dropout. The first two are also measured as people write them to save memory, by `lax.scan`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.measure import Call, table_of_steps, time_together, wide_console
from jointcut import aot

WIDTH, ROWS, STEPS = 512, 64, 32
PLAIN = "plain"

Function = Callable[..., Array]


def normal(seed: int, *shape: int) -> Array:
    """Random numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


def recurrence() -> tuple[Function, Function, tuple[Any, ...]]:
    """A network of tanh units over a sequence, step by step and in a scan, and its arguments."""

    def step(h: Array, x: Array, matrices: tuple[Array, Array]) -> Array:
        return jnp.tanh(h @ matrices[0] + x @ matrices[1])

    def written_out(matrices: tuple[Array, Array], h: Array, inputs: Array) -> Array:
        for x in inputs:
            h = step(h, x, matrices)
        return jnp.sum(h**2)

    def scanned(matrices: tuple[Array, Array], h: Array, inputs: Array) -> Array:
        return jnp.sum(lax.scan(lambda h, x: (step(h, x, matrices), None), h, inputs)[0] ** 2)

    matrices = (normal(0, WIDTH, WIDTH) / WIDTH**0.5, normal(1, WIDTH, WIDTH) / WIDTH**0.5)
    return written_out, scanned, (matrices, normal(2, ROWS, WIDTH), normal(3, STEPS, ROWS, WIDTH))


def same_layers() -> tuple[Function, Function, tuple[Any, ...]]:
    """Residual layers that share their matrices, as in ALBERT, step by step and in a scan, and their arguments."""

    def layer(x: Array, matrices: tuple[Array, Array]) -> Array:
        return x + jax.nn.gelu(_normed(x) @ matrices[0]) @ matrices[1]

    def written_out(matrices: tuple[Array, Array], x: Array) -> Array:
        for _ in range(STEPS // 2):
            x = layer(x, matrices)
        return jnp.sum(x**2)

    def scanned(matrices: tuple[Array, Array], x: Array) -> Array:
        return jnp.sum(lax.scan(lambda x, _: (layer(x, matrices), None), x, length=STEPS // 2)[0] ** 2)

    matrices = (normal(0, WIDTH, 2 * WIDTH) / WIDTH**0.5, normal(1, 2 * WIDTH, WIDTH) / WIDTH)
    return written_out, scanned, (matrices, normal(2, 2 * ROWS, WIDTH))


def dropped() -> tuple[Function, None, tuple[Any, ...]]:
    """A deep residual network with dropout at the end of each layer, and its arguments."""

    def loss(matrices: list[tuple[Array, Array]], x: Array, key: Array) -> Array:
        for i, (up, down) in enumerate(matrices):
            is_kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = x + jnp.where(is_kept, jax.nn.gelu(_normed(x) @ up) @ down / 0.9, 0.0)
        return jnp.sum(x**2)

    width = WIDTH // 2
    matrices = [
        (normal(2 * i, width, 2 * width) / width**0.5, normal(2 * i + 1, 2 * width, width) / width)
        for i in range(STEPS)
    ]
    return loss, None, (matrices, normal(99, 16 * ROWS, width), jax.random.key(7))


def _normed(x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


PROGRAMS = {"a recurrence": recurrence, "layers that share matrices": same_layers, "layers with dropout": dropped}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sums", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="timing rounds (%(default)s)")
    rounds = parser.parse_args().rounds
    rows = ((name, *row) for name, build in PROGRAMS.items() for row in measured(*build(), rounds))
    wide_console(100).print(table_of_steps(rows))


def measured(
    loss: Function, scanned: Function | None, arguments: tuple[Any, ...], rounds: int
) -> list[tuple[str, int, float]]:
    """For each way to take the step: its name, XLA's temporaries in bytes, and its time over plain's."""
    sizes, calls = weighed(loss, scanned, arguments)
    timings = time_together(calls, PLAIN, rounds)
    return [(name, sizes[name], timings[name].ratio.median) for name in calls]


def weighed(
    loss: Function, scanned: Function | None, arguments: tuple[Any, ...]
) -> tuple[dict[str, int], dict[str, Call]]:
    """Compile the step in each way: XLA's temporaries in bytes, and the calls, by the name of the way."""
    ways = {PLAIN: jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()}
    if scanned is not None:
        ways["plain, in a scan"] = jax.jit(jax.value_and_grad(scanned)).lower(*arguments).compile()
    sizes = {name: way.memory_analysis().temp_size_in_bytes for name, way in ways.items()}
    calls: dict[str, Call] = {name: partial(way, *arguments) for name, way in ways.items()}
    for name, function in {"jointcut": loss, "jointcut, in a scan": scanned}.items():
        if function is not None:
            step = aot.function(function).trace(*arguments).partition().compile()
            sizes[name], calls[name] = step.activation_bytes, partial(step.value_and_grad, *arguments)
    return sizes, calls


if __name__ == "__main__":
    main()
