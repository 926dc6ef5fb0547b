"""The lanes of a mapped loop are kept apart where that can be seen, and a finished one puts no NaN into a gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.loops import lanes
from looped import near

X = jnp.array([4.0, 0.0, 30.0])
W = jnp.arange(12.0).reshape(3, 4)
APART = {
    "elementwise": lambda x: jnp.sin(x) * x + 1,
    "a matrix": lambda x: (x @ W.T @ W)[::-1],
    "a product of lanes' own": lambda x: jnp.outer(x, x) @ x,
    "a sum": lambda x: x / jnp.sum(x, axis=0, keepdims=True),
    "sorted": lambda x: jnp.sort(x) + jnp.cumsum(x),
    "pieces": lambda x: jnp.concatenate([x[1:], x[:1]]) + jnp.pad(x[2:], (1, 1)),
    "another shape": lambda x: x.reshape(2, 2).T.reshape(4) * jnp.where(x > 0, x, 0),
    "a rule": lambda x: jax.nn.relu(x) + jax.nn.silu(x),
    "a call": jax.jit(lambda x: jnp.argmax(x) + x),
    "rows of a table": lambda x: W.T[jnp.argmax(x)] @ W,
    "a loop of steps": lambda x: lax.scan(lambda c, w: (jnp.sin(c * w), w), x, W)[0],
    "a branch for all": lambda x: lax.cond(W[0, 0] > 1, jnp.sin, jnp.cos, x),
}
MIXED = {
    "a sum over lanes": lambda x: x + lax.psum(x, "lanes"),
    "the largest of all": lambda x: x + lax.pmax(x, "lanes"),
    "from the next": lambda x: lax.ppermute(x, "lanes", [(0, 1), (1, 2), (2, 0)]),
    "what has no rule": lambda x: x + lax.reduce(x, 0.0, lambda a, b: a + b + 0.0, (0,)),
    "all of them": lambda x: lax.all_gather(x, "lanes")[1] + x,
}


def is_apart(body, axis):
    closed = jax.make_jaxpr(jax.vmap(body, axis, 0, axis_name="lanes"))(jnp.ones((3, 4) if axis == 0 else (4, 3)))
    return lanes.apart(closed, [axis], 0)


@pytest.mark.parametrize("name", APART)
def test_lanes_that_are_apart(name):
    assert is_apart(APART[name], 0)
    assert is_apart(APART[name], 1)


@pytest.mark.parametrize("name", MIXED)
def test_lanes_that_are_mixed(name):
    assert not is_apart(MIXED[name], 0)


def test_a_finished_lane_puts_no_nan_into_a_gradient():
    def total(x, n):
        return jnp.sum(jax.vmap(lambda x, n: lax.fori_loop(0, n, lambda i, y: jnp.sqrt(y) - 1.0, x))(x, n))

    want = np.array([0.25, 1.0, 0.25 / (np.sqrt(30) * np.sqrt(np.sqrt(30) - 1))])
    near(aot.function(total).grad(X, jnp.array([1, 0, 2])), want, rtol=1e-6)


INSIDE = {
    "gather": lambda i, y: jnp.sin(y) * W[(i + jnp.argmax(y)) % 3],
    "scan": lambda i, y: lax.scan(lambda c, w: (jnp.sin(c * w), None), y, W / 9)[0],
    "while": lambda i, y: lax.while_loop(lambda z: jnp.sum(z) < 3.0, lambda z: z * 1.5, y * 0.5),
    "cond": lambda i, y: lax.cond(y[0] > 0.4, jnp.sin, jnp.cos, y),
}


@pytest.mark.parametrize("loop", [lax.fori_loop, aot.fori_loop], ids=["of jax", "ours"])
@pytest.mark.parametrize("name", INSIDE)
def test_lanes_of_different_trips_run_back_through_ops_with_bodies(name, loop):
    x, n = jax.random.uniform(jax.random.key(0), (3, 4)) + 0.1, jnp.array([0, 2, 5])

    def one(x, n):
        return jnp.sum(loop(0, n, INSIDE[name], x) ** 2)

    got = aot.function(lambda x: jnp.sum(jax.vmap(one)(x, n))).grad(x)
    alone = aot.function(one)
    near(got, jnp.stack([alone.grad(x[k], n[k]) for k in range(3)]), rtol=1e-5)


TABLE = jnp.array([5.0, 4.0, 3.0])


def unseen(i):
    """The same number, by an op that has no rule."""
    return lax.reduce(jnp.asarray(i, jnp.int32)[None], jnp.int32(0), lambda a, b: a + b + 0, (0,))


ENDS = {
    "a logarithm": lambda w, n, i: w * jnp.log((n - i) * 1.0),
    "a table": lambda w, n, i: w * jnp.log((n - i) * TABLE[i]),
    "what is not seen to be apart": lambda w, n, i: w * jnp.log((n - i) * TABLE[unseen(i)]),
    "a loop in the loop": lambda w, n, i: lax.fori_loop(0, n, lambda j, z: w * jnp.log((n - i) * 1.0) + z, 1.0),
}


@pytest.mark.parametrize("name", ENDS)
def test_nor_does_one_that_makes_no_trip_where_the_end_of_its_own_is_singular(name):
    def lane(loop, w, n):
        return loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + ENDS[name](w, n, c[0])), (0, 0.0))[1]

    def lanes_of(f):
        return lambda w: jnp.sum(jax.vmap(f, (None, 0))(w, jnp.array([0, 2])))

    def by_hand(w):
        return ENDS[name](w, 2, 0) + ENDS[name](w, 2, 1)

    w, plain = jnp.float32(2.0), partial(lane, lax.while_loop)
    want = jax.grad(by_hand)(w)
    near(aot.function(lanes_of(plain)).grad(w), want, rtol=1e-5)
    near(jax.grad(lanes_of(aot.function(plain)))(w), want, rtol=1e-5)


def test_constants_of_the_lanes_own_are_told_from_those_of_all():
    def step(x, own, shared):
        return jnp.sin(x * own) @ shared

    x, own, shared = jnp.ones((4, 4)), jnp.ones((4, 4)), jnp.ones((4, 4))
    closed = jax.make_jaxpr(lambda own, shared, x: jax.vmap(step, (0, 0, None))(x, own, shared))(own, shared, x)
    assert lanes.of_inputs([closed], closed.in_avals, 2) == [0, None, 0]


def test_steps_that_end_at_each_lanes_own_time():
    """The error of a step of length zero has an infinite derivative: it must not be taken."""

    def solved(a, end):
        def step(c):
            t, y = c
            h = jnp.minimum(0.25, end - t)
            error = jnp.sqrt(jnp.sum((h * a * y) ** 2))
            return t + h, y + h * a * y * (1 + 0.0 * error)

        return lax.while_loop(lambda c: c[0] < end, step, (jnp.float32(0), jnp.ones(2)))[1]

    ends = jnp.array([0.25, 1.0, 0.5])
    grads = aot.function(lambda a: jnp.sum(jax.vmap(solved, (None, 0))(a, ends))).grad(jnp.float32(0.3))
    near(grads, sum(2 * n * 0.25 * 1.075 ** (n - 1) for n in (1, 4, 2)), rtol=1e-5)


def test_lanes_that_read_each_other_see_a_finished_one_as_it_is():
    trips = np.array([1, 3, 2])

    def total(x, n):
        def lane(x, n):
            return lax.fori_loop(0, n, lambda i, y: jnp.sin(y) * lax.pmean(y, "lanes"), x)

        return jnp.sum(jax.vmap(lane, axis_name="lanes")(x, n))

    def by_hand(x):
        for i in range(3):
            x = jnp.where(i < trips, jnp.sin(x) * jnp.mean(x), x)
        return jnp.sum(x)

    near(aot.function(total).value_and_grad(X, jnp.asarray(trips)), jax.value_and_grad(by_hand)(X), rtol=1e-5)
