"""References in the bodies of loops: what plain JAX runs, ours run, and differentiate too."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.errors import DerivativeError, TraceError
from pythonic import Box

HERE = r"\S*test_references\.py"
X = jnp.array([1.0, 0.5, -0.3])


class Unrolled:
    """Loops of Python."""

    new_ref = Box

    @staticmethod
    def while_loop(cond, body, carry):
        while cond(carry):
            carry = body(carry)
        return carry

    @staticmethod
    def fori_loop(lower, upper, body, carry):
        for i in range(lower, upper):
            carry = body(i, carry)
        return carry

    @staticmethod
    def scan(f, carry, xs):
        ys, is_held = [], isinstance(xs, Box)
        for i in range(len(xs.x if is_held else xs)):
            row = Box(xs[i]) if is_held else xs[i]
            carry, y = f(carry, row)
            ys.append(y)
            if is_held:
                xs[i] = row[...]
        return carry, jnp.stack(ys)


class Lax:
    """JAX's loops."""

    new_ref = jax.new_ref
    while_loop, fori_loop, scan = lax.while_loop, lax.fori_loop, lax.scan


class Ours(Lax):
    """Our loops."""

    while_loop, fori_loop, scan = aot.while_loop, aot.fori_loop, aot.scan


def summed(loops, x):
    ref = loops.new_ref(jnp.zeros(3))

    def body(c):
        i, y = c
        ref[...] = ref[...] + y * y
        return i + 1, jnp.sin(y)

    _, y = loops.while_loop(lambda c: c[0] < 3, body, (0, x))
    return jnp.sum(y) + jnp.sum(ref[...])


def only_read(loops, x):
    ref = loops.new_ref(2 * x)
    _, y = loops.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, jnp.sin(c[1]) * ref[...]), (0, x))
    return jnp.sum(y)


def no_trips(loops, x):
    ref = loops.new_ref(x)

    def body(c):
        ref[...] = ref[...] * 2
        return c + 1

    loops.while_loop(lambda c: c < 0, body, 0)
    return jnp.sum(ref[...])


def made_inside(loops, x):
    def body(c):
        ref = loops.new_ref(c[1])
        ref[...] = ref[...] * ref[0]
        return c[0] + 1, ref[...]

    return jnp.sum(loops.while_loop(lambda c: c[0] < 3, body, (0, x))[1])


def nested(loops, x):
    ref, other = loops.new_ref(jnp.zeros(3)), loops.new_ref(x)

    def inner(d):
        ref[...] = ref[...] + d[1] * other[0]
        return d[0] + 1, d[1]

    def body(c):
        loops.while_loop(lambda d: d[0] < 2, inner, (0, c[1]))
        other[0] = other[0] * 1.5
        return c[0] + 1, jnp.sin(c[1])

    loops.while_loop(lambda c: c[0] < 3, body, (0, x))
    return jnp.sum(ref[...])


def by_counter(loops, x):
    ref = loops.new_ref(jnp.zeros(3))

    def body(i, y):
        ref[i] = jnp.sum(y)
        return y * x

    return jnp.sum(loops.fori_loop(0, 3, body, x) * ref[...])


def scanned(loops, x):
    ref = loops.new_ref(jnp.float32(1.0))

    def step(c, row):
        ref[...] = ref[...] * row
        return jnp.sin(c + row), ref[...] * c

    c, ys = loops.scan(step, jnp.float32(0.1), x)
    return c + jnp.sum(ys) + ref[...]


def over_a_reference(loops, x):
    rows = loops.new_ref(x * 1.0)

    def step(c, row):
        row[...] = row[...] * c
        return jnp.sin(c) + row[...], row[...]

    c, ys = loops.scan(step, jnp.float32(0.1), rows)
    return c + jnp.sum(ys * rows[...])


PROGRAMS = [summed, only_read, no_trips, made_inside, nested, by_counter, scanned, over_a_reference]
each = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


def near(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def unrolled(program):
    """Return the value and the gradient by loops of Python."""
    return jax.value_and_grad(lambda x: program(Unrolled, x))(X)


@each
def test_our_loops_have_the_values_and_gradients_of_loops_of_python(program):
    def loss(x):
        return program(Ours, x)

    want = unrolled(program)
    near(loss(X), want[0])
    near(jax.jit(loss)(X), program(Lax, X))
    near(jax.value_and_grad(loss)(X), want)
    near(jax.jvp(loss, (X,), (X,)), (want[0], want[1] @ X))
    near(jax.vmap(loss)(jnp.stack([X, 2 * X])), [loss(X), loss(2 * X)])


@each
def test_loops_of_jax_and_ours_run_backwards_in_a_function_and_on_a_tape(program):
    want = unrolled(program)
    for loops in (Lax, Ours):
        near(aot.function(lambda x, loops=loops: program(loops, x)).value_and_grad(X), want)
        taped = aot.tape(lambda x, loops=loops: program(loops, x))
        for _ in range(2):
            near(taped.value_and_grad(X), want)
        assert len(taped.captures) == 1


@pytest.mark.parametrize("loops", [Lax, Ours], ids=["jax", "ours"])
@pytest.mark.parametrize("call", [lambda f: f, jax.jit, jax.grad, aot.function, lambda f: aot.function(f).grad])
def test_a_reference_from_outside_counts_steps(loops, call):
    count = jax.new_ref(jnp.int32(0))

    def loss(x):
        def body(c):
            count[...] += 1
            return c[0] + 1, c[1] * 2

        trips = lax.stop_gradient(jnp.int32(jnp.sum(x) * 0)) + 3
        return jnp.sum(loops.while_loop(lambda c: c[0] < trips, body, (0, x))[1])

    if call is jax.grad and loops is Lax:
        return  # JAX differentiates no `lax.while_loop`
    call(loss)(X)
    assert count[...] == 3


def test_a_predicate_may_read_a_reference():
    def root(x):
        ref = jax.new_ref(x)

        def body(i):
            ref[...] = ref[...] * ref[...]
            return i + 1

        return aot.while_loop(lambda i: ref[...] < 100.0, body, 0) + ref[...]

    assert root(3.0) == 3.0**8 + 3
    near(jax.grad(root)(3.0), 8 * 3.0**7)


def test_trips_are_checked_with_references_too():
    ref = jax.new_ref(jnp.zeros(3))

    def body(c):
        ref[...] += c[1]
        return c[0] + 1, c[1]

    aot.while_loop(lambda c: c[0] < 3, body, (0, X), max_trips=3)
    near(ref[...], 3 * X)


@jax.custom_jvp
def ruled(ref, x):
    return ref[...] * x


ruled.defjvp(lambda primals, tangents: (ruled(*primals), primals[0][...] * tangents[1]))


def reading(read):
    ref = jax.new_ref(X)
    return aot.while_loop(lambda c: c.sum() < 20, lambda c: read(ref, c), X)


def predicate_writes():
    ref = jax.new_ref(0)

    def cond(c):
        ref[...] += 1
        return c.sum() < 20

    return aot.while_loop(cond, lambda c: 2 * c, X)


def stacked():
    ref = jax.new_ref(X)

    def body(c):
        ref[...] = c
        return 2 * c

    return aot.while_loop_stack_output(lambda c: c.sum() < 20, body, X, max_trips=9)


def carried():
    return aot.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (0, jax.new_ref(X)))


REFUSED = {
    "a rule": (
        lambda: reading(ruled),
        f"body_fun at {HERE}:\\d+ \\(<lambda>\\) hands a jax\\.Ref from outside of the loop to a function with a "
        "derivative rule of its own\\.\nGive the function what the reference holds: ref\\[\\.\\.\\.\\]\\.",
    ),
    "a result": (
        lambda: reading(lambda ref, c: ref),
        f"body_fun at {HERE}:\\d+ \\(<lambda>\\) returns a jax\\.Ref as carry\\.\n"
        "Return what it holds: ref\\[\\.\\.\\.\\]\\.",
    ),
    "a predicate": (
        predicate_writes,
        f"cond_fun at {HERE}:\\d+ \\(cond\\) writes a jax\\.Ref, Ref{{int32\\[\\]}}\\.\nWrite it in the body\\.",
    ),
    "a stack": (
        stacked,
        f"body_fun at {HERE}:\\d+ \\(body\\) writes a jax\\.Ref from outside of the loop, of which no row would be in "
        "the stack\\.\nCarry its value, and write it to the reference after the loop\\.",
    ),
    "a carry": (
        carried,
        "init\\[1\\] is a jax\\.Ref, not an array\\.\nCarry arrays and numbers only; close over everything else\\.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_loop_cannot_do_with_a_reference_is_refused(case):
    call, text = REFUSED[case]
    with pytest.raises(TraceError, match=f"^{text}$"):
        call()


def test_a_loop_of_jax_that_hands_a_reference_to_a_rule_has_no_derivative():
    def loss(x):
        ref = jax.new_ref(2 * x)
        return jnp.sum(lax.while_loop(lambda c: c.sum() < 20, lambda c: ruled(ref, c), x))

    with pytest.raises(DerivativeError) as caught:
        aot.function(loss).grad(X)
    assert re.fullmatch(
        f"the lax\\.while_loop at {HERE}:\\d+ \\(\\S*loss\\) hands a jax\\.Ref from outside of the loop to a function "
        "with a derivative rule of its own; so the loop has no derivative\\.\n"
        "Give the function what the reference holds: ref\\[\\.\\.\\.\\]\\.",
        str(caught.value),
    )
