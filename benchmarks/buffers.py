"""Weigh the gradient of a loop that fills an array row by row, beside plain JAX, for more and more rows.

    python -m benchmarks.buffers

Each step reads the whole array and writes one row. Plain JAX keeps the array of every step: bytes grow with the square
of the rows. Bytes are XLA's temporaries, the same on every machine; times are ratios of interleaved paired runs.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from rich import box
from rich.table import Table

from benchmarks.measure import machine, memory_of, time_together, wide_console
from jointcut import aot

RESULT = Path(__file__).parent / "results" / "buffers.json"
ROWS, WIDTH, ROUNDS = (64, 128, 256, 512, 1024), 16, 15
MOST = 1.05  # of the bytes per row of the fewest rows


@dataclass(frozen=True)
class Row:
    """One number of rows: XLA's temporaries, our time over plain JAX's, and the largest relative difference.

    `first_bytes` are our temporaries for each row where there are fewest.
    """

    rows: int
    first_bytes: float
    temp_bytes: int
    jax_temp_bytes: int
    time_ratio: float
    error: float

    @property
    def is_reached(self) -> bool:
        """Whether bytes grow no faster than the rows."""
        return self.temp_bytes / self.rows <= MOST * self.first_bytes


def filled(loop: Callable[..., Any], rows: int, w: Array, x: Array) -> Array:
    """A loss of an array whose rows follow from all rows before them."""

    def step(i: Array, array: Array) -> Array:
        mean = jnp.tanh(array @ w).sum(0) / i
        return array.at[i].set(mean + jnp.sin(array[i - 1]))

    return jnp.sum(loop(1, rows, step, jnp.zeros((rows, WIDTH)).at[0].set(x)) ** 2)


def main() -> None:
    """Measure all numbers of rows, print a table, and keep the figures."""
    found = rows()
    figures = {"machine": machine(), "rows": [asdict(row) for row in found]}
    RESULT.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    wide_console(100).print(table_of(found))


def rows(is_quick: bool = False) -> list[Row]:
    """The figures for all numbers of rows."""
    rounds = 3 if is_quick else ROUNDS
    found = [measure(count, rounds) for count in (ROWS[:3] if is_quick else ROWS)]
    first_bytes = found[0].temp_bytes / found[0].rows
    return [replace(row, first_bytes=first_bytes) for row in found]


def measure(rows: int, rounds: int) -> Row:
    """The figures for one number of rows, but for `first_bytes`."""
    arguments = 0.3 * jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)), jnp.ones(WIDTH)
    loops = {"plain": lax.fori_loop, "jointcut": aot.fori_loop}
    programs = {
        name: jax.jit(jax.grad(partial(filled, loop, rows))).lower(*arguments).compile() for name, loop in loops.items()
    }
    timed = time_together({name: partial(run, *arguments) for name, run in programs.items()}, "plain", rounds)
    want, got = (run(*arguments) for run in programs.values())
    return Row(
        rows,
        0.0,
        memory_of(programs["jointcut"]).temp,
        memory_of(programs["plain"]).temp,
        timed["jointcut"].ratio.median,
        float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want))),
    )


def table_of(rows: Sequence[Row]) -> Table:
    """A line for each number of rows."""
    table = Table(title="An array filled row by row", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("rows", "plain JAX", "jointcut", "a row", "time ÷ plain", "gradient differs by"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = [f"{row.jax_temp_bytes / 1e6:.2f} MB", f"{row.temp_bytes / 1e6:.2f} MB"]
        figures = f"{row.temp_bytes / row.rows:.0f} B", f"{row.time_ratio:.2f}", f"{row.error:.0e}"
        table.add_row(str(row.rows), *sizes, *figures, style=None if row.is_reached else "red")
    return table


if __name__ == "__main__":
    main()
