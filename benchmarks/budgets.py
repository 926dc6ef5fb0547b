"""Put budgets on the suite: does each hold, what does it cost, and which `jax.checkpoint` does it beat.

    python -m benchmarks.budgets                    # all programs: two hours or so on two cores
    python -m benchmarks.budgets gru ode            # some programs
    python -m benchmarks.budgets --outside          # six models of libraries that nothing was tuned for
    python -m benchmarks.budgets --no-checkpoint    # without building the methods that are compared with
    python -m benchmarks.budgets --resume           # go on where a run was stopped

For each program eight budgets in bytes, evenly spread between the smallest peak that is found and plain's. Each step is
compiled and XLA's account read, and is timed in close pairs with plain. Every placement of `jax.checkpoint`, and its
nesting by square roots, is built and timed likewise, and its peak is given to us as a budget: it is matched where some
plan of ours takes no more memory and at most 2 % more time.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks import outside, programs
from benchmarks.measure import Call, machine, time_together, wide_console
from benchmarks.methods import PLAIN, Step, build_plain, forget, methods_for
from benchmarks.nesting import nested_for
from benchmarks.programs import SIZES, Program
from jointcut import aot
from jointcut.partition import Plan
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.mincut import save_all

RESULTS = Path(__file__).parent / "results"
BUDGETS = 8
SLACK = 1.02  # of a checkpoint's time
MB = 1e6


@dataclass(frozen=True)
class Point:
    """One budget in bytes of the whole step: the plan that it led to, what XLA says of it, and its time over plain's.

    `compiled` counts the plans that were compiled for it, `promised_bytes` is what the model promised of the one taken;
    `seconds`, `bound_seconds` and `bytes_saved` are the plan's own figures, `modelled_time` is what the
    cost model expects over plain's.
    """

    budget_bytes: int
    peak_bytes: int
    activation_bytes: int
    promised_bytes: int
    compiled: int
    first_fits: bool
    strategy: str
    bytes_saved: int
    seconds: float
    bound_seconds: float
    time: float
    modelled_time: float

    @property
    def holds(self) -> bool:
        """Whether XLA's account stays within the budget."""
        return self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True)
class Rival:
    """One placement of `jax.checkpoint`: its peak, its time over plain's, and whether a plan of ours matches it."""

    name: str
    peak_bytes: int
    time: float
    matched: bool


@dataclass(frozen=True)
class Outcome:
    """One program: plain's peak, activations and time, our points by falling budget, and the rivals.

    `modelled_s` is how long plain takes by the cost model.
    """

    name: str
    plain_peak_bytes: int
    plain_activation_bytes: int
    plain_s: float
    modelled_s: float
    menu_s: float
    points: tuple[Point, ...]
    rivals: tuple[Rival, ...]


def main() -> None:
    """Measure, print, write."""
    options = parse_options()
    console = wide_console(150)
    where = machine() | {"size": options.size}
    partial_run = bool(options.named or options.size == "tiny")
    folder = Path(tempfile.mkdtemp()) if partial_run else RESULTS
    kind = "budgets-outside" if options.outside else "budgets"
    path = folder / f"{kind}-{where['backend']}-py{where['python']}-jax{where['jax']}.json"
    outcomes = read_outcomes(path) if options.resume else []
    done = {o.name for o in outcomes}
    with tqdm([name for name in options.programs if name not in done], unit="program", disable=None) as bar:
        for name in bar:
            bar.set_description(name)
            outcomes.append(measure(options.source.load(name, options.size), options))
            path.write_text(json.dumps({"machine": where, "programs": list(map(asdict, outcomes))}, indent=1) + "\n")
            with bar.external_write_mode():
                console.print(table_of(outcomes[-1]))
    for line in summary(outcomes):
        console.print(line)
    console.print(f"Written to {path}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__.partition("\n")[0])
    parser.add_argument("named", nargs="*", metavar="PROGRAM", help="of the suite, or of --outside; all when none")
    parser.add_argument("--outside", action="store_true", help="models of libraries instead of the suite")
    parser.add_argument("--size", choices=SIZES, default="small", help="how large the programs are (%(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="timing rounds (%(default)s)")
    parser.add_argument("--no-checkpoint", action="store_true", help="build no method with jax.checkpoint")
    parser.add_argument("--resume", action="store_true", help="keep the programs that a stopped run has measured")
    options = parser.parse_args()
    options.source = outside if options.outside else programs
    names = tuple(options.source.FOUND_IN)
    if unknown := sorted(set(options.named) - set(names)):
        parser.error(f"unknown program {', '.join(unknown)}; there are {', '.join(names)}")
    if options.outside and options.size not in outside.SIZES:
        parser.error(f"--outside has no size {options.size}; it has {', '.join(outside.SIZES)}")
    options.programs = options.named or list(names)
    return options


def measure(program: Program, options: argparse.Namespace) -> Outcome:
    """One program at eight budgets, beside plain and every placement of `jax.checkpoint`."""
    plain = build_plain(program)
    forget()
    traced = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments)
    start = time.perf_counter()
    _ = traced.planner.menu
    menu_s = time.perf_counter() - start
    least = traced.partition(budget=0.0).compile().peak_bytes
    rivals = {} if options.no_checkpoint else others(program)
    spread = [int(b) for b in np.linspace(plain.peak_bytes, least, BUDGETS)]
    budgets = spread + sorted({r.peak_bytes for r in rivals.values() if least <= r.peak_bytes < plain.peak_bytes})
    found = [traced.partition(budget=b) for b in budgets]
    steps = [cut.compile() for cut in found]
    calls: dict[str, Call] = {PLAIN: plain.call}
    taken: dict[Any, str] = {}
    for i, (cut, step) in enumerate(zip(found, steps, strict=True)):
        name = taken.setdefault(cut.plan.key, f"budget {i}")
        calls.setdefault(name, partial(step.value_and_grad, *program.arguments))
    calls |= {name: step.call for name, step in rivals.items()}
    timings = time_together(calls, PLAIN, options.rounds)
    times = {name: t.ratio.median for name, t in timings.items()}
    model = Modelled.of(traced.planner)
    points = tuple(
        point(budget, cut, step, times[taken[cut.plan.key]], model.time(cut.plan))
        for budget, cut, step in zip(budgets, found, steps, strict=True)
    )
    pairs = tuple(
        Rival(name, step.peak_bytes, times[name], matched(points, step.peak_bytes, times[name]))
        for name, step in rivals.items()
    )
    seconds = timings[PLAIN].seconds.median, model.plain_s
    return Outcome(program.name, plain.peak_bytes, plain.activation_bytes, *seconds, menu_s, points[:BUDGETS], pairs)


@dataclass(frozen=True)
class Modelled:
    """The seconds that the cost model gives to a step: what every plan computes, and what a plan adds to it."""

    planner: Planner
    plain_s: float

    @classmethod
    def of(cls, planner: Planner) -> "Modelled":
        """Price each op of the joint program once, as if what is fused took no time, and plain as if it saved all."""
        whole = planner.candidate(planner.priced(save_all(planner.graph))).step_seconds
        return cls(planner, planner.common_seconds + whole)

    def time(self, plan: Plan) -> float:
        """How long a step takes with a plan, over plain's."""
        added_s = self.planner.candidate(self.planner.priced(plan)).step_seconds
        return (self.planner.common_seconds + added_s) / self.plain_s


def others(program: Program) -> dict[str, Step]:
    """The methods with `jax.checkpoint`, in every place, once and nested."""
    built: dict[str, Step] = {}
    for name, build in (methods_for(program) | nested_for(program)).items():
        if name.startswith("checkpoint"):
            built[name] = build(program)
    return built


def point(budget: int, cut: aot.Cut, step: aot.Compiled, ratio: float, modelled: float) -> Point:
    """The figures of one budget."""
    plan = cut.plan
    return Point(
        budget_bytes=budget,
        peak_bytes=step.peak_bytes,
        activation_bytes=step.activation_bytes,
        promised_bytes=plan.peak_bytes or 0,
        compiled=len(step.trail),
        first_fits=step.trail[0].fits,
        strategy=plan.strategy,
        bytes_saved=plan.bytes_saved,
        seconds=plan.seconds or 0.0,
        bound_seconds=plan.bound_seconds or 0.0,
        time=ratio,
        modelled_time=modelled,
    )


def matched(points: Sequence[Point], peak_bytes: int, ratio: float) -> bool:
    """Whether some plan takes no more memory than a rival and at most 2 % more time."""
    return any(p.peak_bytes <= peak_bytes and p.time <= SLACK * ratio for p in points)


def read_outcomes(path: Path) -> list[Outcome]:
    """What a stopped run has written; nothing where there is no such file."""
    if not path.exists():
        return []
    return [
        Outcome(
            **{
                **program,
                "points": tuple(Point(**p) for p in program["points"]),
                "rivals": tuple(Rival(**r) for r in program["rivals"]),
            }
        )
        for program in json.loads(path.read_text())["programs"]
    ]


def table_of(outcome: Outcome) -> Table:
    """The budgets of one program, and the rivals that no plan matches."""
    unmatched = [r for r in outcome.rivals if not r.matched]
    caption = f"plain {outcome.plain_peak_bytes / MB:.1f} MB; menu of plans in {outcome.menu_s:.1f} s"
    if outcome.rivals:
        caption += f"; jax.checkpoint matched at {len(outcome.rivals) - len(unmatched)} of {len(outcome.rivals)} points"
    for rival in unmatched:
        caption += f"\nnot matched: {rival.name}, {rival.peak_bytes / MB:.1f} MB at {rival.time:.2f} of plain's time"
    table = Table(title=outcome.name, caption=caption, box=box.SIMPLE_HEAD, caption_justify="left")
    for heading in ("budget\nMB", "peak\nMB", "holds", "promised\nMB", "compiled", "saved\nMB", "again\nms", "gap",
                    "time\n÷ plain", "by the\nmodel", "plan"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for p in outcome.points:
        table.add_row(
            f"{p.budget_bytes / MB:.1f}", f"{p.peak_bytes / MB:.1f}", "yes" if p.holds else "NO",
            f"{p.promised_bytes / MB:.1f}", str(p.compiled), f"{p.bytes_saved / MB:.1f}", f"{1e3 * p.seconds:.2f}",
            f"{gap(p):.1%}", f"{p.time:.2f}", f"{p.modelled_time:.2f}", p.strategy,
        )  # fmt: skip
    return table


def gap(p: Point) -> float:
    """How far a plan's seconds lie above the least that its bytes allow."""
    return (p.seconds - p.bound_seconds) / p.bound_seconds if p.bound_seconds else 0.0


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """What all programs say together."""
    points = [p for o in outcomes for p in o.points]
    rivals = [r for o in outcomes for r in o.rivals]
    ratios = sorted(p.peak_bytes / p.promised_bytes for p in points)
    rises = [
        b.time / a.time for o in outcomes for a, b in zip(o.points[1:], o.points, strict=False) if a.time and b.time
    ]
    errors = sorted(p.modelled_time / p.time for p in points)
    steps = sorted(o.modelled_s / o.plain_s for o in outcomes)
    lines = [
        f"budgets that hold: {sum(p.holds for p in points)} of {len(points)}",
        f"first plan compiled fits: {sum(p.first_fits for p in points)} of {len(points)}; "
        f"plans compiled: {np.mean([p.compiled for p in points]):.1f} on average, {max(p.compiled for p in points)} "
        "at most",
        f"peak over promise: median {np.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}",
        f"time over plain's, the model's by the measured: median {np.median(errors):.2f}, from {errors[0]:.2f} to "
        f"{errors[-1]:.2f}; seconds of plain likewise: median {np.median(steps):.2f}, from {steps[0]:.2f} to "
        f"{steps[-1]:.2f}",
        f"time with more budget over time with less: {max(rises):.2f} at most",
    ]
    if rivals:
        hit = sum(r.matched for r in rivals)
        lines.append(f"points of jax.checkpoint that a plan matches: {hit} of {len(rivals)} ({hit / len(rivals):.0%})")
    return lines


if __name__ == "__main__":
    main()
