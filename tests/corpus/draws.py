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
    lacks={"second grad": "Reverse-mode differentiation does not work"},
    tags="random",
)
def gamma_draw(shape, key):
    return jnp.sum(jnp.log1p(jax.random.gamma(key, shape)))


# ------------------------------------------------------------------ losses that return their masks, of (x, key)


def dropped(key: jax.Array, x: jax.Array, keep: float = 0.5) -> tuple[jax.Array, jax.Array]:
    """Dropout and its mask, around operations that a plan would rather recompute; their slope is zero nowhere."""
    mask = jax.random.bernoulli(key, keep, x.shape)
    return jnp.where(mask, jnp.exp(jnp.sin(x)) / keep, 0.0), mask


def masked(x, key):
    y, mask = dropped(key, x)
    return jnp.sum(y**2), mask


def masked_twice(x, key):
    """An element's slope is zero if it was dropped once."""
    masks = []
    for k in range(2):
        x, mask = dropped(jax.random.fold_in(key, k), x)
        masks.append(mask)
        x = jnp.tanh(x) + jnp.where(mask, 0.5, 0.0)
    return jnp.sum(x**2), jnp.stack(masks)


def masked_in_scan(x, key):
    """Each row is dropped in a step of its own, the key split in the carry."""

    def step(carry, row):
        key, total = carry
        key, now = jax.random.split(key)
        y, mask = dropped(now, row)
        return (key, total + jnp.sum(y**2)), mask

    (_, total), masks = lax.scan(step, (key, jnp.float32(0)), x)
    return total, masks


def masked_in_nested_scans(x, key):
    """The key is carried through both loops, and what is dropped is read again by the next step."""

    def inner(carry, row):
        key, mean = carry
        key, now = jax.random.split(key)
        y, mask = dropped(now, row + lax.stop_gradient(mean))
        return (key, jnp.mean(jnp.tanh(y))), (mask, jnp.sum(y**2))

    def outer(carry, rows):
        return lax.scan(inner, carry, rows)

    _, (masks, sums) = lax.scan(outer, (key, jnp.float32(0)), x.reshape(-1, 2, x.shape[-1]))
    return jnp.sum(sums), masks.reshape(x.shape)
