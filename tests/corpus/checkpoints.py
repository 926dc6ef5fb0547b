"""Checkpoints: regions of which the user says what may be saved."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from corpus.networks import block, block_weights
from corpus.program import normal, program

POLICIES = jax.checkpoint_policies


@program(
    "A block under checkpoint, as it comes.",
    lambda: (block_weights(600), normal(604, 4, 8)),
    tags="checkpoint",
)
def checkpointed_block(weights, x):
    return jnp.sum(jax.checkpoint(block)(weights, x) ** 2)


@program(
    "A block under checkpoint that may save products.",
    lambda: (block_weights(605), normal(609, 4, 8)),
    tags="checkpoint",
)
def checkpointed_block_saving_dots(weights, x):
    return jnp.sum(jax.checkpoint(block, policy=POLICIES.dots_saveable)(weights, x) ** 2)


@program(
    "The body of a scan under checkpoint.",
    lambda: (normal(610, 3, 4, 4), normal(611, 2, 4)),
    argnums=(0, 1),
    tags="checkpoint scan",
)
def checkpointed_scan_body(layers, x):
    @jax.checkpoint
    def step(h, layer):
        return h + jnp.tanh(jnp.sin(h) @ layer), None

    return jnp.sum(lax.scan(step, x, layers)[0] ** 2)


@program(
    "The body of a scan under checkpoint that may save products.",
    lambda: (normal(612, 3, 4, 4), normal(613, 2, 4)),
    argnums=(0, 1),
    tags="checkpoint scan",
)
def checkpointed_scan_body_saving_dots(layers, x):
    def step(h, layer):
        return h + jnp.tanh(jnp.sin(h) @ layer), None

    step = jax.checkpoint(step, policy=POLICIES.dots_with_no_batch_dims_saveable, prevent_cse=False)
    return jnp.sum(lax.scan(step, x, layers)[0] ** 2)


@program(
    "A checkpoint around a whole scan.",
    lambda: (normal(614, 3, 4, 4), normal(615, 2, 4)),
    argnums=(0, 1),
    tags="checkpoint scan",
)
def checkpoint_around_scan(layers, x):
    @jax.checkpoint
    def run(layers, x):
        return lax.scan(lambda h, layer: (jnp.tanh(h @ layer) + h, jnp.sin(h)), x, layers)

    last, seen = run(layers, x)
    return jnp.sum(last**2) + jnp.sum(seen)


@program(
    "A checkpoint within a checkpoint.",
    lambda: (normal(616, 4), normal(617, 4)),
    argnums=(0, 1),
    tags="checkpoint",
)
def checkpoint_in_checkpoint(x, y):
    @jax.checkpoint
    def inner(h):
        return jnp.sin(h) * jnp.exp(h)

    return jnp.sum(jax.checkpoint(lambda a, b: inner(inner(a) * b) + jnp.cos(a))(x, y))


@program(
    "A checkpoint that saves one value by its name.",
    lambda: (normal(618, 4, 4), normal(619, 2, 4)),
    tags="checkpoint",
)
def checkpoint_by_name(weight, x):
    def layer(w, h):
        h = checkpoint_name(jnp.sin(h) @ w, "kept")
        return jnp.exp(jnp.tanh(h)) * h

    return jnp.sum(jax.checkpoint(layer, policy=POLICIES.save_only_these_names("kept"))(weight, x))


@program(
    "Two checkpoints of one function, one fed by the other.",
    lambda: (normal(620, 2, 4, 4), normal(621, 2, 4)),
    tags="checkpoint",
)
def checkpoints_in_a_row(layers, x):
    layer = jax.checkpoint(lambda w, h: h + jnp.tanh(jnp.sin(h) @ w))
    return jnp.sum(layer(layers[1], layer(layers[0], x)) ** 2)
