"""Change steps in sixty ways, and see whether the ratchet finds the thirty that take more memory, and no other.

    python -m benchmarks.ratchet                # all: some minutes
    python -m benchmarks.ratchet donation one   # those whose names have one of these words

Each step of `ratcheted/` is recorded as `pytest --peak-record` does, changed in its text (`ratchet_changes`), and
compared as `pytest --peak-check` does. A run of all is kept in `benchmarks/results/ratchet.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType

import jax
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import machine, wide_console
from benchmarks.ratchet_changes import REFACTORINGS, REGRESSIONS, Edit
from jointcut.aot.ratchet.session import Session, Settings
from jointcut.partition.errors import PeakError

FOLDER = Path(__file__).parent / "ratcheted"
RESULTS = Path(__file__).parent / "results" / "ratchet.json"


@dataclass(frozen=True)
class Row:
    """What the ratchet said of one change.

    Attributes:
        is_regression: whether the change is one of those that take more.
        is_found: whether the check failed.
        grown: the figures that the failure names.
        line: the first line that the failure names.
    """

    file: str
    name: str
    is_regression: bool
    is_found: bool
    grown: str = ""
    line: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it was found, if it is to be found."""
        return self.is_regression == self.is_found


def main() -> int:
    """Judge the changes asked for, print a table, and keep a whole run; return 1 where one is judged wrongly."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ratchet", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="of the names of changes; all when none")
    words = parser.parse_args().words
    rows = judged(edit for edit in [*REGRESSIONS, *REFACTORINGS] if not words or any(w in edit.name for w in words))
    wide_console(130).print(table_of(rows))
    if not words:
        text = json.dumps({"machine": machine(), "changes": [asdict(row) for row in rows]}, indent=1)
        RESULTS.write_text(text + "\n", "utf-8")
    return int(not all(row.is_right for row in rows))


def judged(edits: Iterable[Edit]) -> list[Row]:
    """Record each file as it is, and check it with each change."""
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(True):
        root = Path(folder)
        recorded: set[str] = set()
        return [_judged(edit, root, recorded) for edit in tqdm(list(edits), unit="change", disable=None)]


def _judged(edit: Edit, root: Path, recorded: set[str]) -> Row:
    settings = Settings(root / "peaks.json", root)
    if edit.file not in recorded:
        _weigh(Session.of(replace(settings, mode="record")), Edit(edit.file, "as it is", ()), root)
        recorded.add(edit.file)
    is_regression = edit in REGRESSIONS
    try:
        _weigh(Session.of(replace(settings, mode="check")), edit, root)
    except PeakError as error:
        lines = str(error).splitlines()
        grown = lines[0].rpartition(": ")[2].rstrip(".")
        named = next((line for line in lines if line.startswith(("new ", "larger "))), "")
        return Row(edit.file, edit.name, is_regression, True, grown, " ".join(named.split()))
    return Row(edit.file, edit.name, is_regression, False)


def _weigh(session: Session, edit: Edit, root: Path) -> None:
    module = changed(edit, root)
    session.weigh(edit.file, None, None, module.step, *module.arguments())
    session.end(edit.file, has_mark=False)
    if session.settings.mode == "record":
        session.write()


def changed(edit: Edit, root: Path) -> ModuleType:
    """Import a file with a change; it is written to a folder, so that its lines are found there."""
    text = (FOLDER / f"{edit.file}.py").read_text("utf-8")
    for old, new in edit.pairs:
        assert old in text, f"{edit.name}: {edit.file} does not have {old!r}"
        text = text.replace(old, new)
    path = root / f"{edit.file}.py"
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(f"ratcheted_{edit.file}", path)
    assert spec is not None and spec.loader is not None, "it is a file of Python"
    module = importlib.util.module_from_spec(spec)
    exec(compile(text, str(path), "exec"), module.__dict__)  # not by its cached bytecode
    return module


def table_of(rows: Sequence[Row]) -> Table:
    """A line for each change, what grew, and the first line that the failure names."""
    table = Table(title="what the ratchet says of changes", box=box.SIMPLE_HEAD, title_justify="left")
    for heading, most in (("file", 11), ("change", 34), ("says", 7), ("grown", 20), ("first line", 44)):
        table.add_column(heading, no_wrap=True, max_width=most)
    for row in rows:
        says = "more" if row.is_found else "no more"
        said = says if row.is_right else f"[red]{says}[/red]"
        table.add_row(row.file, row.name, said, row.grown, row.line)
    found = sum(row.is_found for row in rows if row.is_regression)
    wrong = sum(row.is_found for row in rows if not row.is_regression)
    many, few = sum(row.is_regression for row in rows), sum(not row.is_regression for row in rows)
    table.caption = f"found {found} of {many} regressions, flagged {wrong} of {few} refactorings"
    return table


if __name__ == "__main__":
    sys.exit(main())
