"""Put programs against methods, print the table, judge the targets.

    python -m benchmarks.bench                    # all programs, ten rounds
    python -m benchmarks.bench gpt-scan --rounds 20
    python -m benchmarks.bench --small            # a smoke test: small sizes, few rounds, no claim

The figures go to `benchmarks/results/` as JSON, with the machine and the versions they were measured on.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks import gpt
from benchmarks.measure import Timing, machine, time_together, wide_console
from benchmarks.methods import Method, Step, all_methods, count_equations, forget
from benchmarks.programs import PROGRAMS, Program, gpt_program
from jointcut import aot

RESULTS = Path(__file__).parent / "results"
REFERENCE, JUDGED = "plain", "jointcut min_cut"
SMOKE = {REFERENCE, "checkpoint nothing + barriers", JUDGED}
TEN_THOUSAND = 10_000
DEEP = 42  # layers that make a joint graph of about so many equations
MB = 1e6

HEADINGS = (
    "activations\nMB",
    "÷ plain",
    "peak\nMB",
    "saved\nMB",
    "step\nms",
    "÷ plain\n(quartiles)",
    "trace\ns",
    "cut\ns",
    "compile\ns",
    "share",
    "dots",
)
CAPTION = (
    "activations: XLA's temp bytes, and residuals between programs; peak: arguments and results as well; "
    "saved: residuals by the jaxprs\n"
    "share: trace and cut over compile; dots: matrix products in the jaxprs, a loop's counted once; "
    "+ barriers: without the CPU pass that expands them"
)


@dataclass(frozen=True)
class Row:
    """One method on one program: as built, and as timed beside the others."""

    step: Step
    timing: Timing


@dataclass(frozen=True)
class Scaling:
    """How long a large joint graph takes from function to two jaxprs, beside what JAX alone takes to trace it."""

    equations: int
    jax_trace_s: float
    trace_s: float
    cut_s: float

    @property
    def seconds(self) -> float:
        """Tracing, cutting and emitting together."""
        return self.trace_s + self.cut_s


@dataclass(frozen=True)
class Target:
    """One bound that the project has set itself, and what was measured."""

    claim: str
    measured: float
    bound: float
    unit: str = ""

    @property
    def reached(self) -> bool:
        """Whether the measured figure is within the bound."""
        return self.measured <= self.bound


def main() -> None:
    """Measure, print, judge, write."""
    options = parse_options()
    console = wide_console(140)
    methods = {name: build for name, build in all_methods().items() if not options.small or name in SMOKE}
    programs = [PROGRAMS[name](options.small) for name in options.programs]
    if not options.small:
        warm_up()
    total = len(programs) * len(methods) * (options.rounds + 2)
    results: dict[str, dict[str, Row]] = {}
    with tqdm(total=total, unit="run", disable=None) as bar:
        for program in programs:
            results[program.name] = measure_program(program, methods, options.rounds, bar)
    for program in programs:
        console.print(table_of(program, results[program.name]))
    scaling = measure_scaling(layers=4 if options.small else DEEP)
    console.print(
        f"A joint graph of {scaling.equations} equations: traced in {scaling.trace_s:.2f} s "
        f"(jax.value_and_grad alone: {scaling.jax_trace_s:.2f} s), cut and emitted in {scaling.cut_s:.2f} s."
    )
    targets = judge(results, scaling)
    if options.small:
        console.print("Small sizes: the targets are not meant for them.")
    for target in targets:
        verdict = "[green]reached[/]" if target.reached else "[red]missed [/]"
        figures = f"{target.measured:.3g}{target.unit}, bound {target.bound:g}{target.unit}"
        console.print(f"{verdict} {target.claim}: {figures}")
    path = write_results(programs, results, scaling, targets, options)
    console.print(f"Written to {path}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; all when none")
    parser.add_argument("--rounds", type=int, default=None, help="timing rounds (10; 3 with --small)")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    unknown = sorted(set(options.programs) - set(PROGRAMS))
    if unknown:
        parser.error(f"unknown program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    options.programs = options.programs or list(PROGRAMS)
    options.rounds = options.rounds or (3 if options.small else 10)
    return options


def warm_up() -> None:
    """Trace and compile once what every method needs, so that the first one measured does not pay for it."""
    tiny = gpt_program("warm-up", gpt.Config(layers=1, width=8, heads=1, context=8), rows=1)
    methods = all_methods()
    for name in (REFERENCE, JUDGED):
        methods[name](tiny)


def measure_program(program: Program, methods: Mapping[str, Method], rounds: int, bar: tqdm) -> dict[str, Row]:
    """Build every method, then time them together."""
    steps: dict[str, Step] = {}
    for name, build in methods.items():
        bar.set_description(f"{program.name}: {name}")
        steps[name] = build(program)
        bar.update()
    bar.set_description(f"{program.name}: timing")
    timings = time_together({name: step.call for name, step in steps.items()}, REFERENCE, rounds, bar.update)
    return {name: Row(step, timings[name]) for name, step in steps.items()}


def measure_scaling(layers: int) -> Scaling:
    """Trace and cut a deep unrolled GPT, without compiling it."""
    config = gpt.Config(layers=layers, width=8, heads=2, context=8, scan=False)
    program = gpt_program("scaling", config, rows=1)
    forget()
    start = time.perf_counter()
    jax.jit(jax.value_and_grad(program.loss)).trace(*program.arguments)
    jax_trace_s = time.perf_counter() - start
    forget()
    start = time.perf_counter()
    traced = aot.function(program.loss).trace(*program.arguments)
    middle = time.perf_counter()
    traced.partition()
    end = time.perf_counter()
    return Scaling(count_equations(traced.joint), jax_trace_s, middle - start, end - middle)


def table_of(program: Program, rows: dict[str, Row]) -> Table:
    """All methods on one program."""
    title = f"{program.name}: {program.title}"
    executables = len(rows[JUDGED].step.programs)
    caption = f"{CAPTION}\n{JUDGED} runs as {executables} executable{'s'[: executables - 1]}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, caption=caption, caption_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    base = rows[REFERENCE].step.activation_bytes
    for name, row in rows.items():
        step, ratio = row.step, row.timing.ratio
        table.add_row(
            name,
            f"{step.activation_bytes / MB:.1f}",
            f"{step.activation_bytes / base:.2f}",
            f"{step.peak_bytes / MB:.1f}",
            f"{step.saved_bytes / MB:.1f}",
            f"{row.timing.seconds.median * 1e3:.0f}",
            f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
            f"{step.trace_s:.2f}",
            f"{step.cut_s:.2f}",
            f"{step.compile_s:.1f}",
            f"{step.share_of_compile:.0%}",
            str(step.dots),
            style="bold" if name == JUDGED else None,
        )
    return table


def judge(results: dict[str, dict[str, Row]], scaling: Scaling) -> list[Target]:
    """Hold the figures against what the project has promised."""
    targets: list[Target] = []
    if "gpt-scan" in results:
        plain, ours = results["gpt-scan"][REFERENCE], results["gpt-scan"][JUDGED]
        ratio = ours.step.activation_bytes / plain.step.activation_bytes
        targets.append(Target("gpt-scan: activation bytes over plain's", ratio, 0.50))
        targets.append(Target("gpt-scan: time over plain's", ours.timing.ratio.median, 1.00))
    if "gpt-unrolled" in results:
        plain, ours = results["gpt-unrolled"][REFERENCE], results["gpt-unrolled"][JUDGED]
        ratio = ours.step.saved_bytes / plain.step.saved_bytes
        targets.append(Target("gpt-unrolled: bytes saved over JAX's residuals", ratio, 0.40))
        extra = ours.step.dots - plain.step.dots
        targets.append(Target("gpt-unrolled: matrix products recomputed", extra, 0))
    for name, rows in results.items():
        share = rows[JUDGED].step.share_of_compile
        targets.append(Target(f"{name}: trace, cut and emit over XLA's compile time", share, 0.25))
    if scaling.equations < TEN_THOUSAND:
        claim = f"trace, cut and emit {scaling.equations} equations, scaled to {TEN_THOUSAND}"
    else:
        claim = f"trace, cut and emit {scaling.equations} equations"
    seconds = scaling.seconds * max(1.0, TEN_THOUSAND / scaling.equations)
    targets.append(Target(claim, seconds, 3.0, " s"))
    return targets


def write_results(
    programs: list[Program],
    results: dict[str, dict[str, Row]],
    scaling: Scaling,
    targets: list[Target],
    options: argparse.Namespace,
) -> Path:
    """Write everything measured as JSON; what a smoke test measured is kept apart."""
    where = machine()
    record = {
        "machine": where,
        "rounds": options.rounds,
        "small": options.small,
        "programs": {p.name: {"sizes": dict(p.sizes), "methods": as_record(results[p.name])} for p in programs},
        "scaling": asdict(scaling),
        "targets": [asdict(t) | {"reached": t.reached} for t in targets],
    }
    folder = Path(tempfile.mkdtemp()) if options.small else RESULTS
    folder.mkdir(exist_ok=True)
    path = folder / f"bench-{where['backend']}-py{where['python']}-jax{where['jax']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def as_record(rows: dict[str, Row]) -> dict[str, dict[str, Any]]:
    """The figures of each method, without the executables."""
    unwritten = {"call", "programs"}
    return {
        name: {k: v for k, v in vars(row.step).items() if k not in unwritten}
        | {"share_of_compile": row.step.share_of_compile, "timing": asdict(row.timing)}
        for name, row in rows.items()
    }


if __name__ == "__main__":
    main()
