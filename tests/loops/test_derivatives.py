"""Derivatives of `aot.while_loop` are those of the unrolled loop: any memory, number type, mode, order and map."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.eagerly import traced
from jointcut import aot
from looped import MATRIX, VECTOR, masked, near, ours, unrolled
from programs import EVERY_PROGRAM

MEMORIES = [1, 2, 3, 7, None, "stack", "sqrt", "1KiB"]
LANES = np.random.default_rng(1).uniform(0.1, 0.9, (4, 4))
TRIPS = np.array([0, 3, 1, 9], np.int32)
ARGS = (VECTOR, MATRIX)


@pytest.fixture(autouse=True)
def in_double():
    """In float64, so that a wrong derivative is no rounding."""
    with jax.enable_x64(True):
        yield


def loss(loop):
    return lambda x, w, *n: (loop(x, w, *n) ** 2).sum()


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_gradients_equal_those_of_the_unrolled_loop_in_every_memory(memory):
    most = 50 if memory in ("stack", "sqrt") else None
    grads = jax.jit(jax.value_and_grad(loss(lambda x, w, n: ours(x, w, n, memory, most)), (0, 1)))
    for n in (0, 1, 2, 3, 8, 21, 50):
        near(grads(*ARGS, n), of_the_unrolled_loop(n))


@cache
def of_the_unrolled_loop(n):
    return jax.jit(jax.value_and_grad(loss(partial(unrolled, n=n)), (0, 1)))(*ARGS)


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("bfloat16", 5e-2), ("complex64", 1e-5)])
def test_gradients_equal_those_of_the_unrolled_loop_in_every_number_type(dtype, rtol):
    x, w = (jnp.asarray(v, dtype) for v in ARGS)

    def grad(loop):
        return jax.grad(lambda x, w, *n: jnp.abs(loop(x, w, *n)).sum().astype(jnp.float32), (0, 1))

    by_loop = jax.jit(grad(ours))
    for n in (0, 1, 6):
        grads = by_loop(x, w, n), traced(grad(partial(unrolled, n=n)), (x, w))
        assert [g.dtype for g in grads[0]] == [x.dtype, w.dtype]
        near(*grads, rtol=rtol)


ORDERS = {
    "forward": lambda f: jax.jacfwd(f, (0, 1)),
    "reverse": lambda f: jax.jacrev(f, (0, 1)),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f, (0, 1)), (0, 1)),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f, (0, 1)), (0, 1)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f, (0, 1)), (0, 1)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f, (0, 1)), (0, 1)),
}


@pytest.mark.parametrize("order", ORDERS if EVERY_PROGRAM else [order for order in ORDERS if "over" in order])
def test_every_mode_to_second_order_equals_that_of_the_unrolled_loop(order):
    derivative = jax.jit(ORDERS[order](loss(ours)))
    for n in (0, 1, 4) if EVERY_PROGRAM else (0, 3):
        near(derivative(*ARGS, n), jax.jit(ORDERS[order](loss(partial(unrolled, n=n))))(*ARGS))


def test_the_third_derivative_is_right():
    def power(x):
        return aot.fori_loop(0, jnp.int32(5), lambda i, y: y * x, x, memory=2)

    assert jax.jit(jax.grad(jax.grad(jax.grad(power))))(2.0) == 6 * 5 * 4 * 8.0


GRADS = jax.grad(loss(ours), (0, 1)), jax.grad(loss(masked), (0, 1))
MAPPED = {
    "values": lambda f, g, x, w, n: jax.vmap(f, (0, None, 0))(x, w, n),
    "map of gradients": lambda f, g, x, w, n: jax.vmap(g, (0, None, 0))(x, w, n),
    "map of gradients, same trips": lambda f, g, x, w, n: jax.vmap(g, (0, None, None))(x, w, n[3] - 4),
    "gradient of a map": lambda f, g, x, w, n: jax.grad(
        lambda x, w: (jax.vmap(f, (0, None, 0))(x, w, n) ** 2).sum(), (0, 1)
    )(x, w),
    "gradient of a map, same trips": lambda f, g, x, w, n: jax.grad(
        lambda x, w: (jax.vmap(f, (0, None, None))(x, w, n[1] + 1) ** 2).sum(), (0, 1)
    )(x, w),
    "map of maps": lambda f, g, x, w, n: jax.vmap(lambda m: jax.vmap(g, (0, None, 0))(x, w, n * m))(jnp.arange(3)),
    "map of a gradient of a map": lambda f, g, x, w, n: jax.vmap(
        lambda m: jax.grad(lambda x: jax.vmap(f, (0, None, 0))(x, w, n * m).sum())(x)
    )(jnp.arange(3)),
    "map of pullbacks": lambda f, g, x, w, n: jax.vmap(lambda p, c: p(c))(
        jax.vmap(lambda x, n: jax.vjp(lambda x: f(x, w, n), x)[1])(x, n), jnp.ones((4, 4))
    ),
    "map of hessians": lambda f, g, x, w, n: jax.vmap(jax.hessian(lambda x, n: f(x, w, n).sum()))(x, n),
    "gradient of a map of gradients": lambda f, g, x, w, n: jax.grad(
        lambda x: (jax.vmap(g, (0, None, 0))(x, w, n)[0] ** 2).sum()
    )(x),
}


#: Others say the same of trips that are the same, and of a map of a map.
REPEATED = () if EVERY_PROGRAM else ("map of gradients, same trips", "map of maps")


@pytest.mark.parametrize("case", [case for case in MAPPED if case not in REPEATED])
def test_under_vmap_each_lane_makes_its_own_number_of_trips(case):
    found = [
        jax.jit(partial(MAPPED[case], loop, gradient))(LANES, MATRIX, TRIPS)
        for loop, gradient in zip((ours, masked), GRADS, strict=True)
    ]
    near(*found)


@pytest.mark.parametrize("case", ["map of gradients", "map of hessians"])
def test_all_lanes_have_as_many_checkpoints_as_one_whatever_they_take(case):
    less = partial(ours, memory="128B")
    found = [
        jax.jit(partial(MAPPED[case], loop, jax.grad(loss(loop), (0, 1))))(LANES, MATRIX, TRIPS)
        for loop in (less, masked)
    ]
    near(*found)


AROUND = {
    "jit of grad of jit": lambda f: jax.jit(jax.grad(jax.jit(loss(f)), (0, 1)))(*ARGS, 6),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f)), (0, 1))(*ARGS, 6),
    "scan": lambda f: jax.grad(
        lambda x, w: jax.lax.scan(lambda c, n: (f(c, w, n), None), x, jnp.asarray(TRIPS))[0].sum(), (0, 1)
    )(*ARGS),
    "cond": lambda f: jax.grad(lambda x: jax.lax.cond(x[0] > 0, lambda: f(x, MATRIX, 3), lambda: x).sum())(VECTOR),
    "linearize": lambda f: jax.linearize(lambda x: f(x, MATRIX, 6), VECTOR)[1](VECTOR),
    "transpose of linearize": lambda f: jax.linear_transpose(
        jax.linearize(lambda x: f(x, MATRIX, 6), VECTOR)[1], VECTOR
    )(VECTOR),
    "aot.function": lambda f: jax.grad(aot.function(lambda x, w: loss(f)(x, w, 6)), (0, 1))(*ARGS),
}


@pytest.mark.parametrize("case", AROUND)
def test_inside_of_other_transformations(case):
    near(AROUND[case](ours), AROUND[case](masked))


def test_a_finished_lane_puts_no_nan_into_a_gradient():
    def roots(x, n):
        return aot.fori_loop(0, n, lambda i, y: jnp.sqrt(y) - 1.0, x, memory=2)

    x, n = jnp.array([4.0, 0.0, 30.0]), jnp.array([1, 0, 2])
    apart = np.array([0.25, 1.0, 0.25 / (np.sqrt(30) * np.sqrt(np.sqrt(30) - 1))])
    near(jax.grad(lambda x: jax.vmap(roots)(x, n).sum())(x), apart)
    near(jax.vmap(jax.grad(roots))(x, n), apart)


def test_nor_does_one_whose_lanes_read_each_other():
    def lane(w, n):
        def body(c):
            return c[0] + 1, c[1] + w * jnp.log(1.0 * (n - c[0])) * jax.lax.pmean(c[2], "lanes"), c[2]

        return aot.while_loop(lambda c: c[0] < n, body, (0, 0.0, w))[1]

    lanes = jax.vmap(lane, (None, 0), axis_name="lanes")
    near(jax.grad(lambda w: lanes(w, jnp.array([0, 2])).sum())(2.0), 2 * 2.0 * np.log(2.0))


def test_a_loop_of_jaxs_in_a_body_runs_backwards():
    def nest(x):
        def body(c):
            return c[0] + 1, jax.lax.fori_loop(0, c[0], lambda j, z: jnp.sin(z), c[1])

        return aot.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

    want = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(1.0)
    near(jax.grad(nest)(1.0), want)
    near(aot.function(nest).grad(1.0), want)


def test_nested_loops():
    def nest(loop):
        return lambda x, n: loop(n, lambda i, y: loop(i, lambda j, z: jnp.sin(z) * x, y), x)

    kept = nest(lambda n, body, y: aot.fori_loop(0, n, body, y, memory=2))

    def by_python(n, body, y):
        for i in range(n):
            y = body(i, y)
        return y

    for order in (jax.grad, lambda f: jax.grad(jax.grad(f))):
        near(jax.jit(order(kept))(1.3, jnp.int32(3)), jax.jit(order(partial(nest(by_python), n=3)))(1.3))
    mapped = jax.jit(jax.vmap(jax.grad(kept), (None, 0)))
    near(mapped(1.3, jnp.array([0, 3]))[1], jax.grad(nest(by_python))(1.3, 3))
