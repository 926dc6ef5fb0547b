"""Read a snapshot back from JSON, and refuse what is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from jointcut.aot.report.compare.snapshot import FIGURES, FORMAT, Array, Snapshot
from jointcut.partition.errors import CallError, RecordError, message

_CURE = "Give a file that report.save('report.json') or jointcut explain --save report.json wrote."
_ANEW = "Write it anew: jointcut explain --save report.json, or report.save('report.json')."


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Return the snapshot of a report's JSON file.

    Raises `RecordError` where the file cannot be read, is damaged, or holds no report.
    """
    if not isinstance(path, str | os.PathLike):
        what = f"is given a {type(path).__name__}, which is no step to compare with."
        raise CallError(message("diff", what, "Give the report of the step before, or its JSON file."))
    data = parsed(Path(path), _CURE, _ANEW)
    if not isinstance(data, dict) or "snapshot" not in data:
        raise RecordError(message(str(path), "holds no report that can be compared.", _CURE))
    return from_dict(data["snapshot"], str(path), _ANEW)


def parsed(path: Path, cure: str, anew: str) -> Any:
    """Return what a JSON file holds; `cure` is for a file that is not there, `anew` for a damaged one."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecordError(message(str(path), f"cannot be read: {error.strerror}.", cure)) from error
    except UnicodeDecodeError as error:
        raise RecordError(message(str(path), f"is damaged: byte {error.start} is no text.", anew)) from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RecordError(message(str(path), f"is damaged: it is no JSON from {where} on.", anew)) from error


def from_dict(data: Any, where: str, anew: str) -> Snapshot:
    """Return the snapshot that `to_dict` wrote; `where` it stands is told in errors, and how to write it `anew`.

    Raises `RecordError` for anything else.
    """
    number = data.get("format") if isinstance(data, Mapping) else None
    if number != FORMAT:
        what = f"has format {number!r}, and this jointcut reads {FORMAT}."
        raise RecordError(message(where, what, anew))
    try:
        known = {f.name: data[f.name] for f in fields(Snapshot)}
        figures = {name: _number(known["figures"][name]) for name in FIGURES if name in known["figures"]}
        at_peak, saved = (tuple(map(_array, known[name])) for name in ("at_peak", "saved"))
        function, backend, jax, account = (_text(known[name]) for name in ("function", "backend", "jax", "account"))
        memory = None if known["memory"] is None else _memory(known["memory"])
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error.args[0]!r} is there" if isinstance(error, KeyError) else str(error)
        raise RecordError(message(where, f"is damaged: {what}.", anew)) from error
    return Snapshot(function, backend, jax, account, figures, at_peak, saved, memory)


def _array(data: Any) -> Array:
    count = _number(data["bytes"])
    if not isinstance(count, int):
        raise TypeError(f"{count!r} is no number of bytes")
    return Array(count, *(_text(data[name]) for name in ("type", "op", "scope", "line")))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise TypeError(f"{value!r} is no number from 0 on")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _memory(value: Any) -> dict[str, Any]:
    """Return the section of a page, if it has what a picture of two steps reads."""
    sizes = [_number(size) for size in value["total"]]
    if value["kind"] != "timeline" or len(value["steps"]) != len(sizes) or (sizes and value["peak"] is None):
        raise TypeError("the memory over the step is not whole")
    return dict(value)
