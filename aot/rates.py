"""Measure what a device computes and moves in a second.

Four short programs are timed once per kind of device: a matrix product, a chain of exponentials, and additions of
large arrays, in place and into memory that is new. The rates are kept in the process and, for a month, in `rates.json`
below `$JOINTCUT_CACHE_DIR`, else below the user's cache folder; `rates(anew=True)` measures again at once, say where
other programs ran the first time. `Measured` times each heavy op itself instead. Both time on a
thread of their own, since a budget may be met inside somebody's `jit`, where the caller's thread computes nothing, or
under settings that would distort the figures.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import platform
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.limits import default_device
from jointcut.aot.progress import Stage, size
from jointcut.partition import jaxprs
from jointcut.partition.cost import Roofline
from jointcut.partition.counts import WEIGHTS
from jointcut.partition.errors import JointcutError, PlanError, message
from jointcut.partition.graph import LITERAL, SCAN, STEP, Graph, Op
from jointcut.partition.policy import COLLECTIVES, heavy

_LOG = logging.getLogger("jointcut")
_KNOWN: dict[str, Roofline] = {}
_LOCK = threading.Lock()
_T = TypeVar("_T")

_DEPTH = 8  # exponentials in a chain: then a pass computes longer than it moves
_SPAN, _ROUNDS = 0.3, 10  # seconds and rounds at least, the best of which counts: some fall between what others do
_FRESH_ROUNDS = 3
_WHEN, _MONTH_S = "measured_unix_s", 30 * 86_400  # of an entry in the file, which counts for so many seconds
_TRIES = 5  # runs of one op, of which the median counts

#: Ops that random operands would lead elsewhere or harm, and ops that need company.
_NOT_ALONE = COLLECTIVES | {"axis_index", "cond", "ffi_call", "pure_callback", "while"}


# ------------------------------------------------------------------------------------------------- of a device


def rates(device: Any = None, *, anew: bool = False) -> Roofline:
    """What a device (by default JAX's default device) does in a second, to two digits.

    Measured once per kind of device, processor, number of host cores and version of jaxlib, in a second or two; then
    read from memory or from the file, unless `anew`. A folder that cannot be written does not matter, a file that
    cannot be read is logged and replaced. Raises `JointcutError` where the device cannot run the programs, as when its
    memory is full.
    """
    device = default_device() if device is None else device
    name = _name(device)
    with _LOCK:
        if anew or name not in _KNOWN:
            entries = _read()
            found = None if anew else _rates_in(entries.get(name))
            if found is None:
                found = _measured(device)
                _write({**entries, name: {**asdict(found), _WHEN: int(time.time())}})
            _KNOWN[name] = found
        return _KNOWN[name]


def _name(device: Any) -> str:
    """All that decides the rates, and that differs between hosts which may share a folder."""
    kind = f"{device.device_kind} ({_processor()})" if device.platform == "cpu" else device.device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{kind}, {cores} cores, jaxlib {metadata.version('jaxlib')}"


@functools.cache
def _processor() -> str:
    """The model of the host's processor where the system names it, else its family."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _measured(device: Any) -> Roofline:
    try:
        with Stage("measure", device.device_kind) as now:
            found = _aside(lambda: _measure(device))
            now.ends(lambda: f"measured in {now}, {found.flops_per_s:.1e} flops/s, {size(found.bytes_per_s)}/s")
            return found
    except jax.errors.JaxRuntimeError as error:
        cure = "Free memory on it, or say what it does in a second: cost=Roofline(...)."
        raise JointcutError(message(str(device), f"cannot be measured: {error}", cure)) from error


def _measure(device: Any) -> Roofline:
    small = device.platform == "cpu"
    side, length, chained = (512, 2**23, 2**18) if small else (4096, 2**26, 2**26)
    programs = [
        _program(device, lambda x, y: x @ y, (side, side), (side, side)),
        _program(device, _exponentials, (chained,)),
        _program(device, lambda x, y: x + y, (length,), (length,)),
    ]
    best = [math.inf] * len(programs)
    end, rounds = time.perf_counter() + _SPAN, 0
    while time.perf_counter() < end or rounds < _ROUNDS:
        best = [min(seconds, run()) for seconds, run in zip(best, programs, strict=True)]
        rounds += 1
    product, chain, added = best
    fresh = min(_into_fresh_memory(device, 2 * length) for _ in range(_FRESH_ROUNDS))
    return Roofline(
        _rounded(2.0 * side**3 / product),
        _rounded(_DEPTH * (WEIGHTS["exp"] + 1) * chained / chain),
        _rounded(3.0 * 4 * length / added),
        _rounded(2.0 * 4 * 2 * length / fresh),
    )


def _exponentials(x: jax.Array) -> jax.Array:
    for _ in range(_DEPTH):
        x = jnp.exp(-x)
    return x


def _program(device: Any, function: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> Callable[[], float]:
    """A call that runs a function once and returns the seconds, each time on the result before and in its buffer.

    A program reuses its buffers in the same way; a fresh one would be paid for page by page.
    """
    run = jax.jit(function, donate_argnums=0)
    first, *others = (jax.device_put(np.full(shape, 1 / shape[0], np.float32), device) for shape in shapes)
    state = [run(first, *others).block_until_ready()]

    def once() -> float:
        start = time.perf_counter()
        state.append(run(state.pop(), *others).block_until_ready())
        return time.perf_counter() - start

    return once


def _into_fresh_memory(device: Any, length: int) -> float:
    """Seconds to write an array of `float32` into a buffer that the program has not had before.

    It is larger than what C libraries keep for themselves when it is freed (32 MB), as the temporaries of a step are.
    """
    x = jax.device_put(np.ones(length, np.float32), device)
    run = jax.jit(lambda x: x + 1)
    run(x).block_until_ready()
    start = time.perf_counter()
    run(x).block_until_ready()
    return time.perf_counter() - start


def _rounded(rate: float) -> float:
    return float(f"{rate:.1e}")


def _aside(function: Callable[[], _T]) -> _T:
    """Run a function on a fresh thread, where nothing is being traced and no `with` of the caller's holds."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


# --------------------------------------------------------------------------------------------------- the file


def _file() -> Path:
    if own := os.environ.get("JOINTCUT_CACHE_DIR"):
        return Path(own) / "rates.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jointcut" / "rates.json"


def _read() -> dict[str, Any]:
    """The entries of the file by name; none where there is no file, or one that is not ours."""
    try:
        return dict(json.loads(_file().read_text("utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        _LOG.warning("Rates are measured anew, since the file that should hold them cannot be read: %s", error)
        return {}


def _rates_in(entry: Any) -> Roofline | None:
    """The rates in an entry of the file, None where there are none, or old ones."""
    try:
        figures = dict(entry)
        is_young = 0 <= time.time() - figures.pop(_WHEN) < _MONTH_S
        return Roofline(**figures) if is_young else None
    except (KeyError, TypeError, ValueError, PlanError):
        return None


def _write(entries: dict[str, Any]) -> None:
    """Write the file in one stroke, or leave it where that is not allowed."""
    try:
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            draft.write_text(json.dumps(entries, indent=2), "utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        _LOG.info("Rates are not kept for the next process: %s", error)


# ------------------------------------------------------------------------------------------------- op by op


@dataclass
class Measured:
    """A cost model that runs each distinct heavy op once, alone, on JAX's default device.

    `roofline` prices what is cheap, since that would be fused with others, and what cannot run alone: an op of a graph
    text, an effect, a collective, foreign code, what branches or loops by values. `taken` keeps the seconds of each.
    """

    roofline: Roofline = field(default_factory=rates)
    taken: dict[str, float | None] = field(default_factory=dict, repr=False)

    def saving_seconds(self, num_bytes: int) -> float:
        """What the roofline says."""
        return self.roofline.saving_seconds(num_bytes)

    def seconds(self, graph: Graph, op: Op) -> float:
        """The median of several runs on random operands, less what it takes to start a program."""
        if op.payload is None or op.name in (STEP, LITERAL, SCAN) or not heavy(graph, op) or not _can_run_alone(op):
            return self.roofline.seconds(graph, op)
        key = _key(op.payload)
        if key not in self.taken:
            with_doubles = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
            device = default_device()
            self.taken[key] = _aside(lambda: _alone(op.payload, device, with_doubles))
        taken = self.taken[key]
        return self.roofline.seconds(graph, op) if taken is None else taken


def _can_run_alone(op: Op) -> bool:
    avals = [v.aval for v in (*op.payload.invars, *op.payload.outvars)]
    plain = all(jaxprs.is_plain(aval) and not jaxprs.is_explicit(aval.sharding) for aval in avals)
    return plain and not op.effects and not (op.inner | {op.name}) & _NOT_ALONE


def _key(eqn: jaxprs.Equation) -> str:
    """What decides how long an equation takes: primitive, types and parameters."""
    types = [[str(v.aval) for v in ends] for ends in (eqn.invars, eqn.outvars)]
    return f"{eqn.primitive.name} {types} {sorted((name, str(value)) for name, value in eqn.params.items())}"


def _alone(eqn: jaxprs.Equation, device: Any, with_doubles: bool) -> float | None:
    """Seconds of one run of an equation as a program of its own, None where the device cannot run it."""
    inputs: list[Any] = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jaxprs.Literal)))
    outputs = [jaxprs.fresh(v.aval) for v in eqn.outvars]
    closed = jaxprs.build(inputs, outputs, [jaxprs.rebound(eqn, eqn.invars, outputs)])
    with jax.default_device(device), jax.enable_x64(with_doubles):
        try:
            rng = np.random.default_rng(0)
            bound = max((1, *(v.aval.shape[0] for v in inputs[:1] if v.aval.shape)))
            operands = [jax.device_put(_operand(v.aval, rng, bound)) for v in inputs]
            taken = _median(lambda *xs: jaxprs.evaluate(closed, *xs), *operands)
            return max(0.0, taken - _median(lambda: np.float32(0)))
        except (jax.errors.JaxRuntimeError, FloatingPointError, NotImplementedError, ValueError):
            return None


def _operand(aval: Any, rng: np.random.Generator, bound: int) -> np.ndarray:
    """Random numbers: indices below `bound`, or numbers in [0, 1), a square matrix with a heavy diagonal."""
    if jnp.issubdtype(aval.dtype, np.bool_):
        return rng.random(aval.shape) < 0.5
    if jnp.issubdtype(aval.dtype, np.integer):
        return rng.integers(0, min(bound, int(jnp.iinfo(aval.dtype).max)), aval.shape).astype(aval.dtype)
    numbers = rng.random(aval.shape, np.float32)
    if len(aval.shape) >= 2 and aval.shape[-1] == aval.shape[-2]:
        numbers += aval.shape[-1] * np.eye(aval.shape[-1], dtype=np.float32)  # then a factorisation goes to its end
    return numbers.astype(aval.dtype)


def _median(function: Callable[..., Any], *operands: Any) -> float:
    run = jax.jit(function)
    jax.block_until_ready(run(*operands))
    taken = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        jax.block_until_ready(run(*operands))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
