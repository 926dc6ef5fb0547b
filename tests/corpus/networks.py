"""Networks: the models people train, in a few dozen numbers each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from corpus.program import integers, normal, program


def perceptron_weights(seed: int = 0, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return {
        "in": normal(seed, 3, 5, dtype=dtype),
        "bias": normal(seed + 1, 5, dtype=dtype),
        "out": normal(seed + 2, 5, 2, dtype=dtype),
    }


def perceptron(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights["in"] + weights["bias"]) @ weights["out"]


def normalised(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)


def block_weights(seed: int, *lead: int, width: int = 8) -> dict[str, jax.Array]:
    return {
        "qkv": normal(seed, *lead, width, 3 * width, scale=0.3),
        "out": normal(seed + 1, *lead, width, width, scale=0.3),
        "up": normal(seed + 2, *lead, width, 2 * width, scale=0.3),
        "down": normal(seed + 3, *lead, 2 * width, width, scale=0.3),
    }


def attention(weights: dict[str, jax.Array], x: jax.Array, heads: int = 2) -> jax.Array:
    time, width = x.shape
    q, k, v = jnp.split((x @ weights["qkv"]).reshape(time, heads, -1), 3, axis=-1)
    scores = jnp.einsum("qhd,khd->hqk", q, k) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((time, time), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("hqk,khd->qhd", shares, v).reshape(time, width) @ weights["out"]


def block(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x = x + attention(weights, normalised(x))
    return x + jax.nn.gelu(normalised(x) @ weights["up"]) @ weights["down"]


@program(
    "A perceptron of two layers with a squared loss.",
    lambda: (perceptron_weights(), normal(3, 4, 3), normal(4, 4, 2)),
)
def two_layers(weights, x, y):
    return jnp.mean((perceptron(weights, x) - y) ** 2)


@program(
    "One transformer block: causal attention, two norms, a gelu network.",
    lambda: (block_weights(5), normal(6, 4, 8)),
)
def transformer_block(weights, x):
    return jnp.sum(block(weights, x) ** 2)


@program(
    "Two convolutions, a pooling, a dense layer.",
    lambda: (
        {"first": normal(7, 3, 3, 1, 2), "second": normal(8, 3, 3, 2, 2), "dense": normal(9, 8, 2)},
        normal(10, 2, 4, 4, 1),
    ),
)
def convolutions(weights, images):
    layout = ("NHWC", "HWIO", "NHWC")
    h = jax.nn.relu(lax.conv_general_dilated(images, weights["first"], (1, 1), "SAME", dimension_numbers=layout))
    h = jax.nn.silu(lax.conv_general_dilated(h, weights["second"], (1, 1), "SAME", dimension_numbers=layout))
    pooled = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.sum(jnp.tanh(pooled.reshape(2, -1) @ weights["dense"]))


@program(
    "A layer norm with scale and shift.",
    lambda: ((normal(11, 6), normal(12, 6)), normal(13, 3, 6), normal(14, 3, 6)),
    argnums=(0, 1),
)
def layer_norm(scale_and_shift, x, weight):
    scale, shift = scale_and_shift
    return jnp.sum((normalised(x) * scale + shift) * weight)


@program(
    "Cross entropy by log_softmax with integer labels.",
    lambda: (normal(15, 3, 4), normal(16, 5, 3), integers(17, 5, below=4)),
)
def cross_entropy(weights, x, labels):
    logs = jax.nn.log_softmax(x @ weights)
    return -jnp.mean(jnp.take_along_axis(logs, labels[:, None], axis=1))


@program("Every activation that carries a derivative rule of its own.", lambda: (normal(18, 7, scale=2.0),))
def activations(x):
    rules = (
        jax.nn.relu,
        jax.nn.relu6,
        jax.nn.silu,
        jax.nn.softplus,
        jax.nn.elu,
        jax.nn.celu,
        jax.nn.logsumexp,
    )
    return sum(jnp.sum(rule(x)) for rule in rules) + jnp.sum(jax.nn.softmax(x)[:3]) + jnp.sum(jax.nn.gelu(x) ** 2)


@program(
    "An embedding table read at tokens, some of them twice, and tied to the output.",
    lambda: (normal(19, 6, 3), integers(20, 8, below=6)),
)
def tied_embedding(table, tokens):
    logits = jnp.tanh(table[tokens]) @ table.T
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(8), tokens])


@program(
    "An Elman network over a sequence, read at its last step.",
    lambda: ((normal(21, 2, 4), normal(22, 4, 4)), normal(23, 5, 2)),
    tags="scan",
)
def elman(weights, sequence):
    into, again = weights

    def step(h, x):
        return jnp.tanh(x @ into + h @ again), None

    last, _ = lax.scan(step, jnp.zeros(4), sequence)
    return jnp.sum(last**2)


@program(
    "A gated recurrent unit that emits at every step.",
    lambda: (
        {"gates": normal(24, 6, 8), "candidate": normal(25, 6, 4), "read": normal(26, 4)},
        normal(27, 5, 2),
        normal(28, 4),
    ),
    argnums=(0, 2),
    tags="scan",
)
def gated_recurrent_unit(weights, sequence, start):
    def step(h, x):
        update, reset = jnp.split(jax.nn.sigmoid(jnp.concatenate([x, h]) @ weights["gates"]), 2)
        candidate = jnp.tanh(jnp.concatenate([x, reset * h]) @ weights["candidate"])
        h = update * h + (1 - update) * candidate
        return h, h @ weights["read"]

    _, emitted = lax.scan(step, start, sequence)
    return jnp.sum(emitted**2)


@program(
    "Forces as the gradient of an energy, fitted by a loss: a derivative inside the function.",
    lambda: (perceptron_weights(29), normal(30, 4, 3), normal(31, 4, 3)),
)
def energy_and_forces(weights, places, forces):
    def energy(x):
        return jnp.sum(jnp.tanh(perceptron(weights, x)) ** 2)

    value, slope = jax.value_and_grad(energy)(places)
    return 0.1 * value + jnp.mean((slope + forces) ** 2)


@program(
    "Two steps of inner training by scan, then a loss on other data.",
    lambda: (
        perceptron_weights(32),
        (normal(33, 2, 4, 3), normal(34, 2, 4, 2)),
        (normal(35, 4, 3), normal(36, 4, 2)),
    ),
    rtol=5e-4,
    tags="scan",
)
def inner_training(weights, inner, outer):
    def loss(w, x, y):
        return jnp.mean((perceptron(w, x) - y) ** 2)

    def step(w, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, *batch)), None

    trained, _ = lax.scan(step, weights, inner)
    return loss(trained, *outer)


@program(
    "The perceptron in bfloat16, its loss in float32.",
    lambda: (perceptron_weights(37, jnp.bfloat16), normal(38, 4, 3, dtype=jnp.bfloat16)),
    rtol=5e-2,
    atol=3e-2,
    tags="half",
)
def bfloat16_weights(weights, x):
    return jnp.mean(perceptron(weights, x).astype(jnp.float32) ** 2)


@program(
    "Float32 weights cast to float16 to compute, the loss scaled.",
    lambda: (perceptron_weights(39), normal(40, 4, 3)),
    rtol=2e-2,
    atol=2e-2,
    tags="half",
)
def mixed_float16(weights, x):
    low = jax.tree.map(lambda w: w.astype(jnp.float16), weights)
    return jnp.mean(jnp.square(4 * perceptron(low, x.astype(jnp.float16)))).astype(jnp.float32) / 16
