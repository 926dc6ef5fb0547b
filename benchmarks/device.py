"""Check and weigh the suite on the device that JAX finds, such as a GPU.

    python -m benchmarks.device                          # all programs: some minutes on a GPU
    python -m benchmarks.device gpt-scan vit             # some programs
    python -m benchmarks.device mlp --size large --time  # for a GPU; with the time of each step beside plain JAX's
    python -m benchmarks.device --size large --no-run    # compile only: for sizes that do not fit the device
    python -m benchmarks.device --jobs 12                # so many at once, each in a process of its own

For each program stand the temporaries of plain JAX's step, and those of the default plan and of half a budget as shares
of it, by XLA's account; in brackets the smallest share that was found, where half cannot be met. The budget is plain
JAX's peak less half of its temporaries, in bytes, and `plans` is how many were compiled for it. `model` is the default
plan's predicted peak over XLA's. `differ` is the Euclidean norm of the difference of the gradients over that of plain
JAX's, with products in full precision. Times are ratios to plain JAX; where its step does not fit into the device's
memory, they are seconds.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import Call, machine, memory_of, time_together, wide_console
from benchmarks.programs import PROGRAMS, SIZES, Program, load
from jointcut import aot
from jointcut.partition.errors import BudgetError

GB = 1e9
ROUNDS = 8
PLAIN = "plain"


@dataclass(frozen=True)
class Weighed:
    """The figures of one program, in bytes of temporaries; `failed` tells where there are none.

    `times` are medians in seconds by step: plain, default and half. One that does not fit is missing.
    """

    name: str
    plain_bytes: int = 0
    default_bytes: int = 0
    predicted_bytes: int = 0
    half_bytes: int | None = None
    least_bytes: int | None = None
    plans: int = 0
    differ: float | None = None
    tolerance: float = 0.0
    times: Mapping[str, float] | None = None
    failed: str = ""

    def time(self, step: str) -> str:
        """The time of a step over plain JAX's, or in seconds where plain JAX's does not fit; empty without one."""
        times = self.times or {}
        if step not in times:
            return "does not fit" if times else ""
        return f"{times[step] / times[PLAIN]:.2f}" if PLAIN in times else f"{times[step]:.2f} s"

    @property
    def half(self) -> tuple[str, str, str]:
        """What half a budget takes, its time, and how many plans were compiled; or the least share, in brackets."""
        if self.half_bytes is not None:
            return f"{self.half_bytes / self.plain_bytes:.2f}", self.time("half"), str(self.plans)
        return "" if self.least_bytes is None else f"({self.least_bytes / self.plain_bytes:.2f})", "", ""


def main() -> None:
    """Weigh the programs asked for, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; all when none")
    parser.add_argument("--size", choices=SIZES, default="small", help="how large the programs are (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="programs at once (%(default)s)")
    parser.add_argument("--time", action="store_true", help="time the steps too; only with one job")
    parser.add_argument("--no-run", action="store_true", help="compile, and run no step")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    if options.time and (options.jobs > 1 or options.no_run):
        parser.error("--time needs the device for itself: leave --jobs and --no-run out")
    names = options.programs or list(PROGRAMS)
    found: dict[str, Weighed] = {}
    for weighed in tqdm(weigh_all(names, options), total=len(names), unit="program", disable=None):
        found[weighed.name] = weighed
        if options.json:
            rows = [asdict(found[name]) for name in names if name in found]
            written = {"machine": machine() | {"size": options.size}, "programs": rows}
            options.json.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    wide_console(120).print(table_of([found[name] for name in names]))


def weigh_all(names: list[str], options: argparse.Namespace) -> Iterator[Weighed]:
    """Weigh programs, each in a process of its own; they come as they end."""
    jobs, context = options.jobs, get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(weigh, name, options.size, options.time, not options.no_run): name for name in names}
        for future in as_completed(futures):
            error = future.exception()
            failed = f"{type(error).__name__}: {error}"
            yield future.result() if error is None else Weighed(futures[future], failed=failed)


def weigh(name: str, size: Any, is_timed: bool, runs: bool) -> Weighed:
    """The figures of one program."""
    program = load(name, size)
    step = jax.value_and_grad(program.loss, has_aux=program.has_aux)
    plain = jax.jit(step).lower(*program.arguments).compile()
    memory = memory_of(plain)
    traced = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments)
    cut = traced.partition()
    steps, least_bytes = {"default": cut.compile(1)}, None
    try:
        steps["half"] = traced.partition(budget=memory.peak - memory.temp // 2).compile(1)
    except BudgetError as error:
        least_bytes = None if error.least_bytes is None else error.least_bytes - memory.peak + memory.temp
    calls: dict[str, Call] = {PLAIN: partial(plain, *program.arguments)}
    calls |= {which: partial(ours.value_and_grad, *program.arguments) for which, ours in steps.items()}
    return Weighed(
        name,
        memory.temp,
        steps["default"].activation_bytes,
        cut.request.planner.replay(cut.plan).peak_bytes,
        steps["half"].activation_bytes if "half" in steps else None,
        least_bytes,
        len(steps["half"].trail) if "half" in steps else 0,
        difference(program) if runs and not is_timed else None,
        program.tolerance["float32"],
        timed(calls) if is_timed else None,
    )


def timed(calls: Mapping[str, Call]) -> dict[str, float]:
    """The seconds of each step that fits into the device's memory."""
    fitting: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            jax.block_until_ready(call())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        else:
            fitting[name] = call
    reference = next(iter(fitting), None)
    return (
        {} if reference is None else {n: t.seconds.median for n, t in time_together(fitting, reference, ROUNDS).items()}
    )


def difference(program: Program) -> float:
    """The norm of the difference between our gradients and plain JAX's, over that of plain JAX's."""
    with jax.default_matmul_precision("highest"):
        want = jax.jit(jax.grad(program.loss, has_aux=program.has_aux))(*program.arguments)
        got = aot.function(program.loss, has_aux=program.has_aux).grad(*program.arguments)
    if program.has_aux:
        want, got = want[0], got[0]
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, got, want)) / optax.tree.norm(want))


def table_of(rows: list[Weighed]) -> Table:
    """A line for each program."""
    title = f"{jax.devices()[0].device_kind}, JAX {jax.__version__}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for heading in ("program", "plain GB", "default", "time", "model", "half", "time", "plans", "differ", "tolerance"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    for row in rows:
        if row.failed:
            table.add_row(row.name, row.failed)
            continue
        shares = f"{row.plain_bytes / GB:.3f}", f"{row.default_bytes / row.plain_bytes:.2f}", row.time("default")
        model = f"{row.predicted_bytes / max(row.default_bytes, 1):.2f}"
        differ = ("", "") if row.differ is None else (f"{row.differ:.0e}", f"{row.tolerance:.0e}")
        table.add_row(row.name, *shares, model, *row.half, *differ)
    if done := [row for row in rows if not row.failed]:
        mean = geometric_mean(row.default_bytes / row.plain_bytes for row in done)
        table.caption = f"default over plain JAX, geometric mean of {len(done)}: {mean:.2f}"
    return table


if __name__ == "__main__":
    main()
