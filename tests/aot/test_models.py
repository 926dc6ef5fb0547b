"""Models that other people's libraries build train under jointcut as they train under plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.linen import fp8_ops
from jax import lax

from jointcut import aot

STEPS = 5
WIDTH = 16
DRAWS = np.random.default_rng(0)
TOKENS = jnp.asarray(DRAWS.integers(0, 11, (4, 6)))
IMAGES = jnp.asarray(DRAWS.normal(size=(4, 8, 8, 3)), jnp.float32)
ROWS = jnp.asarray(DRAWS.normal(size=(8, 5)), jnp.float32)
LABELS = jnp.asarray(DRAWS.integers(0, 3, 8))


@dataclass(frozen=True)
class Training:
    """A loss `(params, state, key, *batch) -> (loss, state)`, where it starts, and what it reads."""

    loss: Callable[..., Any]
    params: Any
    state: Any
    batch: tuple[Any, ...]


def cross_entropy(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


# ---------------------------------------------------------------- flax.linen


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        h = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(num_heads=2)(h)
        h = linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x)))
        return x + linen.Dense(WIDTH)(linen.Dropout(0.1, deterministic=False)(h)), None


class LinenTransformer(linen.Module):
    """Two blocks under `nn.scan`, with dropout."""

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(11, WIDTH)(tokens)
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
        x, _ = linen.scan(LinenBlock, length=2, **axes)()(x, None)
        return linen.Dense(11)(x)


def linen_transformer():
    model = LinenTransformer()
    variables = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, TOKENS)

    def loss(params, state, key, tokens):
        logits = model.apply({"params": params}, tokens, rngs={"dropout": key})
        return cross_entropy(logits[:, :-1], tokens[:, 1:]), state

    return Training(loss, variables["params"], {}, (TOKENS,))


# ---------------------------------------------------------------- equinox


def equinox_recurrent():
    cell = eqx.nn.GRUCell(5, WIDTH, key=jax.random.key(0))
    head = eqx.nn.Linear(WIDTH, 3, key=jax.random.key(1))

    def loss(params, state, key, sequences, labels):
        cell, head = params

        def read(sequence):
            last, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(WIDTH), sequence)
            return head(last)

        return cross_entropy(jax.vmap(read)(sequences), labels), state

    return Training(loss, (cell, head), {}, (jnp.stack([ROWS] * 4, 1), LABELS))


# Layers with state, of Flax, Haiku and Equinox, are trained in `test_training.py`.
TRAININGS = (linen_transformer, equinox_recurrent)


def losses(training, value_and_grad, wrap=lambda step: step):
    """Losses of some steps, and the parameters they end at."""
    # Not Adam, which blows the rounding of a gradient that is zero up to a full step.
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9, nesterov=True))

    @jax.jit
    def update(params, moments, gradients):
        updates, moments = optimiser.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    def step(params, state, moments, key):
        (loss, state), gradients = value_and_grad(params, state, key, *training.batch)
        return loss, *update(params, moments, gradients), state

    step = wrap(step)
    params, state = training.params, training.state
    moments, seen = optimiser.init(params), []
    for key in jax.random.split(jax.random.key(7), STEPS):
        loss, params, moments, state = step(params, state, moments, key)
        seen.append(loss)
    return seen, params, state


def assert_near(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


@pytest.fixture(params=TRAININGS, ids=lambda make: make.__name__, scope="module")
def trained(request):
    """A training, and what plain JAX makes of it."""
    with jax.numpy_dtype_promotion("standard"):  # libraries mix int and float
        training = request.param()
        want = losses(training, jax.value_and_grad(training.loss, has_aux=True), jax.jit)
        assert want[0][-1] < want[0][0]
        yield training, want


def test_it_trains_as_with_plain_jax(trained):
    training, want = trained
    loss = aot.function(training.loss, has_aux=True)
    assert_near(losses(training, loss.value_and_grad), want)


def test_it_trains_so_inside_the_users_own_jit(trained):
    training, want = trained
    loss = aot.function(training.loss, has_aux=True)
    assert_near(losses(training, loss.value_and_grad, jax.jit), want)


def test_a_whole_module_is_an_argument():
    layer = eqx.nn.Linear(5, 3, key=jax.random.key(3))  # a pytree of arrays, unlike modules that hold functions

    def loss(layer, x):
        assert layer.in_features == 5
        return jnp.mean(jax.vmap(layer)(x) ** 2)

    value, gradient = aot.function(loss).value_and_grad(layer, ROWS)
    assert isinstance(gradient, eqx.nn.Linear)
    assert_near((value, gradient), jax.value_and_grad(loss)(layer, ROWS))


def test_a_method_of_a_module_is_made_a_function_of_ours():
    class Squared(eqx.Module):
        weight: jax.Array

        @aot.function
        def loss(self, x):
            return jnp.sum((x @ self.weight) ** 2)

    model = Squared(jnp.ones(5))
    value, gradient = model.loss.value_and_grad(ROWS)
    assert isinstance(gradient, Squared)
    assert_near((value, gradient.weight), jax.value_and_grad(lambda w: jnp.sum((ROWS @ w) ** 2))(model.weight))


def of_largest(x, scale):
    """A product with a number of Flax's type, whose gradient is the largest of those from all its readers."""
    return x * lax.convert_element_type(scale, "float32")


def of_largest_back(kept, ct):
    x, scale = kept
    largest = lax.convert_element_type(jnp.max(jnp.abs(ct * x)), scale.dtype)
    return ct * lax.convert_element_type(scale, "float32"), largest


scaled = jax.custom_vjp(of_largest)
scaled.defvjp(lambda x, scale: (scaled(x, scale), (x, scale)), of_largest_back)


def read_twice(scale, x):
    """A number of Flax's type that each step of a loop reads, and the last line."""
    hidden, rows = lax.scan(lambda h, _: (jnp.sin(scaled(h, scale)), h), jnp.sin(x), None, length=3)
    return jnp.sum(scaled(hidden, scale)) + jnp.sum(rows)


def from_float(function):
    """The function as one of a float: JAX has numbers of Flax's type inside of `jit` alone."""
    return lambda s, x: function(lax.convert_element_type(s, fp8_ops.fp32_max_grad), x)


@pytest.mark.parametrize("options", [{}, {"budget": "1MB"}, {"budget": 0.0}, {"strategy": "save_all"}])
def test_numbers_whose_gradients_are_not_summed(options):
    arguments = jnp.float32(1.3), jnp.arange(3.0)
    want = jax.jit(jax.grad(from_float(read_twice), (0, 1)))(*arguments)
    called = aot.function(from_float(read_twice), argnums=(0, 1), **options)
    inside = from_float(aot.function(read_twice, argnums=(0, 1), **options))
    for got in (called.grad(*arguments), jax.jit(jax.grad(inside, (0, 1)))(*arguments)):
        jax.tree.map(np.testing.assert_allclose, got, want)


def test_arguments_whose_gradients_are_not_summed():
    def gradients(function):
        def run(scale, x):
            out, pullback = jax.vjp(function, scale, x)
            return lax.convert_element_type((cts := pullback(jnp.ones_like(out)))[0], "float32"), cts[1]

        return jax.jit(from_float(run))(jnp.float32(1.3), jnp.arange(3.0))

    for function in (aot.function(read_twice, argnums=(0, 1)), aot.tape(read_twice)):
        jax.tree.map(np.testing.assert_allclose, gradients(function), gradients(read_twice))
