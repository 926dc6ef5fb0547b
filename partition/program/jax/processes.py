"""Tell which processes hold the arrays of a program, and send texts between these processes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import distributed as _distributed
from jax._src import pjit as _pjit

#: Seconds for which a process may be late, and for which one that has come may give no sign of life.
PATIENCE_S, SILENCE_S = 600.0, 30.0
_SLICE_S = 0.5  # seconds between two looks, and between two signs of life


def holders(arrays: Iterable[Any]) -> tuple[int, ...]:
    """The processes whose devices hold arrays, or arguments of the `jax.jit` that is traced; sorted.

    Only this process where `jax.distributed` has not begun.
    """
    here = jax.process_index()
    if _distributed.global_state.client is None:
        return (here,)
    found, frame = [*arrays], sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_infer_params" and frame.f_globals is _pjit.__dict__:
            known = frame.f_locals
            info = known["ji"]
            found += jax.tree.leaves((known["args"], known["kwargs"]))
            found += [*info.in_shardings_leaves, *info.out_shardings_leaves]
        frame = frame.f_back
    return tuple(sorted({here}.union(*map(_processes, found))))


def _processes(x: Any) -> set[int]:
    """The processes of an array's or a sharding's devices; none where they are not known."""
    while isinstance(x, jax.core.Tracer) and hasattr(x, "primal"):
        x = x.primal
    if isinstance(x, jax.core.Tracer):
        return set()
    devices = getattr(getattr(x, "sharding", x), "device_set", ())
    return {device.process_index for device in devices}


def send(key: str, text: str) -> None:
    """Give all processes a text under a key, which is new."""
    _distributed.global_state.client.key_value_set(key, text)


def receive(key: str, beat: str) -> str | None:
    """The text under a key, once its process has sent it; None if that process ends, or does not come.

    `beat` is the key of that process's signs of life.
    """
    client, last, start = _distributed.global_state.client, None, time.monotonic()
    while True:
        try:
            return client.blocking_key_value_get(key, int(1e3 * _SLICE_S))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                return None  # the process that keeps the texts has ended
        signs = dict(client.key_value_dir_get(beat))
        if signs != last:
            last, start = signs, time.monotonic()
        if time.monotonic() - start > (SILENCE_S if signs else PATIENCE_S):
            return None


@contextmanager
def living(beat: str) -> Iterator[None]:
    """Give signs of life under a key while this lasts."""
    client, ended = _distributed.global_state.client, threading.Event()

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


def forget(key: str) -> None:
    """Remove all texts whose keys begin with this one and a slash."""
    _distributed.global_state.client.key_value_delete(f"{key}/")
