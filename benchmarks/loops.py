"""Measure loops that run backwards: beside Equinox, masked scans, `lax.while_loop`, Diffrax and finite differences.

    python -m benchmarks.loops                # all parts; half an hour on two cores
    python -m benchmarks.loops ode libraries  # some of them, by the names below
    python -m benchmarks.loops --quick        # fewer and shorter rows, which are not kept

Each part prints a table, whose red rows miss the mark, and a line that counts those that reach it. The figures go to
`benchmarks/results/loops.json`, each part with the machine on which it was measured last.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import (
    branches,
    buffers,
    loops_libraries,
    loops_ode,
    loops_plain,
    loops_rivals,
    loops_steps,
    loops_trips,
)
from benchmarks.measure import machine, wide_console

RESULTS = Path(__file__).parent / "results" / "loops.json"


@dataclass(frozen=True)
class Part:
    """One table.

    Attributes:
        rows: measures its rows, fewer if told to be quick. Each has `is_reached`.
        table: lays them out.
        mark: what a row has to reach.
        needs: the libraries without which nothing can be measured.
        uses: those without which some of it cannot.
    """

    rows: Callable[[bool], list[Any]]
    table: Callable[[list[Any]], Table]
    mark: str
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


PARTS = {
    "equinox": Part(
        loops_rivals.rivalries, loops_rivals.rivalry_table,
        "no more time, bytes and repeated steps than Equinox", needs=("equinox",),
    ),
    "gradients": Part(
        loops_rivals.gradients, loops_rivals.gradients_table, f"within {loops_rivals.MOST_EXACT:g} of Equinox's",
        needs=("equinox",),
    ),
    "scan": Part(loops_plain.scans, loops_plain.masked_table, "equal gradients"),
    "flat": Part(loops_plain.flats, loops_plain.flat_table, "the same bytes for any number of trips"),
    "forward": Part(
        loops_plain.forwards, loops_plain.forward_table,
        f"the instructions of lax.while_loop, or at most {loops_plain.MOST_FORWARD}x its time",
    ),
    "ode": Part(
        loops_ode.rows, loops_ode.table_of, f"within {loops_ode.MOST_ERROR:g} of finite differences", uses=("diffrax",)
    ),
    "libraries": Part(
        lambda _: loops_libraries.rows(), loops_libraries.table_of,
        f"JAX refuses, and ours is within {loops_libraries.MOST_ERROR:g} of finite differences",
        uses=tuple(sorted({p.library for p in loops_libraries.PROGRAMS})),
    ),
    "steps": Part(loops_steps.steps, loops_steps.steps_table, "fewer bytes cut; time in proportion to the rows"),
    "trips": Part(
        loops_trips.rows, loops_trips.table_of,
        f"a solver at most {loops_trips.MOST_BYTES / 1e6:g} MB and {loops_trips.MOST_RATIO:.2f}x the time of "
        f"budget=0.0, ten trips at most the bytes of memory=10 or {loops_trips.LITTLE_BYTES / 1e6:g} MB",
    ),
    "branches": Part(
        branches.rows, branches.table_of, f"at most {branches.MOST}x what the largest branch keeps alone"
    ),
    "buffers": Part(buffers.rows, buffers.table_of, f"at most {buffers.MOST}x the bytes per row of the fewest rows"),
}  # fmt: skip


def main() -> None:
    """Measure the parts that are asked for, print them, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rows, which are not kept")
    given = parser.parse_args()
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    console = wide_console(165)
    for name in given.parts or PARTS:
        rows = measured(name, PARTS[name], given.quick, console)
        if rows and not given.quick:
            keep(name, rows)


def measured(name: str, part: Part, is_quick: bool, console: Console) -> list[Any]:
    """Measure and print one part; nothing without the libraries that it needs."""
    lacks = list(absent(part.needs))
    for library in [*lacks, *absent(part.uses)]:
        what = "is left out" if library in lacks else "lacks some rows or columns"
        console.print(f"{name} {what}: {library} is not installed. The extra `bench` brings it.", style="red")
    if lacks:
        return []
    rows = part.rows(is_quick)
    console.print(part.table(rows))
    reached = sum(row.is_reached for row in rows)
    console.print(f"{name}: {reached} of {len(rows)} rows reach the mark ({part.mark})\n")
    return rows


def absent(libraries: tuple[str, ...]) -> Iterator[str]:
    """Those libraries that are not installed."""
    return (library for library in libraries if find_spec(library) is None)


def keep(name: str, rows: list[Any]) -> None:
    """Put the figures of one part in the place of its earlier ones."""
    kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    found = [asdict(row) | {"is_reached": row.is_reached} for row in rows]
    kept[name] = {"machine": machine(), "rows": found}
    RESULTS.write_text(json.dumps({n: kept[n] for n in PARTS if n in kept}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
