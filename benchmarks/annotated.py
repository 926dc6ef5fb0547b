"""Weigh and time steps of models that come with `jax.checkpoint` around their blocks or scan bodies.

    python -m benchmarks.annotated                 # all programs with such places: half an hour on two cores
    python -m benchmarks.annotated gpt-unrolled vit
    python -m benchmarks.annotated --rounds 4

Many models come so from their library (`nn.remat`). jointcut opens what is under a checkpoint, does not save it either,
and chooses when it runs again. Beside it stand plain JAX as it comes, and with the barriers of `jax.checkpoint` kept:
up to JAX 0.11, a pass of XLA:CPU removes them, and straight-line code is then computed once and saved.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import time_together, wide_console
from benchmarks.methods import build_jointcut, forms, step_of
from benchmarks.programs import PROGRAMS, load
from benchmarks.programs.program import Program
from jointcut.aot.planning.budgets.rates import rates

MB = 1e6
POLICIES: dict[str, Callable[..., Any] | None] = {"nothing": None, "dots": jax.checkpoint_policies.dots_saveable}


@dataclass(frozen=True)
class Row:
    """One program with a checkpoint at one place: temporaries in bytes, and time over that with barriers kept.

    `taken` and `times` are by way: "as it comes", "kept" (with barriers), "jointcut", and "least" (`budget=0.0`).
    """

    name: str
    place: str
    saves: str
    taken: dict[str, int]
    times: dict[str, float]

    def over_kept(self, way: str) -> float:
        """The bytes of a way over those with barriers kept."""
        return self.taken[way] / self.taken["kept"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.annotated", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("programs", nargs="*", help="some programs of the suite; all if none is given")
    parser.add_argument("--rounds", type=int, default=6, help="timing rounds (%(default)s)")
    options = parser.parse_args()
    rates()
    table = Table(box=box.SIMPLE_HEAD)
    for heading in (
        "program",
        "around each",
        "saves",
        "as it comes MB",
        "kept MB",
        "jointcut MB",
        "÷ kept",
        "time ÷ kept",
    ):
        table.add_column(heading, justify="left" if heading in ("program", "around each", "saves") else "right")
    for heading in ("least MB", "÷ kept", "time ÷ kept"):
        table.add_column(heading, justify="right")
    rows = []
    for name in tqdm(options.programs or list(PROGRAMS), unit="program", disable=None):
        rows += rows_of(load(name), options.rounds)
    for row in rows:
        sizes = {way: f"{taken / MB:.1f}" for way, taken in row.taken.items()}
        figures = [
            figure
            for way in ("jointcut", "least")
            for figure in (sizes[way], f"{row.over_kept(way):.2f}", f"{row.times[way]:.2f}")
        ]
        table.add_row(row.name, row.place, row.saves, sizes["as it comes"], sizes["kept"], *figures)
    console = wide_console(140)
    console.print(table)
    for way in ("as it comes", "jointcut", "least"):
        taken, time = _mean([row.over_kept(way) for row in rows]), _mean([row.times[way] for row in rows])
        console.print(f"{way}: {taken:.2f} of the temporaries with barriers kept, at {time:.2f} of the time (means)")


def _mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return float(np.exp(np.mean(np.log(ratios))))


def rows_of(program: Program, rounds: int) -> Iterator[Row]:
    """One row for each place of a program, and for each policy."""
    for place in program.places:
        for saves, policy in POLICIES.items():
            loss = program.wrapped(place, partial(jax.checkpoint, policy=policy))
            annotated = replace(program, loss=loss)
            ways = {"as it comes" if not keeps else "kept": step_of(annotated, loss, keeps) for _, keeps in forms()}
            ways.setdefault("kept", ways["as it comes"])
            ways["jointcut"], ways["least"] = build_jointcut(annotated), build_jointcut(annotated, budget=0.0)
            timings = time_together({name: way.call for name, way in ways.items()}, "kept", rounds)
            yield Row(
                program.name,
                place,
                saves,
                {name: way.activation_bytes for name, way in ways.items()},
                {name: timings[name].ratio.median for name in ways},
            )


if __name__ == "__main__":
    main()
