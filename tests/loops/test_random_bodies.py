"""Loops over random bodies are what Python's own loop over them is: values, gradients, both modes, to second order."""

from __future__ import annotations

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jointcut import aot
from looped import near

EXAMPLES = 24 if "JOINTCUT_EVERY_PROGRAM" in os.environ else 2
few = settings(deadline=None, max_examples=EXAMPLES, derandomize=True, database=None)
RNG = np.random.default_rng(3)
VECTOR, MATRIX = RNG.uniform(0.1, 0.9, 3), 0.4 * RNG.normal(size=(3, 3))
LANES = np.array([0, 3, 1], np.int32)
ROUNDING = {"float64": 1e-8, "float32": 2e-4, "complex64": 2e-4, "bfloat16": 0.15}


@pytest.fixture(autouse=True)
def in_double():
    """In float64 where nothing else is said, so that a wrong derivative is no rounding."""
    with jax.enable_x64(True):
        yield


def small(y):
    return y / (1 + jnp.sum(jnp.abs(y) ** 2))


def inner(loop, y, w):
    """A loop within the loop, whose trips follow from the carry."""
    return loop(y["n"] % 3, lambda j, z: jnp.sin(z + w[0]), y["y"])


def branch(loop, y, w):
    index = (y["n"] + y["flag"].astype(jnp.int32)) % 3
    return lax.switch(index, [lambda v: jnp.sin(v @ w), lambda v: v, lambda v: small(v) * jnp.exp(-(v**2))], y["y"])


#: What a step may do to the carry, of which `y` and `z` are differentiated.
MOVES = [
    lambda loop, y, w: {**y, "y": jnp.sin(w @ y["y"])},
    lambda loop, y, w: {**y, "y": y["y"][::-1] * 0.9, "z": y["z"] + 0.1 * y["y"]},
    lambda loop, y, w: {**y, "z": small(y["z"] * w[1]) + y["y"][0], "flag": ~y["flag"]},
    lambda loop, y, w: {**y, "y": jnp.where(y["flag"], y["y"], 0.5 * y["y"] + w[2])},
    lambda loop, y, w: {**y, "key": jax.random.fold_in(y["key"], y["n"]), "n": y["n"] + 2},
    lambda loop, y, w: {**y, "y": y["y"] * jax.random.uniform(y["key"], (3,), "float32").astype(y["y"].dtype)},
    lambda loop, y, w: {**y, "y": branch(loop, y, w)},
    lambda loop, y, w: {**y, "y": lax.cond(y["flag"], lambda v: jnp.tanh(v), lambda v: v * 0.7, y["y"])},
    lambda loop, y, w: {**y, "y": inner(loop, y, w)},
    lambda loop, y, w: {**y, "z": lax.scan(lambda c, r: (jnp.sin(c + r), None), y["z"], w)[0]},
    lambda loop, y, w: {**y, "z": jax.checkpoint(lambda v: small(jnp.sin(v) * w[0]))(y["z"])},
]


def by_python(n, body, init):
    for i in range(int(n)):
        init = body(i, init)
    return init


def program(moves, loop, x, w, n):
    """The loop, and numbers of what it returns; one part of the carry is passed on as it is."""
    carry = {"y": x, "z": x * 0.5, "n": jnp.int32(1), "flag": jnp.bool_(True), "key": jax.random.key(0), "none": None}

    def body(i, y):
        for move in moves:
            y = move(loop, y, w)
        return {**y, "n": y["n"] + 1}

    out = loop(n, body, carry)
    return jnp.sum(jnp.abs(out["y"] + out["z"])).astype("float32" if x.dtype.name != "float64" else "float64")


def plain(n, body, init):
    return lax.fori_loop(0, jnp.asarray(n, jnp.int32), body, init)


def ours(n, body, init, memory=None):
    return aot.fori_loop(0, jnp.asarray(n, jnp.int32), body, init, memory=memory, max_trips=50)


bodies = st.lists(st.sampled_from(MOVES), min_size=1, max_size=3)
memories = st.sampled_from([1, 2, 3, 7, None, "stack", "sqrt", "64KiB"])


@few
@given(bodies, memories, st.one_of(st.integers(0, 6), st.integers(7, 50)), st.sampled_from(sorted(ROUNDING)))
def test_gradients_are_those_of_pythons_loop(moves, memory, trips, dtype):
    x, w = jnp.asarray(VECTOR, dtype), jnp.asarray(MATRIX, dtype)
    with jax.numpy_dtype_promotion("standard"):
        want = jax.value_and_grad(partial(program, moves, by_python), (0, 1))(x, w, trips)
        kept = jax.jit(jax.value_and_grad(partial(program, moves, partial(ours, memory=memory)), (0, 1)))
        cut = aot.function(partial(program, moves, plain), argnums=(0, 1)).value_and_grad
        for got in (kept(x, w, trips), cut(x, w, jnp.int32(trips))):
            assert [v.dtype for v in jax.tree.leaves(got)] == [v.dtype for v in jax.tree.leaves(want)]
            near(got, want, rtol=ROUNDING[dtype])


@few
@given(bodies, memories, st.integers(0, 4))
def test_tangents_and_second_derivatives_are_those_of_pythons_loop(moves, memory, trips):
    def both(f):
        twice = jax.grad(lambda x, w: jnp.sum(jax.grad(f)(x, w) * w[0]), (0, 1))
        return jax.jvp(f, (VECTOR, MATRIX), (VECTOR, MATRIX)), twice(VECTOR, MATRIX)

    want = jax.jit(lambda: both(lambda x, w: program(moves, by_python, x, w, trips)))()
    kept, cut = partial(program, moves, partial(ours, memory=memory)), aot.function(partial(program, moves, plain))
    for f in (kept, cut):
        near(jax.jit(lambda f=f: both(lambda x, w: f(x, w, jnp.int32(trips))))(), want)


@few
@given(bodies, memories)
def test_mapped_each_lane_makes_its_own_trips(moves, memory):
    xs = np.stack([VECTOR, -VECTOR, 2 * VECTOR])

    def over(f):
        return lambda xs, w, n: jnp.sum(jax.vmap(f, (0, None, 0))(xs, w, n))

    def alone(x, n):
        return jax.jit(jax.grad(partial(program, moves, by_python, n=n), (0, 1)))(x, MATRIX)

    apart = [alone(x, n) for x, n in zip(xs, LANES, strict=True)]
    want = np.stack([x for x, _ in apart]), sum(w for _, w in apart)
    near(
        jax.jit(jax.grad(over(partial(program, moves, partial(ours, memory=memory))), (0, 1)))(xs, MATRIX, LANES), want
    )
    near(aot.function(over(partial(program, moves, plain)), argnums=(0, 1)).grad(xs, MATRIX, LANES), want)
    each = jax.vmap(jax.grad(aot.function(partial(program, moves, plain))), (0, None, 0))
    near(jax.jit(each)(xs, MATRIX, LANES), want[0])
