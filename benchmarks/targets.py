"""Weigh and price the suite for GPUs and TPUs that need not be here, beside plain JAX and `jax.checkpoint`.

    python -m benchmarks.targets                                    # all programs on an H100: an hour or so
    python -m benchmarks.targets gpt-scan vit --targets h100 v5e-4  # some programs, on two targets
    python -m benchmarks.targets nnx-denoiser haiku-agent           # models that are no part of the suite
    python -m benchmarks.targets --placements '*: nothing' 'block: dots' --budgets 0.0
    python -m benchmarks.targets --size large --resume              # go on where a run was stopped

Each step is compiled by XLA for the target, and its temporaries are read from XLA's account. Its time is by the rates
of the target (`partition.prices.targets`), in the same way for all methods: the equations of the jaxpr of the whole
step, without dead code, each priced as the planner prices an op, and the bytes that the forward keeps for the backward,
written once and read once. For plain JAX and `jax.checkpoint` these are what `jax.vjp` keeps; for a plan, what it
saves. What a backward stores for itself while it computes again is counted nowhere, which favours `jax.checkpoint`
around a whole loss. On TPUs the cycles that XLA expects stand beside it.

A placement of `jax.checkpoint` is matched where a plan of ours takes no more memory and no more time, but for 1% of it:
the default, a budget, or one of a few points of the planner's menu, which are compiled for the placements that the
others do not match. Temporaries below 64 KiB count as 64 KiB. Figures are added to
`benchmarks/results/targets-TARGET-jaxVERSION.json` after each program; those of tiny sizes go to a temporary folder.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property, partial
from multiprocessing import get_context
from multiprocessing.managers import SyncManager
from pathlib import Path
from queue import Empty, Queue
from typing import Any, cast

import jax
from tqdm import tqdm

from benchmarks import outside, programs
from benchmarks.measure import machine, memory_of, wide_console
from benchmarks.methods import PLAIN, placements, residual_bytes
from benchmarks.outside import MODELS
from benchmarks.programs import PROGRAMS, SIZES, Program, Size
from benchmarks.target_figures import (
    CHECKPOINT,
    DEFAULT,
    POINT,
    Outcome,
    Row,
    read_outcomes,
    summary,
    table_of,
    write_outcomes,
)
from benchmarks.target_prices import estimated_cycles, step_seconds
from jointcut import aot
from jointcut.aot.command.cli import REFUSED
from jointcut.aot.run.compile import compiled
from jointcut.aot.stages.traced import Traced

RESULTS = Path(__file__).parent / "results"
BUDGETS = (0.5, 0.25, 0.1, 0.0)
POINTS = 2  # of the planner's menu, for each program

Tell = Callable[[str], object]


@dataclass(frozen=True)
class Choice:
    """Which methods are measured: placements of `jax.checkpoint` by pattern, budgets, and how many points at most."""

    placements: tuple[str, ...] = ("*",)
    budgets: tuple[float, ...] = BUDGETS
    points: int = POINTS

    @property
    def asked(self) -> tuple[str, ...]:
        """What is asked for, in words, to know a program of which all has been measured."""
        return (*self.placements, *map(budget_name, self.budgets), f"{self.points} points")

    def takes(self, placement: str) -> bool:
        """Whether a placement fits one of the patterns."""
        return any(fnmatch(placement.removeprefix(CHECKPOINT), pattern) for pattern in self.placements)


def budget_name(budget: float) -> str:
    """The name of a budget's row."""
    return f"budget={budget}"


def main() -> int:
    """Measure, print, write; the exit code is that of the command line where a target cannot be used."""
    options = parse_options()
    console, names = wide_console(150), options.programs or list(PROGRAMS)
    with get_context("spawn").Manager() as manager:
        try:
            for target in options.targets:
                alone(manager, str, check, target)
        except aot.TargetError as error:
            print(f"Error: {error}", file=sys.stderr)
            return REFUSED
        for target in options.targets:
            path = path_of(target, options.size)
            found = measure_all(manager, target, names, options, path)
            console.print(table_of(target, found))
            for line in summary(found):
                console.print(line, markup=False)
            console.print(f"Written to {path}")
    return 0


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.targets", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "programs",
        nargs="*",
        metavar="PROGRAM",
        help=f"of the suite ({', '.join(PROGRAMS)}; all when none), or of models that are no part of it "
        f"({', '.join(MODELS)})",
    )
    parser.add_argument("--targets", nargs="+", default=["h100"], metavar="TARGET", help="as aot.target takes them")
    parser.add_argument("--size", choices=SIZES, default="small", help="how large the programs are (%(default)s)")
    parser.add_argument("--budgets", nargs="*", type=float, default=BUDGETS, metavar="FRACTION", help="of plain's")
    parser.add_argument("--placements", nargs="*", default=["*"], metavar="PATTERN", help="such as 'block: *'; all")
    parser.add_argument("--points", type=int, default=POINTS, help="points of the menu to compile (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep what was measured before")
    options = parser.parse_args()
    if unknown := sorted(set(options.programs).difference(PROGRAMS, MODELS)):
        parser.error(f"unknown program {', '.join(unknown)}; there are {', '.join((*PROGRAMS, *MODELS))}")
    options.choice = Choice(tuple(options.placements), tuple(options.budgets), options.points)
    return options


def path_of(target: str, size: str) -> Path:
    """Where the figures of a target go."""
    folder = Path(tempfile.mkdtemp()) if size == "tiny" else RESULTS
    return folder / f"targets-{target}-jax{jax.__version__}.json"


def measure_all(
    manager: SyncManager, target: str, names: Sequence[str], options: argparse.Namespace, path: Path
) -> list[Outcome]:
    """Measure programs one after the other, each in a process of its own: a compiler that dies takes only that along.

    Returns those that were asked for and measured, now or before.
    """
    known, where = read_outcomes(path), machine()
    with tqdm(names, desc=target, unit="program", disable=None) as bar:
        for name in bar:
            key = name, options.size
            before = known.get(key, Outcome(*key)) if options.resume else Outcome(*key)
            if set(options.choice.asked) <= set(before.asked):
                continue
            try:
                known[key] = alone(manager, bar.set_postfix_str, measure, before, target, options.choice)
            except RemoteError as error:
                known[key] = replace(before, failed=str(error))
            write_outcomes(path, known.values(), where)
            with bar.external_write_mode():
                print(line_of(known[key]), flush=True)
    return [known[name, options.size] for name in names if (name, options.size) in known]


def line_of(outcome: Outcome) -> str:
    """One program's temporaries in a line, while others are measured."""
    rows = (f"{row.name} {row.temp_bytes / 1e6:.2f}" for row in outcome.rows if row.temp_bytes is not None)
    return f"{outcome.name}: {outcome.failed or ', '.join(rows)}"


# ---------------------------------------------------------------------------------------- a process for each program


class RemoteError(Exception):
    """A program could not be measured: its process ended, or something was raised there."""


def alone(manager: SyncManager, tell: Tell, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process of its own, and pass on what it says meanwhile.

    Raises `TargetError` as the function does, and `RemoteError` for anything else that goes wrong.
    """
    words: Queue[str] = manager.Queue()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        future: Future[Any] = pool.submit(function, *args, words)
        while not future.done():
            try:
                tell(words.get(timeout=0.2))
            except Empty:
                continue
        error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, aot.TargetError):
        raise error from None
    raise RemoteError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def check(target: str, words: "Queue[str]") -> None:
    """Load XLA's compiler for a target. Raises `TargetError` where there is none."""
    words.put(f"{len(aot.target(target).devices)} devices")


# --------------------------------------------------------------------------------------------------- of one program


def measure(before: Outcome, target: str, choice: Choice, words: "Queue[str]") -> Outcome:
    """Weigh and price all methods that were chosen on one program, but for those that were measured before."""
    source = outside if before.name in MODELS else programs
    place = Place(source.load(before.name, cast(Size, before.size)), aot.target(target))
    rows = {row.name: row for row in before.rows}
    for name, build in place.methods(choice).items():
        if name not in rows:
            words.put(f"{before.name}: {name}")
            rows[name] = build()
    if not any(name.startswith(POINT) for name in rows):
        rows |= {row.name: row for row in place.points(list(rows.values()), choice.points)}
    asked = tuple(dict.fromkeys((*before.asked, *choice.asked)))
    return Outcome(before.name, before.size, tuple(rows.values()), asked)


@dataclass(frozen=True)
class Place:
    """One program on one target."""

    program: Program
    goal: aot.Target

    @cached_property
    def shapes(self) -> tuple[Any, ...]:
        """The types of the arguments."""
        return jax.eval_shape(lambda *arguments: arguments, *self.program.arguments)

    @cached_property
    def structs(self) -> tuple[Any, ...]:
        """The types of the arguments, on the target's devices."""
        return jax.tree.map(self.goal.placed, self.shapes)

    @cached_property
    def traced(self) -> Traced:
        """The program as `aot.function` traces it for the target."""
        loss = aot.function(self.program.loss, has_aux=self.program.has_aux, target=self.goal)
        return loss.trace(*self.shapes)

    def methods(self, choice: Choice) -> dict[str, Callable[[], Row]]:
        """What builds each method, by name: plain JAX, placements, the default, budgets."""
        placed = {
            name: partial(self.of_jax, name, self.program.wrapped(place, wrap))
            for name, (place, wrap) in placements(self.program).items()
            if choice.takes(name)
        }
        plain, default = partial(self.of_jax, PLAIN, self.program.loss), partial(self.of_plan, DEFAULT)
        budgets = {budget_name(budget): partial(self.of_budget, budget) for budget in choice.budgets}
        return {PLAIN: plain, **placed, DEFAULT: default, **budgets}

    def of_jax(self, name: str, loss: Callable[..., Any]) -> Row:
        """`jax.jit(jax.value_and_grad(loss))`, compiled for the target."""
        start = time.perf_counter()
        traced = jax.jit(jax.value_and_grad(loss, has_aux=self.program.has_aux)).trace(*self.structs)
        program = compiled(traced.lower(), self.goal)
        build_s = time.perf_counter() - start
        kept = residual_bytes(loss, self.structs, self.program.has_aux)
        seconds = step_seconds([traced.jaxpr], kept, self.goal.rates)
        return Row(name, memory_of(program).temp, seconds, estimated_cycles(program.as_text() or ""), kept, build_s)

    def of_plan(self, name: str, **how: Any) -> Row:
        """A plan of ours, chosen as `Traced.partition` is told."""
        start = time.perf_counter()
        cut = self.traced.partition(**how)
        program = cut.compile(1).programs[0]
        build_s = time.perf_counter() - start
        seconds = step_seconds([cut.forward, cut.backward], cut.plan.bytes_saved, self.goal.rates)
        planner = cut.request.planner
        return Row(
            name,
            memory_of(program).temp,
            seconds,
            estimated_cycles(program.as_text() or ""),
            cut.plan.bytes_saved,
            build_s,
            cut.plan.strategy,
            round(planner.candidate(planner.priced(cut.plan)).predicted_bytes),
        )

    def of_budget(self, budget: float) -> Row:
        """A budget as a fraction of plain JAX's temporaries; where it is refused, the least that was found."""
        start, name = time.perf_counter(), budget_name(budget)
        try:
            row = self.of_plan(name, budget=budget)
            fitted = self.traced.partition(budget=budget).fitted  # which the traced program keeps
            assert fitted is not None, "a cut within a budget knows what was tried"
            used = (
                row.temp_bytes / (budget * self.traced.plain_memory.temp_bytes) if budget and row.temp_bytes else None
            )
            return replace(row, first_fits=fitted.trail[0].fits, used=used)
        except aot.BudgetError as error:
            fixed = self.traced.plain_memory.peak_bytes - self.traced.plain_memory.temp_bytes
            least = None if error.least_bytes is None else error.least_bytes - fixed
            return Row(name, None, None, None, 0, time.perf_counter() - start, least_bytes=least)

    def points(self, rows: Sequence[Row], most: int) -> Iterator[Row]:
        """The smallest plans that are as fast as the placements that are not matched, by the planner, `most` at most.

        The planner knows how much longer than the default a plan takes.
        """
        default = next(row for row in rows if row.name == DEFAULT)
        unmatched = sorted(Outcome("", "", tuple(rows)).unmatched, key=lambda row: row.taken_bytes)
        chosen = self.traced.partition()
        planner = chosen.request.planner
        of_default = planner.candidate(planner.priced(chosen.plan))
        plans = {of_default.plan.key: of_default.plan}
        for theirs in unmatched:
            most_seconds = (theirs.seconds or 0.0) - (default.seconds or 0.0) + of_default.step_seconds
            for found in [c for c in planner.ranked if c.step_seconds <= most_seconds][-1:]:
                plans.setdefault(found.plan.key, found.plan)
        for n, plan in enumerate(list(plans.values())[1 : 1 + most], 1):
            yield self.of_plan(f"{POINT}{n}", plan=plan)


if __name__ == "__main__":
    raise SystemExit(main())
