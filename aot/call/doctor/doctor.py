"""Watch the functions that are compiled in a block, and tell why one does not fit into memory."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any

import jax

from jointcut.aot.call.doctor.causes import Cause, causes
from jointcut.aot.call.doctor.subject import Subject, types_of
from jointcut.aot.call.function import Function
from jointcut.aot.call.method import Method
from jointcut.aot.options.limits import Budget, default_device, limit
from jointcut.aot.options.target import Target
from jointcut.aot.options.target import target as target_named
from jointcut.aot.run.compile import ProgramMemory
from jointcut.partition.drawing.picture import short
from jointcut.partition.errors import BudgetError, CallError, message
from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.lower.memory.lifetimes import Lifetimes
from jointcut.partition.program.jax import jitting, runtime
from jointcut.partition.program.roles import Side
from jointcut.wrappers.boundary import bounded_class

_COMPILES = "/jax/core/compile/"
_NO_ROOM = "RESOURCE_EXHAUSTED"
_SHOWN = 5
_CURE = "Give bytes, as in aot.doctor(memory='24GiB') or --memory 24GiB, or a device that is not here: target='h100'."
_NONE = "The doctor saw no function compiled in this block. Ask aot.doctor().check(function, *args)."


@dataclass(frozen=True)
class Diagnosis:
    """What a function takes of a device's memory, and why; `print` it.

    Attributes:
        name: the function's name.
        memory_bytes: the memory that it may take.
        account: XLA's account of the function's program.
        lives: the temporaries alive at each instruction; None where the device does not say.
        has_failed: whether it ran out of memory.
        causes: why it takes so much, each with its cure; empty where it fits.
        is_value: whether `check` was asked about a function that returns one number, as a loss without its gradient.
    """

    name: str
    memory_bytes: int
    account: ProgramMemory
    lives: Lifetimes | None = None
    has_failed: bool = False
    causes: tuple[Cause, ...] = ()
    is_value: bool = False

    @property
    def fits(self) -> bool:
        """Whether the program fits, by XLA's account."""
        return self.account.peak_bytes <= self.memory_bytes

    def __str__(self) -> str:
        """Return one line if the function fits; else a few, with its causes."""
        account, size = self.account, human_bytes(self.memory_bytes)
        takes = f"it takes {human_bytes(account.peak_bytes)} of {size}, by XLA's account."
        if self.fits and not self.has_failed:
            return "\n".join([f"{self.name} fits: {takes}", *self._of_value()])
        parts = f"arguments {human_bytes(account.argument_bytes)}, results {human_bytes(account.output_bytes)}"
        parts += f" ({human_bytes(account.alias_bytes)} in the memory of arguments)" * bool(account.alias_bytes)
        lines = [f"{self.name} {'ran out of memory' if self.fits else 'does not fit'}: {takes}"]
        lines += [f"  {parts}, temporaries {human_bytes(account.temp_bytes)}", *_at_peak(self.lives)]
        told = [line for cause in self.causes for line in cause.told(self.memory_bytes)]
        return "\n".join([*lines, *(told or ["The doctor knows no cause."]), *self._of_value()])

    def _of_value(self) -> Iterator[str]:
        if self.is_value:
            yield "It returns one number. If it is a loss, its gradient takes more: ask about jax.value_and_grad of it."


def _at_peak(lives: Lifetimes | None) -> list[str]:
    """Return the largest temporaries at the peak, by op and line."""
    if lives is None or not lives.buffers:
        return []
    groups: dict[tuple[str, str], list[int]] = {}
    for buffer in lives.alive(lives.peak):
        groups.setdefault((buffer.op, short(buffer.place.line) or "no known line"), []).append(buffer.bytes)
    rows = sorted(groups.items(), key=lambda row: -sum(row[1]))
    half = "backward" if lives.moments[lives.peak].side is Side.BACKWARD else "forward"
    lines = [f"  at the peak of the temporaries, in the {half}:"]
    for (op, line), sizes in rows[:_SHOWN]:
        lines.append(f"    {human_bytes(sum(sizes)):>8}  {counted(len(sizes), 'array')} of {op} at {line}")
    return lines


@bounded_class()
class Doctor:
    """Watches a block; `diagnoses` has the functions of the block that do not fit, the largest first."""

    def __init__(self, memory: Budget | None, goal: Target | None) -> None:
        """Call `aot.doctor` instead."""
        self._memory, self._goal = memory, goal
        self._seen: dict[Any, Callable[[], Subject]] = {}
        self.diagnoses: tuple[Diagnosis, ...] = ()
        self._memory_bytes = _memory_bytes(memory, goal)

    def check(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Diagnosis:
        """Say whether a call fits, and if it does not, why; nothing is run, and types do for arrays.

        The function may be jitted or not, or an `aot.function`, whose value and gradient are meant.
        """
        if not callable(function):
            what = f"is of type {type(function).__name__}, which cannot be called."
            cure = "Give a function and its arguments: doctor.check(step, params, batch)."
            raise CallError(message("check(...)", what, cure))
        subject = _subject(function, args, kwargs, self._goal)
        found = _diagnosed(subject, self._memory_bytes, False)
        return replace(found, is_value=not subject.is_gradient and subject.returns_a_number)

    def __enter__(self) -> Doctor:
        """Watch what is compiled from here on."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell what does not fit: on standard error, or as a note of an error of memory, which goes on."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
        has_failed = isinstance(error, jax.errors.JaxRuntimeError) and _NO_ROOM in str(error)
        if error is not None and not has_failed:
            return
        subjects = self._largest()
        if error is not None:
            self._note(error, subjects)
            return
        found = [_diagnosed(subject, self._memory_bytes, False) for subject in subjects]
        self.diagnoses = tuple(each for each in found if not each.fits)
        sys.stderr.write(f"{chr(10).join(map(str, self.diagnoses or found[:1])) or _NONE}\n")

    def _largest(self) -> list[Subject]:
        """Return the functions of the block that could be too large, or else one, the largest first."""
        seen = sorted((make() for make in self._seen.values()), key=lambda subject: -subject.most_bytes)
        self._seen.clear()
        large = [subject for subject in seen if 2 * subject.most_bytes > self._memory_bytes]
        return sorted(large or seen[:1], key=lambda subject: -subject.account.peak_bytes)

    def _note(self, error: BaseException, subjects: Sequence[Subject]) -> None:
        """Tell of the largest function as a note of an error of memory."""
        try:
            self.diagnoses = tuple(_diagnosed(s, self._room_for(s), True) for s in subjects[:1])
            error.add_note("\n".join(map(str, self.diagnoses)) or _NONE)
        except jax.errors.JaxRuntimeError as problem:  # the device is full, and XLA may need it to compile
            error.add_note(f"The doctor could not compile a cure: {str(problem).partition(chr(10))[0]}")

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        """Keep the call that JAX compiles for: the outermost on the stack."""
        call = _outermost(sys._getframe()) if event.startswith(_COMPILES) else None
        if call is not None and not any(map(runtime.is_tracer, jax.tree.leaves(call[1:]))):
            args, kwargs = types_of(call[1], call[2], self._goal)
            leaves, tree = jax.tree.flatten((args, kwargs))
            key = call[0].__wrapped__, tree, tuple(map(str, leaves))
            self._seen.setdefault(key, functools.partial(_subject, call[0], args, kwargs, self._goal))

    def _room_for(self, subject: Subject) -> int:
        """Return the memory that a call has: the device's, less the bytes of arrays that are not its arguments."""
        stats = default_device().memory_stats() or {}
        if self._memory is not None or self._goal is not None or "bytes_in_use" not in stats:
            return self._memory_bytes
        return self._memory_bytes - max(0, stats["bytes_in_use"] - subject.account.argument_bytes)


def doctor(memory: Budget | None = None, *, target: str | Target | None = None) -> Doctor:
    """Tell why a function runs out of memory, or would, and try cures by compiling.

    In `with aot.doctor():` each function that JAX compiles is weighed by XLA's account: arguments, results and
    temporaries against the device's memory. That holds for any `jax.jit` and any `aot.function`. Where one does not
    fit, or ends in RESOURCE_EXHAUSTED, the doctor prints what fills the peak by the lines of your source, and each
    cause that it finds with a line to type and the bytes that the step takes with it. An error gets this as a note.
    The block runs as it would without the doctor.

    JAX tells of a function when it compiles it. A function that was called before with the same types, or that is
    compiled by `jax.jit(f).lower(...).compile()`, is not seen, nor one that `jax.grad` or `jax.vmap` calls outside
    a `jax.jit`. Of an `aot.function` only `value_and_grad` and `grad` are seen. `aot.doctor().check(f, *args)` takes
    any call.

    Args:
        memory: what the device has, such as `"24GiB"`; by default what it says. A CPU does not say.
        target: a device that need not be here, such as `"h100"`, for `check`.

    Raises `BudgetError` where the memory is not known.

    >>> import jax.numpy as jnp
    >>> print(doctor(memory="1MiB").check(jnp.sin, jnp.ones(1000)))
    sin fits: it takes 8.00 kB of 1.05 MB, by XLA's account.
    """
    return Doctor(memory, None if target is None else target_named(target))


def _memory_bytes(memory: Budget | None, goal: Target | None) -> int:
    if memory is not None:
        try:
            size = limit(memory).peak_bytes
        except BudgetError as error:
            what = str(error).partition("\n")[0].removeprefix("budget ")
            raise BudgetError(message("memory", what, _CURE)) from error
        if size is None:
            raise BudgetError(message("memory", f"is {memory!r}, no number of bytes.", _CURE))
        return size
    if goal is not None:
        return goal.memory_bytes
    device = default_device()
    size = (device.memory_stats() or {}).get("bytes_limit")
    if size is None:
        what = f"asks what the device has, and {device.device_kind} does not say."
        raise BudgetError(message("doctor()", what, _CURE))
    return int(size)


def _outermost(frame: FrameType | None) -> tuple[Any, Any, Any] | None:
    """Return the function and arguments of the outermost jitted function or `aot.function` on a stack."""
    found: tuple[Any, Any, Any] | None = None
    while frame is not None:
        if frame.f_code is Function.value_and_grad.__code__:
            known = frame.f_locals
            found = known["self"], known["args"], known["kwargs"]
        elif (call := jitting.called(frame) or _around(frame)) is not None:
            found = call
        frame = frame.f_back
    return found


def _around(frame: FrameType) -> tuple[Any, Any, Any] | None:
    """Return function and arguments if a frame calls an object around a jitted function, such as that of `nnx.jit`."""
    known = frame.f_locals
    if frame.f_code.co_name != "__call__" or any(name not in known for name in ("self", "args", "kwargs")):
        return None
    owner = known["self"]
    is_around = hasattr(owner, "lower") and hasattr(owner, "__wrapped__") and not isinstance(owner, Function | Method)
    return (owner, known["args"], known["kwargs"]) if is_around else None


def _subject(function: Any, args: Any, kwargs: Any, goal: Target | None) -> Subject:
    if not isinstance(function, Function):
        return Subject.of(function, args, kwargs, goal)

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        return function.value_and_grad(*args, **kwargs)

    options = function._options
    static = {"static_argnums": options.static_argnums, "static_argnames": options.static_argnames}
    return replace(Subject.of(jax.jit(step, **static), args, kwargs, goal), is_gradient=True)


def _diagnosed(subject: Subject, memory_bytes: int, has_failed: bool) -> Diagnosis:
    found = Diagnosis(subject.name, memory_bytes, subject.account)
    if found.fits and not has_failed:
        return found
    return replace(found, has_failed=has_failed, lives=subject.lives, causes=causes(subject, memory_bytes))
