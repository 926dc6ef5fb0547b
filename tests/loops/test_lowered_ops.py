"""Ops that JAX lowers before it compiles, such as `jnp.nonzero` in JAX 0.12, work in all bodies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot

X = jnp.array([1.0, 0.0, 2.0])


def picked(x):
    return x[jnp.nonzero(x > 0.5, size=2)[0]].sum()


def step(c):
    return c * picked(c)


BODIES = {
    "whole": step,
    "jit": lambda x: jax.jit(step)(x),
    "scan": lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=1)[0],
    "cond": lambda x: lax.cond(x[0] > 0, step, lambda x: x, x),
    "lax.while_loop": lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, step(c[1])), (0, x))[1],
    "aot.while_loop": lambda x: aot.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, step(c[1])), (0, x))[1],
    "aot.scan": lambda x: aot.scan(lambda c, _: (step(c), None), x, length=1)[0],
    "checkpoint": lambda x: jax.checkpoint(step)(x),
    "scan in scan": lambda x: lax.scan(lambda c, _: (BODIES["scan"](c), None), x, None, length=1)[0],
}
WAYS = {
    "function": lambda f: aot.function(f).grad(X),
    "budget": lambda f: aot.function(f, budget=0.0).grad(X),
    "inside": lambda f: jax.jit(jax.grad(aot.function(f)))(X),
    "tape": lambda f: aot.tape(f).grad(X),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_gradient_is_that_of_the_op_alone(body, way):
    got = way(lambda x: jnp.sum(body(x) ** 2))
    np.testing.assert_allclose(got, jax.grad(lambda x: jnp.sum(step(x) ** 2))(X), rtol=1e-6)


def test_our_loop_outside_of_a_function():
    got = jax.grad(lambda x: jnp.sum(BODIES["aot.while_loop"](x) ** 2))(X)
    np.testing.assert_allclose(got, jax.grad(lambda x: jnp.sum(step(x) ** 2))(X), rtol=1e-6)
