"""Values that wait for each other are unchanged, and what the compiler does stops at the barrier."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.cache.fingerprint import fingerprint
from jointcut.partition.plans.backend import CPU, PORTABLE
from jointcut.partition.program.jax import barriers, jaxprs, runtime
from jointcut.partition.program.jax.barriers import held

ARRAYS = [
    np.array([[1.0, -0.0], [np.inf, np.nan]], np.float32),
    np.arange(3, dtype=np.int8),
    np.array([True, False]),
    np.array([3 - 2j], np.complex64),
    np.zeros((0, 3), np.float16),
    np.float32(7),
]


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["as it is", "in a jit"])
def test_values_that_wait_are_unchanged(run):
    outs = run(lambda *xs: held(xs))(*ARRAYS)
    for x, out in zip(ARRAYS, outs, strict=True):
        assert (np.asarray(out).tobytes(), out.dtype, out.shape) == (x.tobytes(), x.dtype, x.shape)


def test_nothing_waits_for_nothing():
    assert held([]) == []


def waiting(x):
    first, second = held([jnp.sin(x), x])
    return jnp.sum(first * second)


@pytest.mark.parametrize(
    "transform",
    [jax.grad, jax.hessian, lambda f: jax.vmap(jax.grad(f)), lambda f: jax.grad(jax.checkpoint(f))],
    ids=["grad", "hessian", "vmap of grad", "grad of checkpoint"],
)
def test_derivatives_and_batches_pass_the_barrier(transform):
    x = np.array([[0.5, 2.0], [-1.0, 0.25]], np.float32)
    want = transform(lambda x: jnp.sum(jnp.sin(x) * x))(x)
    np.testing.assert_allclose(jax.jit(transform(waiting))(x), want, rtol=1e-6)


def temp_bytes(function, *args):
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_nothing_is_merged_across_a_barrier():
    """Without it both sides share one sine, which then is kept while the product is computed."""
    x = w = np.ones((512, 512), np.float32)

    def twice(wait):
        def function(x, w):
            first = jnp.sin(x)
            y = (jnp.cos(first @ w) @ w) @ w
            again = jnp.sin(wait([x, y])[0])
            return jnp.sum(again * y)

        return function

    text = jax.jit(twice(held)).lower(x, w).compile().as_text()
    assert text.count(" sine(") == 2
    assert jax.jit(twice(list)).lower(x, w).compile().as_text().count(" sine(") == 1


def test_what_only_waits_is_not_copied():
    def step(x, w):
        (made,) = held([jnp.sin(x) * 2])
        return made @ w

    x, w = np.ones((256, 128), np.float32), np.ones((128, 8), np.float32)
    assert temp_bytes(step, x, w) < 1.5 * x.nbytes


def test_an_equation_that_is_called_gives_what_it_gave():
    x = np.array([3.0, 1.0, 2.0], np.float32)
    (eqn,) = jaxprs.opened(jax.make_jaxpr(jnp.cumsum)(x))[0].eqns
    call = barriers.called(eqn)
    closed = jaxprs.build(eqn.invars, eqn.outvars, [call])
    np.testing.assert_array_equal(runtime.evaluate(closed, x)[0], np.cumsum(x))
    assert 'inlineable="false"' in jax.jit(lambda x: runtime.evaluate(closed, x)).lower(x).compile().as_text()


def test_programs_that_hold_ours_have_an_identity():
    x = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(8, 8)
    program = jax.make_jaxpr(aot.function(layer).grad)(x, x)
    assert fingerprint(program=program) == fingerprint(program=jax.make_jaxpr(aot.function(layer).grad)(x, x))


def pooled(w, x):
    maxima = jax.lax.reduce_window(jnp.sin(x * w), -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID")
    return jnp.sum(maxima**2)


def test_the_gradient_of_a_maximum_pooling_is_called_on_cpu():
    x = np.linspace(0.0, 9.0, 64, dtype=np.float32).reshape(8, 8)
    cut = aot.function(pooled).trace(x, x).partition()

    def names(halves):
        return [eqn.primitive.name for eqn in jaxprs.opened(halves.backward)[0].eqns]

    assert "select_and_scatter_add" in names(cut.split.on(PORTABLE))
    assert "select_and_scatter_add" not in names(cut.split.on(CPU))
    want = jax.grad(pooled)(x, x)
    np.testing.assert_allclose(aot.function(pooled).grad(x, x), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(aot.function(pooled).grad)(x, x), want, rtol=1e-5, atol=1e-6)


def layer(w, x):
    gated = jnp.tanh(x @ w) * (x @ w)
    return jnp.sum((gated @ w) ** 2)


def read_by_products(jaxpr):
    """For each product, how its operands are made."""
    eqns = jaxprs.opened(jaxpr)[0].eqns
    made = {v: eqn.primitive.name for eqn in eqns for v in eqn.outvars}
    dots = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    return [tuple(made.get(v, "input") for v in eqn.invars) for eqn in dots]


def made_for_products(jaxpr):
    return {name for pair in read_by_products(jaxpr) for name in pair}


def test_on_cpu_products_read_no_elementwise_op():
    w = x = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(8, 8)
    split = aot.function(layer).trace(w, x).partition().split
    portable = split.on(PORTABLE)
    assert read_by_products(portable.forward)[-1] == ("mul", "input")
    assert read_by_products(split.on(CPU).forward)[-1] == ("optimization_barrier", "input")
    assert "mul" in made_for_products(portable.backward)
    assert made_for_products(split.on(CPU).backward) == {"input", "optimization_barrier"}
    want = jax.grad(layer)(w, x)
    np.testing.assert_allclose(aot.function(layer).grad(w, x), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(aot.function(layer).grad)(w, x), want, rtol=1e-5, atol=1e-6)
