"""Measure how much a device computes and moves in a second.

Four short programs are timed: a matrix product, a chain of exponentials, and additions of large arrays, in place and
into new memory. Other work on the machine can only make a run longer, so each program runs many times, in bursts with
pauses, and the least time counts. Rates are rounded to decibels (1.0, 1.3, 1.6, 2.0, ... of a power of ten), since a
plan should not depend on the third digit.

The same budget should give the same plan tomorrow. So the rates are noted in a small JSON file, under the kind of
device, the model of the processor, the number of cores and the version of jaxlib. The file is the one that
`$JOINTCUT_RATES` names, else `rates.json` in `$JOINTCUT_CACHE_DIR`, else `~/.cache/jointcut/rates.json`. After a month
the rates are measured again, and a rate is replaced only if the new one is more than 1.5 times the old.
`rates(anew=True)` measures at once and replaces all rates. An entry `"*"` of the file holds for any device and is never
measured again: write one where several machines, or tests, should choose the same plans.

Four programs are not a step. `feed` lets the time of a step that ran correct the rates: all by one factor, so that
prices keep their proportions, and plans their choices. An entry that was fed says by what, and does not grow old.

`Measured` times each heavy op itself instead. Both measure on a thread of their own: the caller's thread may be tracing
a `jit`, and then computes nothing, or have settings that would distort the figures.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.options.limits import default_device
from jointcut.aot.planning.budgets.rates_file import ANY, file, noted, read, there, undisturbed, write
from jointcut.aot.progress.progress import Stage
from jointcut.partition.errors import CallError, JointcutError, PlanError, message
from jointcut.partition.figures import human_bytes
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.prices.rules import heavy
from jointcut.partition.program.graph import LITERAL, OPEN, STEP, Graph, Op
from jointcut.partition.program.jax import abstract, jaxprs, meshes, runtime
from jointcut.partition.program.primitives import COLLECTIVES, MISLED, WEIGHTS

_LOG = logging.getLogger("jointcut")
_KNOWN: dict[str, Roofline] = {}
_LOCK = threading.Lock()
_T = TypeVar("_T")

_DEPTH = 8  # exponentials in a chain, enough that computing takes longer than moving
_BURST_S, _PAUSE_S = 0.15, 0.1  # length of a burst of runs, and of the pause between two
_STEADY, _BETTER = 4, 0.97  # measuring ends after this number of bursts without a time below this share of the best
_MOST_S = 4.0  # measuring ends after this time at the latest
_WHEN, _MONTH_S = "measured_unix_s", 30 * 86_400  # key of the time in an entry of the file, and how long it counts
_FED = "fed_by"  # key of the step that corrected an entry
_FASTER = 1.5  # a rate measured again replaces the noted one if it is higher by this factor
_TRIES = 5  # number of runs of one op; the median counts

#: Ops that random operands could mislead or harm, and ops that need other devices.
_NOT_ALONE = COLLECTIVES | MISLED


# ------------------------------------------------------------------------------------------------- of a device


def rates(device: Any = None, *, anew: bool = False) -> Roofline:
    """Return the rates of a device (by default JAX's default device), rounded to decibels.

    They are measured once per kind of device, processor, number of host cores and version of jaxlib, in some seconds;
    then read from memory or from the file, unless `anew`. A file that cannot be written is no error. An entry that
    holds no rates is logged and replaced. A file that cannot be read is logged, and left to whoever wrote it. Raises
    `JointcutError` where the device cannot run the programs, as when its memory is full.
    """
    device = default_device() if device is None else device
    name = device_name(device)
    with _LOCK:
        if anew or name not in _KNOWN:
            _KNOWN[name] = _noted_or_measured(device, name, anew)
        return _KNOWN[name]


def _noted_or_measured(device: Any, name: str, anew: bool) -> Roofline:
    """Return the rates in the file, or else new ones, which are written there."""
    entries = read()
    fixed, noted = _rates_in(entries, ANY), _rates_in(entries, name)
    if fixed is not None and not anew:
        return fixed
    if noted is not None and not anew and _is_young(entries[name]):
        return noted
    with undisturbed():
        theirs = there() or {}
        if not anew and theirs.get(name) != entries.get(name) and (found := _rates_in(theirs, name)) is not None:
            return found  # another process has measured them meanwhile
        measured = _measured(device)
        if noted is not None and not anew:
            measured = _fastest(noted, measured)
        write(name, _told(measured))
    return measured


def _told(measured: Roofline) -> dict[str, Any]:
    """Return rates as an entry of the file."""
    told = {rate: given for rate, given in asdict(measured).items() if rate != "host_bytes_per_s"}  # see `link`
    return {**told, _WHEN: int(time.time())}


def _fastest(noted: Roofline, measured: Roofline) -> Roofline:
    """Return the noted rates, or much higher new ones: other programs ran when those were measured first."""
    pairs = {name: (rate, getattr(measured, name)) for name, rate in asdict(noted).items()}
    return Roofline(**{n: new if old is None or new > _FASTER * old else old for n, (old, new) in pairs.items()})


def _rates_in(entries: dict[str, Any], name: str) -> Roofline | None:
    """Return the rates in an entry of the file, None where there are none."""
    if name not in entries:
        return None
    try:
        return Roofline(**{key: rate for key, rate in dict(entries[name]).items() if key not in (_WHEN, _FED)})
    except (TypeError, ValueError, PlanError):
        _LOG.warning("Rates are measured anew, since the entry %r of %s holds none.", name, file())
        return None


def _is_young(entry: dict[str, Any]) -> bool:
    """Whether an entry was fed, or measured within a month, and not in the future, as after a clock was put back."""
    when = entry.get(_WHEN)
    return _FED in entry or (isinstance(when, int | float) and 0 <= time.time() - when < _MONTH_S)


def feed(used: Roofline, predicted_seconds: float, least_seconds: float, by: str) -> str:
    """Correct the rates of JAX's default device by a step that ran, and return a sentence that says so.

    A step takes the predicted seconds by the rates that were `used`, and took the least seconds. It may be fed twice.
    Raises `CallError` where an entry of the file holds for any device.
    """
    device = default_device()
    name, before = device_name(device), rates(device)
    if ANY in read():
        what, cure = f"has no rates to correct: {file()} fixes those of any device.", f"Remove its entry {ANY!r}."
        raise CallError(message("feed", what, cure))
    share = rounded(used.flops_per_s * predicted_seconds / least_seconds) / before.flops_per_s
    after = Roofline(**{n: rate and rounded(rate * share) for n, rate in asdict(before).items()})
    with _LOCK, undisturbed():
        _KNOWN[name], entry = after, {**_told(after), _FED: by}
        write(name, entry)
    kept = f"in {file()}; remove the entry there to have them measured again" if noted(name) == entry else "not kept"
    by_much = after.flops_per_s / before.flops_per_s
    words = f"{by_much:.1f} times higher" if by_much > 1 else f"{1 / by_much:.1f} times lower"
    told = f"the rates of {device.device_kind} are {words if by_much != 1 else 'what they were'}, {kept}"
    _LOG.info("By the time of %s %s.", by, told)
    return told


def device_name(device: Any) -> str:
    """Return everything that decides the rates and may differ between hosts that share a folder."""
    kind = f"{device.device_kind} ({_processor()})" if device.platform == "cpu" else device.device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{kind}, {cores} cores, jaxlib {metadata.version('jaxlib')}"


@functools.cache
def _processor() -> str:
    """Return the model of the host's processor where the system names it, else its family."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _measured(device: Any) -> Roofline:
    try:
        with Stage("measure", device.device_kind) as now:
            measured = on_a_thread(lambda: _measure(device))
            moved = human_bytes(measured.bytes_per_s)
            now.ends(lambda: f"measured in {now}, {measured.flops_per_s:.1e} flops/s, {moved}/s")
            return measured
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
    product, chain, added, fresh = _least([*programs, _into_fresh_memory(device, 2 * length)])
    return Roofline(
        rounded(2.0 * side**3 / product),
        rounded(_DEPTH * (WEIGHTS["exp"] + 1) * chained / chain),
        rounded(3.0 * 4 * length / added),
        rounded(2.0 * 4 * 2 * length / fresh),
    )


def _least(programs: Sequence[Callable[[], float]]) -> list[float]:
    """Return the least seconds of each program, run in bursts until no time improves."""
    best, steady, end = _burst(programs), 0, time.perf_counter() + _MOST_S
    while steady < _STEADY and time.perf_counter() < end:
        time.sleep(_PAUSE_S)
        before, best = best, list(map(min, best, _burst(programs)))
        is_better = any(now < _BETTER * then for now, then in zip(best, before, strict=True))
        steady = 0 if is_better else steady + 1
    return best


def _burst(programs: Sequence[Callable[[], float]]) -> list[float]:
    """Return the least seconds of each program, run in turns for `_BURST_S`, and at least once."""
    best, end = [run() for run in programs], time.perf_counter() + _BURST_S
    while time.perf_counter() < end:
        best = [min(seconds, run()) for seconds, run in zip(best, programs, strict=True)]
    return best


def _exponentials(x: jax.Array) -> jax.Array:
    for _ in range(_DEPTH):
        x = jnp.exp(-x)
    return x


def _program(device: Any, function: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> Callable[[], float]:
    """Return a call that runs a function once on its last result, in the same buffer, and returns the seconds.

    A step reuses its buffers in the same way; each page of a new one would cost time.
    """
    run = jax.jit(function, donate_argnums=0)
    first, *others = (jax.device_put(np.full(shape, 1 / shape[0], np.float32), device) for shape in shapes)
    state = [run(first, *others).block_until_ready()]

    def once() -> float:
        start = time.perf_counter()
        state.append(run(state.pop(), *others).block_until_ready())
        return time.perf_counter() - start

    return once


def _into_fresh_memory(device: Any, length: int) -> Callable[[], float]:
    """Return a call that writes an array of `float32` into a new buffer, and returns the seconds.

    The buffer is larger than those that C libraries keep when they are freed (32 MB), as the temporaries of a step are.
    """
    x = jax.device_put(np.ones(length, np.float32), device)
    run = jax.jit(lambda x: x + 1)
    run(x).block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        run(x).block_until_ready()
        return time.perf_counter() - start

    return once


def rounded(rate: float) -> float:
    """Return a rate in whole decibels, written with two digits."""
    return float(f"{10 ** (round(10 * math.log10(rate)) / 10):.1e}")


def on_a_thread(function: Callable[[], _T]) -> _T:
    """Run a function on a new thread, free of the caller's traces and `with` blocks."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


# ------------------------------------------------------------------------------------------------- op by op


@dataclass
class Measured:
    """A cost model that times each distinct heavy op once, alone, on JAX's default device.

    `roofline` prices cheap ops, since XLA would fuse them with others, and ops that cannot run alone: ops of a graph
    text, effects, collectives, foreign code, branches and loops that depend on values. `taken` holds the seconds of
    each op that was timed, None where the device could not run it.
    """

    roofline: Roofline = field(default_factory=rates)
    taken: dict[str, float | None] = field(default_factory=dict, repr=False)

    def saving_seconds(self, num_bytes: int) -> float:
        """Return the seconds to write and read bytes, by the roofline."""
        return self.roofline.saving_seconds(num_bytes)

    def seconds(self, graph: Graph, op: Op) -> float:
        """Return the median of several runs on random operands, less the time to start a program."""
        if op.payload is None or op.name in (STEP, LITERAL, *OPEN):
            return self.roofline.seconds(graph, op)
        if not heavy(graph, op) or not _can_run_alone(op):
            return self.roofline.seconds(graph, op)
        key = _key(op.payload)
        if key not in self.taken:
            with_doubles = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
            device = default_device()
            self.taken[key] = on_a_thread(lambda: _alone(op.payload, device, with_doubles))
        seconds = self.taken[key]
        return self.roofline.seconds(graph, op) if seconds is None else seconds


def _can_run_alone(op: Op) -> bool:
    avals = [v.aval for v in (*op.payload.invars, *op.payload.outvars)]
    plain = all(abstract.is_plain(aval) and not meshes.is_explicit(aval.sharding) for aval in avals)
    return plain and not op.effects and not (op.inner | {op.name}) & _NOT_ALONE


def _key(eqn: jaxprs.Equation) -> str:
    """Return everything that decides how long an equation takes: primitive, types and parameters."""
    types = [[str(v.aval) for v in variables] for variables in (eqn.invars, eqn.outvars)]
    return f"{eqn.primitive.name} {types} {sorted((name, str(value)) for name, value in eqn.params.items())}"


def _alone(eqn: jaxprs.Equation, device: Any, with_doubles: bool) -> float | None:
    """Return the seconds of one run of an equation as its own program, None where the device cannot run it."""
    inputs: list[Any] = list(dict.fromkeys(jaxprs.variables(eqn.invars)))
    outputs = [jaxprs.fresh(v.aval) for v in eqn.outvars]
    closed = jaxprs.build(inputs, outputs, [jaxprs.rebound(eqn, eqn.invars, outputs)])
    with jax.default_device(device), jax.enable_x64(with_doubles):
        try:
            rng = np.random.default_rng(0)
            bound = max((1, *(v.aval.shape[0] for v in inputs[:1] if v.aval.shape)))
            operands = [jax.device_put(_operand(v.aval, rng, bound)) for v in inputs]
            seconds = _median(lambda *xs: runtime.evaluate(closed, *xs), *operands)
            return max(0.0, seconds - _median(lambda: np.float32(0)))
        except (jax.errors.JaxRuntimeError, FloatingPointError, NotImplementedError, ValueError):
            return None


def _operand(aval: Any, rng: np.random.Generator, bound: int) -> np.ndarray:
    """Return random indices below `bound`, or numbers in [0, 1); square matrices have a heavy diagonal."""
    if jnp.issubdtype(aval.dtype, np.bool_):
        return rng.random(aval.shape) < 0.5
    if jnp.issubdtype(aval.dtype, np.integer):
        return rng.integers(0, min(bound, int(jnp.iinfo(aval.dtype).max)), aval.shape).astype(aval.dtype)
    numbers = rng.random(aval.shape, np.float32)
    if len(aval.shape) >= 2 and aval.shape[-1] == aval.shape[-2]:
        numbers += aval.shape[-1] * np.eye(aval.shape[-1], dtype=np.float32)  # so that factorisations succeed
    return numbers.astype(aval.dtype)


def _median(function: Callable[..., Any], *operands: Any) -> float:
    run = jax.jit(function)
    jax.block_until_ready(run(*operands))
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        jax.block_until_ready(run(*operands))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
