"""Measure how fast a device copies to its host's memory.

The rate is noted in the file of `rates`, once per kind of device and version of jaxlib. It decides what a search may
offload, so it should not change from day to day.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import numpy as np

from jointcut.aot.options.limits import default_device
from jointcut.aot.planning.budgets.rates import device_name, on_a_thread, rounded
from jointcut.aot.planning.budgets.rates_file import note, noted
from jointcut.partition.errors import JointcutError, message
from jointcut.partition.program.jax import abstract

_KNOWN: dict[str, float] = {}
_LOCK = threading.Lock()

_RUNS = 5  # number of copies; the fastest counts
_BYTES = 2**26  # of a copy


def host_rate() -> float:
    """Return the bytes that JAX's default device copies to its host in a second, rounded to decibels.

    It is measured once per kind of device and version of jaxlib, and noted in the file. Raises `JointcutError` where
    the device cannot run the copy.
    """
    device = default_device()
    name = f"host, {device_name(device)}"
    with _LOCK:
        if name not in _KNOWN:
            entry = noted(name) or {}
            _KNOWN[name] = entry.get("host_bytes_per_s") or _measured_host(device)
            note(name, {"host_bytes_per_s": _KNOWN[name]})
        return _KNOWN[name]


def _measured_host(device: Any) -> float:
    try:
        return on_a_thread(lambda: _measure(device))
    except jax.errors.JaxRuntimeError as error:
        cure = "Free memory on it, or say what it copies in a second: cost=Roofline(..., host_bytes_per_s=...)."
        raise JointcutError(message(str(device), f"cannot be measured: {error}", cure)) from error


def _measure(device: Any) -> float:
    """Return the rate of the fastest of some copies to pinned memory."""
    there = jax.sharding.SingleDeviceSharding(device, memory_kind=abstract.HOST)
    x = jax.device_put(np.ones(_BYTES // 4, np.float32), device)

    def once() -> float:
        start = time.perf_counter()
        jax.device_put(x, there).block_until_ready()
        return time.perf_counter() - start

    once()
    return rounded(_BYTES / min(once() for _ in range(_RUNS)))
