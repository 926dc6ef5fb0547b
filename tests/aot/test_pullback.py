"""A pullback holds what the backward needs, as a value that can be kept, passed on and called again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot

W = jnp.arange(6.0).reshape(3, 2) / 5
X = jnp.arange(12.0).reshape(4, 3) / 7
CT = jnp.cos(jnp.arange(8.0)).reshape(4, 2)


def layer(w, x):
    return jnp.tanh(x @ w) ** 2


made = aot.function(layer)
WANT = jax.vjp(layer, W, X)[1](CT)


def assert_near(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_it_is_called_more_than_once():
    out, pullback = made.vjp(W, X)
    assert_near(out, layer(W, X))
    for _ in range(2):
        assert_near(pullback(CT), WANT)
    assert_near(pullback(2 * CT), jax.tree.map(lambda x: 2 * x, WANT))


def test_it_is_a_pytree():
    _, pullback = made.vjp(W, X)
    leaves, tree = jax.tree.flatten(pullback)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert_near(jax.tree.unflatten(tree, leaves)(CT), WANT)
    assert jax.tree.structure(made.vjp(W + 1, X)[1]) == tree
    doubled = jax.tree.map(lambda x: x, pullback)
    assert_near(doubled(CT), WANT)


def test_it_crosses_the_boundary_of_jit_in_both_directions():
    _, pullback = made.vjp(W, X)
    assert_near(jax.jit(lambda p, ct: p(ct))(pullback, CT), WANT)
    _, pullback = jax.jit(made.vjp)(W, X)
    assert_near(pullback(CT), WANT)
    assert_near(jax.jit(lambda w, x, ct: made.vjp(w, x)[1](ct))(W, X, CT), WANT)


@pytest.mark.parametrize("forward", [made.vjp, jax.jit(made.vjp)], ids=["called", "jitted"])
def test_a_jit_that_takes_it_is_traced_once(forward):
    traces = []

    @jax.jit
    def apply(pullback, cotangent):
        traces.append(None)
        return pullback(cotangent)

    for scale in (1.0, 2.0, 3.0):
        apply(forward(scale * W, X)[1], CT)
    assert len(traces) == 1


def test_it_can_be_mapped_and_differentiated():
    _, pullback = made.vjp(W, X)
    many = jnp.stack([CT, 2 * CT])
    assert_near(jax.vmap(pullback)(many), jax.vmap(jax.vjp(layer, W, X)[1])(many))

    def norm(vjp):
        return lambda w: jnp.sum(vjp(w, X)[1](CT)[0] ** 2)

    plain = norm(lambda w, x: jax.vjp(layer, w, x))
    assert_near(jax.grad(norm(made.vjp))(W), jax.grad(plain)(W))
    assert_near(jax.jit(jax.grad(norm(made.vjp)))(W), jax.grad(plain)(W))


def test_it_holds_the_callers_arrays_and_no_copies():
    _, pullback = made.vjp(W, X)
    held = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pullback)}
    assert {W.unsafe_buffer_pointer(), X.unsafe_buffer_pointer()} <= held
    assert pullback.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(pullback))


def test_min_cut_holds_less_than_jaxs_own_pullback():
    def deep(x):
        for _ in range(8):
            x = x * x * x / (1.0 + x * x)
        return x

    x = jnp.ones((32, 32))
    ours, jaxs = aot.function(deep).vjp(x)[1], jax.vjp(deep, x)[1]
    assert ours.nbytes == x.nbytes
    assert ours.nbytes < sum(leaf.nbytes for leaf in jax.tree.leaves(jaxs))
    assert_near(ours(x), jaxs(x))


@pytest.mark.parametrize("kind", [jnp.arange(3), 7, True, jax.random.key(0)], ids=["array", "int", "bool", "key"])
def test_what_carries_no_derivative_gets_float0(kind):
    def offset(w, other):
        return w * 2

    _, pullback = aot.function(offset).vjp(W, other := {"at": kind})
    want = jax.vjp(offset, W, other)[1](W)
    assert_near(pullback(W), want)


def test_integer_outputs_take_float0_or_zeros():
    def counted(w):
        return {"a": w * 2, "n": jnp.arange(3)}

    _, pullback = aot.function(counted).vjp(W)
    for seed in (np.zeros(3, jax.dtypes.float0), jnp.zeros(3, int)):
        assert_near(pullback({"a": W, "n": seed}), jax.vjp(counted, W)[1]({"a": W, "n": seed}))


def test_python_and_numpy_numbers_are_cotangents():
    def number(w):
        return jnp.sum(w * 3)

    _, pullback = aot.function(number).vjp(W)
    for seed in (2.0, np.float32(2), jnp.float32(2)):
        assert_near(pullback(seed), (jnp.full_like(W, 6),))
