"""Cut a perceptron with jointcut, with dropout."""

import jax
import jax.numpy as jnp

from jointcut import aot

LAYERS, WIDTH, ROWS, RATE = 4, 64, 512, 0.9


def activation(x):
    return jnp.tanh(x)


def layer(x, w, key):
    y = activation(x @ w)
    keep = jax.random.bernoulli(key, RATE, y.shape)
    return jnp.where(keep, y / RATE, 0.0)


def value(weights, x, key):
    for i, w in enumerate(weights):
        x = layer(x, w, jax.random.fold_in(key, i))
    return jnp.mean(x**2)


step = aot.function(value)


def arguments():
    shape = jax.ShapeDtypeStruct
    weights = [shape((WIDTH, WIDTH), jnp.float32)] * LAYERS
    return weights, shape((ROWS, WIDTH), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))
