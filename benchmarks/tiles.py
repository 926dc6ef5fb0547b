"""Put budgets below the floor: a quarter and a tenth of plain JAX's activations, which no residuals hold.

    python -m benchmarks.tiles                      # the suite at its size `small`: how many hold each budget
    python -m benchmarks.tiles resnet unet          # some programs, in place of what was measured of them
    python -m benchmarks.tiles --target h100        # by XLA's account for a GPU that need not be here
    python -m benchmarks.tiles --outside            # models of libraries that nothing was tuned for

For each program: the share of plain JAX's temporaries that XLA reports for the step within each budget, the tiles that
it runs in, and the seconds of the search. Where a budget is refused, the least share that was found. On a device that
is here the step runs once, and its gradients are compared with those of plain JAX. `python -m benchmarks.below_floor`
takes single arrays that are the peak, times them, and compares them with splits by hand.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich import box
from rich.table import Table

from benchmarks import outside, programs
from benchmarks.measure import machine, wide_console
from benchmarks.programs import Program
from jointcut import aot
from jointcut.partition.errors import BudgetError

HERE = Path(__file__).parent
RESULTS = HERE / "results"
BUDGETS = (0.25, 0.1)


@dataclass(frozen=True)
class Row:
    """One program within one budget.

    Attributes:
        name: of the program.
        budget: the share of plain JAX's temporaries that was allowed.
        share: the share that the step takes; the least that was found if the budget is refused.
        is_held: whether the budget is held.
        tiles: the rows that run in blocks.
        seconds: the time of the search.
        error: the largest difference of a gradient from plain JAX's, relative to its largest number; None if not run.
    """

    name: str
    budget: float
    share: float
    is_held: bool
    tiles: tuple[str, ...]
    seconds: float
    error: float | None


def measured(program: Program, budget: float, target: str | None) -> Row:
    """One program within one budget."""
    given = {"has_aux": program.has_aux, "target": target}
    traced = aot.function(program.loss, **given).trace(*program.arguments)
    plain_bytes, fixed_bytes = traced.request.plain_weighed.result().temp_bytes, traced.program.fixed_bytes
    start = time.perf_counter()
    if not plain_bytes:  # all of it fits on the chip
        return Row(program.name, budget, 0.0, True, (), 0.0, None)
    try:
        cut = aot.function(program.loss, budget=budget, **given).trace(*program.arguments).partition()
    except BudgetError as error:
        found = (error.least_bytes or 0) - fixed_bytes
        return Row(program.name, budget, found / plain_bytes, False, (), time.perf_counter() - start, None)
    seconds = time.perf_counter() - start
    tiles = tuple(str(tile).replace(f"{HERE.parent}/", "") for tile in cut.plan.tiles)
    share = cut.fitted.measured.activation_bytes / plain_bytes if cut.fitted else 1.0
    error = None if target else error_of(program, budget)
    return Row(program.name, budget, share, True, tiles, seconds, error)


def error_of(program: Program, budget: float) -> float:
    """The largest difference of a gradient, relative to the largest number of plain JAX's.

    A gradient that is zero but for rounding is measured by the largest of the others.
    """
    has_aux = program.has_aux
    ours = aot.function(program.loss, budget=budget, has_aux=has_aux).grad(*program.arguments)
    plain = jax.jit(jax.grad(program.loss, has_aux=has_aux))(*program.arguments)
    ours, plain = (made[0] if has_aux else made for made in (ours, plain))
    pairs = [(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True) if b.size]
    largest = [float(jnp.max(jnp.abs(b))) for _, b in pairs]
    least = max(1e-30, 1e-4 * max(largest))
    return max(float(jnp.max(jnp.abs(a - b))) / max(size, least) for (a, b), size in zip(pairs, largest, strict=True))


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    shown = Table(box=box.SIMPLE)
    for head in ("program", "budget", "takes", "search", "error", "rows in blocks"):
        shown.add_column(head, justify="left" if head in ("program", "rows in blocks") else "right")
    for row in rows:
        share = f"{row.share:.3f}" if row.is_held else f"[red]{row.share:.3f}[/]"
        error = "" if row.error is None else f"{row.error:.0e}"
        cells = row.name, f"{row.budget:g}", share, f"{row.seconds:.0f} s", error, "\n".join(row.tiles)
        shown.add_row(*cells)
    return shown


def keep(path: Path, row: Row) -> None:
    """Write a row to a file of rows, in place of the row of the same program and budget if there is one."""
    known: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    made = {(old["name"], old["budget"]): old for old in known} | {(row.name, row.budget): asdict(row)}
    path.write_text(json.dumps({"machine": machine(), "rows": [*made.values()]}, indent=2) + "\n", "utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for, keep each row, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("programs", nargs="*", help="names of programs; all by default")
    parser.add_argument("--target", help="a device that need not be here, such as h100")
    parser.add_argument("--outside", action="store_true", help="models of libraries that are not in the suite")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    given = parser.parse_args(argv)
    source = outside if given.outside else programs
    names = given.programs or (outside.MODELS if given.outside else programs.PROGRAMS)
    path = RESULTS / f"tiles{'-outside' * given.outside}{'-' + given.target if given.target else ''}.json"
    console, rows = wide_console(140), list[Row]()
    for name in names:
        for budget in given.budgets:
            rows.append(measured(source.load(name), budget, given.target))
            keep(path, rows[-1])
            console.print(table(rows[-1:]))
    console.print(table(rows))
    for budget in given.budgets:
        held = sum(row.is_held for row in rows if row.budget == budget)
        console.print(f"{held} of {len(names)} programs hold a budget of {budget:g}.")


if __name__ == "__main__":
    main()
