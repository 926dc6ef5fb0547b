"""Keep and show what programs take on targets: records, JSON, the table and its last lines."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.methods import PLAIN

DEFAULT, CHECKPOINT, POINT, LEAST = "default", "checkpoint ", "point ", "budget=0.0"
MB = 1e6

#: Temporaries below so many bytes count as so many: their ratios say nothing.
FEW_BYTES = 1 << 16

#: How much longer than a placement of `jax.checkpoint` a plan may take that matches it, as a share of its step.
SLACK = 0.01

#: How far a prediction may be off that counts as near.
NEAR = 0.1

#: What the default plan may take of plain JAX's temporaries before the program is told of.
MORE = 1.01


@dataclass(frozen=True)
class Row:
    """One method on one target.

    Attributes:
        name: `plain`, a placement of `jax.checkpoint`, `default`, a budget, or a point of the planner's menu.
        temp_bytes: temporaries by XLA's account of the compiled step; None where the budget was refused.
        seconds: of one step by the target's rates.
        cycles: XLA's own estimate of the step, on TPUs.
        kept_bytes: what the forward keeps for the backward, counted in the jaxprs.
        build_s: seconds to trace, plan and compile.
        strategy: how a plan of ours was found.
        predicted_bytes: temporaries that the planner predicts of a plan of ours.
        least_bytes: the least temporaries that were found for a budget that was refused.
        first_fits: whether the first plan that XLA weighed for a budget holds it.
        used: the share of a budget that its plan takes.
    """

    name: str
    temp_bytes: int | None
    seconds: float | None
    cycles: int | None
    kept_bytes: int
    build_s: float
    strategy: str = ""
    predicted_bytes: int | None = None
    least_bytes: int | None = None
    first_fits: bool | None = None
    used: float | None = None

    @property
    def is_placement(self) -> bool:
        """Whether it is `jax.checkpoint` somewhere."""
        return self.name.startswith(CHECKPOINT)

    @property
    def is_ours(self) -> bool:
        """Whether it is a plan of ours."""
        return self.name != PLAIN and not self.is_placement

    @property
    def is_built(self) -> bool:
        """Whether there is a step: a budget may be refused."""
        return self.temp_bytes is not None

    @property
    def taken_bytes(self) -> int:
        """The temporaries, `FEW_BYTES` at least, for ratios."""
        assert self.temp_bytes is not None, "a budget that was refused takes nothing"
        return max(self.temp_bytes, FEW_BYTES)

    def matches(self, other: "Row") -> bool:
        """Whether it takes no more memory than another method, and no more time but for `SLACK`."""
        if self.seconds is None or other.seconds is None:
            return False
        return self.taken_bytes <= other.taken_bytes and self.seconds <= (1 + SLACK) * other.seconds


@dataclass(frozen=True)
class Outcome:
    """One program at one size on one target.

    `asked` has the words for what was to be measured, and `failed` tells why there are no rows, or not all.
    """

    name: str
    size: str
    rows: tuple[Row, ...] = ()
    asked: tuple[str, ...] = ()
    failed: str = ""

    def row(self, name: str) -> Row | None:
        """The row of a method, if it was measured and not refused."""
        return next((row for row in self.rows if row.name == name and row.is_built), None)

    @property
    def placements(self) -> list[Row]:
        """The placements of `jax.checkpoint`."""
        return [row for row in self.rows if row.is_placement and row.is_built]

    @property
    def best_placement(self) -> Row | None:
        """The placement that takes least memory, the faster of equals."""
        return min(self.placements, key=lambda row: (row.taken_bytes, row.seconds), default=None)

    @property
    def least(self) -> Row | None:
        """The row of `budget=0.0`."""
        return self.row(LEAST)

    @property
    def unmatched(self) -> list[Row]:
        """The placements that no plan of ours matches."""
        ours = [row for row in self.rows if row.is_ours and row.is_built]
        return [theirs for theirs in self.placements if not any(mine.matches(theirs) for mine in ours)]


# -------------------------------------------------------------------------------------------------------- in a file


def read_outcomes(path: Path) -> dict[tuple[str, str], Outcome]:
    """What a file holds, by name and size; nothing where there is no such file."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text("utf-8"))["programs"]
    made = (
        Outcome(**{**row, "rows": tuple(Row(**each) for each in row["rows"]), "asked": tuple(row["asked"])})
        for row in rows
    )
    return {(outcome.name, outcome.size): outcome for outcome in made}


def write_outcomes(path: Path, outcomes: Iterable[Outcome], where: Mapping[str, Any]) -> None:
    """Write what was measured so far."""
    path.parent.mkdir(exist_ok=True)
    kept = {"machine": dict(where), "programs": [asdict(outcome) for outcome in outcomes]}
    path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


# ---------------------------------------------------------------------------------------------------- on the console


def table_of(target: str, outcomes: Sequence[Outcome]) -> Table:
    """A line for each program; what takes least memory is bold. Ratios are to plain JAX; times are by the rates."""
    table = Table(title=f"{target}: temporaries", box=box.SIMPLE_HEAD, title_justify="left")
    headings = ("program", "plain MB", "best checkpoint MB", "", "time", "default MB", "", "time", f"{LEAST} MB", "",
                "time", "checkpoints\nmatched", "predicted\n÷ XLA")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "program" else "right")
    for outcome in outcomes:
        table.add_row(*cells(outcome))
    return table


def cells(outcome: Outcome) -> Iterator[str]:
    """The cells of one program."""
    plain, default = outcome.row(PLAIN), outcome.row(DEFAULT)
    yield f"{outcome.name} {outcome.size}"
    if plain is None:
        yield outcome.failed
        return
    shown = plain, outcome.best_placement, default, outcome.least
    most = min((row.taken_bytes for row in shown if row is not None), default=0)
    for row in shown:
        bold = "[bold]" if row is not None and row.taken_bytes == most else ""
        yield "" if row is None else f"{bold}{(row.temp_bytes or 0) / MB:.2f}"
        if row is plain:
            continue
        yield "" if row is None else f"{bold}{row.taken_bytes / plain.taken_bytes:.2f}"
        yield "" if row is None else f"{time_ratio(row, plain):.2f}"
    count = len(outcome.placements)
    yield f"{count - len(outcome.unmatched)} of {count}" if count else ""
    yield f"{prediction(default):.2f}" if default is not None else outcome.failed


def time_ratio(row: Row, other: Row) -> float:
    """How long a step takes over another, by the rates."""
    assert row.seconds and other.seconds, "both were priced"
    return row.seconds / other.seconds


def prediction(row: Row) -> float:
    """The planner's temporaries over XLA's."""
    return max(row.predicted_bytes or 0, FEW_BYTES) / row.taken_bytes


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What all programs of one target say together."""
    whole = [outcome for outcome in outcomes if outcome.row(PLAIN) is not None]
    picks = {
        "best checkpoint": lambda outcome: outcome.best_placement,
        "default": lambda outcome: outcome.row(DEFAULT),
        **{name: lambda outcome, name=name: outcome.row(name) for name in budget_names(whole)},
    }
    for what, pick in picks.items():
        pairs = [(row, plain) for outcome in whole if (row := pick(outcome)) and (plain := outcome.row(PLAIN))]
        if pairs:
            bytes_ = geometric_mean(row.taken_bytes / plain.taken_bytes for row, plain in pairs)
            time = geometric_mean(time_ratio(row, plain) for row, plain in pairs)
            cycles = [row.cycles / plain.cycles for row, plain in pairs if row.cycles and plain.cycles]
            by_xla = f", {geometric_mean(cycles):.3f} by XLA's cycles" if cycles else ""
            yield f"{what}: geometric mean of {len(pairs)}: memory {bytes_:.3f}, time {time:.3f}{by_xla} of plain's"
    count = sum(len(outcome.placements) for outcome in whole)
    missed = [(outcome.name, row.name) for outcome in whole for row in outcome.unmatched]
    if count:
        yield f"placements of jax.checkpoint that a plan of ours matches: {count - len(missed)} of {count}"
        yield from (f"    not matched: {program}, {name}" for program, name in missed)
    yield from more_than_plain(whole)
    yield from of_budgets(whole)
    ours = [prediction(row) for outcome in whole for row in outcome.rows if row.is_ours and row.is_built]
    near = sum(abs(ratio - 1.0) <= NEAR for ratio in ours)
    yield f"predicted within {NEAR:.0%} of XLA's temporaries: {near} of {len(ours)} plans"
    if ratios := sorted(prediction(row) for outcome in whole if (row := outcome.row(DEFAULT))):
        low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (ratios[0],) * 3
        spread = f"quartiles {low:.2f} and {high:.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}"
        yield f"default's predicted temporaries over XLA's: median {median(ratios):.2f}, {spread}"
    yield from (f"failed: {outcome.name}: {outcome.failed}" for outcome in outcomes if outcome.failed)


def of_budgets(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """How often the first plan that was tried for a budget holds it, and what the plans use of their budgets."""
    rows = [row for outcome in outcomes for row in outcome.rows if row.used is not None]
    if rows:
        first, used = sum(bool(row.first_fits) for row in rows), [row.used for row in rows if row.used is not None]
        yield f"budgets that the first plan holds: {first} of {len(rows)}; they use {median(used):.2f} at the median"


def more_than_plain(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """The programs whose default plan takes more than `MORE` of plain JAX's temporaries."""
    for outcome in outcomes:
        plain, default = outcome.row(PLAIN), outcome.row(DEFAULT)
        if plain is not None and default is not None and default.taken_bytes > MORE * plain.taken_bytes:
            ratio = default.taken_bytes / plain.taken_bytes
            figures = f"{default.temp_bytes:,} bytes for {plain.temp_bytes:,} ({ratio:.2f}), by {default.strategy}"
            yield f"the default takes more than plain JAX: {outcome.name}, {figures}"


def budget_names(outcomes: Iterable[Outcome]) -> list[str]:
    """The budgets that were asked for, the largest first."""
    names = {row.name for outcome in outcomes for row in outcome.rows if row.name.startswith("budget=")}
    return sorted(names, reverse=True)
