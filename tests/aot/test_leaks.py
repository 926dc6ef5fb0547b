"""What a function of ours captured goes when the function goes, however it was called."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from jointcut import aot

X, ONE = jnp.arange(4.0), jnp.float32(1)


def debugged(function):
    with aot.debug():
        function.vjp(X)[1](ONE)


WAYS = {
    "vjp": lambda f: f.vjp(X)[1](ONE),
    "vjp with an array twice": lambda f: aot.function(lambda x, y: f(x) * jnp.sum(y)).vjp(X, X)[1](ONE),
    "vjp in somebody's jit": lambda f: jax.jit(f.vjp)(X)[1](ONE),
    "value_and_grad": lambda f: f.value_and_grad(X),
    "call": lambda f: f(X),
    "in somebody's grad": lambda f: jax.grad(f)(X),
    "in somebody's jit of grad": lambda f: jax.jit(jax.grad(f))(X),
    "in somebody's vmap": lambda f: jax.vmap(f)(X[None]),
    "compiled": lambda f: f.trace(X).partition().compile().vjp(X)[1](ONE),
    "told of": lambda f: f.trace(X).partition().explain(measure=False),
    "debugged": debugged,
}


@jax.custom_jvp
def ruled(x):
    return jnp.sin(x)


ruled.defjvp(lambda primals, tangents: (ruled(*primals), tangents[0] * jnp.cos(primals[0])))


@pytest.mark.parametrize("way", WAYS)
def test_captured_arrays_go_with_the_function(way):
    def one():
        captured = 2 * X
        WAYS[way](aot.function(lambda x: jnp.sum(jnp.sin(x * captured) * ruled(x))))
        return weakref.ref(captured)

    references = [one() for _ in range(2)]
    gc.collect()
    assert [reference() for reference in references] == [None, None]
