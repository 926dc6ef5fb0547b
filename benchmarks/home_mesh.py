"""Weigh a training step on a mesh: plain and cut, by `shard_map` and in jit, on axes of both kinds.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.home_mesh

Prints the rows of `benchmarks.home` as JSON: bytes for each device.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.measure import memory_of
from benchmarks.programs import gpt
from jointcut import aot

MB = 1e6


def main() -> None:
    """Weigh each kind of program in each way."""
    config = gpt.Config(layers=4)
    rows = []
    count = len(jax.devices())
    for build in ("scan", "unrolled"):
        program = gpt.of(build, config, 4 * count, unrolled=build == "unrolled")
        for way, compiled in WAYS.items():
            plain, ours = (
                memory_of(compiled(f, program.arguments)) for f in (program.loss, aot.function(program.loss))
            )
            figures = {"plain MB": plain.peak / MB, "cut MB": ours.peak / MB}
            rows.append({"program": f"gpt {build}", "way": way} | figures | {"peak ÷": ours.peak / plain.peak})
    print(json.dumps(rows))


def by_shard_map(loss: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """`jax.shard_map` as it comes, around the gradient of each device's part of the batch."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    params, batch, key = arguments

    def step(params: Any, batch: Any, key: Any) -> Any:
        return jax.value_and_grad(lambda p: jax.lax.pmean(loss(p, batch, key), "data"))(params)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    return jax.jit(mapped).lower(params, batch, key).compile()


def in_jit(kind: AxisType, loss: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The user's own jit, of arguments that lie on a mesh."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(kind,))
    params, batch, key = arguments
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P()))
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        return jax.jit(jax.value_and_grad(loss)).lower(params, batch, key).compile()


WAYS = {
    "shard_map": by_shard_map,
    "jit, automatic axes": partial(in_jit, AxisType.Auto),
    "jit, explicit axes": partial(in_jit, AxisType.Explicit),
}


if __name__ == "__main__":
    main()
