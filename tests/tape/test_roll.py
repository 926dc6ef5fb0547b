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
LENGTHS = (1, 3, 4, 18)


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
        if length == 3:
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
    assert [str(capture) for capture in rolled.captures] == ["20 ops, 1 hit, 192 B kept: the first call"]
    rolled = aot.tape(recurrent, roll=True)
    for length in (1, 6):
        rolled.grad(WEIGHTS, INPUTS[:length])
    assert rolled.captures[1].why == "equal blocks of 3 ops are a loop"


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


def half_and(x):
    return lambda g: g * 0.5 + x


def scaled_by(factor):
    return lambda g: factor * g


def traced_hooks(p, xs):
    """A hook on each state reads an array of its step."""
    h = jnp.zeros(3)
    for x in xs:
        h = aot.on_cotangent(jnp.tanh(p @ h + x), half_and(x), traced=True)
    return jnp.sum(h)


def call_hooks(p, xs):
    """Each step is a call with hooks before and after its backward."""
    cell = aot.hooked(
        lambda p, h, x: jnp.tanh(p @ h + x),
        pre_hook=lambda ct: 2 * ct,
        post_hook=lambda grads, ct: (grads[0], grads[1] + ct, None),
        traced=True,
    )
    h = p[0]
    for x in xs:
        h = cell(p, h * 1.5, x)
    return jnp.sum(h)


def layered(p, xs):
    """Each step has two parameters of its own, one of which it reads twice."""
    h = jnp.ones(3)
    for layer, x in zip(p["layers"], xs, strict=False):
        h = jnp.tanh(layer["w"] @ h + layer["b"] * x) + layer["b"]
    return jnp.sum(h * p["end"])


def gathered(p, xs):
    """The results of all steps are stacked."""
    hs = [jnp.zeros(3)]
    for x in xs:
        hs.append(jnp.tanh(p @ hs[-1] + x))
    return jnp.sum(jnp.stack(hs) ** 2)


def gathered_twice(p, xs):
    """Two results of each second step are read by all that follows, and the last one is not."""
    hs, h = [], jnp.ones(3)
    for i, x in enumerate(xs):
        c = jnp.sin(h * x)
        h = jnp.tanh(p @ c)
        hs += [h, c] if i % 2 == 0 else []
    return jnp.sum(jnp.concatenate(hs) ** 2)


PARAMETERS = {"layers": [{"w": WEIGHTS + i / 50, "b": STATE * i} for i in range(19)], "end": STATE}
MORE = {
    "traced hooks": (traced_hooks, WEIGHTS, 2),
    "hooks of calls": (call_hooks, WEIGHTS, 2),
    "own parameters": (layered, PARAMETERS, 2),
    "stacked": (gathered, WEIGHTS, 4),
    "stacked now and then": (gathered_twice, WEIGHTS, 4),
}


@pytest.mark.parametrize("name", MORE)
def test_blocks_with_hooks_parameters_of_their_own_and_stacked_results_are_rolled(name):
    loss, p, captures = MORE[name]
    rolled, plain = aot.tape(loss, roll=True), aot.tape(loss)
    for length in (5, 18, 19):
        with aot.tape.disabled():
            want = plain.grad(p, INPUTS[:length])
        near(rolled.grad(p, INPUTS[:length]), want)
    assert rolled.captures.made <= captures
    assert "jointcut_hook" in rolled.captures[0].text
    assert rolled.captures[0].text.count(" = ") < 35 + 20 * (captures - 2)


def test_hooks_that_are_called_back_are_called_block_by_block():
    def loss(p, xs, note):
        h = jnp.zeros(3)
        p = aot.post_accumulate(p, lambda g: note("p"))
        for i, x in enumerate(xs):
            h = aot.on_cotangent(jnp.tanh(p @ h + x), lambda g, i=i: note((i, np.asarray(g).round(4).tolist())))
            h = aot.hooked(jnp.sin, post_hook=lambda grads, ct, i=i: note(("sin", i)))(h)
        return jnp.sum(h)

    logs = {}
    for way in ("rolled", "plain"):
        logs[way] = []
        taped = aot.tape(loss, roll=way == "rolled")
        for length in (4, 5):
            got = taped.grad(WEIGHTS, INPUTS[:length], logs[way].append)
            near(got, jax.grad(lambda p, n=length: loss(p, INPUTS[:n], lambda what: None))(WEIGHTS))
        assert taped.captures.made == (1 if way == "rolled" else 2)
    assert logs["rolled"] == logs["plain"]
    assert [what[1] for what in logs["plain"][:8:2]] == [3, 2, 1, 0]


def test_arrays_that_hooks_of_blocks_read_are_inputs():
    def loss(p, xs, factor):
        h = jnp.ones(3)
        for x in xs:
            h = aot.on_cotangent(jnp.tanh(p @ h + x), scaled_by(factor), traced=True)
        return jnp.sum(h)

    rolled, plain = aot.tape(loss, roll=True), aot.tape(loss)
    for factor in (0.5, 0.7):
        near(*(way.grad(WEIGHTS, INPUTS[:5], jnp.float32(factor)) for way in (rolled, plain)))
    assert [capture.hits for capture in rolled.captures] == [1]


def test_parameters_of_blocks_with_references_or_hooks_are_not_handed_out_by_the_loop():
    p = {"layers": PARAMETERS["layers"][:6], "end": STATE}
    want = jax.grad(layered)(p, INPUTS)
    rolled, seen = aot.tape(layered, roll=True), []
    refs = jax.tree.map(lambda x: jax.new_ref(jnp.ones_like(x)), p)
    rolled.accumulate_into(refs)(p, INPUTS)
    near(jax.tree.map(lambda ref: ref[...], refs), jax.tree.map(lambda g: g + 1, want))

    def noted(p, xs):
        layers = [aot.post_accumulate(x, lambda g: seen.append(g.shape)) for x in (p["layers"][2]["w"],)]
        return layered(p, xs) + 0 * jnp.sum(layers[0])

    near(aot.tape(noted, roll=True).grad(p, INPUTS), want)
    assert seen == [(3, 3)]


def test_a_second_derivative_goes_through_the_loop_and_parameters_of_its_blocks():
    p = {"layers": PARAMETERS["layers"][:3], "end": STATE}
    rolled = aot.tape(layered, roll=True)
    second = aot.tape(lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(rolled.grad(p, INPUTS))))
    want = jax.grad(lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(layered)(p, INPUTS))))(p)
    near(second.grad(p), want)
    assert len(rolled.captures) == 1


def packed(p, xs):
    h = jnp.zeros(3)
    for x in xs:
        with aot.saved_arrays(lambda x: x * 2, aot.Hook(lambda x: x / 2, traced=True)):
            h = jnp.tanh(p @ h + x)
    return jnp.sum(h)


def test_what_cannot_be_rolled_is_captured_as_it_is():
    rolled, plain = aot.tape(packed, roll=True), aot.tape(packed)
    near(rolled.grad(WEIGHTS, INPUTS[:7]), plain.grad(WEIGHTS, INPUTS[:7]))
    assert rolled.captures[0].ops == plain.captures[0].ops
    assert "jointcut_hook" not in rolled.captures[0].text


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(["sin", "dot", "gate", "mix", "scale", "state", "hook", "own"]), min_size=1, max_size=5),
    st.lists(st.integers(1, 18), min_size=2, max_size=2),
    st.sampled_from(["last", "sum of all", "stacked"]),
)
def test_random_loops_have_the_gradients_of_jax(ops, lengths, end):
    def loss(p, xs):
        w, h, c, total, states = p["w"] * 2, p["h"] + 1, p["h"], 0.0, []
        for k, x in enumerate(xs):
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
                elif op == "hook":
                    h = aot.on_cotangent(h * 1.5, lambda g: 0.5 * g, traced=True)
                elif op == "own":
                    h = h * p["own"][k]
                else:
                    c = c * 0.5 + p["h"]
            states.append(h)
            total = total + jnp.sum(h * x)
        if end == "stacked":
            return jnp.sum(jnp.stack(states) ** 2)
        return total if end == "sum of all" else jnp.sum(h) + jnp.sum(c)

    rolled, p = aot.tape(loss, roll=True), {"w": WEIGHTS, "h": STATE, "own": [STATE + k / 20 for k in range(18)]}
    for length in lengths:
        near(rolled.grad(p, INPUTS[:length]), jax.grad(loss)(p, INPUTS[:length]))
