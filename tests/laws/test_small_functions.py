"""A function with one or two layers has next to nothing to recompute: its step takes no more memory than plain JAX's.

Small arrays apart, as biases and single numbers: one part in a hundred.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot

ROWS, WIDTH = 2048, 256
X = jnp.ones((ROWS, WIDTH))
WEIGHTS = [0.05 * jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) for i in range(3)]
BIAS = jnp.zeros(WIDTH)


def layers(activation, depth):
    def loss(weights, bias, x):
        for weight in weights[:depth]:
            x = activation(x @ weight + bias)
        return jnp.mean(x**2)

    return loss


def classifier(weights, bias, x):
    logits = jax.nn.gelu(x @ weights[0] + bias) @ weights[1]
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 3])


def gated(weights, bias, x):
    return jnp.mean((jax.nn.silu(x @ weights[0]) * (x @ weights[1])) @ weights[2] + bias)


def residual_block(weights, bias, x):
    centred = x - x.mean(-1, keepdims=True)
    h = centred / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) + bias
    return jnp.mean((x + jax.nn.gelu(h @ weights[0]) @ weights[1]) ** 2)


FUNCTIONS = {
    # The numbers in a gelu: if the forward and the backward both read them, XLA writes four arrays of the layer's size.
    "the mean of a gelu": lambda weights, bias, x: jnp.mean(jax.nn.gelu(x @ weights[0])),
    "gelu": layers(jax.nn.gelu, 2),
    "relu": layers(jax.nn.relu, 2),
    "tanh": layers(jnp.tanh, 1),
    "exact gelu": layers(lambda x: jax.nn.gelu(x, approximate=False), 1),
    "classifier": classifier,
    "gated": gated,
    "residual block": residual_block,
}


def temporaries(function):
    """The bytes of temporaries of one step, as XLA tells them."""
    step = jax.jit(jax.value_and_grad(function)).lower(WEIGHTS, BIAS, X).compile()
    return step.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_default_takes_no_more_memory_than_plain_jax(name):
    assert temporaries(aot.function(FUNCTIONS[name])) <= 1.01 * temporaries(FUNCTIONS[name])


def test_a_budget_holds_inside_jax_s_own_gradient_where_it_holds_by_itself():
    function = FUNCTIONS["the mean of a gelu"]
    own = aot.function(function).trace(WEIGHTS, BIAS, X).partition().compile().memory
    cut = aot.function(function, budget=own.peak_bytes)
    np.testing.assert_array_equal(jax.value_and_grad(cut)(WEIGHTS, BIAS, X)[0], cut.value_and_grad(WEIGHTS, BIAS, X)[0])
