"""What a function on a tape writes to Flax's NNX objects is written to the caller's, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jointcut import aot
from jointcut.partition.errors import CallError, TraceError

X = jnp.arange(12.0).reshape(4, 3)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(nnx.relu(self.norm(self.first(x))))


class Tied(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
        self.again = self.w


def error(model, x):
    return jnp.mean(model(x) ** 2)


def by_vjp(taped):
    def value_and_grad(model, x):
        value, pullback = taped.vjp(model, x)
        return value, pullback(jnp.ones(()))[0]

    return value_and_grad


def trained(step):
    model, values = Net(), []
    for _ in range(3):
        value, gradient = step(model, X)
        params, moved = nnx.state(model, nnx.Param), nnx.state(gradient, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, moved))
        values.append(value)
    return values, [jax.random.key_data(x) if "key" in str(x.dtype) else x for x in jax.tree.leaves(nnx.state(model))]


@pytest.mark.parametrize("of", [lambda taped: taped.value_and_grad, by_vjp], ids=["value_and_grad", "vjp"])
def test_training_on_a_tape_is_training_with_nnx(of):
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6),
        trained(of(aot.tape(error))),
        trained(nnx.value_and_grad(error)),
    )


@pytest.mark.parametrize("by_name", [False, True])
def test_objects_that_are_not_differentiated_are_written_with_numbers(by_name):
    def loss(w, seen):
        seen.w[...] = w * seen.w[...]
        return jnp.sum(jnp.sin(seen.w[...]))

    seen = Tied()
    del seen.again
    taped = aot.tape(loss)
    gradient = taped.grad(jnp.full(3, 2.0), seen=seen) if by_name else taped.grad(jnp.full(3, 2.0), seen)
    np.testing.assert_allclose(gradient, np.cos(2.0) * np.ones(3), rtol=1e-6)
    np.testing.assert_array_equal(seen.w[...], np.full(3, 2.0))


def refused(loss, model, kind=CallError, call=lambda taped, model: taped.grad(model, X)):
    before = jax.tree.map(jnp.copy, nnx.state(model))
    with pytest.raises(kind) as error:
        call(aot.tape(loss), model)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    return str(error.value).splitlines()


def test_new_parts_are_refused():
    def loss(model, x):
        model.seen = nnx.Variable(jnp.sum(x))
        return jnp.sum(model.w[...])

    assert refused(loss, Tied()) == [
        "args[0] gets or loses parts in the function, and a tape writes back arrays alone.",
        "Use aot.function, or make the parts before the call.",
    ]


def test_a_variable_at_two_places_is_not_written():
    def loss(model, x):
        model.w[...] = 2.0 * model.w[...]
        return jnp.sum(model.again[...] * x)

    assert refused(loss, Tied()) == [
        "args[0] is written by the function, and holds a variable twice: on a tape these are two.",
        "Use aot.function, which takes them for one.",
    ]


def test_an_object_that_is_updated_is_not_written():
    def loss(model, x):
        model.w[...] = 2.0 * model.w[...]
        return jnp.sum(model.w[...] * x)

    def update(taped, model):
        return taped.value_and_update(model, (), X, update=lambda g, s, p: (p, s))

    assert refused(loss, Tied(), TraceError, update) == [
        "args[0] is an object that is updated, and loss writes to it.",
        "Take value_and_grad, and update after it.",
    ]


def test_a_module_that_a_hook_changes_is_refused_with_the_array_that_it_reads():
    def loss(model, x):
        def hook(cotangent):
            model.w[...] = 0.0 * model.w[...]
            return cotangent

        return jnp.sum(aot.on_cotangent(jnp.sin(model.w[...]) * x, hook))

    line = loss.__code__.co_firstlineno + 1
    first, _ = jax.tree_util.tree_flatten_with_path(Tied())[0][0]
    assert refused(loss, Tied()) == [
        f"The hook {loss.__qualname__}.<locals>.hook at {__file__}:{line} is set (on_cotangent) and reads "
        f"model{jax.tree_util.keystr(first)}, float32[3], whose time is over when the hook is called.",
        "Read jax.lax.stop_gradient of it on a tape. Elsewhere write a jax.custom_vjp that saves it. "
        "A hook may write to an object that is no argument.",
    ]


def test_an_object_outside_is_written_by_a_hook_that_is_called_back():
    seen = Tied()

    def loss(w):
        def hook(cotangent):
            seen.w[...] = seen.w[...] + cotangent

        return jnp.sum(aot.on_cotangent(2.0 * w, hook) ** 2)

    before = np.asarray(seen.w[...])
    aot.tape(loss).grad(X[0])
    np.testing.assert_allclose(seen.w[...], before + 4.0 * X[0], rtol=1e-6)
