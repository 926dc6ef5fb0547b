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


def fresh(width=4):
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [{"w": 0.5 * jax.random.normal(key, (width, width)), "b": jnp.zeros(width)} for key in keys]
    return {"layers": layers, "scale": jnp.ones(()), "unused": jnp.ones(2)}


@pytest.fixture(autouse=True)
def promotion_as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


CLIPPED = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-3))
OPTIMISERS = {"sgd": (optax.sgd(1e-2), 1), "adamw": (optax.adamw(1e-3), 1), "clipped": (CLIPPED, 2)}
IN_JIT = (("clipped", "in jit"), ("adamw", "cut in jit"))


@pytest.mark.parametrize("name, how", [*((name, way) for name in OPTIMISERS for way in ("eager", "cut")), *IN_JIT])
def test_twenty_steps_end_in_equal_parameters(name, how):
    (optimiser, sweeps), x = OPTIMISERS[name], jnp.ones((2, 4))
    made = aot.function(network) if "cut" in how else aot.tape(network)

    def step(params, state, x):
        return made.value_and_update(params, state, x, update=optimiser, sweeps=sweeps)

    @jax.jit
    def plain(params, state, x):
        value, gradients = jax.value_and_grad(network)(params, x)
        changes, state = optimiser.update(gradients, state, params)
        return value, optax.apply_updates(params, changes), state

    run = jax.jit(step, donate_argnums=(0, 1)) if "in jit" in how else step
    got, want = (fresh(), optimiser.init(fresh())), (fresh(), optimiser.init(fresh()))
    for _ in range(20):
        value, *got = run(*got, x)
        expected, *want = plain(*want, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert how.startswith("cut") or made.captures.made == 1


@pytest.mark.parametrize("decorator", [aot.function, aot.tape])
def test_parameters_and_state_are_given_up(decorator):
    made, params = decorator(network), fresh()
    state = optax.adam(1e-2).init(params)
    made.value_and_update(params, state, jnp.ones((2, 4)), update=optax.adam(1e-2))
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))


def test_the_program_of_an_update_goes_back_as_often_as_there_are_sweeps():
    x, params = jnp.ones((2, 8)), fresh(8)
    for name in ("sgd", "clipped"):
        optimiser, sweeps = OPTIMISERS[name]
        state = optimiser.init(params)
        for made in (aot.tape(network), aot.function(network)):

            def step(params, state, made=made, optimiser=optimiser, sweeps=sweeps):
                return made.value_and_update(params, state, x, update=optimiser, sweeps=sweeps)

            products = jax.jit(step).lower(params, state).compile().as_text().count(" dot(")
            assert products == 3 + 5 * sweeps, name


def test_an_update_of_a_cut_function_has_its_options():
    @aot.function(has_aux=True, static_argnums=2, budget=0.0)
    def loss(params, x, times):
        return times * network(params, x), x

    def descent(gradients, state, params):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), state

    x = jnp.ones((2, 4))
    (value, aux), params, state = loss.value_and_update(fresh(), (), x, 3, update=descent)
    want, gradients = jax.value_and_grad(lambda p: 3 * network(p, x))(fresh())
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert (aux.shape, state) == ((2, 4), ())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, descent(gradients, (), fresh())[0])


def test_a_capture_says_that_gradients_are_used_for_an_update():
    taped, x = aot.tape(network), jnp.ones((2, 4))
    taped.grad(fresh(), x)
    taped.value_and_update(fresh(), (), x, update=lambda g, s, p: (jax.tree.map(lambda a, b: a - b, p, g), s))
    assert taped.captures[1].why == "gradients are used for an update, not returned"
