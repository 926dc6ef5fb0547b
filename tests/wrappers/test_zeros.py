"""An output whose cotangent is zero costs the backward nothing, and the gradients are those of jax.vjp."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero

from jointcut import aot
from jointcut.partition.program.jax import jaxprs
from jointcut.wrappers.built_in.zeros import Backwards

W, V = jnp.linspace(-0.5, 0.6, 12).reshape(4, 3), jnp.linspace(0.2, -0.3, 6).reshape(3, 2)
X = jnp.linspace(0.1, 0.9, 20).reshape(5, 4)


def heads(w, v, x):
    """Two heads on one trunk, the second with a product of its own, and a third that is an integer."""
    h = jnp.tanh(x @ w)
    return jnp.sum(h**2), jnp.sin(h @ v), jnp.argmax(h, axis=1)


def products(jaxpr):
    """How many matrix products a jaxpr holds, however deep."""
    return sum(
        (eqn.primitive.name == "dot_general") + sum(map(products, jaxprs.inner_jaxprs(eqn))) for eqn in jaxpr.eqns
    )


def near(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def cotangents(kind):
    """Of both heads the full cotangent, and the one that says zero in the way asked for."""
    full = (jnp.float32(1.5), jnp.cos(jnp.arange(10.0)).reshape(5, 2))
    if kind == "float0":
        return full, tuple(np.zeros(ct.shape, jax.dtypes.float0) for ct in full)
    return full, tuple(SymbolicZero(jax.typeof(ct)) for ct in full)


NO_INTEGER = np.zeros(5, jax.dtypes.float0)


@pytest.mark.parametrize("kind", ["float0", "symbolic"])
@pytest.mark.parametrize("pattern", list(itertools.product([False, True], repeat=2)), ids=str)
def test_gradients_are_those_of_zeros(pattern, kind):
    full, zero = cotangents(kind)
    given = tuple(z if on else f for f, z, on in zip(full, zero, pattern, strict=True))
    filled = tuple(jnp.zeros_like(f) if on else f for f, on in zip(full, pattern, strict=True))
    _, pullback = aot.function(heads).vjp(W, V, X)
    _, jax_pullback = jax.vjp(heads, W, V, X)
    near(pullback((*given, NO_INTEGER)), jax_pullback((*filled, NO_INTEGER)))
    compiled = aot.function(heads, argnums=(0, 1, 2)).trace(W, V, X).partition().compile()
    near(compiled.vjp(W, V, X)[1]((*given, NO_INTEGER)), jax_pullback((*filled, NO_INTEGER)))


def test_each_pattern_has_a_smaller_backward_made_once():
    cut = aot.function(heads, argnums=(0, 1, 2)).trace(W, V, X).partition()
    backwards = Backwards(cut.split.halves, functools.partial(jax.jit))
    whole = products(jaxprs.opened(cut.backward)[0])
    trunk, second = backwards.variant((1,)), backwards.variant((0,))
    assert (whole, products(jaxprs.opened(trunk.closed)[0])) == (4, 2)
    assert products(jaxprs.opened(second.closed)[0]) == 4
    assert trunk.zero_outputs == (False, True, False)
    none = backwards.variant((0, 1))
    assert none.zero_outputs == (True, True, True)
    assert not jaxprs.opened(none.closed)[0].eqns
    assert backwards.variant((1,)) is trunk


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["as it is", "in a jit"])
def test_jax_grad_of_one_output_leaves_the_work_of_the_others_out(outer):
    def one(function):
        return lambda w, v, x: jax.grad(lambda w: outer(function)(w, v, x)[0])(w)

    mine = jax.make_jaxpr(one(aot.function(heads)))(W, V, X)
    theirs = jax.make_jaxpr(one(heads))(W, V, X)
    near(one(aot.function(heads))(W, V, X), one(heads)(W, V, X))
    compiled = [jax.jit(one(f)).lower(W, V, X).compile().as_text().count(" dot(") for f in (aot.function(heads), heads)]
    assert compiled[0] <= compiled[1]
    assert products(mine.jaxpr) <= products(theirs.jaxpr)


def test_an_output_that_nothing_differentiated_reaches_has_no_tangent():
    def function(w, x):
        return jnp.sum(w * x), jnp.sin(x)

    seen = []

    def whole(w):
        first, second = aot.function(function)(w, X)
        seen.append(second)
        return first

    jax.jvp(whole, (jnp.ones_like(X),), (jnp.ones_like(X),))
    (second,) = seen
    assert type(second).__name__ != "JVPTracer"


def test_second_derivatives_see_no_zeros_where_there_are_none():
    def total(f):
        def outer(w):
            def inner(w):
                loss, logits, _ = f(w, V, X)
                return loss * jnp.sum(logits)

            return jnp.sum(jax.grad(inner)(w) ** 2)

        return outer

    near(jax.grad(total(aot.function(heads)))(W), jax.grad(total(heads))(W))
