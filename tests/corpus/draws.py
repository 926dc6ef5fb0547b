"""Draws: random numbers, which must come out the same in the forward and in the backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from corpus.program import normal, program


def dropout(key: jax.Array, x: jax.Array, keep: float = 0.6) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0.0)


@program(
    "A network with dropout on its hidden layer.",
    lambda: (normal(700, 3, 8), normal(701, 4, 3), jax.random.key(1)),
    tags="random",
)
def dropout_network(weight, x, key):
    return jnp.sum(dropout(key, jnp.tanh(x @ weight)) ** 2)


@program(
    "Dropout in a scan, its keys as xs.",
    lambda: (normal(702, 3, 4, 4), normal(703, 2, 4), jax.random.key(2)),
    tags="random scan",
)
def dropout_in_scan(layers, x, key):
    def step(h, xs):
        layer, key = xs
        return h + dropout(key, jnp.tanh(h @ layer)), None

    return jnp.sum(lax.scan(step, x, (layers, jax.random.split(key, 3)))[0] ** 2)


@program(
    "Dropout in a scan in a scan, its key split in the carry.",
    lambda: (normal(704, 4, 4), normal(705, 2, 4), jax.random.key(3)),
    tags="random scan",
)
def dropout_in_nested_scans(weight, x, key):
    def inner(carry, _):
        key, h = carry
        key, now = jax.random.split(key)
        return (key, h + dropout(now, jnp.sin(h @ weight))), None

    def outer(carry, _):
        return lax.scan(inner, carry, None, length=2)[0], None

    (_, last), _ = lax.scan(outer, (key, x), None, length=2)
    return jnp.sum(last**2)


@program(
    "A sample by reparametrisation, from a key of the old kind.",
    lambda: ((normal(706, 4), normal(707, 4)), jax.random.PRNGKey(4)),
    tags="random",
)
def reparametrised_sample(mean_and_log_scale, key):
    mean, log_scale = mean_and_log_scale
    sample = mean + jnp.exp(log_scale) * jax.random.normal(key, mean.shape)
    return jnp.sum(jnp.sin(sample) ** 2) - jnp.sum(log_scale)


@program(
    "A key made inside the function from an integer, folded with another.",
    lambda: (normal(708, 4), 7),
    tags="random",
)
def key_made_inside(x, seed):
    key = jax.random.fold_in(jax.random.key(5), seed)
    return jnp.sum(dropout(key, jnp.exp(jnp.sin(x)))) + jnp.sum(jax.random.uniform(key, (4,)) * x**2)


@program(
    "A gamma draw, whose derivative is a rule of JAX's own.",
    lambda: (jnp.float32([1.5, 2.5, 0.7]), jax.random.key(6)),
    rtol=1e-3,
    atol=1e-4,
    tags="random",
)
def gamma_draw(shape, key):
    return jnp.sum(jnp.log1p(jax.random.gamma(key, shape)))
