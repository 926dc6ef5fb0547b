"""Put budgets per device on steps over eight devices of the host: does each hold, and at the first plan.

    python -m benchmarks.mesh_budgets                  # what is not stored yet: half an hour on two quiet cores
    python -m benchmarks.mesh_budgets FSDP --anew      # measure again rows whose name has this word
    python -m benchmarks.mesh_budgets --sample         # of each program one row, every kind of row in turn

The models and layouts of `benchmarks.mesh`, called and in the user's `jax.jit`, and the losses in one `jax.shard_map`
of `benchmarks.shards`, these also with the function inside it cut. Budgets are a half and a quarter of plain JAX's
temporaries. Bytes are temporaries of one device by XLA's account of the compiled step. Where a budget is refused, the
least that is found without one is compiled, to see whether the refusal is true.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from typing import Any
from unittest import mock

import jax
from jax import Array
from rich import box
from rich.table import Table

from benchmarks import mesh, shards
from benchmarks.measure import memory_of, wide_console
from benchmarks.mesh_figures import is_first, is_met
from benchmarks.parallel import relative_error
from jointcut import aot
from jointcut.aot.planning.budgets import fit, searches
from jointcut.aot.planning.budgets.attempts import Attempt

RESULT = mesh.RESULTS / "mesh-budgets.json"
BUDGETS = 0.5, 0.25
CALLED, IN_JIT, INSIDE = "called", "in jit", "inside"


@dataclass(frozen=True)
class Row:
    """One budget of one program in one way.

    Attributes:
        name, way, budget: the program; called, in the user's jit, or cut inside the `shard_map`; share of plain's.
        plain, taken: temporaries of plain JAX and of the step; None for a budget that was refused.
        tries: the plans that were weighed or compiled, and for each the bytes by XLA and whether these fit.
        promised: the peak that was promised of the first of them, arguments and results included.
        least: for a refusal, the temporaries of the least that is found without a budget.
        error: the largest difference of a gradient, relative to the largest of it.
        seconds: how long the row took to measure.
    """

    name: str
    way: str
    budget: float
    plain: int
    taken: int | None
    tries: list[tuple[int, bool]]
    promised: int
    least: int | None
    error: float | None
    seconds: float


@dataclass(frozen=True)
class Program:
    """A loss and its arguments; `cut` puts a cut of it, by the options of `aot.function`, where the way asks for it."""

    function: Callable[..., Array]
    args: tuple[Any, ...]
    cut: Callable[..., Callable[..., Array]]


def of_jit(name: str, way: str) -> Program:
    """A program of `benchmarks.mesh`."""
    function, args = mesh.setting(*mesh.programs([], is_quick=False)[name])
    return Program(function, args, partial(aot.function, function))


def of_shard_map(name: str, way: str) -> Program:
    """A program of `benchmarks.shards`."""
    place, layers = name.removeprefix("shard_map, ").rsplit(", ", 1)
    laid, *args = shards.placed(place)
    body = partial(shards.WAYS[place][0], layers == "scan")
    if way == INSIDE:
        return Program(laid(body), tuple(args), lambda **options: laid(aot.function(body, **options)))
    return Program(laid(body), tuple(args), partial(aot.function, laid(body)))


def cells() -> list[tuple[str, str, float]]:
    """The name, way and budget of each row."""
    in_shard_map = [f"shard_map, {name}, {layers}" for name in shards.WAYS for layers in ("scan", "unrolled")]
    rows = [*product(mesh.programs([], is_quick=False), BUDGETS, (CALLED, IN_JIT))]
    rows += [*product(in_shard_map, BUDGETS, (CALLED, IN_JIT, INSIDE))]
    return [(name, way, budget) for name, budget, way in rows]


def sampled(rows: list[tuple[str, str, float]]) -> list[tuple[str, str, float]]:
    """One row of each program, with the next budget and way for each."""
    by_name: dict[str, list[tuple[str, str, float]]] = {}
    for row in rows:
        by_name.setdefault(row[0], []).append(row)
    own_rows = list(enumerate(by_name.values()))  # scans and unrolled layers alternate, so a step is left out at times
    return [own[-1 - (number + number // 4) % len(own)] for number, own in own_rows]


@contextmanager
def attempts() -> Iterator[list[Attempt]]:
    """The plans that searches try, in order."""
    tried, noted = list[Attempt](), fit.attempt

    def notes(*facts: Any) -> Attempt:
        tried.append(noted(*facts))
        return tried[-1]

    with mock.patch.object(fit, "attempt", notes):
        yield tried


@cache
def plain(name: str) -> tuple[int, Any]:
    """The temporaries of plain JAX, and its gradients."""
    program = _program(name, CALLED)
    step = jax.jit(jax.value_and_grad(program.function)).lower(*program.args).compile()
    return memory_of(step).temp, step(*program.args)[1]


def measure(name: str, way: str, budget: float) -> Row:
    """The figures of one row; no plan of another row is known."""
    (bytes_of_plain, want), start = plain(name), time.perf_counter()
    searches.forget()
    program, taken, least, error = _program(name, way), None, None, None
    with attempts() as tried:
        try:
            step, call = compiled(program, way, budget)
            taken, error = memory_of(step).temp, relative_error(call(), want)
        except aot.BudgetError:
            searches.forget()
    if taken is None:
        least = memory_of(compiled(program, way, 0.0)[0]).temp
    tries = [(attempt.activation_bytes, attempt.fits) for attempt in tried]
    promised = tried[0].promised_bytes
    return Row(name, way, budget, bytes_of_plain, taken, tries, promised, least, error, time.perf_counter() - start)


def compiled(program: Program, way: str, budget: float) -> tuple[Any, Callable[[], Any]]:
    """The compiled step within a budget, and a call of it that returns gradients."""
    cut, args = program.cut(budget=budget), program.args
    if way == CALLED:
        run = cut.trace(*args).partition().compile()  # pyright: ignore[reportFunctionMemberAccess]
        return run.cut.jits.compiled("step"), lambda: run.value_and_grad(*args)[1]
    step = jax.jit(jax.value_and_grad(cut)).lower(*args).compile()
    return step, lambda: step(*args)[1]


def _program(name: str, way: str) -> Program:
    return (of_shard_map if name.startswith("shard_map") else of_jit)(name, way)


def table_of(rows: list[dict[str, Any]]) -> Table:
    """A line for each row."""
    table = Table(title="Budgets per device", box=box.SIMPLE_HEAD, title_justify="left")
    for head in ("", "", "budget", "taken ÷", "held", "plans tried ÷", "error", "s"):
        table.add_column(head, justify="right" if head in ("budget", "taken ÷", "error", "s") else "left")
    for row in rows:
        shares = ", ".join(f"{size / row['plain']:.3f}" for size, _ in row["tries"])
        taken = "refused" if row["taken"] is None else f"{row['taken'] / row['plain']:.3f}"
        held = "first plan" if is_first(row) else "yes" if is_met(row) else "no"
        if row["least"] is not None:
            held = f"least {row['least'] / row['plain']:.3f}"
        error = "" if row["error"] is None else f"{row['error']:.0e}"
        texts = row["name"], row["way"], f"{row['budget']}", taken, held, shares, error, f"{row['seconds']:.0f}"
        table.add_row(*texts)
    return table


def read() -> dict[tuple[str, str, float], dict[str, Any]]:
    """The rows that are stored."""
    if not RESULT.exists():
        return {}
    rows = json.loads(RESULT.read_text("utf-8"))["rows"]
    return {(row["name"], row["way"], row["budget"]): row for row in rows}


def store(row: Row) -> None:
    """Put a row in its place among the others."""
    rows = read() | {(row.name, row.way, row.budget): asdict(row)}
    kept = [rows[cell] for cell in cells() if cell in rows]
    RESULT.write_text(json.dumps({"jax": jax.__version__, "rows": kept}, indent=1) + "\n", "utf-8")


def main() -> None:
    """Measure rows, keep each, and print a table of all that are stored."""
    opening = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh_budgets", description=opening)
    parser.add_argument("words", nargs="*", help="of the rows to measure; all when none")
    parser.add_argument("--sample", action="store_true", help="of each program one row")
    parser.add_argument("--anew", action="store_true", help="measure rows that are stored, too")
    options = parser.parse_args()
    chosen = sampled(cells()) if options.sample else cells()
    wanted = [cell for cell in chosen if all(word in ", ".join(map(str, cell)) for word in options.words)]
    known = {} if options.anew else read()
    for cell in wanted:
        if cell not in known:
            store(row := measure(*cell))
            print(f"{', '.join(map(str, cell))}: {row.seconds:.0f} s", flush=True)
    rows = [row for cell, row in read().items() if cell in wanted]
    wide_console(200).print(table_of(rows))
    met = sum(map(is_met, rows))
    print(f"{met} of {len(rows)} budgets hold, {sum(map(is_first, rows))} at the first plan")


if __name__ == "__main__":
    main()
