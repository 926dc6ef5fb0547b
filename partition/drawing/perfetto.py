"""Write the memory of a step over its time as a trace that Perfetto shows: https://ui.perfetto.dev.

A step takes a microsecond, since it has no known time. Each program is a process with a counter of the bytes alive, a
thread with its steps, and a row for each array, from the step that writes it to the last that reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jointcut.partition.lower.memory.lifetimes import Lifetimes

JSON = dict[str, Any]

_STEPS = 1  # the thread of the steps


def perfetto(lives: Mapping[str, Lifetimes]) -> str:
    """Return the trace of some programs, by their names, as a JSON text of trace events."""
    events = [event for pid, pair in enumerate(lives.items(), 1) for event in _process(pid, *pair)]
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}) + "\n"


def _process(pid: int, name: str, lives: Lifetimes) -> Iterator[JSON]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    yield {"ph": "M", "pid": pid, "tid": _STEPS, "name": "thread_name", "args": {"name": "steps"}}
    for step, (moment, total) in enumerate(zip(lives.moments, lives.totals, strict=True)):
        yield {"ph": "C", "pid": pid, "ts": step, "name": "bytes alive", "args": {"bytes": total}}
        told = {"at": moment.place.line, "module": "/".join(moment.place.modules), "runs": moment.trips, "bytes": total}
        known = {"name": moment.op, "cat": moment.side.value, "args": told}
        yield {"ph": "X", "pid": pid, "tid": _STEPS, "ts": step, "dur": 1, **known}
    yield {"ph": "C", "pid": pid, "ts": len(lives.moments), "name": "bytes alive", "args": {"bytes": 0}}
    for number, buffer in enumerate(lives.buffers):
        known = {"pid": pid, "tid": _STEPS, "cat": "arrays", "id": f"{pid}.{number}"}
        known["name"] = f"{buffer.type} of {buffer.op}"
        told = {"bytes": buffer.bytes, "at": buffer.place.line, "module": "/".join(buffer.place.modules)}
        yield {"ph": "b", "ts": buffer.first, "args": told, **known}
        yield {"ph": "e", "ts": buffer.last + 1, **known}
