"""Weigh a training step on a mesh: plain and cut, by `shard_map` and in jit, on axes of both kinds.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.home_mesh

Prints the rows of `benchmarks.home` as JSON. Bytes are those of one device, by XLA's account.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.measure import memory_of
from jointcut import aot

LAYERS, ROWS, TIME, WIDTH, HEADS = 4, 32, 64, 64, 4  # rows for each device
MB = 1e6
Weights = dict[str, Array]


def norm(x: Array) -> Array:
    """Layer norm without weights."""
    return (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


def block(x: Array, w: Weights) -> Array:
    """Self-attention and an MLP, each added to the stream `(rows, time, width)`."""
    q, k, v = ((norm(x) @ w["qkv"][i]).reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for i in range(3))
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / (WIDTH // HEADS) ** 0.5)
    x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def scanned(weights: Weights, x: Array) -> Array:
    """The loss, its layers in a scan."""
    x, _ = lax.scan(lambda x, w: (block(x, w), None), x, weights)
    return jnp.mean(jnp.square(x))


def unrolled(weights: Weights, x: Array) -> Array:
    """The same, its layers written one after the other."""
    for i in range(LAYERS):
        x = block(x, jax.tree.map(lambda w, i=i: w[i], weights))
    return jnp.mean(jnp.square(x))


def arguments() -> tuple[Weights, Array]:
    """Weights and a batch for all devices."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"qkv": (3, WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    pairs = zip(shapes.items(), keys, strict=False)
    weights = {name: 0.1 * jax.random.normal(key, (LAYERS, *shape)) for (name, shape), key in pairs}
    return weights, jax.random.normal(keys[-1], (ROWS * len(jax.devices()), TIME, WIDTH))


def by_shard_map(loss: Callable[..., Any]) -> Any:
    """`jax.shard_map` as it comes, around the gradient of each device's part of the batch."""

    def step(weights: Weights, x: Array) -> Any:
        return jax.value_and_grad(lambda w: lax.pmean(loss(w, x), "data"))(weights)

    mesh, given = placed(AxisType.Auto)
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())).lower(*given).compile()


def in_jit(kind: AxisType, loss: Callable[..., Any]) -> Any:
    """The user's own jit, of arguments that lie on a mesh."""
    mesh, given = placed(kind)
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss)).lower(*given).compile()


def placed(kind: AxisType) -> tuple[jax.sharding.Mesh, tuple[Any, Any]]:
    """A mesh of all devices, weights on each of them, and the batch divided among them."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(kind,))
    weights, x = arguments()
    return mesh, (jax.device_put(weights, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data"))))


WAYS = {
    "shard_map": by_shard_map,
    "jit, automatic axes": partial(in_jit, AxisType.Auto),
    "jit, explicit axes": partial(in_jit, AxisType.Explicit),
}


def main() -> None:
    """Weigh each program in each way."""
    rows = []
    for name, loss in (("blocks in a scan", scanned), ("blocks unrolled", unrolled)):
        for way, compiled in WAYS.items():
            plain, ours = (memory_of(compiled(f)) for f in (loss, aot.function(loss)))
            rows.append(
                {
                    "program": name,
                    "way": way,
                    "plain peak MB": plain.peak / MB,
                    "activations ÷": ours.temp / plain.temp,
                    "peak ÷": ours.peak / plain.peak,
                }
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
