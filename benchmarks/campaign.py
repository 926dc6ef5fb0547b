"""Measure on a GPU, in the order of what matters most, what no machine without one can tell.

    python -m benchmarks.campaign                 # eight minutes on an H100 or H200
    python -m benchmarks.campaign --minutes 20    # for slower ones
    python -m benchmarks.campaign --rehearse      # tiny sizes on any machine; nothing is kept

- `gradients`: those of each program of the suite beside plain JAX's, with products in full precision.
- `steps`: six programs at their large size, by default, within half and a quarter of plain's activations, beside plain
  JAX and each block under `jax.checkpoint`: the allocator's own peak, XLA's account, and the time over plain's.
- `accounts`: XLA's account made without the device beside that made on it.
- `offload`: the time of a step whose residuals all wait in host memory, over that of the same step with none there.
- `updates`: peak and time of `value_and_update` beside a step that updates after the gradient.

Each figure is written to `benchmarks/results/campaign-CHIP.json` as soon as it is there. What stands there already is
not measured again, so a campaign that was stopped goes on. Every program runs in a process of its own, since the
allocator tells the highest peak of a process: steps run from the smallest to the largest, and one that does not raise
the peak has none of its own.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding
from rich.console import Console

from benchmarks.device import difference, timed
from benchmarks.measure import Call, machine, memory_of, wide_console
from benchmarks.offloads import everything
from benchmarks.programs import PROGRAMS, load
from jointcut import aot
from jointcut.aot.options import compilers
from jointcut.aot.run.compile import compiled_unseen
from jointcut.partition.errors import BudgetError, TargetError
from jointcut.partition.prices.targets import chip_of

RESULTS = Path(__file__).parent / "results"
MINUTES = 8.0
#: The programs of `steps` and `accounts`, the first ones first.
LARGE = ("gpt-scan", "vit", "resnet", "gpt-unrolled", "unet", "mamba")
BUDGETS = {"half": 0.5, "quarter": 0.25}
UPDATED = ("gpt-scan", "mlp")

Row = dict[str, Any]


def main() -> None:
    """Measure what is not known yet, for so many minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="when to stop (%(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on any machine; nothing is kept")
    options = parser.parse_args()
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is None and not options.rehearse:
        parser.error(f"{jax.devices()[0].device_kind} is no GPU or TPU that jointcut knows; --rehearse runs anywhere")
    file = None if options.rehearse or chip is None else RESULTS / f"campaign-{chip.name}.json"
    found = json.loads(file.read_text("utf-8")) if file is not None and file.exists() else {}
    end, console = time.monotonic() + 60 * options.minutes, wide_console(120)
    for part, name, measure in tasks(options.rehearse):
        if name in found.get(part, {}).get("rows", {}):
            continue
        if time.monotonic() > end:
            console.print(f"{options.minutes:g} minutes are over; run it again to go on with {part}, {name}")
            return
        row = in_a_process(measure)
        found.setdefault(part, {"machine": machine(), "rows": {}})["rows"][name] = row
        if file is not None:
            file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        tell(console, part, name, row)


def tasks(is_rehearsal: bool) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """All parts in order: the part, the program, and what measures it."""
    small, large = ("tiny", "tiny") if is_rehearsal else ("small", "large")
    few = 2 if is_rehearsal else None
    for name in list(PROGRAMS)[:few]:
        yield "gradients", name, partial(gradients, name, small)
    for name in LARGE[:few]:
        yield "steps", name, partial(steps, name, large)
    for name in LARGE[:few]:
        yield "accounts", name, partial(accounts, name, large)
    yield "offload", "gpt-scan", partial(offload, "gpt-scan", small)
    for name in UPDATED[:few]:
        yield "updates", name, partial(updates, name, small)


def in_a_process(measure: Callable[[], Row]) -> Row:
    """What a part measures in a process of its own, or how it failed."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        future = pool.submit(measure)
        error = future.exception()
        return future.result() if error is None else {"failed": f"{type(error).__name__}: {error}"[:500]}


def tell(console: Console, part: str, name: str, row: Row) -> None:
    """Print one row."""
    shown = ", ".join(f"{key} {_shown(value)}" for key, value in row.items())
    console.print(f"{part:10} {name:14} {shown}", style="red" if "failed" in row else None)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_shown(each)}" for key, each in value.items()) + ")"
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


# --------------------------------------------------------------------------------------------------------- parts


def gradients(name: str, size: Any) -> Row:
    """How far our gradients are from plain JAX's, and how far they may be."""
    program = load(name, size)
    return {"differ": difference(program), "tolerance": program.tolerance["float32"]}


def steps(name: str, size: Any) -> Row:
    """Of each way to take a step XLA's account, the allocator's peak, and the time over plain JAX's."""
    program = load(name, size)
    traced = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments)
    ours = {"default": traced.partition().compile(1)}
    for way, budget in BUDGETS.items():
        try:
            ours[way] = traced.partition(budget=budget).compile(1)
        except BudgetError:
            continue
    losses = {"plain": program.loss}
    if "block" in program.places:
        losses["checkpoint"] = program.wrapped("block", jax.checkpoint)
    jitted = {
        way: jax.jit(jax.value_and_grad(loss, has_aux=program.has_aux)).lower(*program.arguments).compile()
        for way, loss in losses.items()
    }
    temps = {way: step.activation_bytes for way, step in ours.items()}
    temps |= {way: memory_of(step).temp for way, step in jitted.items()}
    calls: dict[str, Call] = {way: partial(step.value_and_grad, *program.arguments) for way, step in ours.items()}
    calls |= {way: partial(step, *program.arguments) for way, step in jitted.items()}
    order = sorted(calls, key=lambda way: temps[way])
    peaks = {way: allocated(calls[way]) for way in order}
    seconds = timed({way: calls[way] for way in ("plain", *(w for w in order if w != "plain"))})
    base = seconds.get("plain")
    return {
        way: {
            "temp_bytes": temps[way],
            "allocated_bytes": peaks[way],
            "time": None if base is None or way not in seconds else seconds[way] / base,
            "seconds": seconds.get(way),
        }
        for way in order
    }


def allocated(call: Call) -> int | None:
    """The allocator's peak after a call, if the call raised it; None where it did not, or does not fit."""
    (device, *_) = jax.local_devices()
    before = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    try:
        jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    after = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return after if after > before else None


def accounts(name: str, size: Any) -> Row:
    """XLA's temporaries of plain JAX's step and of ours, made on the device and without it."""
    program = load(name, size)
    loss = aot.function(program.loss, has_aux=program.has_aux)
    plain = jax.jit(jax.value_and_grad(program.loss, has_aux=program.has_aux))
    inside = jax.jit(loss.value_and_grad)
    functions = {"plain": plain, "default": inside}
    row: Row = {
        way: {"on_device": memory_of(f.lower(*program.arguments).compile()).temp} for way, f in functions.items()
    }
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is None:
        return row
    try:
        there = SingleDeviceSharding(compilers.devices(chip, 1, "1x1x1")[0])
    except TargetError as error:
        return row | {"without_device": str(error)}
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.typeof(x).dtype, sharding=there), program.arguments
    )
    for way, f in functions.items():
        row[way]["without_device"] = memory_of(compiled_unseen(f.lower(*placed))).temp
    return row


def offload(name: str, size: Any) -> Row:
    """The time of a step with all its residuals in host memory, over that of the same with none there."""
    program = load(name, size)
    traced = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments)
    kept, away = (traced.partition(how).compile(2) for how in ("min_cut", partial(everything, "min_cut")))
    calls: dict[str, Call] = {
        "plain": partial(kept.value_and_grad, *program.arguments),
        "away": partial(away.value_and_grad, *program.arguments),
    }
    same = all(np.array_equal(a, b) for a, b in zip(*(jax.tree.leaves(call()) for call in calls.values()), strict=True))
    seconds = timed(calls)
    spared = kept.memory.residual_bytes - away.memory.residual_bytes
    return {"equal": same, "spared_bytes": spared, "time": seconds["away"] / seconds["plain"]}


def updates(name: str, size: Any) -> Row:
    """XLA's peak of a step with its update inside the backward, over that of one that updates after the gradient."""
    program = load(name, size)
    parameters, *rest = program.arguments
    rule = optax.adam(1e-3)
    state = rule.init(parameters)

    def after(parameters: Any, state: Any, *rest: Any) -> Any:
        value, gradient = jax.value_and_grad(program.loss, has_aux=program.has_aux)(parameters, *rest)
        change, state = rule.update(gradient, state, parameters)
        return value, optax.apply_updates(parameters, change), state

    plain = memory_of(jax.jit(after, donate_argnums=(0, 1)).lower(parameters, state, *rest).compile())
    traced = aot.function(program.loss, has_aux=program.has_aux).trace_update(parameters, state, *rest, update=rule)
    return {"peak_bytes": traced.partition().compile().peak_bytes, "plain_peak_bytes": plain.peak}


if __name__ == "__main__":
    main()
