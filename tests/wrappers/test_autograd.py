"""The two halves stand for a function under every transformation of JAX, and only what is asked for is cut."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jointcut import aot
from jointcut.partition import Roles, split
from jointcut.partition.program.places import line_of
from jointcut.wrappers.built_in.autograd import differentiable

X, Y = jnp.arange(1.0, 4.0), jnp.array([0.5, -1.0, 2.0])


def plain(x, n, y):
    """Three inputs, one an integer; two outputs that carry a derivative and one that does not."""
    return [jnp.sin(x) * y**2 + n, jnp.argmax(x), jnp.sum(x * y)]


def made(strategy="min_cut"):
    """The function through its halves, and the masks for which a cut was asked."""
    source, masks = jax.make_jaxpr(plain)(X, 3, Y), []

    def cut(closed, mask):
        masks.append(mask)
        wanted = [i for i, on in enumerate(mask) if on]

        def joint(*flat):
            args, seeds = list(flat[:3]), flat[3:]

            def chosen(*picked):
                for i, x in zip(wanted, picked, strict=True):
                    args[i] = x
                out, index, total = plain(*args)
                return (out, total), index

            (out, total), pullback, index = jax.vjp(chosen, *(args[i] for i in wanted), has_aux=True)
            return out, index, total, *pullback(seeds)

        program = jax.make_jaxpr(joint)(X, 3, Y, jnp.ones(3), jnp.float32(1))
        this = split(program, Roles.simple(3, 2, 3, len(wanted)), strategy)
        return this.graph, this.halves, ()

    return differentiable(source, cut), masks


def assert_near(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_call_asks_for_no_cut():
    function, masks = made()
    assert_near(function(X, 3, Y), plain(X, 3, Y))
    assert_near(jax.jit(function)(X, 3, Y), plain(X, 3, Y))
    assert masks == []


MASKS = [(0, (True, False, False)), (2, (False, False, True)), ((0, 2), (True, False, True))]


@pytest.mark.parametrize(("argnums", "mask"), MASKS, ids=["first", "last", "both"])
def test_only_what_is_differentiated_is_cut_and_once(argnums, mask):
    function, masks = made()

    def scalar(run):
        return lambda *args: jnp.sum(run(*args)[0]) * run(*args)[2]

    for _ in range(2):
        assert_near(jax.grad(scalar(function), argnums)(X, 3, Y), jax.grad(scalar(plain), argnums)(X, 3, Y))
    assert set(masks) == {mask}
    assert len(masks) == 1


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
def test_reverse_forward_and_mixed_modes(strategy):
    function, _ = made(strategy)

    def on_x(run):
        return lambda x: run(x, 3, Y)[0] * run(x, 3, Y)[2]

    ours, theirs = on_x(function), on_x(plain)
    assert_near(jax.jacrev(ours)(X), jax.jacrev(theirs)(X))
    assert_near(jax.jacfwd(ours)(X), jax.jacfwd(theirs)(X))
    assert_near(jax.jvp(ours, (X,), (Y,)), jax.jvp(theirs, (X,), (Y,)))
    assert_near(jax.jacfwd(jax.jacrev(ours))(X), jax.jacfwd(jax.jacrev(theirs))(X))
    assert_near(jax.jacrev(jax.jacrev(ours))(X), jax.jacrev(jax.jacrev(theirs))(X))
    assert_near(jax.vmap(jax.jacrev(ours))(jnp.stack([X, Y])), jax.vmap(jax.jacrev(theirs))(jnp.stack([X, Y])))


def test_integer_outputs_carry_no_cotangent():
    function, _ = made()
    out, pullback = jax.vjp(lambda x, y: function(x, 3, y), X, Y)
    seeds = [jnp.ones(3), np.zeros((), jax.dtypes.float0), jnp.float32(2)]
    assert_near(out, plain(X, 3, Y))
    assert_near(pullback(seeds), jax.vjp(lambda x, y: plain(x, 3, y), X, Y)[1](seeds))


def test_checks_inside_a_call_reach_checkify():
    @aot.function
    def loss(x):
        checkify.check(jnp.all(x > 0), "not all are positive")
        return jnp.sum(jnp.sin(x) * x)

    for run in (loss, jax.jit(loss), jax.grad(loss), jax.vmap(loss)):
        error, _ = checkify.checkify(run)(-jnp.ones((2, 3)))
        assert "not all are positive" in (error.get() or "")
        error, _ = checkify.checkify(run)(jnp.ones((2, 3)))
        assert error.get() is None


def test_no_cache_of_jax_keeps_a_function_alive():
    """Parameters of primitives are keys there."""

    def used(big):
        function = aot.function(lambda x: jnp.sum(jnp.sin(x * big) * x))
        jax.jit(lambda x: function(x))(big)
        jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(function)(x))))(jnp.stack([big, big]))
        jax.jit(lambda x: jax.jvp(function, (x,), (x,)))(big)
        return weakref.ref(function), weakref.ref(big)

    function, big = used(jnp.ones(3) * 2)
    gc.collect()
    assert function() is None
    assert big() is None


def test_in_the_users_jit_each_op_of_both_halves_keeps_its_line():
    def layers(w, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w))

    def step(w, x):
        return jax.grad(aot.function(layers))(w, x)

    w = jnp.ones((3, 3))
    line = f"{__file__}:{layers.__code__.co_firstlineno + 1} ({layers.__qualname__})"
    program = jax.make_jaxpr(step)(w, w).jaxpr
    assert {line_of(eqn) for eqn in program.eqns} == {line} and len(program.eqns) > 8, program
    np.testing.assert_array_equal(jax.jit(step)(w, w), step(w, w))
