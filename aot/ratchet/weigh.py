"""Weigh a step by compiling it: memory, flops and collectives by XLA's own account."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import jax

from jointcut.aot.call.doctor.subject import Subject
from jointcut.aot.call.function import Function
from jointcut.aot.call.method import Method
from jointcut.aot.options.options import name_of
from jointcut.aot.options.target import Target
from jointcut.aot.report.compare.exchanges import exchanges
from jointcut.aot.report.compare.snapshot import Array, Snapshot, alive_at_peak, together
from jointcut.aot.report.lists import Lists
from jointcut.aot.run.compile import ProgramMemory
from jointcut.aot.stages.gather import lives_of
from jointcut.partition.errors import CallError, message
from jointcut.partition.program.outline import outline


def weighed(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], goal: Target | None = None
) -> Snapshot:
    """Return what a step takes: a function by `jax.jit`, one that is jitted here, or the gradient of an `aot.function`.

    It is compiled for `goal`, or for the devices that are here, and not run.
    """
    if not callable(function):
        what = f"is of type {type(function).__name__}, which cannot be called."
        raise CallError(message("peak(...)", what, "Give a function and its arguments: peak(step, params, batch)."))
    around: AbstractContextManager[Any] = nullcontext() if goal is None else goal
    with around:
        if isinstance(function, Function | Method):
            return _ours(function, args, kwargs)
        return _plain(function, args, kwargs, goal)


def backend_of(goal: Target | None) -> str:
    """Return the name of a target, or of the backend that is here, a GPU with its kind."""
    if goal is not None:
        return goal.name
    backend = jax.default_backend()
    return backend if backend == "cpu" else f"{backend} {jax.local_devices()[0].device_kind}"


def _plain(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], goal: Target | None
) -> Snapshot:
    """Weigh a function that is compiled as it is."""
    subject = Subject.of(function, args, kwargs, goal)
    program = subject.program
    if program is None:  # XLA finds no room for it, and tells its memory alone
        account, figures, at_peak = subject.account, dict[str, float](), ()
    else:
        account, figures = ProgramMemory.of(program), _work([program])
        at_peak = () if subject.lives is None else alive_at_peak(subject.lives)
    figures |= {"peak_bytes": account.peak_bytes, "temp_bytes": account.temp_bytes}
    return _snapshot(subject.name, backend_of(goal), figures, at_peak)


def _ours(function: Function | Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Snapshot:
    """Weigh the value and gradient of an `aot.function`."""
    cut = function.trace(*args, **kwargs).partition()
    run, lives, goal = cut.compile(), lives_of(cut.made), cut.traced.options.goal
    figures = _work(run.programs) | {"peak_bytes": run.peak_bytes, "temp_bytes": run.activation_bytes}
    figures["residual_bytes"] = cut.plan.bytes_saved
    at_peak = () if lives is None else alive_at_peak(lives)
    rows = Lists(cut.request.planner, outline(cut.request.planner.graph, cut.traced.name)).saved(cut.plan)
    saved = together(Array(row.bytes, row.type, row.op, row.path, row.line) for row in rows)
    return replace(_snapshot(name_of(function), backend_of(goal), figures, at_peak), saved=saved)


def _snapshot(name: str, backend: str, figures: dict[str, float], at_peak: tuple[Array, ...]) -> Snapshot:
    return Snapshot(name, backend, version("jax"), "XLA", figures, at_peak)


# ---------------------------------------------------------------------------------------------------- what it does


def _work(programs: Sequence[Any]) -> dict[str, float]:
    """Return the flops of some programs, if XLA counts them, and the bytes that they move between devices."""
    figures: dict[str, float] = {"collective_bytes": exchanges(programs).bytes}
    counts = [(program.cost_analysis() or {}).get("flops", -1.0) for program in programs]
    return figures if min(counts) < 0 else {**figures, "flops": sum(counts)}
