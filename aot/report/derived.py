"""Say where a derivative may differ from JAX's, and by which rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jointcut.aot.options.conventions import Conventions
from jointcut.aot.report.sections import section
from jointcut.aot.trace.formulas.changes import Change
from jointcut.partition.drawing.picture import JSON, file_and_line, short
from jointcut.partition.figures import counted

_GUARDED = "zero_cotangent"
_MOST_LINES = 3  # listed in a sentence

#: The slope that each choice of `Conventions` gives, and JAX's slope.
_GIVES: Mapping[tuple[str, str], str] = {
    ("zero_cotangent", "zero"): "zero cotangent: 0, also times infinity, where JAX gives NaN",
    ("zero_cotangent", "everywhere"): "zero cotangent: 0, also times infinity, where JAX gives NaN",
    ("norm_at_zero", "zero"): "norm at zero: 0 where JAX gives NaN",
    ("angle_at_origin", "zero"): "angle at the origin: 0 where JAX gives NaN",
    ("power_at_zero", "limit"): "power of zero: its limit where JAX gives NaN",
    ("xlogy_at_zero", "zero"): "xlogy at zero: 0 where JAX gives -inf or NaN",
    ("empty_logsumexp", "zero"): "logsumexp of nothing but -inf: 0 where JAX gives NaN",
    ("arc_at_one", "zero"): "arc of a cosine that is 1: 0 where JAX gives NaN or infinity",
    ("equal_eigenvalues", "known"): "equal eigenvalues: the derivative of a function of the matrix where JAX gives NaN",
    ("equal_eigenvalues", "zero"): "equal eigenvalues: no turn of their vectors where JAX gives NaN",
    ("no_derivative", "formula"): "singular values of a full svd: the derivative of svdvals where JAX has none",
    ("abs_at_zero", "zero"): "absolute value of zero: 0 where JAX gives 1",
    ("clamp_at_bound", "one"): "on the bound of a clamp: 1 where JAX gives 1/2, or 0 for lax.clamp",
    ("clamp_at_bound", "zero"): "on the bound of a clamp: 0 where JAX gives 1/2",
    ("max_ties", "first"): "equal elements of a maximum: all to the first where JAX shares evenly",
    ("fmax_ties", "first"): "equal arguments of fmax or fmin: all to the first where JAX gives all to the second",
    ("cumulative_ties", "last"): "equal elements of cummax or cummin: all to the last where JAX shares by its order",
    ("median_ties", "shared"): "elements equal to the median: shared evenly where JAX gives all to one",
}


@dataclass(frozen=True)
class DerivedRow:
    """A rule at a line of the user's code, and the number of its uses there.

    `rule` and `value` are a field of `Conventions` and its value; `gives` names the chosen slope and JAX's slope.
    """

    rule: str
    value: str
    line: str
    count: int
    gives: str


def derived(changes: Iterable[Change], conventions: Conventions) -> tuple[DerivedRow, ...]:
    """Return the rows of the changes: formulas first, then guarded products, each in the order of the program."""
    chosen = conventions.chosen
    rows = [DerivedRow(c.rule, v := chosen[c.rule], c.line, c.count, _GIVES[c.rule, v]) for c in changes]
    return tuple(sorted(rows, key=lambda row: row.rule == _GUARDED))


def in_words(rows: Sequence[DerivedRow]) -> list[str]:
    """Return the rows as one sentence, with the first few lines; return no sentence without rows."""
    if not rows:
        return []
    formulas = sum(row.count for row in rows if row.rule != _GUARDED)
    guards = sum(row.count for row in rows if row.rule == _GUARDED)
    counts = ((formulas, "formula"), (guards, "guarded product"))
    parts = [counted(count, name) for count, name in counts if count]
    places = [f"{file_and_line(row.line) or 'no known line'} {row.gives}" for row in rows[:_MOST_LINES]]
    more = [f"{len(rows) - _MOST_LINES} more"] if len(rows) > _MOST_LINES else []
    return [f"derivatives: {', '.join(parts)} ({'; '.join([*places, *more])})"]


def derived_section(rows: Sequence[DerivedRow]) -> JSON:
    """Return the rows as a table of a page."""
    cells = [[short(row.line) or "no known line", row.gives, (f"{row.count}", row.count), row.rule] for row in rows]
    lead = "Where a derivative may differ from JAX's; it does at singular points alone. A rule is an option of "
    lead += "aot.conventions. What stands in a loop is counted once."
    return section("derivatives", "Derivatives", lead, "source line, what is taken, >times, rule", cells)
