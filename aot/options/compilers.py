"""Load XLA's compiler for a device that is not here, from the plugin by which JAX would run it.

A plugin for GPUs compiles without NVIDIA's libraries, and libtpu without a TPU. JAX goes on running on the same device.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import requires, version
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from jointcut.partition.errors import TargetError, message
from jointcut.partition.prices.targets import Chip
from jointcut.partition.program.jax.runtime import quiet_plugins

#: Settings that libtpu asks for where no TPU is attached. Several processes may then load it.
_WITHOUT_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

#: With this setting a plugin for NVIDIA's GPUs loads although their libraries are not there.
_WITHOUT_GPU = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"

#: The version of libtpu that a version of JAX asks for.
_LIBTPU = re.compile(r"libtpu==([0-9.]+)\*")

_LOCK = threading.Lock()


@cache
def devices(chip: Chip, count: int, topology: str) -> tuple[Any, ...]:
    """Return `count` devices of a chip that is not here, connected by a topology; they only compile.

    Raises `TargetError` with the line to install if the plugin is missing, or does not fit jaxlib, and with the cause
    if it does not start.
    """
    with quiet_plugins():
        jax.devices()  # JAX's own backend is chosen first: a plugin that is loaded for its compiler does not change it
    with _LOCK:
        try:
            found = _tpus(chip, count, topology) if chip.platform == "tpu" else _gpus(chip, topology)
        except (ImportError, RuntimeError) as error:  # JAX's own errors are of the second kind
            what = f"needs XLA's compiler for {chip.platform}, which is installed and does not start: "
            what += f"{str(error).partition(chr(10))[0].rstrip('.')}."
            raise TargetError(message(f"target {chip.name}", what, "Try it in a new process.")) from error
    return found[:count]


def _tpus(chip: Chip, count: int, topology: str) -> tuple[Any, ...]:
    if find_spec("libtpu") is None:
        raise _missing(chip, "libtpu is not installed")
    asked = next((m[1] for r in requires("jax") or () if (m := _LIBTPU.match(r))), "")
    if not version("libtpu").startswith(asked):
        raise _missing(chip, f"libtpu is version {version('libtpu')}, and jaxlib asks for {asked}*")
    with _variables({} if "TPU_ACCELERATOR_TYPE" in os.environ else _WITHOUT_TPU):
        options = {"chips_per_host_bounds": [1, 1, 1]} if count == 1 else {}
        name = f"{chip.name}:{topology}"
        return tuple(topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices)


def _gpus(chip: Chip, topology: str) -> tuple[Any, ...]:
    def described() -> tuple[Any, ...]:
        options = {"target_config": chip.configuration, "topology": topology}
        return tuple(topologies.get_topology_desc(chip.name, chip.platform, **options).devices)

    plugin = _plugin(chip)
    try:
        return described()
    except NotImplementedError:  # JAX has not loaded the plugin, as it found no GPU
        with _variables({_WITHOUT_GPU: "1"}):
            importlib.import_module(f"jax_plugins.{plugin}").initialize()
        return described()


def _plugin(chip: Chip) -> str:
    """Return the name of the plugin for GPUs; raises `TargetError` where none is installed that fits."""
    prefix = f"xla_{chip.platform}"
    plugins = importlib.import_module("jax_plugins") if find_spec("jax_plugins") else None
    found = (
        [] if plugins is None else [m.name for m in pkgutil.iter_modules(plugins.__path__) if m.name.startswith(prefix)]
    )
    if not found:
        raise _missing(chip, "its plugin is not installed")
    name = max(found)
    plugin, ours = version(f"jax-{name.removeprefix('xla_')}-plugin"), version("jaxlib")
    if plugin.split(".")[:3] != ours.split(".")[:3]:
        raise _missing(chip, f"its plugin is version {plugin}, and jaxlib is {ours}")
    return name


def _missing(chip: Chip, why: str) -> TargetError:
    extra = f"pip install 'jointcut[{chip.platform}]'"
    what = f"needs XLA's compiler for {chip.platform}: {why}."
    return TargetError(message(f"target {chip.name}", what, f"Install the plugin that fits jaxlib: {extra}."))


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
