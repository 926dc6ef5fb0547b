"""A loop that is made again at each call is the loop that was made first: nothing is compiled twice."""

from __future__ import annotations

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.loops import interned
from jointcut.partition.errors import CallError
from jointcut.wrappers.table import Table

EVENT = "/jax/core/compile/backend_compile_duration"
W, V = jnp.linspace(0.5, 1.0, 4), jnp.linspace(1.5, 2.0, 4)
SEEN: list[float] = []


def seen(x):
    SEEN.append(float(x))


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x)


doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


def is_small(carry):
    return carry[0] < 3


def while_loop(w):
    return aot.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]) * w), (0, w))[1].sum()


def at_most(w):
    return aot.while_loop(is_small, lambda c: (c[0] + 1, jnp.sin(c[1]) * w), (0, w), max_trips=5)[1].sum()


def fori_loop(w, trips=3):
    return aot.fori_loop(0, trips, lambda _, c: jnp.sin(c) * w, w).sum()


def scan(w):
    return aot.scan(lambda c, x: (jnp.sin(c) * x, c), w, jnp.ones((3, 4)))[1].sum()


def stack_output(w):
    stack = aot.while_loop_stack_output(is_small, lambda c: (c[0] + 1, jnp.sin(c[1]) * w), (0, w), max_trips=4)
    return stack.carries[1].sum()


def nested(w):
    return aot.fori_loop(0, 3, lambda _, c: aot.fori_loop(0, 2, lambda _, x: jnp.sin(x) * w, c), w).sum()


def with_rule(w):
    return aot.fori_loop(0, 3, lambda _, c: doubled(c) * jax.nn.relu(c), w).sum()


def with_callback(w):
    return aot.fori_loop(0, 3, lambda _, c: (jax.debug.callback(seen, c[0]), jnp.sin(c))[1], w).sum()


def with_inner_gradient(w):
    def step(_, c):
        return c - 0.1 * jax.grad(lambda y: aot.fori_loop(0, 2, lambda _, x: jnp.sin(x), y).sum())(c)

    return aot.fori_loop(0, 3, step, w).sum()


ALL = [while_loop, at_most, fori_loop, scan, stack_output, nested, with_rule, with_callback, with_inner_gradient]


def compiled(call):
    """Return how many programs XLA compiles during a call."""
    heard = []
    ear = partial(lambda event, _, **__: heard.append(event) if event == EVENT else None)
    jax.monitoring.register_event_duration_secs_listener(ear)
    try:
        jax.block_until_ready(call())
        return len(heard)
    finally:
        jax.monitoring.unregister_event_duration_listener(ear)


@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
def test_a_tape_captures_a_loop_once(function):
    taped = aot.tape(function)
    for scale in (1.0, 0.5, 2.0, 0.25):
        got, want = taped.value_and_grad(scale * W), jax.value_and_grad(function)(scale * W)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, want)
    assert (taped.captures.made, [capture.hits for capture in taped.captures]) == (1, [3])


@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
def test_an_eager_gradient_compiles_once(function):
    function(W), jax.value_and_grad(function)(W)
    assert compiled(lambda: jax.value_and_grad(function)(V)) == 0
    assert compiled(lambda: function(V)) == 0


def test_second_derivatives_compile_once():
    def curved(w):
        return jax.grad(lambda w: jax.grad(fori_loop)(w).sum())(w)

    curved(W)
    assert compiled(lambda: curved(V)) == 0


def test_what_differs_is_another_loop(monkeypatch):
    def looped(w, scale, **options):
        return aot.fori_loop(0, 3, lambda _, c: scale * jnp.sin(c), w, **options).sum()

    def kept(*args, precision=None, **options):
        with jax.default_matmul_precision(precision):
            got, grad = jax.value_and_grad(looped)(*args, **options)
        w, scale = args
        want = jax.value_and_grad(lambda w: (scale * jnp.sin(scale * jnp.sin(scale * jnp.sin(w)))).sum())(w)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), (got, grad), want)
        return len(interned.LOOPS)

    monkeypatch.setattr(interned, "LOOPS", Table(512))
    assert [kept(W, 5.0), kept(W, 5.0)] == [1, 1]
    assert kept(W, 4.0) == 2  # a Python number is a constant of the body
    assert kept(W, 5.0, memory=2) == 3
    assert kept(W[:2], 5.0) == 4
    assert kept(W, 5.0, max_trips=7) == 5
    assert kept(W, 5.0, precision="highest") == 6


def test_a_value_that_the_body_reads_is_an_input():
    def looped(w, scale):
        return aot.fori_loop(0, 3, lambda _, c: scale * jnp.sin(c), w).sum()

    grads = [jax.grad(looped)(W, jnp.float32(scale)) for scale in (1.0, 3.0)]
    for grad, scale in zip(grads, (1.0, 3.0), strict=True):
        by_hand = jax.grad(lambda w, s=scale: (s * jnp.sin(s * jnp.sin(s * jnp.sin(w)))).sum())
        np.testing.assert_allclose(grad, by_hand(W), rtol=1e-6)


def test_a_rule_with_values_of_its_own_is_never_another_rule():
    def looped(w, scale):
        @jax.custom_vjp
        def scaled(x):
            return jnp.sin(x)

        scaled.defvjp(lambda x: (jnp.sin(x), None), lambda _, ct: (scale * ct,))
        return aot.fori_loop(0, 2, lambda _, c: scaled(c), w).sum()

    for scale in (1.0, 3.0, 5.0):
        np.testing.assert_allclose(jax.grad(looped)(W, scale), scale**2 * jnp.ones(4))


SLOPE = 1.0
SETTINGS = {"slope": 1.0}


@jax.custom_vjp
def by_global(x):
    return 2 * x


by_global.defvjp(lambda x: (2 * x, None), lambda _, ct: (SLOPE * ct,))


@jax.custom_vjp
def by_settings(x):
    return 2 * x


def slope_of_settings():
    return SETTINGS["slope"]


by_settings.defvjp(lambda x: (2 * x, None), lambda _, ct: (slope_of_settings() * ct,))


@pytest.mark.parametrize("rule", [by_global, by_settings])
def test_a_rule_that_reads_a_global_follows_it(rule, monkeypatch):
    def looped(x):
        return aot.while_loop(is_small, lambda c: (c[0] + 1, rule(c[1])), (0, x))[1]

    for slope in (1.0, 3.0, 1.0):
        monkeypatch.setitem(globals(), "SLOPE", slope)
        monkeypatch.setitem(SETTINGS, "slope", slope)
        assert jax.grad(looped)(1.0) == slope**3


def test_an_error_names_the_body_that_it_is_about():
    def other(c):
        return c[0] + 1, jnp.sin(c[1])

    def one(c):
        return c[0] + 1, jnp.sin(c[1])

    for body in (one, other):
        with pytest.raises(CallError, match=rf"\({body.__name__}\)"):
            aot.while_loop(is_small, body, (0, W), max_trips=2)


def test_loops_of_jax_are_kept_as_well():
    def plain(w, n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1]) * w), (0, w))[1].sum()

    taped = aot.tape(plain)
    for n in (2, 3, 3, 4):
        want = jax.grad(lambda w, n=n: fori_loop(w, n))(W)
        np.testing.assert_allclose(taped.grad(W, jnp.int32(n)), want, rtol=1e-6)
    assert taped.captures.made == 1


def test_threads_share_a_loop():
    taped, grads = aot.tape(while_loop), []
    threads = [threading.Thread(target=lambda: grads.append(taped.grad(W))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = jax.grad(while_loop)(W)
    assert len(grads) == 4
    for grad in grads:
        np.testing.assert_allclose(grad, want, rtol=1e-6)


def test_a_loop_inside_a_transformation_holds_no_tracer():
    with jax.checking_leaks():
        jax.jit(jax.grad(while_loop))(W)
        jax.vmap(jax.grad(fori_loop))(jnp.stack([W, W]))
    np.testing.assert_allclose(jax.jit(jax.grad(while_loop))(W), jax.grad(while_loop)(W), rtol=1e-6)
