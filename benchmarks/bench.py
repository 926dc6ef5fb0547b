"""Put programs against methods, print the tables, judge the targets.

    python -m benchmarks.bench                      # all programs and methods: an hour or so on two cores
    python -m benchmarks.bench resnet lstm          # some programs
    python -m benchmarks.bench --resume             # go on where a run was stopped
    python -m benchmarks.bench --methods jointcut   # methods whose name holds a word; plain is always there
    python -m benchmarks.bench --size tiny          # a smoke test: few rounds, no claim
    python -m benchmarks.bench --size large         # for a GPU

The figures go to `benchmarks/results/` after each program, as JSON with the machine and the versions they were measured
on, and in the end as a scatter plot of peak against time. Each method of jointcut is timed in close pairs with plain;
the many methods with `jax.checkpoint` go round with plain, fewer times.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from benchmarks import methods as building
from benchmarks.measure import Spread, Timing, machine, time_together, wide_console
from benchmarks.methods import AGAIN, OURS, PLAIN, Method, Step, methods_for
from benchmarks.picture import scatter
from benchmarks.programs import PROGRAMS, SIZES, Program, load
from benchmarks.report import Result, Row, judge, read_results, summary_of, table_of, write_results
from benchmarks.scaling import DEPTHS, measure_call, measure_scaling
from jointcut import aot

RESULTS = Path(__file__).parent / "results"
ROUNDS = {"tiny": (2, 2), "small": (16, 4), "large": (16, 4)}  # of jointcut's methods, and of the others


def main() -> None:
    """Measure, print, judge, write."""
    options = parse_options()
    console = wide_console(150)
    where = machine() | {"size": options.size}
    path = results_path(where, options)
    results = read_results(where, path) if options.resume else []
    warm_up()
    measured = {r.name for r in results}
    with tqdm([name for name in options.programs if name not in measured], unit="program", disable=None) as bar:
        for name in bar:
            bar.set_description(name)
            results.append(measure_program(load(name, options.size), options, bar))
            write_results(where, results, [], [], [], path)
            with bar.external_write_mode():
                console.print(table_of(results[-1]))
    scaling = [measure_scaling(layers) for layers in (DEPTHS[:1] if options.size == "tiny" else DEPTHS)]
    calls = [measure_call(leaves) for leaves in (2, 50)]
    if {building.MIN_CUT, building.INSIDE} <= results[0].rows.keys():
        console.print(summary_of(results))
        targets = judge(results, scaling, calls)
    else:
        targets = []
    for cost in (*scaling, *calls):
        console.print(str(cost))
    if options.size == "tiny":
        console.print("Tiny sizes: the targets are not meant for them.")
    for target in targets:
        verdict = "[green]reached[/]" if target.reached else "[red]missed [/]"
        console.print(f"{verdict} {target.claim}: {target.measured:.3g}{target.unit}, bound {target.bound:g}")
    write_results(where, results, scaling, calls, targets, path)
    scatter(path.with_suffix(".png"), results)
    console.print(f"Written to {path} and {path.with_suffix('.png').name}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; all when none")
    parser.add_argument("--methods", default="", help="only methods whose name holds this, and plain")
    parser.add_argument("--rounds", type=int, default=None, help="timing rounds of jointcut's methods (16)")
    parser.add_argument("--size", choices=SIZES, default="small", help="how large the programs are (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep the programs that a stopped run has measured")
    options = parser.parse_args()
    unknown = sorted(set(options.programs) - set(PROGRAMS))
    if unknown:
        parser.error(f"unknown program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    if options.rounds is not None and options.rounds < 2:
        parser.error("--rounds must be at least 2")
    if options.resume and (options.programs or options.size == "tiny"):
        parser.error("--resume goes on with the whole suite at its small or large size; name no programs")
    options.partial = bool(options.programs)
    options.programs = options.programs or list(PROGRAMS)
    return options


def results_path(where: Mapping[str, Any], options: argparse.Namespace) -> Path:
    """Where the figures go: with the project's own, if the whole suite is measured at a size that counts."""
    folder = Path(tempfile.mkdtemp()) if options.size == "tiny" or options.partial else RESULTS
    only = f"-{options.methods.replace(' ', '_')}" if options.methods else ""
    return folder / f"bench-{where['backend']}-py{where['python']}-jax{where['jax']}{only}.json"


def warm_up() -> None:
    """Trace and compile once what every method needs, so that the first one measured does not pay for it."""
    tiny = load("mlp", "tiny")
    for build in (building.build_plain, OURS[building.MIN_CUT]):
        build(tiny)


def measure_program(program: Program, options: argparse.Namespace, bar: tqdm) -> Result:
    """Build every method, then time them: ours with plain, the others with plain, the forward by itself."""
    methods: dict[str, Method] = {
        name: build for name, build in methods_for(program).items() if name == PLAIN or options.methods in name
    }
    steps: dict[str, Step] = {}
    for name, build in methods.items():
        bar.set_description(f"{program.name}: {name}")
        steps[name] = build(program)
        if name == PLAIN:
            steps[AGAIN] = steps[PLAIN]
    bar.set_description(f"{program.name}: timing")
    rounds, fewer = ROUNDS[options.size]
    rounds = options.rounds or rounds
    ours = {name: step for name, step in steps.items() if name in (PLAIN, AGAIN) or name in OURS}
    others = {name: step for name, step in steps.items() if name not in OURS}
    timings = timed(others, fewer) if len(others) > 2 else {}
    timings |= timed(ours, rounds)
    rows = {name: Row(step.figures, timings[name]) for name, step in steps.items()}
    sizes = dict(program.sizes) | {"parameters": program.num_parameters}
    return Result(program.name, program.title, sizes, rows, forward(program, rounds))


def timed(steps: Mapping[str, Step], rounds: int) -> dict[str, Timing]:
    """Time steps together, plain among them."""
    return time_together({name: step.call for name, step in steps.items()}, PLAIN, rounds)


def forward(program: Program, rounds: int) -> Spread:
    """The time of a call without gradient over that of `jax.jit` of the same function."""
    jitted, ours = jax.jit(program.loss), aot.function(program.loss, has_aux=program.has_aux)
    calls = {"jit": lambda: jitted(*program.arguments), "ours": lambda: ours(*program.arguments)}
    return time_together(calls, "jit", 4 * rounds)["ours"].ratio


if __name__ == "__main__":
    main()
