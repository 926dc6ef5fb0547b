"""Compare the least peak that a budget finds with the least of `jax.checkpoint`, once and nested.

    python -m benchmarks.floors                 # all programs: an hour or so on two cores
    python -m benchmarks.floors mamba mlp       # some programs
    python -m benchmarks.floors --outside       # six models of libraries that nothing was tuned for

A peak is XLA's account of the compiled step. Nothing is run.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks import outside, programs
from benchmarks.budgets import MB, others
from benchmarks.measure import wide_console
from benchmarks.methods import build_plain, forget
from benchmarks.programs import Program
from jointcut import aot


@dataclass(frozen=True)
class Floor:
    """The least peak of a program in bytes, ours and that of the best `jax.checkpoint`, beside plain JAX's."""

    name: str
    plain_bytes: int
    ours_bytes: int
    strategy: str
    rival_bytes: int
    rival: str

    @property
    def holds(self) -> bool:
        """Whether ours takes no more."""
        return self.ours_bytes <= self.rival_bytes


def main() -> None:
    """Find the floors of the programs asked for, and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floors", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("named", nargs="*", metavar="PROGRAM", help="of the suite, or of --outside; all when none")
    parser.add_argument("--outside", action="store_true", help="models of libraries instead of the suite")
    options = parser.parse_args()
    source = outside if options.outside else programs
    if unknown := sorted(set(options.named) - set(source.FOUND_IN)):
        parser.error(f"unknown program {', '.join(unknown)}; there are {', '.join(source.FOUND_IN)}")
    names = options.named or list(source.FOUND_IN)
    floors = [floor(source.load(name)) for name in tqdm(names, unit="program", disable=None)]
    console = wide_console(110)
    console.print(table_of(floors))
    console.print(f"no more than the best jax.checkpoint: {sum(f.holds for f in floors)} of {len(floors)}")


def floor(program: Program) -> Floor:
    """The floors of one program."""
    plain = build_plain(program).peak_bytes
    rivals = {name: step.peak_bytes for name, step in others(program).items()}
    best = min(rivals, key=rivals.__getitem__, default="")
    forget()
    cut = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments).partition(budget=0.0)
    ours = cut.compile().peak_bytes
    return Floor(program.name, plain, ours, cut.plan.strategy, rivals.get(best, plain), best or "plain JAX")


def table_of(floors: Iterable[Floor]) -> Table:
    """The floors, a row for each program."""
    table = Table(title="least peaks, MB", box=box.SIMPLE_HEAD)
    for heading in ("program", "plain", "ours", "jax.checkpoint", "ours ÷ its", "our plan", "its place"):
        table.add_column(heading, justify="left" if heading in ("program", "our plan", "its place") else "right")
    for f in floors:
        sizes = (f"{size / MB:.2f}" for size in (f.plain_bytes, f.ours_bytes, f.rival_bytes))
        table.add_row(f.name, *sizes, f"{f.ours_bytes / f.rival_bytes:.2f}", f.strategy, f.rival)
    return table


if __name__ == "__main__":
    main()
