"""Lower and compile the two jaxprs for a device.

A step runs as one program, forward and backward with a barrier between them, or as two programs that pass residuals.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.options.options import Options
from jointcut.aot.options.target import Target
from jointcut.aot.options.xla import jit_options
from jointcut.partition.errors import RoomError, message
from jointcut.partition.figures import human_bytes
from jointcut.partition.lower.emit import Halves
from jointcut.partition.program.jax import abstract, jaxprs, processes
from jointcut.wrappers.record import Record, aligned

_BARRIER_PASS = "cse_barrier_expander"


def compiler_options() -> dict[str, Any] | None:
    """Return options that preserve the barriers of a loaded program on the default backend, or None if not needed.

    A program for several platforms or for symbolic sizes has plain barriers (`barriers.held`). Up to JAX 0.11, a pass
    of XLA:CPU removes these.
    """
    if not jaxprs.barriers_expand(jax.default_backend()):
        return None
    disabled = re.search(r"--xla_disable_hlo_passes=(\S+)", os.environ.get("XLA_FLAGS", ""))
    passes = [*(disabled.group(1).split(",") if disabled else ()), _BARRIER_PASS]
    return {"xla_disable_hlo_passes": ",".join(dict.fromkeys(passes))}


#: Some products have no kernel of Triton's, and XLA stops ("Couldn't find output tile sizes", "No supported config
#: found"). Libraries have a kernel for every product, with a workspace of 34 MB for a step.
BY_LIBRARIES: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}

#: XLA:TPU's message for a program that needs more memory than the device has.
_NO_ROOM = re.compile(r"Ran out of memory.*temporaries \(([\d.]+)([KMG])\)")
_POWERS = {"K": 10, "M": 20, "G": 30}


def compiled(lowered: jax.stages.Lowered, goal: Target | None) -> jax.stages.Compiled:
    """Compile a program, which was lowered for the devices of a target if there is one.

    Raises `RoomError` where XLA finds no room for it on a target that is not here.
    """
    if goal is None or goal.is_here:
        return lowered.compile(compiler_options=by_itself())
    try:
        return compiled_unseen(lowered) if goal.is_unseen_gpu else lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if (temp_bytes := no_room(error)) is None:
            raise
        needed, has = human_bytes(temp_bytes), human_bytes(goal.memory_bytes)
        what = f"takes {needed} for temporaries, more than XLA finds on {goal.name}, which has {has} a device."
        cure = "Give a budget, such as aot.function(budget='device'), or a smaller batch."
        raise RoomError(message("The step", what, cure), temp_bytes) from error


def options_for(options: Options) -> dict[str, Any] | None:
    """Return the options that programs of a function are jitted with: the user's, and those of this process."""
    return jit_options({**dict(options.compiler_options or ()), **(by_itself() or {})})


def by_itself() -> dict[str, Any] | None:
    """Return options with which a process compiles without the others; None where it does so anyway.

    XLA divides the timing of kernels among the processes of GPUs, and each waits for the others' part. But the one that
    plans compiles what the others compile later or never.
    """
    are_many = processes.are_many() and jax.default_backend() == "gpu"
    return {"xla_gpu_shard_autotuning": False} if are_many else None


def no_room(error: Exception) -> int | None:
    """Return the bytes of temporaries for which XLA found no room; None for any other error."""
    found = _NO_ROOM.search(str(error))
    return None if found is None else round(float(found[1]) * 2 ** _POWERS[found[2]])


def compiled_unseen(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a program for a GPU that is not here, with kernels that XLA chooses without timing any.

    No option asks for that. With `xla_gpu_autotune_level=0` XLA would take the first kernel that it can build. Without
    the device it can build none for some products, so these went to libraries and took other buffers.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError:
        return lowered.compile(compiler_options=BY_LIBRARIES)


@dataclass(frozen=True)
class ProgramMemory(Record):
    """XLA's account of one compiled program, in bytes of the device's memory.

    `host_bytes` are the bytes of arguments, outputs and temporaries in host memory.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Bytes of arguments, outputs and temporaries; bytes that outputs share with arguments count once.

        XLA's own `peak_memory_in_bytes` leaves out temporaries on CPU.
        """
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

    @classmethod
    def without_room(cls, lowered: jax.stages.Lowered, temp_bytes: int) -> ProgramMemory:
        """Return the account of a program that XLA did not compile, as its temporaries take too much."""
        arguments, outputs = jax.tree.leaves(lowered.in_avals), jax.tree.leaves(lowered.out_info)
        sizes = [sum(abstract.aval_bytes(x) for x in arrays) for arrays in (arguments, outputs)]
        return cls(sizes[0], sizes[1], temp_bytes, 0)

    @classmethod
    def of(cls, executable: Any, on_host: tuple[int, int] = (0, 0)) -> ProgramMemory:
        """Read `memory_analysis()` of a `jax.stages.Compiled`.

        `on_host` are the bytes of its arguments and of its outputs that are arrays in host memory: XLA:CPU counts these
        as the device's.
        """
        stats = executable.memory_analysis()
        arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
        host = stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes + stats.host_temp_size_in_bytes
        host -= stats.host_alias_size_in_bytes
        if not host and any(on_host):
            arguments, outputs, host = arguments - on_host[0], outputs - on_host[1], sum(on_host)
        return cls(arguments, outputs, stats.temp_size_in_bytes, stats.alias_size_in_bytes, host)


@dataclass(frozen=True)
class Memory(Record):
    """Memory of a training step, in bytes, from XLA's accounts of its programs.

    Accounts for a GPU that is not here are made without it: `options.target.ON_H200` compares them with a measurement.

    `step` is the one program that `value_and_grad` runs, None if it runs two. `beside_bytes` counts arrays that the
    caller holds during the backward but that are not its arguments: outputs and unread inputs. All figures are of the
    device's memory, except `host_residual_bytes`, the residuals in host memory.
    """

    forward: ProgramMemory
    backward: ProgramMemory
    step: ProgramMemory | None
    residual_bytes: int
    beside_bytes: int
    host_residual_bytes: int = 0

    def __str__(self) -> str:
        """Return a table: a line for each program, and one for the residuals."""
        programs = {"step": self.step, "forward": self.forward, "backward": self.backward}
        rows = [("", "arguments", "results", "in both", "temporaries", "peak")]
        for name, p in programs.items():
            sizes = () if p is None else (p.argument_bytes, p.output_bytes, p.alias_bytes, p.temp_bytes, p.peak_bytes)
            rows += [(name, *map(human_bytes, sizes))] if sizes else []
        on_host = f", {human_bytes(self.host_residual_bytes)} in host memory" if self.host_residual_bytes else ""
        last = f"  saved between forward and backward: {human_bytes(self.residual_bytes)}{on_host}"
        return "\n".join(["Memory", *aligned(rows), last])

    @property
    def host_bytes(self) -> int:
        """The most bytes of host memory that a program takes."""
        programs = (self.step,) if self.step is not None else (self.forward, self.backward)
        return max(program.host_bytes for program in programs)

    @property
    def peak_bytes(self) -> int:
        """Peak of the step, arguments and results included."""
        if self.step is not None:
            return self.step.peak_bytes
        return max(self.forward.peak_bytes, self.backward.peak_bytes + self.beside_bytes)

    @property
    def activation_bytes(self) -> int:
        """Peak of temporaries and residuals: the memory beyond arguments and results."""
        if self.step is not None:
            return self.step.temp_bytes
        return max(self.forward.temp_bytes, self.backward.temp_bytes) + self.residual_bytes


@dataclass(frozen=True)
class Cost(Record):
    """Floating-point operations of the two jaxprs; a loop's body counts once per trip."""

    forward_flops: float
    backward_flops: float


@dataclass(frozen=True)
class Timings(Record):
    """Milliseconds of wall time of each stage; None if it has not run."""

    trace_ms: float
    cut_ms: float | None = None
    emit_ms: float | None = None
    compile_ms: float | None = None


def donated(halves: Halves) -> tuple[int, ...]:
    """Return the positions of residuals whose buffers the backward can reuse for gradients; the user sees none of them.

    Residuals in host memory cannot be reused: a gradient is in the device's memory.
    """
    backward, _ = jaxprs.opened(halves.backward)
    free = [(v.aval.shape, v.aval.dtype) for v in backward.outvars]
    chosen = []
    for i, residual in enumerate(halves.residuals):
        aval = backward.invars[i].aval
        if residual.kind == "saved" and not abstract.is_on_host(aval) and (aval.shape, aval.dtype) in free:
            free.remove((aval.shape, aval.dtype))
            chosen.append(i)
    return tuple(chosen)
