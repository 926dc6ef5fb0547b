"""An update inside the backward gives the parameters that an update after it gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jointcut import aot


def network(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x**2) + jnp.sum(params["scale"] ** 2)


def fresh():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [{"w": 0.5 * jax.random.normal(key, (4, 4)), "b": jnp.zeros(4)} for key in keys]
    return {"layers": layers, "scale": jnp.ones(()), "unused": jnp.ones(2)}


@pytest.fixture(autouse=True)
def promotion_as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("how", ["eager", "in jit"])
@pytest.mark.parametrize("optimiser", [optax.sgd(1e-2), optax.adamw(1e-3)], ids=["sgd", "adamw"])
def test_twenty_steps_end_in_equal_parameters(optimiser, how):
    taped, x = aot.tape(network), jnp.ones((2, 4))

    def step(params, state, x):
        return taped.value_and_update(params, state, x, update=optimiser)

    @jax.jit
    def plain(params, state, x):
        value, gradients = jax.value_and_grad(network)(params, x)
        changes, state = optimiser.update(gradients, state, params)
        return value, optax.apply_updates(params, changes), state

    run = step if how == "eager" else jax.jit(step, donate_argnums=(0, 1))
    got, want = (fresh(), optimiser.init(fresh())), (fresh(), optimiser.init(fresh()))
    for _ in range(20):
        value, *got = run(*got, x)
        expected, *want = plain(*want, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert taped.captures.made == 1


def test_parameters_and_state_are_given_up():
    taped, params = aot.tape(network), fresh()
    state = optax.adam(1e-2).init(params)
    taped.value_and_update(params, state, jnp.ones((2, 4)), update=optax.adam(1e-2))
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))


def test_a_capture_says_that_gradients_are_used_for_an_update():
    taped, x = aot.tape(network), jnp.ones((2, 4))
    taped.grad(fresh(), x)
    taped.value_and_update(fresh(), (), x, update=lambda g, s, p: (jax.tree.map(lambda a, b: a - b, p, g), s))
    assert taped.captures[1].why == "gradients are used for an update, not returned"
