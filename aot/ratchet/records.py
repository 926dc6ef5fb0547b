"""Keep what steps took in a JSON file, by JAX version and backend or target.

The file has one line for each array, so that a difference of two commits can be read::

    {"format": 1,
     "records": {"JAX 0.12, cpu": {"tests/test_train.py::test_step": {"function": "step", "figures": {...}, ...}}}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jointcut.aot.report.compare.files import write_whole
from jointcut.aot.report.compare.snapshot import FORMAT, Snapshot, together
from jointcut.aot.report.compare.stored import from_dict, parsed
from jointcut.partition.errors import JointcutError, RecordError, message

Records = dict[str, dict[str, Snapshot]]

_MOST = 40  # arrays of a list that are kept, the largest
RECORD = "Record what the steps take now, and commit the file: pytest --peak-record"
ANEW = "Take it from version control; or remove it and record anew: pytest --peak-record"


def read(path: Path, may_be_missing: bool = False) -> Records:
    """Return the records of a file, by `Snapshot.made_by` and then by name.

    Raises `RecordError` where it is damaged, or is not there and may not be missing.
    """
    if may_be_missing and not path.exists():
        return {}
    data = parsed(path, RECORD, ANEW)
    number = data.get("format") if isinstance(data, dict) else None
    if number != FORMAT:
        what = f"has format {number!r}, and this jointcut reads {FORMAT}."
        raise RecordError(message(str(path), what, ANEW))
    return {
        made_by: {name: from_dict(entry, f"{path}, {name}", ANEW) for name, entry in _items(entries, path)}
        for made_by, entries in _items(data.get("records"), path)
    }


def _items(entries: Any, path: Path) -> Iterator[tuple[str, Any]]:
    if not isinstance(entries, dict):
        raise RecordError(message(str(path), "is damaged: its records are no object.", ANEW))
    yield from entries.items()


def write(path: Path, records: Mapping[str, Mapping[str, Snapshot]]) -> None:
    """Write the records to a file, sorted by name; raises `JointcutError` if it cannot be written."""
    entries = {
        made_by: {name: snapshot.to_dict() for name, snapshot in sorted(named.items())}
        for made_by, named in sorted(records.items())
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(_text({"format": FORMAT, "records": entries}, "")) + "\n")
    except OSError as error:
        cure = "Name a file that can be written in [tool.pytest.ini_options]: peak_file = 'peaks.json'."
        raise JointcutError(message(str(path), f"cannot be written: {error.strerror}.", cure)) from error


def _text(value: Any, margin: str) -> Iterator[str]:
    """Yield JSON with a line for each object or list that holds no other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if not any(isinstance(item, dict | list | tuple) for item in inner):
        yield json.dumps(value, allow_nan=False)
        return
    is_object = isinstance(value, dict)
    yield "{" if is_object else "["
    for place, item in enumerate(value):
        name = f"{json.dumps(item)}: " if is_object else ""
        yield f"{',' if place else ''}\n{margin} {name}"
        yield from _text(value[item] if is_object else item, margin + " ")
    yield f"\n{margin}{'}' if is_object else ']'}"


def kept(snapshot: Snapshot, root: Path) -> Snapshot:
    """Return what is kept of a step: its largest arrays, with lines that hold on any machine."""
    lists = (
        together(replace(array, line=_portable(array.line, root)) for array in arrays)[:_MOST]
        for arrays in (snapshot.at_peak, snapshot.saved)
    )
    at_peak, saved = lists
    return replace(snapshot, at_peak=at_peak, saved=saved, memory=None)


def _portable(line: str, root: Path) -> str:
    """Return a `file:line (function)` with the file relative to the project; of other files the name is kept."""
    file, colon, rest = line.partition(":")
    path = Path(file)
    if not path.is_absolute():
        return line
    inside = path.relative_to(root) if path.is_relative_to(root) else Path(*path.parts[-2:])
    return f"{inside.as_posix()}{colon}{rest}"


def others(records: Mapping[str, Mapping[str, Snapshot]], name: str, made_by: str) -> list[str]:
    """Return the versions and targets, other than this one, that a step was recorded with."""
    return [other for other, named in records.items() if name in named and other != made_by]
