"""Weigh a program: learn what memory it takes, from XLA, before XLA makes code for it.

XLA:CPU first rewrites a program, orders its ops and assigns buffers to them. Making code comes last and takes most of
the time. XLA can be told to write its assignment to a folder (`xla_dump_to`), so a program is compiled with one op in
front that no code can be made for: a call of a function that is not registered. XLA writes the assignment, comes to
that op, and stops. The op reads and writes nothing, so that what the others take is the same to the byte.

Where XLA does not write what is looked for, and for a program in parts of several devices, the program is compiled
without optimising its code, for its account.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jointcut.aot.run.compile import ProgramMemory
from jointcut.partition.program import jaxprs

#: The name of the function that is not registered; XLA's error has it.
_NOBODY = "jointcut_weighs_and_does_not_run"

#: A line of the assignment, as `allocation 3: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:`.
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*):$", re.MULTILINE)
_ENDING = "-buffer-assignment.txt"

#: Does not optimise code, which does not change the assignment.
_QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}


def can_weigh() -> bool:
    """Whether a program's memory is known long before it is compiled: on CPU."""
    return jax.default_backend() == "cpu"


def begin(lowered: jax.stages.Lowered) -> Future[ProgramMemory]:
    """Weigh a program on a thread of its own."""
    return _pool().submit(lambda: weigh(lowered))


def weigh(lowered: jax.stages.Lowered) -> ProgramMemory:
    """XLA's account of a program that is not compiled yet, and need not be.

    Raises what XLA raises for a program that it cannot compile; an error of making code is found only where the program
    is compiled in full.
    """
    if not can_weigh():
        return ProgramMemory.of(lowered.compile())
    return _assigned(lowered) or ProgramMemory.of(lowered.compile(compiler_options=_QUICK))


def _assigned(lowered: jax.stages.Lowered) -> ProgramMemory | None:
    """The account by XLA's buffer assignment; None where it is not found."""
    if (stopping := jaxprs.calling(lowered, _NOBODY)) is None:
        return None
    with tempfile.TemporaryDirectory(prefix="jointcut-weigh-", ignore_cleanup_errors=True) as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": ""}
        try:
            stopping.compile(compiler_options={**_QUICK, **dump})
        except jax.errors.JaxRuntimeError as error:
            if _NOBODY not in str(error):
                raise
        written = [*Path(folder).glob(f"*{_ENDING}")]
        return _account(written[0].read_text()) if len(written) == 1 else None


def _account(assignment: str) -> ProgramMemory | None:
    """The account that a text of XLA's buffer assignment amounts to; None where it has no allocation.

    XLA's `memory_analysis()` sums up the same kinds of allocations (`CompiledMemoryStats` of its PJRT).
    """
    arguments = outputs = temporaries = shared = 0
    allocations = _ALLOCATION.findall(assignment)
    for size, kind in allocations:
        is_argument, is_output = " parameter " in kind, "maybe-live-out" in kind
        arguments += int(size) * is_argument
        outputs += int(size) * is_output
        shared += int(size) * (is_argument and is_output)
        temporaries += int(size) * ("preallocated-temp" in kind)
    return ProgramMemory(arguments, outputs, temporaries, shared) if allocations else None


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(2, min(4, (os.cpu_count() or 1))), thread_name_prefix="jointcut-compile")
