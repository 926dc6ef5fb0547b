"""Weigh a program: learn its memory from XLA, before XLA makes code for it.

XLA:CPU first rewrites a program, orders its ops and assigns buffers to them. Making code comes last and takes most of
the time. XLA can be told to write its assignment to a folder (`xla_dump_to`). So the program is compiled with one op in
front that no code can be made for: a call of a function that is not registered. XLA writes the assignment, comes to
that op, and stops. The op reads nothing and writes an array of no bytes, so the other ops take the same memory.

If XLA does not write the assignment, or the program is in parts of several devices, the program is compiled without
optimising its code, for its account.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax

from jointcut.aot.options.target import Target
from jointcut.aot.run.compile import ProgramMemory, compiled
from jointcut.partition.errors import RoomError
from jointcut.partition.program.jax import runtime

#: The name of the function that is not registered, as XLA's error has it, and the shape that identifies its result.
_NOBODY = "jointcut_weighs_and_does_not_run"
_SHAPE = (0, 7919)

#: A line of the assignment, as `allocation 3: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:`,
#: with a line below it for each value there, as ` value: <7 add @0> (size=64,offset=0): f32[16]{0}`; and the total of
#: the report that XLA writes after it.
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*):\n((?: .*\n)*)", re.MULTILINE)
_VALUE = re.compile(r"\(size=(\d+),offset=(\d+)\): (\S*)")
_TOTAL = re.compile(r"^Total bytes: (\d+)", re.MULTILINE)
_ASSIGNMENT, _REPORT = "*-buffer-assignment.txt", "*-memory-usage-report.txt"

_T = TypeVar("_T")


def can_weigh(goal: Target | None = None) -> bool:
    """Whether a program's memory is known long before it is compiled: on CPU."""
    return goal is None and jax.default_backend() == "cpu"


def begin(lowered: jax.stages.Lowered, goal: Target | None = None) -> Future[ProgramMemory]:
    """Weigh a program on a thread of its own."""
    return aside(lambda: weigh(lowered, goal))


def aside(call: Callable[[], _T]) -> Future[_T]:
    """Call a function on one of the threads that weigh."""
    return _pool().submit(call)


def weigh(lowered: jax.stages.Lowered, goal: Target | None = None) -> ProgramMemory:
    """Return XLA's account of a program that need not be compiled; `goal` is the target of its lowering.

    Raises XLA's error for a program that it cannot compile. An error of making code is found only where the program is
    compiled in full.
    """
    if not can_weigh(goal):
        try:
            return ProgramMemory.of(compiled(lowered, goal))
        except RoomError as error:
            return ProgramMemory.without_room(lowered, error.temp_bytes)
    if (assigned := _assigned(lowered)) is not None:
        return assigned
    unoptimised: dict[str, Any] = {"xla_backend_optimization_level": 0}
    return ProgramMemory.of(lowered.compile(compiler_options=unoptimised))


def _assigned(lowered: jax.stages.Lowered) -> ProgramMemory | None:
    """Return the account by XLA's buffer assignment; None where it is not found."""
    if (stopping := runtime.calling(lowered, _NOBODY, _SHAPE)) is None:
        return None
    try:
        temporary = tempfile.TemporaryDirectory(prefix="jointcut-weigh-", ignore_cleanup_errors=True)
    except OSError:  # there is nowhere to write
        return None
    with temporary as folder:
        dump: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": ""}
        try:
            stopping.compile(compiler_options=dump)
        except jax.errors.JaxRuntimeError as error:
            if _NOBODY not in str(error):
                raise
        assignment, report = ("".join(f.read_text() for f in Path(folder).glob(of)) for of in (_ASSIGNMENT, _REPORT))
        return _account(assignment, report)


def _account(assignment: str, report: str) -> ProgramMemory | None:
    """Return the account in a text of XLA's buffer assignment; None unless it adds up to the total of its report.

    XLA's `memory_analysis()` sums up the same kinds of allocations (`CompiledMemoryStats` of its PJRT).
    """
    arguments = outputs = temporaries = shared = total = 0
    for size, kind, values in _ALLOCATION.findall(assignment):
        is_argument, is_output = " parameter " in kind, "maybe-live-out" in kind
        arguments += int(size) * is_argument
        outputs += int(size) * is_output
        shared += int(size) * (is_argument and is_output)
        temporaries += _end(int(size), values) * ("preallocated-temp" in kind)
        total += int(size)
    if [str(total)] != _TOTAL.findall(report):
        return None
    return ProgramMemory(arguments, outputs, temporaries, shared)


def _end(size: int, values: str) -> int:
    """Return the end of an allocation's values, without the value of the call, which may come behind all others."""
    placed = [(int(begin) + int(taken), shape) for taken, begin, shape in _VALUE.findall(values)]
    ours = f"u8[{','.join(map(str, _SHAPE))}]"
    others = [end for end, shape in placed if not shape.startswith(ours)]
    return size if len(others) == len(placed) else max(others, default=0)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(2, min(4, (os.cpu_count() or 1))), thread_name_prefix="jointcut-compile")
