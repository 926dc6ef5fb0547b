"""Loops of all lengths share one program where the part that repeats is found, and gradients are those of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jointcut import aot

WEIGHTS = jnp.array([[0.4, -0.3, 0.2], [0.1, 0.5, -0.2], [-0.4, 0.2, 0.3]])
STATE = jnp.array([0.2, -0.1, 0.4])
INPUTS = [jnp.sin(jnp.arange(3.0) + i) for i in range(40)]


def recurrent(p, xs):
    h = jnp.zeros(3)
    for x in xs:
        h = jnp.tanh(p @ h + x)
    return jnp.sum(h**2)


def with_state(p, xs):
    """The first state is a parameter, and weights are made before the loop."""
    w, h = p["w"] * 0.5, p["h"]
    for x in xs:
        h = jnp.tanh(w @ h + x) + h * p["h"]
    return jnp.sum(h**2)


def with_losses(p, xs):
    """Each step adds to the loss."""
    h, loss = jnp.zeros(3), 0.0
    for x in xs:
        h = jnp.sin(p @ h + x)
        loss = loss + jnp.sum(h * x)
    return loss


def with_cells(p, xs):
    """Two states, and branches of Python in each step."""
    h, c = jnp.zeros(3), jnp.ones(3)
    for x in xs:
        i, u = jax.nn.sigmoid(p @ h + x), jnp.tanh(p.T @ h)
        c = i * u + (1 - i) * c
        h = jnp.tanh(c) if float(x[0]) < 2 else c
    return jnp.sum(h * c)


def with_calls(p, xs):
    """A step is a call of a jitted function."""
    h = jnp.zeros(3)
    for x in xs:
        h = step(p, h, x)
    return jnp.sum(h)


@jax.jit
def step(p, h, x):
    return jnp.tanh(p @ h + x) * jnp.exp(-h)


LOOPS = {
    "recurrent": (recurrent, WEIGHTS),
    "with state": (with_state, {"w": WEIGHTS, "h": STATE}),
    "with losses": (with_losses, WEIGHTS),
    "with cells": (with_cells, WEIGHTS),
    "with calls": (with_calls, WEIGHTS),
}
LENGTHS = (1, 2, 3, 4, 17, 18, 34)


def near(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("name", LOOPS)
def test_gradients_are_those_of_jax_at_every_length(name):
    loss, p = LOOPS[name]
    rolled, plain = aot.tape(loss, roll=True), aot.tape(loss)
    for length in LENGTHS:
        got = rolled.grad(p, INPUTS[:length])
        with aot.tape.disabled():
            near(got, plain.grad(p, INPUTS[:length]))
        if length == 18:
            near(got, jax.grad(loss)(p, INPUTS[:length]))
    assert rolled.captures.made <= 3, rolled.captures
    assert rolled.captures[-1].hits >= len(LENGTHS) - 3


def test_without_rolling_each_length_is_captured():
    plain = aot.tape(recurrent)
    for length in (1, 2, 3, 4, 3):
        plain.grad(WEIGHTS, INPUTS[:length])
    assert plain.captures.made == 4


def test_a_capture_says_that_blocks_are_a_loop():
    rolled = aot.tape(recurrent, roll=True)
    for length in (6, 9):
        rolled.grad(WEIGHTS, INPUTS[:length])
    assert [str(capture) for capture in rolled.captures] == ["21 ops, 1 hit, 192 B kept: the first call"]
    rolled = aot.tape(recurrent, roll=True)
    for length in (1, 6):
        rolled.grad(WEIGHTS, INPUTS[:length])
    assert rolled.captures[1].why == "equal blocks of 3 ops are a loop"


def test_a_second_derivative_goes_through_the_loop():
    rolled = aot.tape(recurrent, roll=True)
    second = aot.tape(lambda p: jnp.sum(rolled.grad(p, INPUTS[:6]) ** 2))
    near(second.grad(WEIGHTS), jax.grad(lambda p: jnp.sum(jax.grad(recurrent)(p, INPUTS[:6]) ** 2))(WEIGHTS))
    assert len(rolled.captures) == 1


def test_a_retained_pullback_runs_its_loop_again():
    rolled = aot.tape(lambda p: recurrent(p, INPUTS[:20]), roll=True)
    _, pullback = rolled.vjp(WEIGHTS)
    _, want = jax.vjp(lambda p: recurrent(p, INPUTS[:20]), WEIGHTS)
    for scale in (1.0, -2.0):
        near(pullback(jnp.float32(scale)), want(jnp.float32(scale)))


def test_hooks_outside_of_the_blocks_are_called():
    log = []

    @aot.tape(roll=True)
    def loss(p, xs):
        p = aot.post_accumulate(p, lambda g: log.append("complete"))
        return aot.on_cotangent(recurrent(p, xs), lambda g: log.append("loss"))

    near(loss.grad(WEIGHTS, INPUTS[:9]), jax.grad(recurrent)(WEIGHTS, INPUTS[:9]))
    assert log == ["loss", "complete"]


def hooked(p, xs):
    h = jnp.zeros(3)
    for x in xs:
        h = aot.on_cotangent(jnp.tanh(p @ h + x), lambda g: g * 0.5)
    return jnp.sum(h)


def gathered(p, xs):
    hs = [jnp.zeros(3)]
    for x in xs:
        hs.append(jnp.tanh(p @ hs[-1] + x))
    return jnp.sum(jnp.stack(hs) ** 2)


def layered(p, xs):
    h = jnp.ones(3)
    for x in p["layers"]:
        h = jnp.tanh(x * h)
    return jnp.sum(h * xs[0])


UNROLLED = {"hooked": (hooked, WEIGHTS), "gathered": (gathered, WEIGHTS), "layered": (layered, {"layers": INPUTS[:7]})}


@pytest.mark.parametrize("name", UNROLLED)
def test_what_cannot_be_rolled_is_captured_as_it_is(name):
    loss, p = UNROLLED[name]
    rolled, plain = aot.tape(loss, roll=True), aot.tape(loss)
    near(rolled.grad(p, INPUTS[:7]), plain.grad(p, INPUTS[:7]))
    assert rolled.captures[0].ops == plain.captures[0].ops
    assert "jointcut_hook" not in rolled.captures[0].text


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(["sin", "dot", "gate", "mix", "scale", "state"]), min_size=1, max_size=5),
    st.lists(st.integers(1, 20), min_size=2, max_size=3),
    st.sampled_from(["last", "sum of all"]),
)
def test_random_loops_have_the_gradients_of_jax(ops, lengths, end):
    def loss(p, xs):
        w, h, c, total = p["w"] * 2, jnp.ones(3), p["h"], 0.0
        for x in xs:
            for op in ops:
                if op == "sin":
                    h = jnp.sin(h + x)
                elif op == "dot":
                    h = jnp.tanh(w @ h)
                elif op == "gate":
                    h, c = jax.nn.sigmoid(h) * c, jnp.tanh(c + h)
                elif op == "mix":
                    h = h * p["h"] + c
                elif op == "scale":
                    h = h / (1 + jnp.sum(h**2))
                else:
                    c = c * 0.5 + p["h"]
            total = total + jnp.sum(h * x)
        return total if end == "sum of all" else jnp.sum(h) + jnp.sum(c)

    rolled, p = aot.tape(loss, roll=True), {"w": WEIGHTS, "h": STATE}
    for length in lengths:
        near(rolled.grad(p, INPUTS[:length]), jax.grad(loss)(p, INPUTS[:length]))
