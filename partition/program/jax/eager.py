"""Run ops one at a time, on tracers that hold numbers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax._src import core as _core

from jointcut.partition.program.jax.jaxprs import opened
from jointcut.partition.program.jax.runtime import tracing


@dataclass(frozen=True)
class Operation:
    """One op of a function that runs eagerly: its `name`, and `bind`, which runs it on values or tracers.

    `key` is equal for equal ops, None where an op has no identity. An op with a user's derivative has a function among
    its `functions`, before the rules. After a run, the caller reads the trees of its results, which the function leaves
    behind.
    """

    name: str
    key: Any
    bind: Callable[..., Any]
    params: dict[str, Any]
    multiple: bool
    functions: tuple[Any, ...] = ()

    def left_behind(self) -> list[Any]:
        """The values that the function left behind; values of its rules are removed, since the caller reads one set."""
        for rule in self.functions[1:]:
            for store in rule.stores:
                if store is not None:
                    store.reset()
        return [store for f in self.functions[:1] for store in f.stores]

    def forget(self) -> None:
        """Remove all values that were left behind, so that the function can run again."""
        for store in (store for f in self.functions for store in f.stores if store is not None):
            store.reset()

    def leave_behind(self, stores: Sequence[Any]) -> None:
        """Leave the same values behind for another caller, whose function does not run."""
        for mine, known in zip(self.functions[0].stores, stores, strict=True):
            if mine is not None:
                mine.store(known.val)


class Recorder(Protocol):
    """What is told of the ops of a function that runs eagerly."""

    def __call__(self, op: Operation, args: Sequence[Any]) -> Any:
        """Run an op on values and tracers."""

    def made(self, ref: Any) -> None:
        """Note a `jax.Ref` that the function made."""

    def follows(self, ref: Any) -> bool:
        """Whether ops on this reference are recorded even where all other operands are plain values."""
        ...

    def wants(self, params: dict[str, Any]) -> bool:
        """Whether an op with these parameters is recorded even where all operands are plain values."""
        ...


class EagerTracer(_core.Tracer[Any]):
    """A value with numbers whose ops are recorded: `held` is the array, `edge` a note of the recorder.

    Where `aval` has symbolic sizes, `held` is padded, and `cut` takes away what is behind the true sizes.
    """

    __slots__ = ("cut", "edge", "held")

    def __init__(self, trace: EagerTrace, held: Any, edge: Any, aval: Any = None, cut: Any = None) -> None:
        """Wrap an array, which may be a tracer of a trace around this one."""
        self._trace = trace
        self.aval = _core.typeof(held) if aval is None else aval
        self.held, self.edge, self.cut = held, edge, cut

    @property
    def value(self) -> Any:
        """The array, without padding."""
        return self.held if self.cut is None else self.cut(self.held, self.shape)

    def to_concrete_value(self) -> Any:
        """The array."""
        return _core.to_concrete_value(self.value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name) if name in _OF_ARRAYS else super().__getattr__(name)


#: Attributes that only arrays with numbers have; they are read from the array inside.
_OF_ARRAYS = (
    *("item", "tolist", "tobytes", "block_until_ready", "copy_to_host_async", "devices", "sharding", "committed"),
    *("device", "addressable_shards", "addressable_data", "global_shards", "is_deleted", "is_fully_addressable"),
    *("is_fully_replicated", "unsafe_buffer_pointer", "on_device_size_in_bytes"),
)


def _of_array(name: str) -> property:
    return property(lambda self: getattr(self.value, name), doc=f"As `jax.Array.{name}`.")


def _method_of_array(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.value, name)(*args, **kwargs)


for _name in _OF_ARRAYS:
    setattr(EagerTracer, _name, _of_array(_name))
for _name in ("array", "complex", "dlpack", "float", "format", "reduce", "repr", "str"):
    setattr(EagerTracer, f"__{_name}__", _method_of_array(f"__{_name}__"))


class EagerTrace(_core.Trace):
    """Hands each op of a running function to `recorder`, with the values and tracers that it is given."""

    __slots__ = ("parent", "recorder")

    def __init__(self) -> None:
        """Start without a recorder; `eager` sets it."""
        super().__init__()
        self.parent: Any = None
        self.recorder: Any = None

    def stage_value(self, val: Any) -> Any:
        """Return a value as an array."""
        return val if isinstance(val, EagerTracer) else self.parent.stage_value(val)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        """Record and run an op."""
        return self._record(primitive, params, (), tracers)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        """Record and run a function with a forward derivative of its own."""
        return self._record(primitive, {"subfuns": (fun, jvp), **params}, (fun, jvp), tracers)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        """Record and run a function with a backward of its own."""
        return self._record(primitive, {"subfuns": (fun, fwd, bwd), **params}, (fun, fwd, bwd), tracers)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        """Record and run a `jax.shard_map` as a jitted call."""
        made: list[Any] = []

        def call(*values: Any) -> list[Any]:
            made[:] = [primitive.bind(*values, subfuns=(fun,), **params)]
            return list(made[0])

        with _core.set_current_trace(self):
            flat = jax.jit(call)(*tracers)
        return made[0].update(flat)

    def _record(self, primitive: Any, params: Any, functions: tuple[Any, ...], tracers: Any) -> Any:
        is_mine = any(type(x) is EagerTracer and x._trace is self for x in tracers) or self.recorder.wants(params)
        if not is_mine and not any(map(self.recorder.follows, references_in(tracers, params))):
            with _core.set_current_trace(self.parent):
                made = primitive.bind(*tracers, **params)
            if type(made) is _core.Ref:
                self.recorder.made(made)
            return made
        rest = ((k, v) for k, v in params.items() if k not in ("out_trees", "subfuns"))
        key = (primitive, *functions[:1], *(rule.f for rule in functions[1:]), *rest)
        try:
            hash(key)
        except TypeError:
            key = None
        bind = functools.partial(primitive.bind, **params)
        operation = Operation(primitive.name, key, bind, params, primitive.multiple_results, functions)
        with _core.set_current_trace(self.parent):
            return self.recorder(operation, tracers)


def references_in(args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """The `jax.Ref`s that an op reads or writes: among its operands, and closed over by the function it calls."""
    return [x for x in (*args, *opened(params.get("jaxpr"))[1]) if type(x) is _core.Ref]


class _EagerTraces(threading.local):
    """The eager traces of a thread, by depth. They are used again, since JAX's caches hold them as part of a key."""

    def __init__(self) -> None:
        self.made: list[EagerTrace] = []
        self.depth = 0


_eager_traces = _EagerTraces()


@contextmanager
def eager(recorder: Recorder) -> Iterator[EagerTrace]:
    """Hand every op that runs in the `with` to a recorder, if it reads an `EagerTracer` or a reference of it."""
    mine = _eager_traces
    if mine.depth == len(mine.made):
        mine.made.append(EagerTrace())
    trace, parent = mine.made[mine.depth], _core.trace_ctx.trace
    trace.parent, trace.recorder = parent, recorder
    mine.depth += 1
    try:
        with _core.set_current_trace(trace):
            yield trace
    finally:
        mine.depth -= 1
        trace.parent = trace.recorder = None


def eager_trace() -> EagerTrace | None:
    """The innermost trace that runs its ops eagerly, if no other transformation is inside it."""
    current = _core.trace_ctx.trace
    return current if isinstance(current, EagerTrace) else None


def runs_eagerly() -> bool:
    """Whether ops run on numbers at the caller: outside all transformations, or only in eager traces."""
    return not tracing() or eager_trace() is not None
