"""Weigh and time steps of which XLA on a CPU would run much too early.

    python -m benchmarks.waits           # two minutes on two cores
    python -m benchmarks.waits --rounds 4

XLA:CPU runs first what is ready first: the zeros that loops fill, random numbers, and what is under `jax.checkpoint`,
whose barriers it takes out up to JAX 0.11. In jointcut these wait until they are needed. The programs are recurrent
layers, layers of a loop each under `jax.checkpoint`, and layers with dropout, as they come and each under a checkpoint.
Beside jointcut, by default and with the least memory, stands plain JAX, as it comes and with those barriers kept.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from tqdm import tqdm

from benchmarks.measure import Call, compile_program, memory_of, table_of_steps, time_together, wide_console
from jointcut import aot

PLAIN = "plain"

Program = tuple[Callable[..., Array], tuple[Any, ...]]


def normal(seed: int, *shape: int) -> Array:
    """Random numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


def recurrent() -> Program:
    """Six layers of tanh units over a sequence, each a scan over what the one before it returned."""
    width, rows, steps = 128, 64, 64

    def loss(matrices: list[Array], inputs: Array) -> Array:
        for matrix in matrices:
            start = jnp.zeros((rows, width))
            _, inputs = lax.scan(lambda h, x, m=matrix: (jnp.tanh(h @ m + x),) * 2, start, inputs)
        return jnp.mean(inputs**2)

    return loss, ([normal(i, width, width) / width**0.5 for i in range(6)], normal(9, steps, rows, width))


def repeated() -> Program:
    """Six layers of eight steps each, every layer under a checkpoint."""
    width, rows = 128, 512

    @jax.checkpoint
    def layer(h: Array, matrix: Array) -> Array:
        return lax.scan(lambda h, _: (jnp.tanh(h @ matrix) + jnp.sin(h), None), h, length=8)[0]

    def loss(matrices: list[Array], x: Array) -> Array:
        for matrix in matrices:
            x = layer(x, matrix)
        return jnp.mean(x**2)

    return loss, ([normal(i, width, width) / width**0.5 for i in range(6)], normal(9, rows, width))


def dropped(around: Callable[..., Any]) -> Program:
    """Eight residual layers with dropout on the wide side, with something around each layer."""
    width, rows = 128, 768

    @around
    def layer(x: Array, matrices: tuple[Array, Array], key: Array) -> Array:
        wide = jax.nn.gelu(x @ matrices[0])
        wide = jnp.where(jax.random.bernoulli(key, 0.9, wide.shape), wide / 0.9, 0.0)
        return x + wide @ matrices[1]

    def loss(matrices: list[tuple[Array, Array]], x: Array, key: Array) -> Array:
        for i, pair in enumerate(matrices):
            x = layer(x, pair, jax.random.fold_in(key, i))
        return jnp.mean(x**2)

    matrices = [(normal(2 * i, width, 4 * width) / 12, normal(2 * i + 1, 4 * width, width) / 23) for i in range(8)]
    return loss, (matrices, normal(99, rows, width), jax.random.key(7))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "recurrent layers": recurrent,
    "loops under checkpoints": repeated,
    "dropout": partial(dropped, lambda layer: layer),
    "dropout under checkpoints": partial(dropped, jax.checkpoint),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waits", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="timing rounds (%(default)s)")
    rounds = parser.parse_args().rounds
    rows = ((name, *row) for name in tqdm(PROGRAMS, desc="programs") for row in measured(*PROGRAMS[name](), rounds))
    wide_console(100).print(table_of_steps(rows))


def measured(loss: Callable[..., Array], arguments: tuple[Any, ...], rounds: int) -> list[tuple[str, int, float]]:
    """For each way to take the step: its name, XLA's temporaries in bytes, and its time over plain's."""
    sizes, calls = weighed(loss, arguments)
    timings = time_together(calls, PLAIN, rounds)
    return [(name, sizes[name], timings[name].ratio.median) for name in calls]


def weighed(loss: Callable[..., Array], arguments: tuple[Any, ...]) -> tuple[dict[str, int], dict[str, Call]]:
    """Compile the step in each way: XLA's temporaries in bytes, and the calls, by the name of the way."""
    lowered = jax.jit(jax.value_and_grad(loss)).lower(*arguments)
    ways = {PLAIN: compile_program(lowered, False), "plain, barriers kept": compile_program(lowered, True)}
    sizes = {name: memory_of(way).temp for name, way in ways.items()}
    calls: dict[str, Call] = {name: partial(way, *arguments) for name, way in ways.items()}
    traced = aot.function(loss).trace(*arguments)
    for name, cut in {"jointcut": traced.partition(), "jointcut, budget=0.0": traced.partition(budget=0.0)}.items():
        step = cut.compile()
        sizes[name], calls[name] = step.activation_bytes, partial(step.value_and_grad, *arguments)
    return sizes, calls


if __name__ == "__main__":
    main()
