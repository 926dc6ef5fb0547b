"""Tell which processes hold the arrays of a program, and send texts between these processes."""

from __future__ import annotations

import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.core
from jax._src import distributed as _distributed
from jax._src import pjit as _pjit

#: Seconds for which a process may be late, and for which one that has come may give no sign of life.
PATIENCE_S, SILENCE_S = 600.0, 30.0
_SLICE_S = 0.5  # seconds between two looks, and between two signs of life
_TRACING = "_infer_params"  # JAX's function that traces a jitted function for the types of a call
_Placed = Iterable[tuple[str, Any]]
_GIVEN: ContextVar[tuple[Callable[[], _Placed], ...]] = ContextVar("given", default=())


# ---------------------------------------------------------------------------------------------- who holds what


def are_many() -> bool:
    """Whether this is one of several processes that `jax.distributed` joins."""
    return _distributed.global_state.client is not None and jax.process_count() > 1


@contextmanager
def given(arrays: Callable[[], _Placed]) -> Iterator[None]:
    """While this lasts, `arguments` also has these arrays with their paths."""
    token = _GIVEN.set((*_GIVEN.get(), arrays))
    try:
        yield
    finally:
        _GIVEN.reset(token)


def arguments() -> list[tuple[str, Any]]:
    """The arrays that are `given`, and the arguments and shardings of each `jax.jit` that is traced, by their paths."""
    found, frame = [pair for arrays in _GIVEN.get() for pair in arrays()], sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == _TRACING and frame.f_globals is _pjit.__dict__:
            known = frame.f_locals
            info = known["ji"]
            trees = {"args": known["args"], "kwargs": known["kwargs"]}
            trees |= {"in_shardings": info.in_shardings_leaves, "out_shardings": info.out_shardings_leaves}
            of = getattr(known["fun"], "__name__", "the program")
            leaves = [(name, *leaf) for name, x in trees.items() for leaf in jax.tree.leaves_with_path(x)]
            found += [(f"{name}{jax.tree_util.keystr(path)} of {of}", x) for name, path, x in leaves]
        frame = frame.f_back
    return found


def holders(arrays: Iterable[Any]) -> tuple[int, ...]:
    """The numbers of the processes, this one among them, whose devices hold arrays, or lie in shardings; sorted."""
    return tuple(sorted({jax.process_index()}.union(*map(_processes, arrays))))


def layout(x: Any) -> str:
    """How an array lies on the devices of several processes, in words; empty where it does not, or nobody knows."""
    if len(_processes(x)) < 2:
        return ""
    if not isinstance(sharding := _sharding(x), jax.sharding.NamedSharding):
        return str(sharding)
    mesh: Any = sharding.mesh
    spec: Any = sharding.spec
    devices = [device.id for device in mesh.devices.flat]
    return f"{tuple(spec.partitions)} on the mesh {dict(mesh.shape)} of devices {devices}, {sharding.memory_kind}"


def _processes(x: Any) -> set[int]:
    """The processes of an array's or a sharding's devices; none where they are not known."""
    sharding = _sharding(x)
    return set() if sharding is None else {device.process_index for device in sharding.device_set}


def _sharding(x: Any) -> jax.sharding.Sharding | None:
    while isinstance(x, jax.core.Tracer) and hasattr(x, "primal"):
        x = x.primal
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", x)
    is_abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
    return sharding if isinstance(sharding, jax.sharding.Sharding) and not is_abstract else None


# ----------------------------------------------------------------------------------------------------- messages


def send(key: str, text: str) -> None:
    """Give all processes a text under a key, which is new."""
    _client().key_value_set_bytes(key, zlib.compress(text.encode()))


def receive(key: str, beat: str) -> str | None:
    """The text under a key, once its process has sent it; None if that process ends, or does not come.

    `beat` is the key of that process's signs of life.
    """
    client, last, start = _client(), None, time.monotonic()
    while True:
        try:
            return zlib.decompress(client.blocking_key_value_get_bytes(key, int(1e3 * _SLICE_S))).decode()
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                return None  # the process that keeps the texts has ended
        signs: Sequence[Any] = client.key_value_dir_get(beat)
        if signs != last:
            last, start = signs, time.monotonic()
        if time.monotonic() - start > (SILENCE_S if signs else PATIENCE_S):
            return None


@contextmanager
def living(beat: str) -> Iterator[None]:
    """Give signs of life under a key while this lasts."""
    client, ended = _client(), threading.Event()

    def run() -> None:
        count = 0
        while not ended.is_set():
            client.key_value_set(f"{beat}/now", str(count := count + 1), allow_overwrite=True)
            ended.wait(_SLICE_S)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(SILENCE_S)


def forget(room: str) -> None:
    """Remove all texts whose keys begin with a name and a slash."""
    _client().key_value_delete(room)


def _client() -> Any:
    return _distributed.global_state.client
