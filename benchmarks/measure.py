"""Weigh and time compiled programs.

Memory is what XLA says of a compiled program, never an estimate. Time is measured in rounds: each round runs
every method once, in an order that rotates, and each method is compared with the reference of its own round,
so that a slow minute of the machine slows all of them alike.
"""

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.stages import Compiled, Lowered
from rich import box
from rich.console import Console
from rich.table import Table

# On CPU up to JAX 0.11 this pass removes the barriers that keep recomputation late, and with them what
# `jax.checkpoint` saves in straight-line code. Newer versions run no such pass there, and ignore the option.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}

Call = Callable[[], Any]


@dataclass(frozen=True)
class Memory:
    """XLA's figures for one program, in bytes."""

    argument: int
    output: int
    temp: int
    alias: int

    @property
    def peak(self) -> int:
        """Everything alive while the program runs; XLA's own peak leaves temp out on CPU."""
        return self.argument + self.output + self.temp - self.alias


def memory_of(compiled: Compiled) -> Memory:
    """Read the memory figures of a compiled program."""
    stats = compiled.memory_analysis()
    if stats is None:
        raise RuntimeError(f"XLA reports no memory figures on {jax.default_backend()}")
    return Memory(
        argument=stats.argument_size_in_bytes,
        output=stats.output_size_in_bytes,
        temp=stats.temp_size_in_bytes,
        alias=stats.alias_size_in_bytes,
    )


def compile_program(lowered: Lowered, keep_barriers: bool) -> Compiled:
    """Compile as it comes, or with the barriers kept."""
    return lowered.compile(compiler_options=dict(KEEP_BARRIERS) if keep_barriers else {})


class XlaClock:
    """Adds up the programs that XLA compiles, and the seconds, whoever asks it to; JAX reports each compilation."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds += seconds
            self.programs += 1


xla_clock = XlaClock()


@dataclass(frozen=True)
class Seconds:
    """How long something took: by the wall, and by the processor in all threads."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> "Seconds":
        """The two clocks."""
        return cls(time.perf_counter(), time.process_time())

    @property
    def since(self) -> "Seconds":
        """What has passed since these clocks were read."""
        now = Seconds.now()
        return Seconds(now.wall - self.wall, now.processor - self.processor)


@dataclass(frozen=True)
class Spread:
    """A median between its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """The quartiles of at least two samples."""
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(low, median, high)


@dataclass(frozen=True)
class Timing:
    """The seconds of one method, and its ratios to the reference round by round."""

    seconds: Spread
    ratio: Spread


def time_together(
    calls: Mapping[str, Call], reference: str, rounds: int, on_call: Callable[[], object] = lambda: None
) -> dict[str, Timing]:
    """Time all calls in an order drawn anew for each round; ratios are to `reference` in the same round.

    In turn, plain came out 2 % slower behind itself than behind another, by what the one before leaves in caches and
    heaps. Each call runs once before the first round. `on_call` is told of every call that ended, for a progress
    bar.
    """
    if rounds < 2:
        raise ValueError(f"a spread needs at least 2 rounds, got {rounds}")
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        jax.block_until_ready(calls[name]())
        on_call()
    for turn in range(rounds):
        for name in random.Random(turn).sample(names, len(names)):
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            seconds[name].append(time.perf_counter() - start)
            on_call()
    base = seconds[reference]
    return {
        name: Timing(Spread.of(own), Spread.of([a / b for a, b in zip(own, base, strict=True)]))
        for name, own in seconds.items()
    }


def time_for(calls: Sequence[Call], seconds: float) -> list[float]:
    """The median seconds of calls that take turns for so long, three turns at least."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for call, into in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            into.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "backend": jax.default_backend(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def wide_console(columns: int) -> Console:
    """A console that never squeezes a table below `columns`, in a narrow terminal or a pipe."""
    return Console(width=max(columns, Console().width), highlight=False)


def table_of_steps(rows: Iterable[tuple[str, str, int, float]]) -> Table:
    """A table of steps: the program, the way to take its step, XLA's temporaries in bytes, and time over plain's."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "step", "temporaries MB", "time ÷ plain"):
        table.add_column(heading, justify="left" if heading in ("", "step") else "right")
    for name, step, temp_bytes, ratio in rows:
        table.add_row(name, step, f"{temp_bytes / 1e6:.1f}", f"{ratio:.2f}")
    return table
