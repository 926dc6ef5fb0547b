"""Weigh losses whose body is one `jax.shard_map`, plain and cut, on eight devices of the host.

    python -m benchmarks.shards

A GPT of six layers, in a scan and unrolled: data parallel, FSDP with a gather for each layer, and tensor parallel with
a sum after each half of a block. Bytes are temporaries of one device by XLA's account; collectives are counted in the
compiled step, with the bytes that they make. The same cut inside the `shard_map` stands beside it. Budgets for these
losses are in `mesh_budgets`.

A second table is about FSDP with few rows, where gathered weights are most of what is kept: by `jax.checkpoint` and by
ours they are kept, or gathered again for the backward.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.table import Table

from benchmarks.measure import memory_of, wide_console
from benchmarks.parallel import (
    HEADS,
    ROWS,
    TIME,
    Moves,
    Weights,
    arguments,
    block,
    in_words,
    listed,
    moves,
    relative_error,
    through,
)
from jointcut import aot

RESULT = Path(__file__).parent / "results" / "shards.json"
GATHERED = "gathered"  # the name of a whole weight
FEW_ROWS = 8, 16  # sequences and their length


@dataclass(frozen=True)
class Row:
    """One program, by bytes of temporaries on a device.

    Attributes:
        name: how it is laid out, and how its layers are written.
        plain, ours, inside: plain JAX; cut from outside the `shard_map`; the function inside cut.
        error: largest difference of a gradient, relative to the largest of it.
        plain_moves, our_moves: collectives by name, each with its number and bytes.
    """

    name: str
    plain: int
    ours: int
    inside: int
    error: float
    plain_moves: Moves
    our_moves: Moves


@dataclass(frozen=True)
class Gathering:
    """FSDP with few rows in one way: temporaries of a device, and how many weights are gathered, of how many bytes."""

    name: str
    temp_bytes: int
    gathers: int
    gathered_bytes: int


def data_parallel(is_scan: bool, weights: Weights, x: Array) -> Array:
    """Every device has all weights and a part of the batch."""
    layer = partial(block, heads=HEADS)
    return lax.pmean(jnp.mean(jnp.square(through(layer, weights if is_scan else listed(weights), x))), "d")


def fsdp(is_scan: bool, weights: Weights, x: Array) -> Array:
    """Every device has a part of each weight, and gathers those of a layer."""
    return lax.pmean(jnp.mean(jnp.square(through(gathering, weights if is_scan else listed(weights), x))), "d")


def gathering(x: Array, parts: Weights) -> Array:
    """A layer whose weights are gathered first."""
    whole = {name: lax.all_gather(part, "d", axis=part.ndim - 1, tiled=True) for name, part in parts.items()}
    return block(x, checkpoint_name(whole, GATHERED), HEADS)


def by_hand(policy: Any, weights: Weights, x: Array) -> Array:
    """Each layer under a policy of `jax.checkpoint`."""
    layer = jax.checkpoint(gathering, policy=policy)
    return lax.pmean(jnp.mean(jnp.square(through(layer, listed(weights), x))), "d")


def tensor_parallel(is_scan: bool, weights: Weights, x: Array) -> Array:
    """Two groups have a part of the batch each; the four devices of a group have a head and a quarter of the MLP."""
    layer = partial(block, heads=HEADS // 4, whole=lambda x: lax.psum(x, "m"))
    return lax.pmean(jnp.mean(jnp.square(through(layer, weights if is_scan else listed(weights), x))), "d")


LAST, ALL = P(None, None, "d"), P()
WAYS: dict[str, tuple[Any, tuple[int, ...], tuple[str, ...], Any, Any]] = {
    "data parallel": (data_parallel, (8,), ("d",), dict.fromkeys(("qkv", "out", "up", "down"), ALL), P("d")),
    "FSDP": (fsdp, (8,), ("d",), {"qkv": P(None, None, None, "d"), "out": LAST, "up": LAST, "down": LAST}, P("d")),
    "tensor parallel": (
        tensor_parallel,
        (2, 4),
        ("d", "m"),
        {"qkv": P(None, None, None, "m"), "out": P(None, "m"), "up": P(None, None, "m"), "down": P(None, "m")},
        P("d"),
    ),
}


def placed(name: str, rows: int = ROWS, length: int = TIME) -> tuple[Callable[[Any], Any], Weights, Array]:
    """A function that puts one into the `shard_map` of a way, and the weights and the batch as they lie there."""
    _, sizes, axes, specs, of_batch = WAYS[name]
    mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))
    weights, x = arguments()
    weights = {key: jax.device_put(w, NamedSharding(mesh, specs[key])) for key, w in weights.items()}

    def laid(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=mesh, in_specs=(specs, of_batch), out_specs=P())

    return laid, weights, jax.device_put(x[:rows, :length], NamedSharding(mesh, of_batch))


def measure(name: str, is_scan: bool) -> Row:
    """The figures of one way to lay the model out."""
    body = WAYS[name][0]
    laid, weights, x = placed(name)
    plain, cut = laid(partial(body, is_scan)), aot.function(laid(partial(body, is_scan)))
    inside = laid(aot.function(partial(body, is_scan)))
    steps = [jax.jit(jax.value_and_grad(f)).lower(weights, x).compile() for f in (plain, inside)]
    ours = cut.trace(weights, x).partition().compile()
    want, got = steps[0](weights, x)[1], cut.value_and_grad(weights, x)[1]
    return Row(
        f"{name}, {'scan' if is_scan else 'unrolled'}",
        memory_of(steps[0]).temp,
        ours.memory.step.temp_bytes,
        memory_of(steps[1]).temp,
        relative_error(got, want),
        moves(steps[0].as_text()),
        moves(ours.cut.jits.compiled("step").as_text()),
    )


def gathered() -> list[Gathering]:
    """FSDP with few rows, unrolled: plain JAX, kept and gathered again by hand, and the same by ours."""
    laid, weights, x = placed("FSDP", *FEW_ROWS)

    def row(name: str, temp_bytes: int, text: str) -> Gathering:
        return Gathering(name, temp_bytes, *moves(text)["all-gather"])

    found, plain = [], laid(partial(fsdp, False))
    ways = {"kept": checkpoint_policies.everything_saveable}
    ways["gathered again"] = checkpoint_policies.save_anything_except_these_names(GATHERED)
    hands = {f"jax.checkpoint, {name}": laid(partial(by_hand, policy)) for name, policy in ways.items()}
    for name, function in {"plain JAX": plain, **hands}.items():
        step = jax.jit(jax.value_and_grad(function)).lower(weights, x).compile()
        found.append(row(name, memory_of(step).temp, step.as_text()))
    policies = {"kept": aot.MUST_SAVE, "gathered again": aot.MUST_RECOMPUTE}
    options = {"by default": {}, **{name: {"policy": {"all_gather": asked}} for name, asked in policies.items()}}
    for name, asked in options.items():
        run = aot.function(plain, **asked).trace(weights, x).partition().compile()
        text = run.cut.jits.compiled("step").as_text()
        found.append(row(f"ours, {name}", run.memory.step.temp_bytes, text))
    return found


def table_of(rows: list[Row]) -> Table:
    """A line for each program."""
    table = Table(
        title="A loss in one jax.shard_map, temporaries of a device", box=box.SIMPLE_HEAD, title_justify="left"
    )
    for head in ("", "plain", "ours", "cut inside", "error", "collectives: plain", "ours"):
        table.add_column(head, justify="left" if not head or "collect" in head else "right")
    for row in rows:
        shares = (f"{size / row.plain:.2f}" for size in (row.ours, row.inside))
        texts = map(in_words, (row.plain_moves, row.our_moves))
        table.add_row(row.name, f"{row.plain / 1e6:.1f} MB", *shares, f"{row.error:.0e}", *texts)
    return table


def table_of_gathers(rows: list[Gathering]) -> Table:
    """A line for each way."""
    table = Table(title="FSDP with few rows, temporaries of a device", box=box.SIMPLE_HEAD, title_justify="left")
    for head in ("", "temporaries", "weights gathered", "their bytes"):
        table.add_column(head, justify="right" if head else "left")
    for row in rows:
        sizes = (f"{size / 1e6:.2f} MB" for size in (row.temp_bytes, row.gathered_bytes))
        table.add_row(row.name, next(sizes), f"{row.gathers}", next(sizes))
    return table


def main() -> None:
    """Measure all ways, print the tables, and keep the figures."""
    rows, gathers = [measure(name, is_scan) for name in WAYS for is_scan in (True, False)], gathered()
    kept = {"rows": [asdict(row) for row in rows], "gathers": [asdict(row) for row in gathers]}
    RESULT.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    wide_console(180).print(table_of(rows), table_of_gathers(gathers))


if __name__ == "__main__":
    main()
