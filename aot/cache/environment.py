"""List everything outside a program that could change how it compiles.

It lists versions, jointcut's own source, JAX's configuration, the environment variables that compilers read, and the
machine. Two processes compute the same key `fingerprint(program=..., environment=environment())` only if all of these
are the same.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from jointcut import partition, wrappers
from jointcut.partition.program.jax import runtime

# Libraries that take part in tracing, planning or compiling: by name, and by prefix for accelerators.
_DISTRIBUTIONS = ("jointcut", "jax", "jaxlib", "libtpu", "numpy", "scipy", "ml-dtypes")
_PREFIXES = ("jax-", "libtpu-", "nvidia-")

# Prefixes of variables that XLA and its libraries read; JAX's own variables are part of its configuration.
_VARIABLES = (
    *("XLA_", "LIBTPU_", "TPU_", "TF_", "PJRT_", "NPROC", "OMP_", "ONEDNN_", "DNNL_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "ROCM_", "HIP_", "MIOPEN_"),
)

# Settings that change only printing, logging, caching or error texts. All others are part of the key.
_SILENT = frozenset(
    {
        "jax_captured_constants_report_frames",
        "jax_captured_constants_warn_bytes",
        "jax_compilation_cache_check_contents",
        "jax_compilation_cache_dir",
        "jax_compilation_cache_expect_pgle",
        "jax_compilation_cache_include_metadata_in_key",
        "jax_compilation_cache_max_size",
        "jax_compiler_detailed_logging_min_ops",
        "jax_debug_log_modules",
        "jax_distributed_debug",
        "jax_dump_ir_modes",
        "jax_dump_ir_to",
        "jax_enable_compilation_cache",
        "jax_explain_cache_misses",
        "jax_include_debug_info_in_dumps",
        "jax_log_checkpoint_residuals",
        "jax_log_compiles",
        "jax_logging_level",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
        "jax_pprint_use_color",
        "jax_raise_persistent_cache_errors",
        "jax_traceback_filtering",
        "jax_tracer_error_num_traceback_frames",
    }
)

# Fields of /proc/cpuinfo that describe the processor, not its current state: on Intel and AMD, and on Arm.
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
_ARM_FIELDS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features")


def environment(devices: Sequence[Any] | None = None) -> dict[str, Any]:
    """Return the parts of a `fingerprint` besides the program; `devices` defaults to all devices of the backend.

    They are read again at each call, except for values that cannot change while a process runs.
    """
    devices = jax.devices() if devices is None else devices
    client = devices[0].client
    return {
        "versions": versions(),
        "python": (platform.python_implementation(), platform.python_version_tuple()[:2]),
        "sources": SOURCES,
        "backend": (client.platform, client.platform_version),
        "devices": tuple(devices),
        "processes": (jax.process_count(), jax.process_index(), jax.device_count()),
        "config": {name: value for name, value in jax.config.values.items() if name not in _SILENT},
        "context": runtime.trace_context(),
        "variables": (_first_variables(), variables()),
        "cpu": cpu(),
    }


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """Return name and version of every installed distribution that takes part in compiling, sorted."""
    names = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    return tuple(sorted(item for item in names.items() if item[0] in _DISTRIBUTIONS or item[0].startswith(_PREFIXES)))


def variables() -> dict[str, str]:
    """Return the environment variables that compilers read; if `XLA_FLAGS` names a file, add its text."""
    values = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    flags = values.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-") and Path(flags).is_file():
        values["XLA_FLAGS file"] = Path(flags).read_text("utf-8", "surrogateescape")
    return values


@functools.cache
def _first_variables() -> dict[str, str]:
    """Return the variables at the first call: some compilers read them only once, others see later changes."""
    return variables()


@functools.cache
def cpu(path: str = "/proc/cpuinfo") -> tuple[Any, ...]:
    """Return the features of the host's processors, and the number of processors that this process may use.

    XLA:CPU compiles for the host's instructions and divides work among its processors; no version includes them.
    """
    lines = Path(path).read_text("utf-8", "replace").splitlines() if Path(path).is_file() else []
    pairs = (line.partition(":")[::2] for line in lines)
    facts = {f"{name.strip()}: {value.strip()}" for name, value in pairs if name.strip() in _CPU_FIELDS + _ARM_FIELDS}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (platform.machine(), platform.processor(), usable, tuple(sorted(facts)))


def sources(folders: Iterable[Path]) -> str:
    """Return the sha256, in hex, of all Python files in folders; it changes with any edit, unlike the version."""
    hashed = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            text = file.read_bytes()
            hashed.update(f"{folder.name}/{file.relative_to(folder).as_posix()} {len(text)}\n".encode() + text)
    return hashed.hexdigest()


# Read at import, since the files on disk may be edited while the process runs.
SOURCES = sources([Path(__file__).parent.parent, *(Path(package.__path__[0]) for package in (wrappers, partition))])
