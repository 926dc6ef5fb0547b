"""Calls: functions inside functions, with rules, compilation, batching, meshes and kernels of their own."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from corpus.program import normal, program

NO_FORWARD_RULE = "forward-mode autodiff"


@jax.custom_vjp
def clipped(x: jax.Array, bound: float) -> jax.Array:
    return jnp.sin(x) * bound


clipped.defvjp(
    lambda x, bound: (clipped(x, bound), (jnp.cos(x), bound)),
    lambda kept, g: (jnp.clip(g, -kept[1], kept[1]) * kept[0], None),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def powered(x: jax.Array, power: int) -> tuple[jax.Array, jax.Array]:
    return x**power, jnp.exp(x)


powered.defvjp(
    lambda x, power: (powered(x, power), {"x": x, "exp": jnp.exp(x)}),
    lambda power, kept, g: (g[0] * power * kept["x"] ** (power - 1) + g[1] * kept["exp"],),
)


@jax.custom_jvp
def steep(x: jax.Array) -> jax.Array:
    return jnp.log1p(jnp.exp(x))


@steep.defjvp
def _steep_slope(primals, tangents):
    (x,), (dx,) = primals, tangents
    return steep(x), dx * jax.nn.sigmoid(x) * 1.5


def _scaled_sine_kernel(x_ref, y_ref, out_ref):
    out_ref[...] = jnp.sin(x_ref[...]) * y_ref[...]


def _scaled_sine_call(x: jax.Array, y: jax.Array) -> jax.Array:
    return pl.pallas_call(_scaled_sine_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, y)


scaled_sine = jax.custom_vjp(_scaled_sine_call)
scaled_sine.defvjp(
    lambda x, y: (_scaled_sine_call(x, y), (x, y)),
    lambda kept, g: (g * jnp.cos(kept[0]) * kept[1], g * jnp.sin(kept[0])),
)


@program(
    "A custom_vjp that clips its cotangent.",
    lambda: (normal(500, 4), normal(501, 4)),
    lacks={"jvp": NO_FORWARD_RULE},
    argnums=(0, 1),
)
def custom_vjp_clip(x, weight):
    return jnp.sum(jnp.exp(clipped(jnp.tanh(x), 0.2)) * weight)


@program(
    "A custom_vjp with a static argument, a tree of residuals and two results.",
    lambda: (normal(502, 4),),
    lacks={"jvp": NO_FORWARD_RULE},
)
def custom_vjp_static(x):
    cube, growth = powered(jnp.sin(x), 3)
    return jnp.sum(cube * jnp.cos(growth))


@program(
    "A custom_vjp in the body of a scan.",
    lambda: (normal(503, 4), normal(504, 3, 4)),
    lacks={"jvp": NO_FORWARD_RULE},
    argnums=(0, 1),
    tags="scan",
)
def custom_vjp_in_scan(x, rows):
    last, _ = jax.lax.scan(lambda h, row: (clipped(h * row, 0.3) + h, None), x, rows)
    return jnp.sum(last**2)


@program("A custom_jvp whose slope is not that of its value.", lambda: (normal(505, 4),))
def custom_jvp_steep(x):
    return jnp.sum(steep(steep(x)) * jnp.sin(x))


@program(
    "A Pallas kernel, interpreted, inside a custom_vjp.",
    lambda: (normal(506, 4), normal(507, 4)),
    lacks={"jvp": NO_FORWARD_RULE, "second grad": "Linearization failed"},
    argnums=(0, 1),
)
def pallas_kernel(x, y):
    return jnp.sum(jnp.exp(scaled_sine(jnp.cos(x), y)) ** 2)


@program(
    "A shard_map over a mesh of one device, with a sum over it.",
    lambda: (normal(508, 2, 3), normal(509, 3)),
    argnums=(0, 1),
)
def sharded_map(x, weight):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
    rows, whole = PartitionSpec("batch"), PartitionSpec()

    def local(x, weight):
        return jax.lax.psum(jnp.sum(jnp.exp(jnp.sin(x * weight)), axis=0), "batch")

    return jnp.sum(jax.shard_map(local, mesh=mesh, in_specs=(rows, whole), out_specs=whole)(x, weight) ** 2)


@program("Named scopes around parts of the function.", lambda: (normal(510, 3, 3), normal(511, 3)))
def named_scopes(weight, x):
    with jax.named_scope("encoder"):
        h = jnp.tanh(weight @ x)
        with jax.named_scope("inner"):
            h = jnp.exp(h) * h
    with jax.named_scope("decoder"):
        return jnp.sum(jnp.sin(weight.T @ h))


@program("A jit inside the function.", lambda: (normal(512, 3, 3), normal(513, 3)), argnums=(0, 1))
def jit_inside(weight, x):
    return jnp.sum(jax.jit(lambda w, h: jnp.tanh(w @ h) * jnp.sin(h))(weight, x) ** 2)


@jax.jit
def twice_jitted(x: jax.Array) -> jax.Array:
    return jax.jit(lambda h: jnp.sin(h) * jnp.exp(h))(x) + jax.jit(jnp.cos, inline=True)(x)


@program("A jit inside a jit, called at two places and in a scan.", lambda: (normal(514, 3),), tags="scan")
def nested_jits(x):
    h = twice_jitted(twice_jitted(x))
    h, _ = jax.lax.scan(lambda g, _: (0.3 * twice_jitted(g), None), h, None, length=2)
    return jnp.sum(h)


@program(
    "A vmap inside the function, over rows and then over columns.",
    lambda: (normal(515, 3, 3), normal(516, 4, 3)),
)
def vmap_inside(weight, rows):
    def one(row):
        return jax.vmap(lambda column: jnp.tanh(column @ row), in_axes=1)(weight)

    return jnp.sum(jax.vmap(one)(rows) ** 2)


@program("A directional derivative inside the loss, by jvp.", lambda: (normal(517, 3, 3), normal(518, 3)))
def jvp_inside(weight, x):
    _, slope = jax.jvp(lambda y: jnp.tanh(weight @ y), (x,), (jnp.ones(3),))
    return jnp.sum(slope**2)


@program("A stop_gradient on one of two paths.", lambda: (normal(519, 3), normal(520, 3)), argnums=(0, 1))
def stop_gradient_on_one_path(x, y):
    h = jnp.sin(x) * y
    return jnp.sum(jnp.exp(h) * jax.lax.stop_gradient(jnp.cos(h))) + jnp.sum(h - jax.lax.stop_gradient(y) ** 2)


@program("A rounding passed straight through by stop_gradient.", lambda: (normal(521, 4, scale=2.0),))
def straight_through(x):
    h = jnp.sin(x)
    return jnp.sum((h + jax.lax.stop_gradient(jnp.round(h) - h)) ** 2)


@program(
    "A value built up in an internal reference.",
    lambda: (normal(522, 3),),
    lacks={"second grad": "no attribute"} if jax.__version_info__ < (0, 12) else {},
)
def internal_reference(x):
    total = jax.new_ref(jnp.zeros(3))
    total[...] = jnp.sin(x)
    total[...] += total[...] * jnp.exp(x)
    return jnp.sum(total[...] ** 2)


@program(
    "An optimisation barrier and a reduced precision on the way.",
    lambda: (normal(523, 3),),
    rtol=2e-2,
    atol=1e-2,
    tags="half",
)
def barrier_and_precision(x):
    h, g = jax.lax.optimization_barrier((jnp.sin(x), jnp.exp(x)))
    return jnp.sum(jax.lax.reduce_precision(h, 8, 7) * g)


@program("A root found by iteration with an implicit derivative.", lambda: (jnp.float32(2.0),))
def implicit_root(x):
    def newton(f, guess):
        return jax.lax.fori_loop(0, 20, lambda _, y: 0.5 * (y + jax.lax.stop_gradient(x) / y), guess)

    root = jax.lax.custom_root(lambda y: y**2 - x, jnp.float32(1.0), newton, lambda g, b: b / g(jnp.float32(1.0)))
    return jnp.sin(root)
