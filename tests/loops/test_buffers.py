"""Arrays that a loop provably fills row by row are in no checkpoint, and their gradients are right."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.loops.buffers import Buffer, buffers
from jointcut.aot.loops.counters import Counters
from jointcut.aot.loops.functions import traced_loop

ROWS, WIDTH, STEPS = 12, 3, 7
W = 0.3 * jnp.cos(jnp.arange(9.0)).reshape(WIDTH, WIDTH)
X = jnp.sin(jnp.arange(1.0, 1 + ROWS * WIDTH)).reshape(ROWS, WIDTH)


def row(array, w):
    return jnp.tanh(array @ w).sum(0)


def up(array, w, i):
    return array.at[i].set(row(array, w))


def up_by_slices(array, w, i):
    return lax.dynamic_update_slice(array, row(array, w)[None], (i + 2, 0))


def two_rows(array, w, i):
    return lax.dynamic_update_slice(array, jnp.stack([row(array, w), w[0]]), (i, 0))


def columns(array, w, i):
    return array.at[:, i].set(array @ w[0])


def added(array, w, i):
    return array.at[i].add(row(array, w))


def written_twice(array, w, i):
    return array.at[i].set(row(array, w)).at[0].set(w[0])


def sometimes(array, w, i):
    return jnp.where(w[0, 0] > i, array, array.at[i].set(row(array, w)))


def unread(array, w, i):
    return array.at[i].set(w[0])


def from_the_middle(array, w, i):
    return array.at[ROWS // 2 - i].set(row(array, w))


# body, first counter, its change, the predicate, and the buffer that is proved
CASES = {
    "at": (up, 0, 1, lambda i: i < STEPS, Buffer(1, 0, 0, 0, 1)),
    "at, by twos": (up, 1, 2, lambda i: i <= STEPS, Buffer(1, 0, 0, 0, 2, True)),
    "at, by twos, unread": (unread, 1, 2, lambda i: i <= STEPS, Buffer(1, 0, 0, 0, 2, True)),
    "at, downwards": (up, STEPS, -1, lambda i: i >= 0, Buffer(1, 0, 0, 0, -1)),
    "at, over the end": (up, 8, 1, lambda i: i < 8 + STEPS, Buffer(1, 0, 0, 0, 1)),
    "slices": (up_by_slices, 0, 1, lambda i: i < STEPS, Buffer(1, 0, 0, 2, 1)),
    "slices, limited from the left": (up_by_slices, 0, 1, lambda i: jnp.int32(STEPS) > i, Buffer(1, 0, 0, 2, 1)),
    "slices and another test": (up_by_slices, 0, 1, lambda i: (i < STEPS) & (i != 5), Buffer(1, 0, 0, 2, 1)),
    "two rows": (two_rows, 0, 2, lambda i: i < ROWS - 2, Buffer(1, 0, 0, 0, 2)),
    "columns": (columns, 0, 1, lambda i: i < WIDTH, Buffer(1, 1, 0, 0, 1)),
    "begins before the array": (up, -2, 1, lambda i: i < STEPS, None),
    "downwards below zero": (up, 3, -1, lambda i: i > -3, None),
    "slices that are moved": (up_by_slices, 0, 1, lambda i: i < ROWS, None),
    "slices that are moved, downwards": (up_by_slices, ROWS, -1, lambda i: i >= 0, None),
    "rows that overlap": (two_rows, 0, 1, lambda i: i < STEPS, None),
    "added": (added, 0, 1, lambda i: i < STEPS, None),
    "twice": (written_twice, 1, 1, lambda i: i < STEPS, None),
    "sometimes": (sometimes, 0, 1, lambda i: i < STEPS, None),
    "from the middle": (from_the_middle, 0, 1, lambda i: i < STEPS, None),
}


def loss(loop, case, w, x):
    body, first, change, test, _ = CASES[case]

    def step(carry):
        i, array = carry
        return i + change, body(array, w, i)

    return jnp.sum(jnp.cos(loop(lambda carry: test(carry[0]), step, (first, x))[1]))


def unrolled(cond_fun, body_fun, carry):
    i, array = carry
    with jax.ensure_compile_time_eval():
        goes_on = bool(cond_fun((jnp.int32(i), None)))
    return unrolled(cond_fun, body_fun, body_fun((i, array))) if goes_on else carry


@pytest.mark.parametrize("case", CASES)
def test_the_proof(case):
    body, first, change, test, want = CASES[case]

    def step(carry):
        return carry[0] + change, body(carry[1], W, carry[0])

    loop = traced_loop(lambda carry: test(carry[0]), step, (first, X), step)
    assert buffers(loop.parts, Counters.of(loop.parts, loop.known)).get(1) == want


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_unrolled_loop(case):
    ours = partial(aot.while_loop, memory=2)
    got, want = (jax.jit(jax.grad(partial(loss, loop, case), (0, 1)))(W, X) for loop in (ours, unrolled))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "cast", "trips", "rows"), [
    ("int8", "int8", 300, 100),
    ("int32", "int8", 300, 100),
    ("uint8", "uint8", 100, 300),  # no index wraps around, and the rows are more than a uint8 counts
])  # fmt: skip
def test_an_index_that_wraps_around_writes_rows_again(kind, cast, trips, rows):
    def filled(loop, w):
        def body(c):
            x = jnp.sin(c[2] * w) + 0.1
            return c[0] + 1, c[1] + np.ones((), kind), x, c[3].at[c[1].astype(cast)].set(x)

        out = loop(trips, body, (0, np.zeros((), kind), w, jnp.zeros((rows, 2))))
        return jnp.sum(jnp.cos(out[3]))

    def ours(trips, body, init):
        return aot.while_loop(lambda c: c[0] < trips, body, init)

    def plain(trips, body, init):
        return lax.while_loop(lambda c: c[0] < trips, body, init)

    def scanned(trips, body, init):
        return lax.scan(lambda c, _: (body(c), None), init, length=trips)[0]

    w = jnp.array([0.3, 0.7])
    want = jax.grad(partial(filled, scanned))(w)
    for got in (jax.grad(partial(filled, ours))(w), aot.function(partial(filled, plain)).grad(w)):
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_mapped_and_to_second_order():
    def ours(w, x):
        return loss(aot.while_loop, "at", w, x)

    def plain(w, x):
        return loss(unrolled, "at", w, x)

    many = jnp.stack([X, -X])
    for f, g in ((jax.grad(ours), jax.grad(plain)), (jax.hessian(ours), jax.hessian(plain))):
        mapped = (jax.jit(jax.vmap(h, (None, 0)))(W, many) for h in (f, g))
        np.testing.assert_allclose(*mapped, rtol=1e-4, atol=1e-5)


def test_memory_grows_with_the_rows_and_not_with_their_square():
    def temporaries(loop, rows):
        def filled(w, x):
            array = jnp.zeros((rows, WIDTH)).at[0].set(x)
            return jnp.sum(loop(1, rows, lambda i, a: up(a, w, i), array))

        compiled = jax.jit(jax.grad(filled)).lower(W, X[0]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = (temporaries(aot.fori_loop, rows) for rows in (100, 1000))
    assert large < 12 * small
    assert temporaries(lax.fori_loop, 1000) > 20 * large
