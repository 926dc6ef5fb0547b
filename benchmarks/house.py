"""Compare what the house costs with a baseline: memory of its plans, seconds, calls, lines of code.

    python -m benchmarks.house                       # everything, a quarter of an hour on two cores
    python -m benchmarks.house gpt-scan              # plans of some programs, and all other parts
    python -m benchmarks.house --parts lines,calls   # of `lines`, `compiled`, `calls`, `replay`, `menu`, `plans`
    python -m benchmarks.house --baseline            # the same, kept as the baseline

Bytes, flops, programs and lines are the same on every machine: the rates of the device are fixed. Times are in the unit
of a piece of Python work beside them, those of calls over calls of `jax.jit`, so that two machines may be compared. The
baseline lies in `benchmarks/results/house_before.json`, the latest figures beside it in `house_now.json`.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.census import FOLDERS, ROOT, files, house_table
from benchmarks.house_plans import RATES, plain_peak
from benchmarks.measure import machine, wide_console
from benchmarks.methods import forget
from benchmarks.programs import PROGRAMS, gpt, load
from jointcut import aot
from jointcut.partition import Plan

RESULTS = Path(__file__).parent / "results"
BEFORE, NOW = RESULTS / "house_before.json", RESULTS / "house_now.json"

#: XLA lays buffers out before it makes code: without optimising the code its account is the same, in a third less time.
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

Figures = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    `asked` is the most that now may be over before, `most` the most that it may be whatever was before; None where
    nothing is asked.
    """

    name: str
    before: float | None
    now: float | None
    asked: float | None = None
    most: float | None = None

    @property
    def ratio(self) -> float:
        """Now over before; infinite where there is nothing now, not a number where there was nothing before."""
        if self.before is None or self.now is None:
            return math.nan if self.before is None else math.inf
        return self.now / self.before if self.before else (math.inf if self.now else 1.0)

    @property
    def is_reached(self) -> bool:
        """Whether now is not above what is asked; so it is where nothing is asked, or there was nothing before."""
        if self.most is not None and (self.now is None or self.now > self.most):
            return False
        return self.asked is None or math.isnan(self.ratio) or self.ratio <= self.asked

    @property
    def demand(self) -> str:
        """What is asked: `≤ 0.2 × before`, or `≤ 1`."""
        if self.most is not None:
            return f"≤ {self.most:g}"
        return "" if self.asked is None else f"≤ {self.asked:.4g} × before"


def main() -> None:
    """Measure the parts that are asked for, keep the figures, and print them beside the baseline."""
    options = parse_options()
    console, path = wide_console(110), BEFORE if options.baseline else NOW
    before = read(BEFORE)
    missed: list[str] = []
    for part in options.parts:
        start = time.perf_counter()
        was = before.get(part, {}).get("figures", {})
        figures = PARTS[part].measure(options, {} if options.baseline else was)
        kept = read(path)
        kept[part] = {"figures": kept.get(part, {}).get("figures", {}) | figures, "machine": machine() | conditions()}
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        rows = list(PARTS[part].rows(figures if options.baseline else was, figures))
        console.print(table_of(f"{part} ({time.perf_counter() - start:.0f} s)", rows))
        if part == "lines":
            console.print(house_table(files()))
        missed += [f"{part}: {row.name}" for row in rows if not (options.baseline or row.is_reached)]
    if not options.baseline:
        console.print("\n".join(["[red]missed[/]", *missed]) if missed else "All that is asked is reached.")
    console.print(f"Written to {path}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; all when none")
    parser.add_argument("--parts", default=",".join(PARTS), help="which to measure, with commas between (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timing rounds, of which the least counts (%(default)s)")
    parser.add_argument("--baseline", action="store_true", help=f"keep the figures as {BEFORE.name}")
    options = parser.parse_args()
    if unknown := sorted(set(options.programs) - set(PROGRAMS)):
        parser.error(f"unknown program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    options.programs, options.parts = options.programs or list(PROGRAMS), options.parts.split(",")
    if unknown := sorted(set(options.parts) - PARTS.keys()):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def read(path: Path) -> dict[str, Any]:
    """The figures in a file, by part; none where there is no such file."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def conditions() -> dict[str, Any]:
    """The commit that last changed the product, where git tells it, and how many processes wanted a core."""
    command = ["git", "log", "-1", "--format=%h", "--", *FOLDERS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {"commit": ended.stdout.strip() or "unknown", "load": os.getloadavg()[0]}


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """Before, now, their ratio, and what is asked of it."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("figure")
    for heading in ("before", "now", "now ÷ before", "asked"):
        table.add_column(heading, justify="right")
    for row in rows:
        ratio = f"{row.ratio:.3f}" if row.is_reached else f"[red]{row.ratio:.3f}[/]"
        table.add_row(row.name, shown(row.before), shown(row.now), ratio, row.demand)
    return table


def shown(figure: float | None) -> str:
    """A figure with the digits that count."""
    return "none" if figure is None else f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.4g}"


# -------------------------------------------------------------------------------------------------- the unit of time


BESIDE = 20  # pieces before and after a long work


def piece() -> int:
    """A fixed piece of work in plain Python: dictionaries, tuples, a sort and a sum, as a search for plans does."""
    table: dict[int, tuple[int, int]] = {}
    for i in range(20_000):
        table[i * 7919 % 10_007] = (i, len(table))
    return sum(b - a for a, b in sorted(table.values()))


def beside(works: Mapping[str, tuple[Callable[[], object], Callable[[], object]]], rounds: int) -> Figures:
    """The least time of each work, of milliseconds, and the same over the least of what it is paired with."""
    figures: Figures = {}
    for name, pair in works.items():
        least = [math.inf, math.inf]
        for _ in range(rounds):
            least = [min(known, seconds_of(work, time.perf_counter)) for known, work in zip(least, pair, strict=True)]
        figures[name] = {"us": 1e6 * least[0], "units": least[0] / least[1]}
    return figures


def in_pieces(works: Mapping[str, Callable[[], Callable[[], object]]], rounds: int) -> Figures:
    """The least time of works of seconds, made anew for each round, and the median of that over pieces around it.

    Others slow down a work of seconds and the pieces before and after it alike. Time of this process alone counts.
    """
    figures: Figures = {}
    for name, make in works.items():
        seconds, ratios = [], []
        for _ in range(rounds):
            work = make()
            around = [seconds_of(piece, time.process_time) for _ in range(BESIDE)]
            seconds.append(seconds_of(work, time.process_time))
            around += [seconds_of(piece, time.process_time) for _ in range(BESIDE)]
            ratios.append(seconds[-1] / statistics.median(around))
        figures[name] = {"us": 1e6 * min(seconds), "units": statistics.median(ratios)}
    return figures


def seconds_of(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """The time of one work by a clock."""
    start = clock()
    work()
    return clock() - start


def timed_rows(before: Figures, now: Figures, asked: float) -> Iterator[Row]:
    """One row for each work that was timed, in its unit."""
    for name, figures in now.items():
        was = before.get(name)
        yield Row(f"{name}; here {figures['us']:,.0f} µs", was and was["units"], figures["units"], asked)


# ------------------------------------------------------------------------------------------------------------- lines


def lines(options: argparse.Namespace, before: Figures) -> Figures:
    """Lines of product code in each folder, pages and scripts not counted."""
    del options, before
    return {f: sum(file.lines for file in files() if file.path.startswith(f"{f}/")) for f in FOLDERS}


def line_rows(before: Figures, now: Figures) -> Iterator[Row]:
    """Each folder, and what is asked of the sum."""
    for folder in FOLDERS:
        yield Row(f"lines in {folder}/", before.get(folder), now[folder])
    yield Row("lines of product code", sum(before.values()) or None, sum(now.values()), 1.0)


# ---------------------------------------------------------------------------------------------------------- compiled


class Compilations:
    """Counts the programs that XLA compiles; JAX reports each compilation."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        self.count += event == "/jax/core/compile/backend_compile_duration"


def compiled(options: argparse.Namespace, before: Figures) -> Figures:
    """Programs compiled before the first result under a budget in bytes that the first plan holds, by way of calling.

    Each way has a budget of its own, as what another way searched for would be found again.
    """
    del options, before
    program, compilations = load("mlp", "tiny"), Compilations()
    peak = plain_peak(program)
    counts: Figures = {}
    for times, (name, call) in enumerate(WAYS.items(), 2):
        loss = aot.function(program.loss, has_aux=program.has_aux, budget=times * peak, cost=RATES)
        ready = call(loss, program.arguments)
        start = compilations.count
        jax.block_until_ready(jax.tree.leaves(ready()))
        counts[name] = compilations.count - start
    return counts


def _after_explain(loss: Any, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    cut = loss.trace(*arguments).partition()
    cut.explain()
    return lambda: cut.compile().value_and_grad(*arguments)


#: Each way prepares what does not count, and returns the rest as a function without arguments.
WAYS: dict[str, Callable[[Any, tuple[Any, ...]], Callable[[], Any]]] = {
    "value_and_grad": lambda f, args: partial(f.value_and_grad, *args),
    "trace().partition().compile()": lambda f, args: lambda: f.trace(*args).partition().compile().value_and_grad(*args),
    "compile() after explain()": _after_explain,
}


def compiled_rows(before: Figures, now: Figures) -> Iterator[Row]:
    """One program each, whatever was before; none after the report has compiled it."""
    for name, count in now.items():
        yield Row(f"programs compiled: {name}", before.get(name), count, most=0 if "after" in name else 1)


# ------------------------------------------------------------------------------------------------------------- calls

CALLS = 25  # in one measurement, which should end before another process gets the core


def calls(options: argparse.Namespace, before: Figures) -> Figures:
    """The time of calls that compute next to nothing, from call to return, and over that of `jax.jit` of the same."""
    del before
    ours = aot.function(_summed)
    pairs = {"forward": (ours, jax.jit(_summed))}
    pairs["value_and_grad"] = ours.value_and_grad, jax.jit(jax.value_and_grad(_summed))
    works: dict[str, Any] = {}
    for leaves in (2, 50):
        parameters, x = {f"w{i:02d}": jnp.ones(4) for i in range(leaves - 1)}, jnp.ones(4)
        for name, pair in pairs.items():
            works[f"{name}, {leaves} leaves"] = [partial(repeated, partial(call, parameters, x)) for call in pair]
    timed = beside(works, 100 * options.rounds)
    return {name: figures | {"us": figures["us"] / CALLS} for name, figures in timed.items()}


def _summed(parameters: dict[str, Array], x: Array) -> Array:
    return sum((jnp.sum(w * x) for w in parameters.values()), jnp.zeros(()))


def repeated(call: Callable[[], Any]) -> None:
    """Call many times, and wait for the last result."""
    jax.block_until_ready([call() for _ in range(CALLS)][-1])


# --------------------------------------------------------------------------------------------------- replay and menu


def replay(options: argparse.Namespace, before: Figures) -> Figures:
    """The time to weigh a plan of a joint program of 10^4 ops that saves all, that recomputes nothing heavy, or all."""
    del before
    program = gpt.of("scaling", gpt.Config(layers=42, width=8, heads=2, context=8, scan=False), rows=1)
    traced = aot.function(program.loss, cost=RATES).trace(*program.arguments)
    plans = {s: traced.partition(strategy=s).plan for s in ("save_all", "min_cut")}
    plans["save nothing"] = traced.partition(strategy=lambda graph: Plan.of(graph, saved=[])).plan
    for plan in plans.values():
        weigh(traced, plan)
    works = {f"weigh {name}": lambda plan=plan: partial(weigh, traced, plan) for name, plan in plans.items()}
    return in_pieces(works, options.rounds)


def weigh(traced: aot.Traced, plan: Plan) -> object:
    """The predicted peak of one plan, as the menu asks for it: the only place here that knows how."""
    return traced.planner.candidate(plan)


def menu(options: argparse.Namespace, before: Figures) -> Figures:
    """The time to list all plans of gpt-unrolled and to weigh each, from a fresh trace."""
    del before
    program = load("gpt-unrolled", "small")
    function = aot.function(program.loss, has_aux=program.has_aux, cost=RATES)

    def make() -> Callable[[], object]:
        forget()
        return function.trace(*program.arguments).pareto

    return in_pieces({"menu of gpt-unrolled": make}, options.rounds)


# ------------------------------------------------------------------------------------------------------------- plans


def plans(options: argparse.Namespace, before: Figures) -> Figures:
    """The default plan and eight of each program, at the budgets of the baseline; each program in its own process."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FAST}"

    def points(name: str) -> list[Figures]:
        budgets = [str(p["budget_bytes"]) for p in before.get(name, []) if p["budget_bytes"] is not None]
        command = [sys.executable, "-m", "benchmarks.house_plans", name, *budgets]
        ended = subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, check=True, stdout=subprocess.PIPE)
        return json.loads(ended.stdout)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        each = tqdm(pool.map(points, options.programs), total=len(options.programs), unit="program", disable=None)
        return dict(zip(options.programs, each, strict=True))


def plan_rows(before: Figures, now: Figures) -> Iterator[Row]:
    """For each program the plan whose peak rose most, and the one that recomputes most in comparison."""
    for name, points in now.items():
        pairs = list(zip(before.get(name) or points, points, strict=True))
        for key, unit, asked in (("peak_bytes", "peak MB", 1.005), ("recomputed_flops", "again Mflop", 1 + 1e-9)):
            yield max((_plan_row(name, unit, asked, key, *pair) for pair in pairs), key=lambda row: row.ratio)


def _plan_row(name: str, unit: str, asked: float, key: str, before: Figures, now: Figures) -> Row:
    budget = now["budget_bytes"]
    where = "by default" if budget is None else f"at {budget / 1e6:.1f} MB"
    was, got = (None if p["peak_bytes"] is None else p[key] / 1e6 for p in (before, now))
    return Row(f"{name}: {unit} {where}", was, got, asked)


@dataclass(frozen=True)
class Part:
    """One part: how it is measured, given the options and the figures of the baseline, and what is told of it."""

    measure: Callable[[argparse.Namespace, Figures], Figures]
    rows: Callable[[Figures, Figures], Iterator[Row]]


PARTS: dict[str, Part] = {
    "lines": Part(lines, line_rows),
    "compiled": Part(compiled, compiled_rows),
    "calls": Part(calls, partial(timed_rows, asked=1.05)),
    "replay": Part(replay, partial(timed_rows, asked=1 / 5)),
    "menu": Part(menu, partial(timed_rows, asked=1 / 3)),
    "plans": Part(plans, plan_rows),
}


if __name__ == "__main__":
    main()
