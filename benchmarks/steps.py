"""Weigh a long loop at several lengths, run plain, with `jax.checkpoint`, and by jointcut's smallest plans.

    python -m benchmarks.steps                 # 100, 1,000 and 10,000 steps of a small cell: a minute
    python -m benchmarks.steps --lengths 400   # of your own choice

*Temporaries* are XLA's account of a training step. *Extra forwards* are the matrix products that a step runs beyond
plain's, for each product of one forward: counted in the jaxprs, in loops once for each trip.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import Call, time_together, wide_console
from jointcut import aot
from jointcut.aot.run.weigh import weigh
from jointcut.partition.program.jax import jaxprs

WIDTH, ROWS = 16, 4
PLAIN, CHECKPOINT = "plain", "jax.checkpoint on the body"
ONCE, LEAST = "jointcut, one extra forward", "jointcut, budget=0.0"
KB = 1e3


@dataclass(frozen=True)
class Way:
    """One way to run a training step: what to call, XLA's bytes of temporaries, and the products that it runs."""

    call: Call
    temp_bytes: int
    products: int


def main() -> None:
    """Measure each length, and print."""
    options = parse_options()
    console = wide_console(110)
    table = Table(title=f"a cell of width {WIDTH}, batch {ROWS}", box=box.SIMPLE_HEAD)
    for heading in ("steps", "way", "temporaries\nkB", "÷ plain", "extra\nforwards", "time\n÷ plain"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    held: list[tuple[int, int]] = []
    for steps in tqdm(options.lengths, unit="length", disable=None):
        ways = ways_of(steps)
        times = time_together({name: way.call for name, way in ways.items()}, PLAIN, options.rounds)
        for name, way in ways.items():
            extra = (way.products - ways[PLAIN].products) / steps
            figures = f"{way.temp_bytes / KB:,.1f}", f"{way.temp_bytes / ways[PLAIN].temp_bytes:.4f}", f"{extra:.2f}"
            table.add_row(f"{steps:,}" if name == PLAIN else "", name, *figures, f"{times[name].ratio.median:.2f}")
        held.append((steps, ways[ONCE].temp_bytes))
    console.print(table)
    for (few, less), (many, more) in pairwise(held):
        power = math.log(more / less) / math.log(many / few)
        console.print(f"from {few:,} to {many:,} steps the temporaries of one extra forward grow as steps^{power:.2f}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1_000, 10_000], metavar="STEPS")
    parser.add_argument("--rounds", type=int, default=10, help="timing rounds (%(default)s)")
    return parser.parse_args()


def ways_of(steps: int) -> dict[str, Way]:
    """The same loop in each of the ways; gradients are taken of the weights."""
    arguments = 0.2 * jnp.ones((WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))
    plain = by_jax(loss_of(steps), arguments)
    traced = aot.function(loss_of(steps)).trace(*arguments)
    by_peak = sorted(traced.planner.menu, key=lambda c: c.peak_bytes)
    cuts = (traced.partition(plan=c.plan) for c in by_peak)
    once = next(way for cut in cuts if (way := by_us(cut, arguments)).products <= plain.products + steps)
    checkpoint = by_jax(loss_of(steps, jax.checkpoint), arguments)
    return {PLAIN: plain, CHECKPOINT: checkpoint, ONCE: once, LEAST: by_us(traced.partition(budget=0.0), arguments)}


def loss_of(steps: int, wrap: Callable[..., Any] = lambda body: body) -> Callable[[Array, Array], Array]:
    """A recurrent cell, `wrap` around its body; `weights` are (WIDTH, WIDTH), `start` is (ROWS, WIDTH)."""

    def loss(weights: Array, start: Array) -> Array:
        def body(state: Array, _: None) -> tuple[Array, None]:
            return jnp.tanh(state @ weights), None

        return jnp.sum(lax.scan(wrap(body), start, None, length=steps)[0])

    return loss


def by_jax(loss: Callable[..., Any], arguments: tuple[Array, ...]) -> Way:
    """`jax.jit(jax.value_and_grad(loss))`."""
    step = jax.jit(jax.value_and_grad(loss))
    traced = step.trace(*arguments)
    return Way(partial(step, *arguments), weigh(step.lower(*arguments)).temp_bytes, products_in(traced.jaxpr))


def by_us(cut: aot.Cut, arguments: tuple[Array, ...]) -> Way:
    """A cut, compiled."""
    made = cut.compile()
    call = partial(made.value_and_grad, *arguments)
    return Way(call, made.activation_bytes, products_in(cut.forward) + products_in(cut.backward))


def products_in(closed: Any) -> int:
    """The matrix products of a program, those in loops once for each trip."""
    return sum(
        layout.length * products_in(layout.body)
        if (layout := jaxprs.scan_layout(eqn) if eqn.primitive.name == "scan" else None)
        else (eqn.primitive.name == "dot_general") + sum(map(products_in, jaxprs.inner_jaxprs(eqn)))
        for eqn in jaxprs.opened(closed)[0].eqns
    )


if __name__ == "__main__":
    main()
