"""Each op of a gradient remembers the expression of the user's that it belongs to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jointcut import aot

X = jnp.linspace(0.1, 1.0, 6)


def two_on_a_line(x):
    return jnp.sum(jnp.sin(x) * jnp.exp(x))


def in_a_jit(x):
    return jax.jit(lambda y: jnp.sum(jnp.tanh(y)))(x)


def with_words_of_many_bytes(x):
    return jnp.sum(x * len("größer") + jnp.cos(x))


def over_lines(x):
    return jnp.sum(
        jnp.logaddexp(
            x,
            2 * x,
        )
    )


MADE = {
    two_on_a_line: {"jnp.sin(x)", "jnp.exp(x)", "jnp.sin(x) * jnp.exp(x)", "jnp.sum(jnp.sin(x) * jnp.exp(x))"},
    in_a_jit: {"jnp.tanh(y)", "jnp.sum(jnp.tanh(y))"},
    with_words_of_many_bytes: {
        'x * len("größer")',
        "jnp.cos(x)",
        'x * len("größer") + jnp.cos(x)',
        'jnp.sum(x * len("größer") + jnp.cos(x))',
    },
    over_lines: {"jnp.logaddexp( x, 2 * x, )", "2 * x", "jnp.sum( jnp.logaddexp( x, 2 * x, ) )"},
}


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
@pytest.mark.parametrize("function", MADE, ids=lambda function: function.__name__)
def test_each_op_of_a_gradient_belongs_to_an_expression(function, strategy):
    gradient = aot.function(function, strategy=strategy).trace(X).partition().gradient
    eqns = gradient.df.jaxpr.eqns
    assert len(gradient.grad_of) == len(eqns)
    told = set(gradient.grad_of) - {""}
    assert told <= MADE[function]
    assert len(told) > 1


def test_the_product_of_a_sine_is_the_sines():
    gradient = aot.function(two_on_a_line, strategy="save_all").trace(X).partition().gradient
    eqns = gradient.df.jaxpr.eqns
    products = [text for text, e in zip(gradient.grad_of, eqns, strict=True) if e.primitive.name == "mul"]
    assert {"jnp.sin(x)", "jnp.exp(x)"} <= set(products)


def test_a_function_without_a_file_has_no_expressions():
    made: dict = {"jnp": jnp}
    exec("def loss(x):\n    return jnp.sum(jnp.sin(x))\n", made)
    assert set(aot.function(made["loss"]).trace(X).partition().gradient.grad_of) == {""}
