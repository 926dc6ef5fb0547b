"""Measure what a device computes and moves in a second.

Four short programs are timed once per kind of device: a matrix product, a chain of exponentials, and additions of
large arrays, in place and into memory that is new. The rates are kept in the process and in `rates.json` below
`$JOINTCUT_CACHE_DIR`, else below the user's cache folder. `Measured` times each heavy op itself instead. Both time on a
thread of their own, since a budget may be met inside somebody's `jit`, where the caller's thread computes nothing, or
under settings that would distort the figures.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.partition import jaxprs
from jointcut.partition.cost import Roofline
from jointcut.partition.counts import WEIGHTS
from jointcut.partition.errors import PlanError
from jointcut.partition.graph import LITERAL, SCAN, STEP, Graph, Op
from jointcut.partition.policy import COLLECTIVES, heavy

_LOG = logging.getLogger("jointcut")
_KNOWN: dict[str, Roofline] = {}
_LOCK = threading.Lock()
_T = TypeVar("_T")

_DEPTH = 8  # exponentials in a chain: then a pass computes longer than it moves
_SPAN, _ROUNDS = 0.3, 10  # seconds and rounds at least, the best of which counts: some fall between what others do
_FRESH_ROUNDS = 3
_TRIES = 5  # runs of one op, of which the median counts

#: Ops that random operands would lead elsewhere or harm, and ops that need company.
_NOT_ALONE = COLLECTIVES | {"axis_index", "cond", "ffi_call", "pure_callback", "while"}


# ------------------------------------------------------------------------------------------------- of a device


def rates(device: Any = None) -> Roofline:
    """What a device (by default JAX's default device) does in a second, to two digits.

    Measured once per kind of device, number of host cores and version of jaxlib, in some hundred milliseconds; then
    read from memory or from the file. A folder that cannot be written does not matter, a file that cannot be read is
    logged and replaced.
    """
    device = _default_device() if device is None else device
    key = f"{device.device_kind}, {os.cpu_count()} cores, jaxlib {metadata.version('jaxlib')}"
    with _LOCK:
        if key not in _KNOWN:
            kept = _read()
            if key not in kept:
                kept[key] = _aside(lambda: _measure(device))
                _write(kept)
            _KNOWN[key] = kept[key]
        return _KNOWN[key]


def _default_device() -> Any:
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(chosen, str) or chosen is None:
        return jax.local_devices(backend=chosen)[0]
    return chosen


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


def _read() -> dict[str, Roofline]:
    """All rates in the file; none where there is no file, or one that is not ours."""
    try:
        return {key: Roofline(**rates) for key, rates in json.loads(_file().read_text("utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, PlanError) as error:
        _LOG.warning("Rates are measured anew, since the file that should hold them cannot be read: %s", error)
        return {}


def _write(kept: dict[str, Roofline]) -> None:
    """Write the file in one stroke, or leave it where that is not allowed."""
    text = json.dumps({key: asdict(roofline) for key, roofline in kept.items()}, indent=2)
    try:
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(path)
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
            self.taken[key] = _aside(lambda: _alone(op.payload, with_doubles))
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


def _alone(eqn: jaxprs.Equation, with_doubles: bool) -> float | None:
    """Seconds of one run of an equation as a program of its own, None where the device cannot run it."""
    inputs: list[Any] = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jaxprs.Literal)))
    outputs = [jaxprs.fresh(v.aval) for v in eqn.outvars]
    closed = jaxprs.build(inputs, outputs, [jaxprs.rebound(eqn, eqn.invars, outputs)])
    with jax.enable_x64(with_doubles):
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
