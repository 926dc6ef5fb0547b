"""Weigh the suite for GPUs and TPUs that are not here, beside plain JAX and `jax.checkpoint`.

    python -m benchmarks.targets                          # all programs for an H100: an hour on two cores
    python -m benchmarks.targets gpt-scan vit --targets h100 v5e-1
    python -m benchmarks.targets --resume                 # what is not stored yet

Temporaries are by XLA's account of the step, compiled for the target. A step of ours also has a time, by the rates of
the target and over plain JAX's: each op once, what runs again, and writing and reading what is kept. For a TPU the
compiler's own cycles stand beside it, each computation as often as its loop runs. What `jax.checkpoint` takes is the
least over the policies and places of `make bench`. A budget that cannot be met has the least that was found.

The figures go to `benchmarks/results/targets-TARGET.json`, each program's as soon as they are there.
"""

import argparse
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import machine, memory_of, wide_console
from benchmarks.methods import POLICIES
from benchmarks.programs import PROGRAMS, SIZES, Program, load
from jointcut import aot
from jointcut.aot.run.compile import compiled
from jointcut.partition.errors import BudgetError, TargetError

RESULTS = Path(__file__).parent / "results"
BUDGETS = (0.5, 0.25, 0.0)
MB = 1e6

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_MOST_CYCLES = 1 << 62  # XLA's mark for an op that it cannot estimate

Row = dict[str, Any]


def main() -> None:
    """Weigh the programs asked for, and print a table for each target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; all when none")
    parser.add_argument("--targets", nargs="+", default=["h100"], metavar="TARGET", help="see aot.target (%(default)s)")
    parser.add_argument("--size", choices=SIZES, default="small", help="how large the programs are (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="leave out what is stored already")
    options = parser.parse_args()
    if unknown := set(options.programs) - set(PROGRAMS):
        parser.error(f"there is no program {min(unknown)}; the programs are {', '.join(PROGRAMS)}")
    for name in options.targets:
        try:
            target = aot.target(name)
            _ = target.devices
        except TargetError as error:
            parser.error(str(error))
        weigh_for(target, options.programs or list(PROGRAMS), options.size, options.resume)


def weigh_for(target: aot.Target, names: list[str], size: Any, resumes: bool) -> None:
    """Weigh programs for one target, keep the figures, and print them."""
    file = RESULTS / f"targets-{target.name}{'' if size == 'small' else '-' + size}.json"
    known = json.loads(file.read_text("utf-8"))["programs"] if file.exists() else {}
    for name in tqdm([n for n in names if not (resumes and n in known)], unit="program", disable=None):
        known[name] = weighed(load(name, size), target)
        jax.clear_caches()
        if size != "tiny":
            where = machine() | {"size": size}
            file.write_text(json.dumps({"machine": where, "programs": known}, indent=1) + "\n", "utf-8")
    console = wide_console(120)
    console.print(table_of(target, {name: known[name] for name in names if name in known}))


def weighed(program: Program, target: aot.Target) -> Row:
    """The figures of one program."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.typeof(x).dtype), program.arguments)
    traced = aot.function(program.loss, has_aux=program.has_aux, target=target).trace(*shapes)
    planner, plain = traced.planner, traced.plain_program
    whole = planner.everything()
    row: Row = {"plain": account(plain, target)}
    for name, wrapped in placements(program):
        step = jax.jit(jax.value_and_grad(wrapped, has_aux=program.has_aux))
        lowered = step.lower(*jax.tree.map(target.placed, shapes))
        row.setdefault("checkpoint", {})[name] = account(compiled(lowered, target), target)

    def ours(cut: aot.Cut) -> Row:
        step = planner.common_seconds + planner.step_seconds(planner.priced(cut.plan))
        base = None if whole is None else planner.common_seconds + planner.step_seconds(whole)
        predicted = planner.candidate(planner.priced(cut.plan)).predicted_bytes
        (program_of, *_) = cut.compile(1).programs
        return account(program_of, target) | {
            "strategy": cut.plan.strategy,
            "saved_bytes": cut.plan.bytes_saved,
            "predicted_bytes": round(predicted),
            "time": None if base is None else step / base,
        }

    row["default"] = ours(traced.partition())
    for budget in BUDGETS:
        try:
            row[f"{budget:g}"] = ours(traced.partition(budget=budget))
        except BudgetError as error:
            fixed = row["plain"]["argument_bytes"] + row["plain"]["output_bytes"]
            row[f"{budget:g}"] = {"least_bytes": None if error.least_bytes is None else error.least_bytes - fixed}
    return row


def placements(program: Program) -> Iterator[tuple[str, Any]]:
    """The loss with `jax.checkpoint` in each of its places, under each policy that needs no names."""
    for place in ("loss", *program.places):
        for name, policy in POLICIES.items():
            yield f"{place}: {name}", program.wrapped(place, partial(jax.checkpoint, policy=policy))


def account(step: jax.stages.Compiled, target: aot.Target) -> Row:
    """XLA's account of a compiled step."""
    memory = memory_of(step)
    row: Row = {"temp_bytes": memory.temp, "argument_bytes": memory.argument, "output_bytes": memory.output}
    return row | ({"cycles": cycles(step.as_text() or "")} if target.platform == "tpu" else {})


def cycles(text: str) -> int:
    """The cycles that XLA:TPU estimates for a program, those of a loop's body times its trips.

    >>> text = '''
    ... %body (p: f32[]) -> f32[] {
    ...   %a = f32[] add(%p, %p), backend_config={"estimated_cycles":"10"}
    ... }
    ... ENTRY %main (x: f32[]) -> f32[] {
    ...   %w = f32[] while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
    ...   %v = f32[] while(%x), condition=%below, body=%body
    ...   %b = f32[] add(%w, %v), backend_config={"estimated_cycles":"5"}
    ... }
    ... %below (n: s32[]) -> pred[] {
    ...   %most = s32[]{:T(128)} constant(4)
    ...   %lt = pred[] compare(%n, %most), direction=LT
    ... }'''
    >>> cycles(text)
    75
    """
    lines, name, entry = dict[str, list[str]](), "", ""
    for line in text.splitlines():
        if (opening := re.match(r"(ENTRY )?%?([\w.\-]+) [^=]*\{$", line)) is not None:
            name, entry = opening[2], opening[2] if opening[1] else entry
        lines.setdefault(name, []).append(line)

    def total(computation: str) -> int:
        cycles = 0
        for line in lines.get(computation, ()):
            cycles += sum(n for n in map(int, _CYCLES.findall(line)) if n < _MOST_CYCLES)
            bodies = re.findall(r"(?:body|to_apply|branch_computations=\{)=?%?([\w.\-]+)", line)
            cycles += sum(_trips(line, lines) * total(body) for body in bodies)
        return cycles

    return total(entry)


def _trips(line: str, lines: dict[str, list[str]]) -> int:
    """How often the loop of a line runs: as it says, or up to the one number that its condition compares with."""
    if (told := re.search(r'known_trip_count":\{"n":"(\d+)"', line)) is not None:
        return int(told[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    held = "\n".join(lines.get(condition[1], ())) if condition is not None else ""
    limits = re.findall(r"s32\[\]\S* constant\((\d+)\)", held)
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in held else 1


def table_of(target: aot.Target, rows: dict[str, Row]) -> Table:
    """A line for each program; the least of a row is bold, whose ever it is."""
    table = Table(title=f"{target}, JAX {jax.__version__}", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("program", "plain MB", "best checkpoint", "default", "time", "budget=0.0", "time"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    shares: dict[str, list[float]] = {"checkpoint": [], "default": [], "0": []}
    for name, row in rows.items():
        plain = row["plain"]["temp_bytes"]
        temps = {
            "checkpoint": min(each["temp_bytes"] for each in row["checkpoint"].values()),
            "default": row["default"]["temp_bytes"],
            "0": row["0"].get("temp_bytes"),
        }
        least = min(size for size in temps.values() if size is not None)
        shown = {way: _share(size, plain, size == least) for way, size in temps.items()}
        for way, size in temps.items():
            shares[way] += [max(size, 1) / plain] if size and plain else []
        times = (_time(row["default"]), _time(row["0"]))
        cells = shown["checkpoint"], shown["default"], times[0], shown["0"], times[1]
        table.add_row(name, f"{plain / MB:,.1f}", *cells)
    means = {way: f"{geometric_mean(found):.2f}" if found else "" for way, found in shares.items()}
    table.caption = f"geometric means: checkpoint {means['checkpoint']}, default {means['default']}, 0.0 {means['0']}"
    return table


def _share(size: int | None, plain: int, is_least: bool) -> str:
    if size is None or not plain:
        return ""
    return f"[bold]{size / plain:.2f}[/bold]" if is_least else f"{size / plain:.2f}"


def _time(row: Row) -> str:
    return "" if row.get("time") is None else f"{row['time']:.2f}"


if __name__ == "__main__":
    main()
