"""Compare all families, or those named: `python -m benchmarks.derivatives [FAMILY ...] [--random N] [--quick]`.

With torch installed PyTorch is run at 50 random inputs of each case and at all probes; without, or with `--quick`, the
committed figures are taken. PyTorch may stand in an environment of its own, whose Python is named by `--pytorch`: both
processes draw the same inputs. With `--functions` there is a row for each function.
"""

from __future__ import annotations

import argparse
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.derivatives.cases import cases, families
from benchmarks.derivatives.compare import Tally, tally
from benchmarks.derivatives.figures import RANDOM, Figures, read


def main() -> None:
    """Print a table with a row for each family, then what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=families())
    parser.add_argument("--random", type=int, default=50, help="random inputs of each case, where torch is installed")
    parser.add_argument("--quick", action="store_true", help="take the committed figures, and few random inputs")
    parser.add_argument("--pytorch", metavar="PYTHON", help="a Python that has torch and numpy")
    parser.add_argument("--functions", action="store_true", help="a row for each function")
    chosen = parser.parse_args()
    live = (chosen.pytorch or find_spec("torch") is not None) and not chosen.quick
    count = chosen.random if live else RANDOM
    rows: list[Tally] = []
    with jax.enable_x64(True):
        for family in chosen.families:
            figures = _figures(family, count, chosen.pytorch) if live else read(family)
            found = [tally(family, [case], figures, count) for case in cases(family)]
            named = [replace(row, family=case.name) for row, case in zip(found, cases(family), strict=True)]
            rows += named if chosen.functions else [total(family, found)]
    print(f"{count} random inputs of each case; PyTorch's figures are {'made now' if live else 'the committed ones'}.")
    show(rows)


def _figures(family: str, count: int, python: str | None) -> Figures:
    """PyTorch's figures of a family, made now, in a process of a Python if one is named."""
    if python:
        with TemporaryDirectory() as folder:
            options = ["--random", f"{count}", "--folder", folder]
            command = [python, "-m", "benchmarks.derivatives.pytorch", family, *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            return read(family, Path(folder))
    import torch  # an extra

    from benchmarks.derivatives.pytorch import figures_of

    return figures_of(torch, family, count)


def show(tallies: list[Tally]) -> None:
    """Print the table and the complaints."""
    console = Console(width=None if Console().is_terminal else 140)
    table = Table(title="NaN or infinite gradients at probes, first + second order, and errors beside PyTorch")
    for name in (
        "family",
        "cases",
        "probes",
        "ours",
        "JAX",
        "of",
        "PyTorch",
        "of",
        "by nature",
        "1st error",
        "2nd error",
    ):
        table.add_column(name, justify="left" if name == "family" else "right")
    for row in tallies:
        table.add_row(*_cells(row))
    table.add_section()
    table.add_row(*_cells(total("all", tallies)))
    console.print(table)
    for row in tallies:
        for complaint in row.complaints:
            console.print(f"{row.family}: {complaint}", style="red", markup=False, highlight=False)


def _cells(row: Tally) -> list[str]:
    counts = {who: " + ".join(map(str, row.not_finite[who])) for who in row.not_finite}
    errors = [f"{error:.1e}" for error in row.worst[1:]]
    shown: list[Any] = [row.family, row.cases, row.probes, counts["ours"], counts["jax"], row.jax_probes]
    return [str(cell) for cell in (*shown, counts["pytorch"], row.pytorch_probes, row.natural, *errors)]


def total(family: str, tallies: list[Tally]) -> Tally:
    """The sums of rows, and the worst of their errors."""
    summed = Tally(family)
    for row in tallies:
        summed.complaints += row.complaints
        for name in ("cases", "probes", "natural", "jax_probes", "pytorch_probes"):
            setattr(summed, name, getattr(summed, name) + getattr(row, name))
        for who, counts in row.not_finite.items():
            summed.not_finite[who] = [a + b for a, b in zip(summed.not_finite[who], counts, strict=True)]
        summed.worst = [max(pair) for pair in zip(summed.worst, row.worst, strict=True)]
    return summed


if __name__ == "__main__":
    main()
