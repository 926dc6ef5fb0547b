"""Threads may call one function, pullback or artefact at once: each gets its own numbers, and work is done once."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot

THREADS, ONE = 8, jnp.float32(1)


@pytest.fixture(autouse=True)
def often_switched():
    """Threads that take turns a thousand times as often find more."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(interval)


def at_once(function, arguments):
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, arguments))


def counted(scale=1.0):
    """A loss that notes each trace, with a constant that it closes over."""
    traces, weights = [], jnp.arange(1.0, 4.0) * scale

    def loss(x, power=2, *, offset=0.0):
        traces.append(power)
        return jnp.sum(weights * x**power + offset)

    return loss, traces


WAYS = {
    "value_and_grad": lambda f, x: f.value_and_grad(x)[1],
    "vjp": lambda f, x: f.vjp(x)[1](ONE)[0],
    "in somebody's grad": lambda f, x: jax.grad(f)(x),
    "in somebody's jit": lambda f, x: jax.jit(jax.grad(lambda x: f(x)))(x),
    "array twice": lambda f, x: f.value_and_grad(x, offset=x)[1],
    "call": lambda f, x: f(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_calling_answers_in_threads_as_alone(way):
    alone, together = aot.function(counted()[0]), aot.function(counted()[0])
    given = [jnp.full(3, float(i)) for i in range(THREADS)]
    want = [WAYS[way](alone, x) for x in given]
    for got, expected in zip(at_once(lambda x: WAYS[way](together, x), given), want, strict=True):
        np.testing.assert_allclose(got, expected)


def test_threads_that_meet_a_signature_at_once_trace_it_once():
    loss, traces = counted()
    loss(jnp.ones(3))
    aot.function(loss).value_and_grad(jnp.ones(3))
    once = len(traces) - 1
    loss, traces = counted()
    function = aot.function(loss)
    at_once(function.value_and_grad, [jnp.ones(3)] * THREADS)
    assert len(traces) == once


def test_many_signatures_in_threads_are_kept_and_forgotten(monkeypatch):
    """More than are kept, in every table that calls share: by method, in somebody's trace, with an array twice."""
    monkeypatch.setattr(importlib.import_module("jointcut.aot.run.bound"), "KEPT_SIGNATURES", 2)
    function = aot.function(counted()[0], static_argnums=1)

    def gradient(power):
        return jax.eval_shape(jax.grad(lambda x: function(x, power % 6)), jnp.ones(3)).shape

    assert at_once(gradient, range(24)) == [(3,)] * 24
    assert len(function._binder.signatures) == 2


def test_a_pullback_and_a_compiled_pair_are_shared(tmp_path):
    loss, _ = counted()
    function, x = aot.function(loss), jnp.ones(3)
    want = jax.grad(loss)(x)
    _, pullback = function.vjp(x)
    made = function.trace(x).partition().compile(2)
    loaded = aot.load(function.export(tmp_path / "artefact", x, platforms="cpu"))
    cached = aot.function(loss, cache=tmp_path / "cache")
    ways = [
        lambda: pullback(ONE)[0],
        lambda: made.vjp(x)[1](ONE),
        lambda: loaded.value_and_grad(x)[1],
        lambda: loaded.vjp(x)[1](ONE),
        lambda: cached.value_and_grad(x)[1],
    ]
    for got in at_once(lambda way: way(), ways * 4):
        np.testing.assert_allclose(got, want)
