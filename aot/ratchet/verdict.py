"""Compare a step with its record and its bound, and say what grew."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from jointcut.aot.options.limits import Limit
from jointcut.aot.report import tabular
from jointcut.aot.report.compare.diff import Diff, arrays, figure_cells
from jointcut.aot.report.compare.matching import changes
from jointcut.aot.report.compare.snapshot import FIGURES, Snapshot
from jointcut.partition.figures import human_bytes

_SHOWN = 6

#: The share by which flops may grow at least: XLA counts what it fuses, and `x * x` in place of `x**2` moved the flops
#: of a step by a five-thousandth, slices in place of a split by a seven-hundredth. Bytes did not move.
_FLOPS = Fraction(1, 200)


@dataclass(frozen=True)
class Compared:
    """A step beside its record.

    Attributes:
        diff: from the record to the step.
        tolerance: the share of a figure by which it may grow.
    """

    diff: Diff
    tolerance: Fraction = field(default=Fraction(0))

    @property
    def grown(self) -> list[str]:
        """The figures that grew by more than the tolerance."""
        return [n for n, (old, new) in self.diff.figures.items() if new > old * (1 + self._tolerated(n))]

    @property
    def shrunk(self) -> list[str]:
        """The figures that shrank by more than the tolerance."""
        return [n for n, (old, new) in self.diff.figures.items() if new < old * (1 - self._tolerated(n))]

    def _tolerated(self, name: str) -> Fraction:
        return max(self.tolerance, _FLOPS) if name == "flops" else self.tolerance


def grew(compared: Compared, name: str, file: str, accept: str) -> str:
    """Return the text for a step that takes more than its record: figures, arrays by line, and what accepts it."""
    diff = compared.diff
    *first, last = (FIGURES[figure] for figure in compared.grown)
    words = f"{', '.join(first)} and {last}" if first else last
    lines = [f"{name} takes more than {file} says for {diff.before.made_by}: {words}."]
    lines += [f"  {text}" for text in figures(diff)]
    lines += [f"  {remark}" for remark in diff.remarks]
    if "temp_bytes" not in compared.grown and diff.outside[1] > diff.outside[0]:
        lines.append("  arguments and results take more: larger ones, one more result, or a donation that is lost")
    if not diff.after.at_peak:
        lines.append(
            f"  XLA does not say for {diff.after.backend} which arrays these are: see records without a target"
        )
    at_peak = diff.at_peak if diff.before.at_peak and diff.after.at_peak else ()
    parts = [*arrays(at_peak, "Alive at the peak"), *arrays(diff.saved, "Saved for the backward")]
    if parts:
        lines.append(tabular.written(parts, in_colour=False))
    return "\n".join([*lines, "", f"If that is meant, accept it: {accept}"])


def above(snapshot: Snapshot, bound: Limit, name: str, where: str) -> str | None:
    """Return the text for a step that takes more than its bound, with its largest arrays; None if it does not.

    `where` says which mark or option bounds it.
    """
    peak, most = snapshot.figures["peak_bytes"], bound.peak_bytes
    assert most is not None, "a bound is a number of bytes"
    if peak <= most:
        return None
    lines = [f"{name} takes {human_bytes(peak)} ({peak:,.0f} bytes), more than the {most:,} bytes of {where}."]
    shown = changes((), snapshot.at_peak[:_SHOWN])
    parts = list(arrays(shown, "The largest arrays at the peak"))
    told = tabular.written(parts[2:], in_colour=False) if parts else ""
    lines += ["The largest arrays at the peak, by XLA's account:", told] if told else []
    return "\n".join([*lines, "", "Make the step smaller, or raise the bound."])


def figures(diff: Diff) -> Iterator[str]:
    """Yield the figures that both steps have and that are not 0, as lines."""
    rows = [(words, *figure_cells(name, *pair)) for name, words, pair in diff.told if any(pair)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield f"{name.ljust(widths[0])}  {aligned[0]} -> {'  '.join(aligned[1:])}".rstrip()


def command(test: str, *options: str) -> str:
    """Return the command that runs one test with options."""
    return shlex.join(["pytest", *options, test])
