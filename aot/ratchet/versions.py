"""Run the same tests with several versions of JAX, and say for each step what it takes with each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from jointcut.aot.ratchet import records
from jointcut.aot.ratchet.environments import OPTION, Environment, environments
from jointcut.aot.report import tabular
from jointcut.aot.report.compare.diff import Diff, arrays, figure_cells
from jointcut.aot.report.compare.snapshot import FIGURES, Snapshot

GOOD, FAILED = 0, 1


@dataclass(frozen=True)
class Matrix:
    """What a run with several versions is asked for.

    Attributes:
        versions: the versions of JAX, or Pythons that have one, with spaces between.
        requires: what pip installs besides; nothing for the project itself.
        file: where the records are.
        root: the project's folder.
        folder: where pytest was called.
        arguments: what pytest was called with.
        variables: the variables of the environment that it was called in.
        is_check: whether each version is compared with its own records, and nothing is recorded.
    """

    versions: str
    requires: tuple[str, ...]
    file: Path
    root: Path
    folder: Path
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    is_check: bool


def run(matrix: Matrix) -> int:
    """Run the tests with each version, record what the steps take, and print it; returns the exit code of pytest.

    That is 0 if the tests pass with all versions, 1 if some fail, and else the first other one of a version. Raises
    `JointcutError` before any test runs, for records that cannot be read and environments that cannot be made.
    """
    known = records.read(matrix.file, may_be_missing=not matrix.is_check)
    found = environments(matrix.versions, matrix.requires, matrix.root, _say)
    codes, taken = [], dict[str, records.Records]()
    with tempfile.TemporaryDirectory() as folder:
        for place, each in enumerate(found):
            _say(f"\nJAX {each.jax}, Python {each.version}: {each.python}")
            file = matrix.file if matrix.is_check else Path(folder, str(place), matrix.file.name)
            codes.append(_tests(each, matrix, file))
            if not matrix.is_check:
                taken[each.jax] = records.read(file, may_be_missing=True)
    for made in taken.values():
        for made_by, named in made.items():
            known.setdefault(made_by, {}).update(named)
    if any(taken.values()):
        records.write(matrix.file, known)
        _say(f"\n{tabular.written(_parts(taken))}")
    return next((code for code in codes if code not in (GOOD, FAILED)), FAILED if FAILED in codes else GOOD)


def _tests(environment: Environment, matrix: Matrix, file: Path) -> int:
    """Run the tests in an environment; returns the exit code of pytest."""
    asked = ["-o", f"peak_file={file}"] if matrix.is_check else ["--peak-record", "-o", f"peak_file={file}"]
    line = [environment.python, "-m", "pytest", *matrix.arguments, *asked, f"{OPTION}="]
    return subprocess.run(line, cwd=matrix.folder, env=matrix.variables, check=False).returncode


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()  # before what the next process writes


# ------------------------------------------------------------------------------------------------------- the table


def _parts(taken: Mapping[str, records.Records]) -> Iterator[RenderableType]:
    """Yield what each step takes with each version, and the arrays that changed from one to the next."""
    yield tabular.headline("memory of steps", f", JAX {', then '.join(taken)}")
    by_step: dict[tuple[str, str], dict[str, Snapshot]] = {}
    for jax, made in taken.items():
        for named in made.values():
            for name, snapshot in named.items():
                by_step.setdefault((name, snapshot.backend), {})[jax] = snapshot
    for (name, backend), snapshots in sorted(by_step.items()):
        yield Text("")
        yield tabular.headline(name, f", {backend}")
        yield _figures(snapshots, list(taken))
        for old, new in zip(list(snapshots)[:-1], list(snapshots)[1:], strict=True):
            diff = Diff(snapshots[old], snapshots[new])
            parts = [*arrays(diff.at_peak, "Alive at the peak"), *arrays(diff.saved, "Saved for the backward")]
            if parts:
                yield Text(f"\nfrom {old} to {new}")
                yield from parts[1:]


def _figures(snapshots: Mapping[str, Snapshot], versions: Sequence[str]) -> RenderableType:
    """Return a row for each figure: with each version, and the change from the first to the last that has it."""
    rows = []
    for figure, words in FIGURES.items():
        found = {jax: each.figures[figure] for jax, each in snapshots.items() if each.figures.get(figure)}
        if found:
            first, *_, last = [*found.values(), *found.values()]
            cells = {jax: figure_cells(figure, count, count)[0] for jax, count in found.items()}
            change = figure_cells(figure, first, last)[2:] if len(found) > 1 else ("", "")
            rows.append((f"  {words}", [*(cells.get(jax, "none") for jax in versions), *change]))
    return tabular.figures(rows[:1], rows[1:], [*versions, "change", ""])
