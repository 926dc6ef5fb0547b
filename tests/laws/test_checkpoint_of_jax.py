"""In whichever form JAX writes `jax.checkpoint`, and whatever its barriers hold, plans and gradients are the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from programs import named, tagged

FORM, BARRIERS = "jax_remat3", "jax_remat_barrier_no_cotangents"
WAYS = [(form, barriers) for form in (False, True) for barriers in (False, True)]

pytestmark = pytest.mark.skipif(not hasattr(jax.config, BARRIERS), reason="this JAX has one form of jax.checkpoint")


@contextmanager
def written(form: bool, barriers: bool) -> Iterator[None]:
    """While this lasts, JAX writes regions in the newer form, and their barriers without cotangents, as is said."""
    before = {name: getattr(jax.config, name) for name in (FORM, BARRIERS)}
    try:
        for name, value in ((FORM, form), (BARRIERS, barriers)):
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def block(x, layer):
    up, down = layer
    return x + jnp.tanh(x @ up) @ down


def without(layers, x):
    for layer in layers:
        x = block(x, layer)
    return jnp.sum(x**2)


def around_blocks(layers, x):
    for layer in layers:
        x = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)(x, layer)
    return jnp.sum(x**2)


def around_loops(layers, x):
    def looped(x, layer):
        return lax.scan(lambda h, _: (block(h, layer), None), x, None, length=3)[0]

    for layer in layers:
        x = jax.checkpoint(looped)(x, layer)
    return jnp.sum(x**2)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32) / 8


LAYERS = [(normal(i, 16, 32), normal(i + 9, 32, 16)) for i in range(3)]
X = normal(20, 8, 16)


@pytest.mark.parametrize("function", [without, around_blocks, around_loops], ids=lambda f: f.__name__)
def test_the_plan_and_the_gradient_are_the_same(function):
    assert_same_in_all_ways(partial(function), (LAYERS, X))


@pytest.mark.parametrize("name", sorted(program.name for program in tagged("checkpoint")))
def test_so_they_are_for_each_program_with_a_checkpoint(name):
    program = named(name)
    with program.precision():
        assert_same_in_all_ways(program.function, program.args, argnums=program.argnums, has_aux=program.has_aux)


def assert_same_in_all_ways(function, arguments, **how):
    found = []
    for way in WAYS:
        with written(*way):
            cut = aot.function(function, **how).trace(*arguments).partition()
            outputs, pullback, *_ = cut.compile(2).vjp(*arguments)
            found.append((str(cut.schedule), jax.tree.leaves(pullback(jax.tree.map(jnp.ones_like, outputs)))))
    (schedule, gradients), *others = found
    for other, got in others:
        assert other == schedule
        for x, y in zip(gradients, got, strict=True):
            np.testing.assert_array_equal(jnp.asarray(x), jnp.asarray(y))
