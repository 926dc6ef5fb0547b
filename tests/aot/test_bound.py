"""A call binds its arguments once at most, and one like the latest is only flattened."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

from jointcut import aot
from jointcut.partition.errors import CallError

bound = importlib.import_module("jointcut.aot.run.bound")
flatten = importlib.import_module("jointcut.wrappers.built_in.flatten")
X, Y, ONE = jnp.arange(3.0), jnp.ones(3), jnp.float32(1)


def loss(w, x, scale=2):
    return jnp.sum(jnp.sin(w["a"]) * x) * float(scale)


@pytest.fixture
def binds(monkeypatch):
    """The calls that were bound, by a binder or by the wrappers."""
    bind, seen = bound.bind, []
    for module in (bound, flatten):
        monkeypatch.setattr(module, "bind", lambda *given: seen.append(given) or bind(*given))
    return seen


WAYS = {
    "call": lambda f: lambda *args: f(*args),
    "value_and_grad": lambda f: f.value_and_grad,
    "vjp": lambda f: lambda *args: f.vjp(*args)[1](ONE),
    "compiled": lambda f: f.trace({"a": Y}, X).partition().compile().value_and_grad,
    "compiled in two": lambda f: f.trace({"a": Y}, X).partition().compile(2).value_and_grad,
    "pullback of a compiled": lambda f: lambda *args: f.trace({"a": Y}, X).partition().compile().vjp(*args)[1](ONE),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_call_is_bound_once_and_others_like_it_not_at_all(way, binds):
    run = WAYS[way](aot.function(loss))
    binds.clear()
    run({"a": X + 1}, X)
    assert len(binds) <= 1
    if way != "pullback of a compiled":  # which is compiled anew each time
        binds.clear()
        run({"a": X + 2}, X)
        assert binds == []


def test_a_call_that_returns_an_argument_is_bound_once(binds):
    made = aot.function(lambda w, x: (jnp.sum(w["a"] * x), x), has_aux=True)
    for most in (1, 0):
        binds.clear()
        (_, same), _ = made.value_and_grad({"a": X + 1}, X)
        assert same is X and len(binds) <= most


def test_calls_that_differ_in_static_values_sizes_and_kinds_of_numbers_keep_apart():
    made, plain = aot.function(loss, static_argnums=2), jax.value_and_grad(loss)
    for scale in (2, 2.0, True, 2, 3, 2):
        for x in (X, X[:1], 2.0, np.ones(3, np.float32), X):
            got, want = made.value_and_grad({"a": X}, x, scale), plain({"a": X}, x, scale)
            jax.tree.map(np.testing.assert_allclose, got, want)


def test_a_container_of_the_type_of_an_array_is_not_taken_for_it():
    made = aot.function(lambda w, x: jnp.sum(w @ x))
    matrix = jnp.eye(3)
    for w in (matrix, matrix, sparse.BCOO.fromdense(matrix), matrix):
        assert made(w, X) == 3.0


def test_a_reference_that_stands_twice_is_refused_after_calls_with_two():
    made = aot.function(lambda a, b: a[...] + b[...])
    first, second = jax.new_ref(X), jax.new_ref(X)
    for _ in range(3):
        np.testing.assert_array_equal(made(first, second), 2 * X)
    with pytest.raises(CallError) as caught:
        made(first, first)
    assert str(caught.value) == (
        "args[1] is the same jax.Ref as args[0].\n"
        "Pass it once: a function that writes through two names could not tell which write comes last."
    )


def test_what_came_between_two_calls_in_the_settings_of_jax_counts():
    made = aot.function(lambda x: jnp.sum(x) * jnp.arange(3.0).dtype.itemsize)
    values = []
    for on in (False, False, True, True, False):
        with jax.enable_x64(on):
            values.append(float(made(X)))
    assert values == [12.0, 12.0, 24.0, 24.0, 12.0]
