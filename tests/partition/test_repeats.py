"""What is repeated for a loop is repeated inside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.partition.program.jax import jaxprs

ROWS, WIDTH = 6, 8


def masked(weights, x):
    """Attention without softmax, its mask repeated over the rows of the batch."""
    mask = jnp.tril(jnp.ones((WIDTH, WIDTH), bool))

    def layer(x, w):
        scores = jnp.where(mask, jnp.einsum("bi,bj->bij", x @ w, x), -1.0)
        return x + jnp.tanh(jnp.sum(jnp.exp(scores), -1)), None

    return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)


def gathered(weights, x):
    """A row that is repeated, and read by a product in each step."""
    rows = jnp.broadcast_to(jnp.sin(x[0]), (ROWS, WIDTH))
    return jnp.sum(jax.lax.scan(lambda x, w: (x + jnp.tanh(rows @ w), None), x, weights)[0] ** 2)


def within(weights, x):
    """The same loop in a loop: the mask goes to the innermost."""
    return jnp.sum(jax.lax.scan(lambda x, w: (x + masked(w, x), None), x, weights[None])[0] ** 2)


def arguments():
    """Weights of five layers, and a batch."""
    key = jax.random.key(0)
    return jax.random.normal(key, (5, WIDTH, WIDTH)) / WIDTH, jax.random.normal(key, (ROWS, WIDTH)) / 2


def before_loops(function, *args):
    """The shapes of what the joint program repeats at its top, largest first."""
    jaxpr, _ = jaxprs.opened(aot.function(function).trace(*args).joint)
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "broadcast_in_dim"]
    return sorted((eqn.outvars[0].aval.shape for eqn in eqns), key=np.prod, reverse=True)


@pytest.mark.parametrize("function", [masked, within])
def test_a_mask_is_repeated_inside_the_loop_that_reads_it(function):
    shapes = before_loops(function, *arguments())
    assert (ROWS, WIDTH, WIDTH) not in shapes


def test_a_row_that_a_product_reads_is_repeated_once_before_the_loop():
    assert (ROWS, WIDTH) in before_loops(gathered, *arguments())


@pytest.mark.parametrize("function", [masked, within, gathered])
@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
def test_the_gradient_is_that_of_jax(function, strategy):
    args = arguments()
    value, gradient = aot.function(function, strategy=strategy).value_and_grad(*args)
    expected, theirs = jax.jit(jax.value_and_grad(function))(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, theirs, rtol=1e-5, atol=1e-6)
