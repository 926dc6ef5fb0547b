"""Train a transformer: scanned blocks under `jax.checkpoint`, momentum, donation."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

LAYERS, WIDTH, HEADS, ROWS, LENGTH, WORDS = 3, 64, 4, 8, 64, 256
RATE = 0.9


def norm(x, scale):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return scale * centred * lax.rsqrt(variance + 1e-6)


def attention(x, p):
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
    q, k, v = (a.reshape(ROWS, LENGTH, HEADS, WIDTH // HEADS) for a in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return mixed.reshape(ROWS, LENGTH, WIDTH) @ p["out"]


def mlp(x, p):
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def dropped(x, key):
    keep = jax.random.bernoulli(key, RATE, x.shape)
    return jnp.where(keep, x / RATE, 0.0)


@jax.checkpoint
def block(x, p, key):
    x = x + attention(norm(x, p["first"]), p)
    x = x + dropped(mlp(norm(x, p["second"]), p), key)
    return x


def loss(params, batch, key):
    x = params["embed"][batch[:, :-1]]
    keys = jax.random.split(key, LAYERS)

    def body(x, layer):
        p, k = layer
        return block(x, p, k), None

    x, _ = lax.scan(body, x, (params["blocks"], keys))
    logits = x @ params["embed"].T
    labels = batch[:, 1:]
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


@partial(jax.jit, donate_argnums=(0, 1))
def step(params, momentum, batch, key):
    value, grads = jax.value_and_grad(loss)(params, batch, key)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
    return params, momentum, value


def arguments():
    shape = jax.ShapeDtypeStruct
    sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    sizes |= {"first": (WIDTH,), "second": (WIDTH,)}
    blocks = {name: shape((LAYERS, *size), jnp.float32) for name, size in sizes.items()}
    params = {"blocks": blocks, "embed": shape((WORDS, WIDTH), jnp.float32)}
    return params, params, shape((ROWS, LENGTH + 1), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
