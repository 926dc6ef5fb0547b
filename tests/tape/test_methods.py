"""Methods of classes, Equinox modules and Flax objects have all that functions have."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jointcut import aot
from jointcut.partition.errors import TraceError

X = jnp.ones((2, 3))
ADAM = optax.adam(0.1)
NUMBERS = itertools.count()
DECORATORS = pytest.mark.parametrize("decorator", [aot.function, aot.tape])


@pytest.fixture(autouse=True)
def promotion_as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def plain(decorator):
    """Return an instance of a new dataclass; its static number is its own.

    JAX 0.10 compares the structures of two dataclasses without their classes. So `jax.jit` in Optax can
    return an instance of the other class.
    """

    @jax.tree_util.register_dataclass
    @dataclass
    class Model:
        w: jax.Array
        number: int = field(metadata={"static": True})

        @decorator
        def loss(self, x):
            return jnp.mean(jnp.tanh(x @ self.w) ** 2)

    return Model(jnp.eye(3), next(NUMBERS))


def module(decorator):
    class Model(equinox.Module):
        w: jax.Array
        act: Callable
        steps: int

        @decorator
        def loss(self, x):
            return self.steps * jnp.mean(self.act(x @ self.w) ** 2)

    return Model(jnp.eye(3), jnp.tanh, 2)


def live(decorator):
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(3))

        @decorator
        def loss(self, x):
            return jnp.mean(jnp.tanh(x @ self.w[...]) ** 2)

    return Model()


@DECORATORS
@pytest.mark.parametrize("make", [plain, module, live])
def test_a_bound_method_updates_its_instance(make, decorator):
    model = make(decorator)
    cls = type(model)
    state = ADAM.init(model.loss.grad(X))
    w, moments, scale = jnp.eye(3), ADAM.init(jnp.eye(3)), 2 if make is module else 1
    for _ in range(3):
        value, model, state = model.loss.value_and_update(state, X, update=ADAM)
        want, gradient = jax.value_and_grad(lambda w: scale * jnp.mean(jnp.tanh(X @ w) ** 2))(w)
        change, moments = ADAM.update(gradient, moments, w)
        w = w + change
        np.testing.assert_allclose(value, want, rtol=1e-5)
    assert type(model) is cls
    np.testing.assert_allclose(jnp.asarray(model.w[...]), w, rtol=1e-4)
    assert make is not module or (model.act, model.steps) == (jnp.tanh, 2)


def test_a_bound_method_of_a_function_traces_its_update():
    model = plain(aot.function)
    traced = model.loss.trace_update(ADAM.init(model), X, update=ADAM)
    value, (after, _) = traced.partition().compile().value_and_grad(model, ADAM.init(model), X)
    assert (type(after), value.shape) == (type(model), ())


def test_a_bound_method_of_a_tape_accumulates_and_tells_its_captures():
    model = plain(aot.tape)
    refs = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), model)
    for _ in range(2):
        model.loss.accumulate_into(refs)(X)
    np.testing.assert_allclose(refs.w[...], 2 * model.loss.grad(X).w, rtol=1e-6)
    assert [capture.hits for capture in model.loss.captures] == [1, 0]
    _, pullback = model.loss.vjp(X)
    assert [type(gradient) for gradient in pullback(1.0)] == [type(model), type(X)]


@DECORATORS
def test_hooks_in_a_bound_method_are_called_with_its_gradients(decorator):
    seen = []

    @jax.tree_util.register_dataclass
    @dataclass
    class Model:
        w: jax.Array

        @decorator
        def loss(self, x):
            w = aot.post_accumulate(self.w, lambda g: seen.append(g.shape))
            h = aot.hooked(self.block, post_hook=lambda grads, cts: seen.append("block"))(x, w)
            return jnp.sum(aot.on_cotangent(h, lambda g: seen.append("h")))

        def block(self, x, w):
            return jnp.tanh(x @ w)

    Model(jnp.eye(3)).loss.grad(X)
    jax.effects_barrier()
    assert seen == ["h", "block", (3, 3)]


def test_an_equinox_module_on_a_tape_has_none_in_the_place_of_what_is_no_array():
    gradient = module(aot.tape).loss.grad(X)
    assert (gradient.act, gradient.steps, gradient.w.shape) == (None, None, (3, 3))


def test_an_object_that_the_function_writes_is_not_updated():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(3))

        @aot.function
        def loss(self, x):
            value = jnp.sum(self.w[...] * x)
            self.w[...] = self.w[...] + 1
            return value

    with pytest.raises(TraceError) as error:
        Model().loss.value_and_update((), jnp.ones(3), update=lambda g, s, p: (p, s))
    assert str(error.value).splitlines() == [
        "args[0].w.value belongs to an object that is updated, and loss writes to it.",
        "Take value_and_grad, and update after it.",
    ]


@DECORATORS
def test_an_instance_that_is_no_pytree_is_named_as_self(decorator):
    class Model:
        @decorator
        def loss(self, x):
            return jnp.sum(x)

    with pytest.raises(TraceError, match=r"args\[0\] is a Model") as error:
        Model().loss.value_and_update((), X, update=lambda g, s, p: (p, s))
    name = "aot.function" if decorator is aot.function else "aot.tape"
    assert error.value.__notes__[-1] == (
        "args[0] is the instance, self, of the method loss; "
        f"{name}(argnums=1) differentiates the argument that comes after it."
    )
