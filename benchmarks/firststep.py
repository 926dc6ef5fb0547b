"""Time the first step under a budget, search included, beside plain JAX's, and count compilations.

    python -m benchmarks.firststep                  # the suite at eight budgets and three fractions: some hours
    python -m benchmarks.firststep gru ode          # some programs
    python -m benchmarks.firststep --outside        # six models of libraries that nothing was tuned for
    python -m benchmarks.firststep --same-budgets   # measure anew at the budgets of the last whole run
    python -m benchmarks.firststep --resume         # go on where a run was stopped

A first step is all that happens until the gradient is there: trace, search, compile, run. Right before it plain JAX
takes its own first step in the same process. The caches of JAX and of jointcut are emptied before each of the two, JAX
keeps none on disk, and the rates of the device, which are measured once for each device and kept on disk, are known
before the first clock starts. Budgets in bytes are evenly spread from plain's peak down to the least that is found;
fractions are of plain's activations, XLA's temporaries. Seconds of the processor are told beside those of the wall,
since they hang less on what else runs. Used is what the step takes of its budget by XLA's account. The least is asked
for twice: like the others, and as a user does whom a refusal has told of it, which is shown as "named".
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks import methods, outside, programs
from benchmarks.measure import Seconds, machine, wide_console, xla_clock
from benchmarks.methods import build_plain
from benchmarks.programs import Program
from jointcut import aot
from jointcut.aot.planning.budgets import searches
from jointcut.aot.planning.budgets.rates import rates

RESULTS = Path(__file__).parent / "results"
FRACTIONS = (0.75, 0.5, 0.25)
BUDGETS = 8
ENOUGH = 0.85  # the share of a budget that a plan should use, where the default plan does not fit
MB = 1e6


def full_compilations(trail: Sequence[Any]) -> int:
    """How many plans of a search were compiled to run; the others were weighed."""
    return sum(not attempt.weighed for attempt in trail)


@dataclass(frozen=True)
class Size:
    """What XLA says of one step, in bytes."""

    peak_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class Bounds:
    """A program's sizes without a budget: plain JAX, the default plan, and the smallest plan found in `least_s`."""

    plain: Size
    default: Size
    least: Size
    least_s: float


@dataclass(frozen=True)
class Point:
    """The first step under one budget.

    Attributes:
        budget: bytes of the peak, or a fraction of plain's activations.
        limit_bytes: what the budget allows the peak, or the activations.
        taken_bytes: what the step takes of it, None where the budget was refused.
        least_bytes, default_bytes: what the smallest known plan and the default plan take of it.
        first, plain: how long the first step took, and plain JAX's beside it; until it was refused, if it was.
        compilations: plans compiled in full.
        programs: all that XLA compiled meanwhile, however it did.
        first_fits: whether the first plan that was compiled in full holds the budget.
        is_named: whether a refusal had named this budget before.
    """

    budget: float
    limit_bytes: float
    taken_bytes: int | None
    least_bytes: int
    default_bytes: int
    first: Seconds
    plain: Seconds
    compilations: int
    programs: int
    first_fits: bool
    is_named: bool = False

    @property
    def is_fraction(self) -> bool:
        """Whether the budget is a fraction of plain's activations."""
        return self.budget < 1

    @property
    def is_reachable(self) -> bool:
        """Whether some plan is known to hold the budget."""
        return self.least_bytes <= self.limit_bytes

    @property
    def is_between(self) -> bool:
        """Whether some plan is known to hold the budget, and the default plan takes all of it or more."""
        return self.is_reachable and self.limit_bytes <= self.default_bytes

    @property
    def ratio(self) -> float:
        """The first step over plain JAX's, by the wall."""
        return self.first.wall / self.plain.wall

    @property
    def processor_ratio(self) -> float:
        """The same by the processor."""
        return self.first.processor / self.plain.processor

    @property
    def used(self) -> float | None:
        """What is taken of the limit; None where the budget was refused."""
        return None if self.taken_bytes is None else self.taken_bytes / self.limit_bytes

    @property
    def holds(self) -> bool:
        """Whether there is a step, and XLA's account of it stays within the limit."""
        return self.taken_bytes is not None and self.taken_bytes <= self.limit_bytes


@dataclass(frozen=True)
class Outcome:
    """One program: its sizes, and its points, those in bytes first, by falling budget; points come last."""

    name: str
    title: str
    bounds: Bounds
    points: tuple[Point, ...] = ()


def main() -> None:
    """Measure, print, write."""
    options = parse_options()
    console = wide_console(120)
    jax.config.update("jax_enable_compilation_cache", False)
    rates()
    outcomes = started(options)
    with tqdm(options.programs, unit="program", disable=None) as bar:
        for name in bar:
            bar.set_description(name)
            known = outcomes.get(name)
            if known and known.points:
                continue
            program = options.source.load(name, options.size)
            outcomes[name] = Outcome(name, program.title, known.bounds if known else bounds_of(program))
            write(options.path, outcomes)  # the least takes long to find
            outcomes[name] = measure(program, outcomes[name].bounds, options.budgets, bar.set_postfix_str)
            write(options.path, outcomes)
            with bar.external_write_mode():
                console.print(table_of(outcomes[name]))
    for line in summary(list(outcomes.values())):
        console.print(line)
    console.print(f"Written to {options.path}")


def parse_options() -> argparse.Namespace:
    """Read the command line; `source` is where programs come from, `path` where the figures go."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.firststep", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="of the suite, or of --outside; all when none")
    parser.add_argument("--outside", action="store_true", help="models of libraries instead of the suite")
    parser.add_argument("--size", choices=outside.SIZES, default="small", help="how large they are (%(default)s)")
    parser.add_argument("--budgets", type=int, default=BUDGETS, metavar="N", help="budgets in bytes (%(default)s)")
    parser.add_argument("--same-budgets", action="store_true", help="do not look for the least anew where it is known")
    parser.add_argument("--resume", action="store_true", help="keep what a stopped run has measured")
    options = parser.parse_args()
    options.source = outside if options.outside else programs
    names = tuple(options.source.FOUND_IN)
    if unknown := sorted(set(options.programs) - set(names)):
        parser.error(f"unknown program {', '.join(unknown)}; there are {', '.join(names)}")
    if options.budgets < 2:
        parser.error(f"--budgets must be at least 2, got {options.budgets}")
    is_whole = not options.programs and options.size == "small" and options.budgets == BUDGETS
    options.programs = options.programs or list(names)
    where = machine()
    kind = "firststep-outside" if options.outside else "firststep"
    options.whole = RESULTS / f"{kind}-{where['backend']}-py{where['python']}-jax{where['jax']}.json"
    options.path = options.whole if is_whole else Path(tempfile.mkdtemp()) / options.whole.name
    return options


def started(options: argparse.Namespace) -> dict[str, Outcome]:
    """What need not be measured: the programs of the run that goes on, or the sizes of those in the last whole run."""
    if options.size != "small" or not (options.resume or options.same_budgets):
        return {}
    kept = {name: outcome for name, outcome in read(options.whole).items() if name in options.programs}
    goes_on = options.resume and options.path == options.whole
    return kept if goes_on else {name: replace(outcome, points=()) for name, outcome in kept.items()}


# --------------------------------------------------------------------------------------------------------- measure


def bounds_of(program: Program) -> Bounds:
    """Compile plain, the default plan, and the smallest that is found."""
    plain = build_plain(program)
    forget()
    traced = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments)
    default = size_of(traced.partition().compile())
    start = time.perf_counter()
    least = size_of(traced.partition(budget=0.0).compile())
    return Bounds(size_of(plain), default, least, time.perf_counter() - start)


def size_of(step: Any) -> Size:
    """The sizes of a step of ours, or of another method."""
    return Size(step.peak_bytes, step.activation_bytes)


def forget(searches_too: bool = True) -> None:
    """Empty the caches of JAX and of jointcut, all but the rates of the device, and collect what they held."""
    methods.forget()
    if searches_too:
        searches.forget()
    gc.collect()


def measure(program: Program, bounds: Bounds, count: int, tell: Callable[[str], object]) -> Outcome:
    """One program at `count` budgets in bytes and at each fraction; `tell` is told of each."""
    spread = [int(b) for b in np.linspace(bounds.plain.peak_bytes, bounds.least.peak_bytes, count)]
    points = []
    for budget in (*spread, *FRACTIONS):
        tell(f"budget {budget / MB:.1f} MB" if budget >= 1 else f"budget {budget}")
        points.append(first_step(program, bounds, budget))
    tell("the least, named by a refusal")
    points.append(first_step(program, bounds, None))
    return Outcome(program.name, program.title, bounds, tuple(points))


def named(program: Program, below: int) -> int:
    """The least peak that a refusal of a small budget names; of all searches, its plan alone is known from then on."""
    forget()
    try:
        aot.function(program.loss, has_aux=program.has_aux, budget=below).trace(*program.arguments).partition()
    except aot.BudgetError as error:
        forget(searches_too=False)
        assert error.least_bytes is not None, "the refusal is for want of room"
        return error.least_bytes
    return named(program, below // 2)


def first_step(program: Program, bounds: Bounds, wanted: float | None) -> Point:
    """The first step within a budget, right after plain JAX's; None stands for the least that a refusal names."""
    plain = plain_first(program)
    forget()
    budget = named(program, bounds.least.peak_bytes // 2) if wanted is None else wanted
    is_fraction = budget < 1
    limit = budget * bounds.plain.activation_bytes if is_fraction else budget
    least, default = (s.activation_bytes if is_fraction else s.peak_bytes for s in (bounds.least, bounds.default))
    start, programs_before = Seconds.now(), xla_clock.programs
    try:
        traced = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments)
        step = traced.partition(budget=budget).compile()
        jax.block_until_ready(step.value_and_grad(*program.arguments))
    except aot.BudgetError:
        step = None
    first, compiled = start.since, xla_clock.programs - programs_before
    return Point(
        budget=budget,
        limit_bytes=limit,
        taken_bytes=step and (step.activation_bytes if is_fraction else step.peak_bytes),
        least_bytes=min(least, default),  # the least by budget=0.0 may take more than the default plan
        default_bytes=default,
        first=first,
        plain=plain,
        compilations=full_compilations(step.trail) if step else 0,
        programs=compiled,
        first_fits=bool(step and next(a for a in step.trail if not a.weighed).fits),
        is_named=wanted is None,
    )


def plain_first(program: Program) -> Seconds:
    """How long plain JAX's first step takes."""
    forget()
    start = Seconds.now()
    jax.block_until_ready(jax.jit(jax.value_and_grad(program.loss, has_aux=program.has_aux))(*program.arguments))
    return start.since


# ---------------------------------------------------------------------------------------------------- keep and show


def read(path: Path) -> dict[str, Outcome]:
    """What was measured, by the name of the program; nothing where there is no such file."""
    if not path.exists():
        return {}
    return {p["name"]: outcome_in(p) for p in json.loads(path.read_text("utf-8"))["programs"]}


def outcome_in(kept: dict[str, Any]) -> Outcome:
    """A program's outcome, from what JSON holds of it."""
    plain, default, least = (Size(**kept["bounds"][key]) for key in ("plain", "default", "least"))
    bounds = Bounds(plain, default, least, kept["bounds"]["least_s"])
    points = ({**p, "first": Seconds(**p["first"]), "plain": Seconds(**p["plain"])} for p in kept["points"])
    return Outcome(kept["name"], kept["title"], bounds, tuple(Point(**p) for p in points))


def write(path: Path, outcomes: dict[str, Outcome]) -> None:
    """Keep what was measured so far."""
    path.parent.mkdir(exist_ok=True)
    kept = {"machine": machine(), "programs": [asdict(outcome) for outcome in outcomes.values()]}
    path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def table_of(outcome: Outcome) -> Table:
    """The points of one program."""
    b = outcome.bounds
    caption = (
        f"{outcome.title}\npeak {b.plain.peak_bytes / MB:.1f} MB plain, {b.default.peak_bytes / MB:.1f} by default, "
        f"{b.least.peak_bytes / MB:.1f} at least; activations {b.plain.activation_bytes / MB:.1f}, "
        f"{b.default.activation_bytes / MB:.1f}, {b.least.activation_bytes / MB:.1f}"
    )
    table = Table(title=outcome.name, caption=caption, box=box.SIMPLE_HEAD, caption_justify="left")
    for heading in ("budget\nMB", "taken\nMB", "used", "holds", "between", "first\nfits", "plans\ncompiled",
                    "programs\ncompiled", "first step\ns", "plain's\ns", "first step\n÷ plain's",
                    "by the\nprocessor"):  # fmt: skip
        table.add_column(heading, justify="right")
    for p in outcome.points:
        share = f"{p.budget:.0%}: " if p.is_fraction else "named: " if p.is_named else ""
        taken = ("refused", "", "") if p.taken_bytes is None or p.used is None else (
            f"{p.taken_bytes / MB:.1f}", f"{p.used:.2f}", "yes" if p.holds else "NO")  # fmt: skip
        table.add_row(
            f"{share}{p.limit_bytes / MB:.1f}", *taken, "yes" if p.is_between else "",
            "yes" if p.first_fits else "no", str(p.compilations), str(p.programs),
            f"{p.first.wall:.2f}", f"{p.plain.wall:.2f}", f"{p.ratio:.2f}", f"{p.processor_ratio:.2f}",
        )  # fmt: skip
    return table


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """What all programs say together."""
    points = [(o.name, p) for o in outcomes for p in o.points]
    in_bytes = [(n, p) for n, p in points if not (p.is_fraction or p.is_named)]
    least = [(n, p) for n, p in in_bytes if p.budget <= p.least_bytes]
    kinds = {
        "bytes": in_bytes,
        "bytes, the least that is found": least,
        "bytes, more than that": [pair for pair in in_bytes if pair not in least] if least else [],
        "fractions": [(n, p) for n, p in points if p.is_fraction],
        "named by a refusal": [(n, p) for n, p in points if p.is_named],
    }
    lines = [line for kind, group in kinds.items() if group for line in told(kind, group)]
    between = [p for _, p in points if p.is_between and not p.is_named and p.used is not None]
    well = sum((p.used or 0.0) >= ENOUGH for p in between)
    return [
        *lines,
        f"used at least {ENOUGH} of a budget between the least and the default plan: {of(well, len(between))}",
    ]


def told(kind: str, points: Sequence[tuple[str, Point]]) -> list[str]:
    """What the points of one kind of budget say."""
    met = [(name, p) for name, p in points if p.taken_bytes is not None]
    refused = [p for _, p in points if p.taken_bytes is None]
    wrongly = sum(p.is_reachable for p in refused)
    lines = [f"{kind}: {len(points)} budgets, {len(refused)} refused, {wrongly} of them though a plan is known to hold"]
    if refused:
        lines[0] += f", after {statistics.median(p.ratio for p in refused):.2f} of plain's first step (median)"
    if met:
        name, worst = max(met, key=lambda pair: pair[1].ratio)
        lines += [
            f"    first step over plain's: median {statistics.median(p.ratio for _, p in met):.2f}, "
            f"worst {worst.ratio:.2f} ({name}); by the processor: median "
            f"{statistics.median(p.processor_ratio for _, p in met):.2f}, "
            f"worst {max(p.processor_ratio for _, p in met):.2f}",
            f"    compiled on average: {statistics.mean(p.compilations for _, p in met):.2f} plans in full, "
            f"{statistics.mean(p.programs for _, p in met):.2f} programs in all",
            f"    first plans that hold: {of(sum(p.first_fits for _, p in met), len(met))}",
            f"    budgets that hold: {of(sum(p.holds for _, p in met), len(met))}",
        ]
    return lines


def of(count: int, total: int) -> str:
    """`3 of 4 (75%)`; the share is left out of nothing."""
    return f"{count} of {total}" + (f" ({count / total:.0%})" if total else "")


if __name__ == "__main__":
    main()
