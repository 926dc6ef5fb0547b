"""Look for the largest number of rows that fits, with rows in blocks and without, and try two per cent more.

    python -m benchmarks.largest                # all programs
    python -m benchmarks.largest head scan      # some

The size with two per cent more is cut for the same budget, as a user would: it should be refused.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from rich import box
from rich.table import Table

from benchmarks.measure import wide_console
from jointcut import aot

MORE = 1.02


@dataclass(frozen=True)
class Case:
    """A loss of weights and rows: its budget, the shapes of its weights, and the width of a row."""

    loss: Callable[..., Array]
    budget: str
    weights: tuple[tuple[int, ...], ...]
    width: int
    has_words: bool = False


def head(table: Array, h: Array, words: Array) -> Array:
    """Cross entropy of a linear layer."""
    logits = jax.nn.log_softmax(h @ table)
    return -jnp.mean(jnp.take_along_axis(logits, words[:, None], axis=1))


def perceptron(up: Array, down: Array, x: Array) -> Array:
    """Two layers."""
    return jnp.mean(jnp.square(jax.nn.gelu(x @ up) @ down))


def scan(stack: Array, x: Array) -> Array:
    """Eight layers in a scan."""
    return jnp.mean(jnp.square(lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, stack)[0]))


CASES = {
    "head": Case(head, "32MB", ((64, 4096),), 64, True),
    "perceptron": Case(perceptron, "2MB", ((16, 64), (64, 16)), 16),
    "scan": Case(scan, "2MB", ((8, 16, 16),), 16),
}


def arguments(case: Case, rows: int | None) -> list[Any]:
    """Shapes of weights and rows; the number of rows is the size `b` where none is given."""
    count = "b" if rows is None else rows
    shapes = [aot.shapes(", ".join(map(str, shape)), "float32") for shape in case.weights]
    words = [aot.shapes(f"{count}", "int32")] if case.has_words else []
    return [*shapes, aot.shapes(f"{count}, {case.width}", "float32"), *words]


def holds(case: Case, rows: int) -> bool:
    """Whether a budget search finds a plan for so many rows."""
    try:
        aot.function(case.loss, budget=case.budget).trace(*arguments(case, rows)).partition()
    except aot.BudgetError:
        return False
    return True


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.largest", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("programs", nargs="*", help="of the table; all when none")
    table = Table(title="The largest number of rows that fits", box=box.SIMPLE_HEAD, title_justify="left")
    for head_ in ("", "budget", "rows", "whole", "of budget", "compiled", "search", "2 % more"):
        table.add_column(head_, justify="right" if head_ else "left")
    for name in parser.parse_args().programs or CASES:
        case = CASES[name]
        start = time.perf_counter()
        found = aot.largest(case.loss, "b", case.budget, *arguments(case, None))
        seconds = time.perf_counter() - start
        whole = aot.largest(aot.function(case.loss, tiles=False), "b", case.budget, *arguments(case, None))
        compiled = sum(row.how == "compiled" for row in found.tried)
        share, more = f"{found.peak_bytes / found.budget_bytes:.1%}", holds(case, int(MORE * found.size))
        rows = f"{found.size:,}", f"{whole.size:,}", share, f"{compiled}", f"{seconds:.0f} s"
        table.add_row(name, case.budget, *rows, "holds" if more else "refused")
    wide_console(120).print(table)


if __name__ == "__main__":
    main()
