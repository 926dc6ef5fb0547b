"""Compare the predicted peak of temporaries with XLA's, for each program and plans across its menu.

    python -m benchmarks.predicted              # all programs: a quarter of an hour or so on two cores
    python -m benchmarks.predicted gru ode      # some programs
    python -m benchmarks.predicted --resume     # go on where a run was stopped

A ratio is predicted over actual. What `save_all`, `min_cut` and the smallest, the largest and plans between them take
is predicted by the planner, and read from the account that XLA gives before it makes code.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import machine, wide_console
from benchmarks.programs import PROGRAMS, load
from jointcut import aot
from jointcut.aot.run.weigh import weigh
from jointcut.aot.stages.traced import Traced
from jointcut.partition import Plan
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.search.mincut import min_cut, save_all

RESULT = Path(__file__).parent / "results" / "predicted.json"
SPREAD = 8  # plans of the menu for each program
NEAR = 0.9, 1.1  # a ratio within these bounds is a good prediction
RATES = Roofline(1.6e11, 1.6e10, 4.0e10, 5.0e9)  # so that the menu is the same everywhere


@dataclass(frozen=True)
class Pair:
    """The predicted and the actual bytes of temporaries of one plan, chosen by `strategy`."""

    strategy: str
    predicted: int
    actual: int

    @property
    def ratio(self) -> float:
        """Predicted over actual."""
        return self.predicted / max(self.actual, 1)


def main() -> None:
    """Compare the programs asked for, print a table, and keep the pairs."""
    parser = argparse.ArgumentParser(description="Compare predicted peaks with XLA's.")
    parser.add_argument("programs", nargs="*", help="some programs of the suite; all if none is given")
    parser.add_argument("--resume", action="store_true", help="keep the programs that the last run finished")
    given = parser.parse_args()
    names = given.programs or list(PROGRAMS)
    found = read(RESULT) if given.resume or given.programs else {}
    for name in tqdm([n for n in names if n not in found or n in given.programs], desc="programs"):
        found[name] = list(pairs(name))
        RESULT.write_text(json.dumps(written(found), indent=1) + "\n", "utf-8")
    wide_console(110).print(table_of(found))


def pairs(name: str) -> Iterator[Pair]:
    """Predict and compile the plans of one program."""
    program = load(name)
    function = aot.function(program.loss, has_aux=program.has_aux, cost=RATES)
    traced = function.trace(*program.arguments)
    yield weighed(traced.as_jax, save_all(traced.as_jax.problem))
    for plan in plans(traced):
        yield weighed(traced, plan)


def plans(traced: Traced) -> Iterator[Plan]:
    """The cheapest cut, and plans evenly spread over the menu, which is sorted by predicted peak."""
    yield min_cut(traced.problem)
    menu = sorted(traced.planner.menu, key=lambda c: c.peak_bytes)
    for i in sorted({round(i) for i in np.linspace(0, len(menu) - 1, SPREAD)}):
        yield menu[i].plan


def weighed(traced: Traced, plan: Plan) -> Pair:
    """The predicted bytes of a plan, and those of its compiled step."""
    cut = traced.partition(plan=plan)
    predicted = round(cut.request.planner.candidate(plan).predicted_bytes)
    return Pair(plan.strategy, predicted, weigh(cut.jits.lowered("step")).temp_bytes)


def read(path: Path) -> dict[str, list[Pair]]:
    """The pairs in a file of results, by program; none where there is no file."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text("utf-8"))["programs"]
    return {name: [Pair(**pair) for pair in rows] for name, rows in found.items()}


def written(found: dict[str, list[Pair]]) -> dict[str, object]:
    """What a file of results holds."""
    programs = {name: [asdict(pair) for pair in found[name]] for name in PROGRAMS if name in found}
    return {"machine": machine(), "programs": programs}


def share(ratios: Iterable[float]) -> float:
    """The share of the ratios that lie within `NEAR`."""
    near = [NEAR[0] <= ratio <= NEAR[1] for ratio in ratios]
    return sum(near) / max(len(near), 1)


def table_of(found: dict[str, list[Pair]]) -> Table:
    """A line for each program, and one for all."""
    table = Table(title="Predicted over actual temporaries", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("program", "plans", "least", "median", "most", "within a tenth"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    every = [pair for rows in found.values() for pair in rows]
    for name, rows in [*found.items(), ("all", every)]:
        ratios = [pair.ratio for pair in rows]
        figures = f"{min(ratios):.2f}", f"{median(ratios):.2f}", f"{max(ratios):.2f}", f"{share(ratios):.0%}"
        table.add_row(name, str(len(ratios)), *figures)
    return table


if __name__ == "__main__":
    main()
