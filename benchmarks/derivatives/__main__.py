"""Compare all families, or those named: `python -m benchmarks.derivatives [FAMILY ...] [--random N] [--quick]`.

With torch installed PyTorch is run at 50 random inputs of each case and at all probes; without, or with `--quick`, the
committed figures are taken.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
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
    chosen = parser.parse_args()
    live = find_spec("torch") is not None and not chosen.quick
    count = chosen.random if live else RANDOM
    with jax.enable_x64(True):
        tallies = [tally(family, cases(family), _figures(family, count, live), count) for family in chosen.families]
    print(f"{count} random inputs of each case; PyTorch's figures are {'made now' if live else 'the committed ones'}.")
    show(tallies)


def _figures(family: str, count: int, live: bool) -> Figures:
    if not live:
        return read(family)
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
    table.add_row(*_cells(_total(tallies)))
    console.print(table)
    for row in tallies:
        for complaint in row.complaints:
            console.print(f"{row.family}: {complaint}", style="red", markup=False, highlight=False)


def _cells(row: Tally) -> list[str]:
    counts = {who: " + ".join(map(str, row.not_finite[who])) for who in row.not_finite}
    errors = [f"{error:.1e}" for error in row.worst[1:]]
    shown: list[Any] = [row.family, row.cases, row.probes, counts["ours"], counts["jax"], row.jax_probes]
    return [str(cell) for cell in (*shown, counts["pytorch"], row.pytorch_probes, row.natural, *errors)]


def _total(tallies: list[Tally]) -> Tally:
    total = Tally("all")
    for row in tallies:
        for name in ("cases", "probes", "natural", "jax_probes", "pytorch_probes"):
            setattr(total, name, getattr(total, name) + getattr(row, name))
        for who, counts in row.not_finite.items():
            total.not_finite[who] = [a + b for a, b in zip(total.not_finite[who], counts, strict=True)]
        total.worst = [max(pair) for pair in zip(total.worst, row.worst, strict=True)]
    return total


if __name__ == "__main__":
    main()
