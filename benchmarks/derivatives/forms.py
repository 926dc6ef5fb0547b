"""Say what cheaper forms save: `python -m benchmarks.derivatives.forms [PROGRAM ...]`.

First the programs of the suite: bytes that the minimum cut keeps for the backward, without and with cheaper forms, and
what XLA needs for a step. Then functions between two matrix products: bytes that are kept for each element, by what
JAX keeps, by the minimum cut of JAX's function and of ours, and by PyTorch. The input of the second product counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks import programs
from benchmarks.measure import wide_console
from benchmarks.report import geometric_mean
from jointcut import aot
from jointcut.aot import derivatives
from jointcut.aot.stages.traced import Traced
from jointcut.partition.lower.verify import run
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.saved import in_cheaper_forms
from jointcut.partition.program.graph import Graph
from jointcut.partition.search.forms.choose import formed
from jointcut.partition.search.mincut import min_cut
from jointcut.partition.split import halved

ROWS, WIDTH = 64, 256

_KEY = jax.random.key(0)


def _spread(labels: jax.Array, x: jax.Array) -> jax.Array:
    """Targets for each element."""
    return jnp.broadcast_to(labels[:, None].astype(x.dtype), x.shape)


#: JAX's function, ours, and the bytes that PyTorch keeps for each element of 32 bits: the input of the second product,
#: and what its formula asks for (`derivatives.yaml`: the input, the result, or a mask).
FUNCTIONS: Mapping[str, tuple[Callable[..., Any] | None, Callable[..., Any], float]] = {
    "relu": (jax.nn.relu, derivatives.relu, 4),
    "leaky_relu": (jax.nn.leaky_relu, derivatives.leaky_relu, 8),
    "elu": (jax.nn.elu, derivatives.elu, 8),
    "sigmoid": (jax.nn.sigmoid, derivatives.sigmoid, 4),
    "softplus": (jax.nn.softplus, derivatives.softplus, 8),
    "log_sigmoid": (jax.nn.log_sigmoid, derivatives.log_sigmoid, 8),
    "silu": (jax.nn.silu, derivatives.silu, 8),
    "mish": (jax.nn.mish, derivatives.mish, 8),
    "gelu": (jax.nn.gelu, derivatives.gelu, 8),
    "softmax": (jax.nn.softmax, derivatives.softmax, 4),
    "log_softmax": (jax.nn.log_softmax, derivatives.log_softmax, 4),
    "sqrt": (lambda x: jnp.sqrt(x * x + 1), lambda x: derivatives.sqrt(x * x + 1), 8),
    "layer_norm": (jax.nn.standardize, derivatives.layer_norm, 8 + 8 / WIDTH),
    "rms_norm": (
        lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5),
        lambda x: derivatives.rms_norm(x, eps=1e-5),
        8 + 4 / WIDTH,
    ),
    "batch_norm": (None, lambda x: derivatives.batch_norm(x)[0], 8),
    "dropout": (
        lambda x: jnp.where(jax.random.bernoulli(_KEY, 0.9, x.shape), x / 0.9, 0.0),
        lambda x: derivatives.dropout(x, jax.random.bernoulli(_KEY, 0.9, x.shape), 0.1),
        5,
    ),
}

#: The same for losses, which end the function: PyTorch keeps the logarithms of the softmax, and the labels.
LOSSES: Mapping[str, tuple[Callable[..., Any] | None, Callable[..., Any], float]] = {
    "cross_entropy": (
        lambda x, labels: -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1).mean(),
        derivatives.cross_entropy,
        4,
    ),
    "huber_loss": (None, lambda x, labels: derivatives.huber_loss(x, _spread(labels, x)), 4),
    "mse_loss": (None, lambda x, labels: derivatives.mse_loss(x, _spread(labels, x)), 4),
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.derivatives.forms", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="of the suite; all when none")
    parser.add_argument("--size", choices=programs.SIZES, default="small", help="how large they are (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the steps, for XLA's figures")
    options = parser.parse_args()
    console = wide_console(140)
    console.print(suite(options.programs or list(programs.FOUND_IN), options.size, options.compile))
    table = Table(title="bytes kept for an element of 32 bits", box=box.SIMPLE_HEAD)
    for heading in ("function", "JAX keeps", "JAX's, cut", "ours, cut", "PyTorch"):
        table.add_column(heading, justify="left" if heading == "function" else "right")
    for name in (*FUNCTIONS, *LOSSES):
        table.add_row(name, *("" if number is None else f"{number:.2f}" for number in per_element(name)))
    console.print(table)


def suite(names: list[str], size: programs.Size, compiles: bool) -> Table:
    """A row for each program of the suite."""
    table = Table(title="bytes kept with cheaper forms, over those without", box=box.SIMPLE_HEAD)
    for heading in ("program", "kept MB", "with MB", "÷", "step MB", "with MB", "÷", "forms"):
        table.add_column(heading, justify="left" if heading in ("program", "forms") else "right")
    ratios: list[tuple[float, float]] = []
    for name in tqdm(names, unit="program", disable=None):
        program = programs.load(name, size)
        traced = aot.function(program.loss, has_aux=program.has_aux, strategy="min_cut").trace(*program.arguments)
        graph = traced.program.graph
        kept = [min_cut(g).bytes_saved for g in (graph, formed(graph))]
        steps = [_step_bytes(traced, g) for g in (graph, formed(graph))] if compiles else [0, 0]
        ratios.append((kept[1] / max(kept[0], 1), steps[1] / max(steps[0], 1)))
        told = "; ".join(in_cheaper_forms(traced.graph.forms))
        sizes = [f"{n / 1e6:,.1f}" if n else "" for n in (*kept, *steps)]
        one, other = (f"{ratio:.3f}" if ratio else "" for ratio in ratios[-1])
        table.add_row(name, *sizes[:2], one, *sizes[2:], other, told)
    means = [f"{geometric_mean(list(column)):.4f}" if min(column) > 0 else "" for column in zip(*ratios, strict=True)]
    table.add_row("geometric mean", "", "", means[0], "", "", means[1], "")
    return table


def _step_bytes(traced: Traced, graph: Graph) -> int:
    """Bytes that XLA needs for a step, both halves in one program, by the minimum cut of a graph of its program."""
    halves, structs = halved(Problem.of(graph), "min_cut").halves, traced.structs
    ones = traced.call.ones()

    def step(*primals: Any) -> Any:
        return run(halves, graph, primals, ones)

    memory: Any = jax.jit(step).lower(*structs).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


def per_element(name: str) -> list[float | None]:
    """Bytes kept for an element: by JAX itself, by the cut of JAX's function and of ours, and by PyTorch."""
    theirs, ours, torch = {**FUNCTIONS, **LOSSES}[name]
    figures = [kept(name, theirs, "save_all"), kept(name, theirs), kept(name, ours)]
    return [*figures, torch]


def kept(name: str, function: Callable[..., Any] | None, strategy: str = "min_cut") -> float | None:
    """Bytes that a plan keeps for each element of what the function takes, between two products or as the loss."""
    if function is None:
        return None
    source = np.random.default_rng(0)
    first, second = (jnp.asarray(source.standard_normal((WIDTH, WIDTH)) / 16, jnp.float32) for _ in range(2))
    x = jnp.asarray(source.standard_normal((ROWS, WIDTH)), jnp.float32)
    labels = jnp.asarray(source.integers(0, WIDTH, ROWS))

    def loss(weights: Any) -> jax.Array:
        before = x @ weights[0]
        return function(before, labels) if name in LOSSES else jnp.sum(function(before) @ weights[1])

    plan = aot.function(loss).trace((first, second)).partition(strategy).plan
    return plan.bytes_saved / x.size


if __name__ == "__main__":
    main()
