"""What waits for a witness is unchanged, for every value that the witness can have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.cache.fingerprint import fingerprint
from jointcut.partition import jaxprs
from jointcut.partition.hold import always, begun, branched, can_witness, tied, waiting

NUMBERS = [0.0, 1.0, 1.5, 2.0, -3.0, np.inf, -np.inf, np.nan]
WITNESSES = [
    *(np.full((2, 3), x, np.float32) for x in NUMBERS),
    np.full((), np.nan, np.float16),
    np.array([1, 2], np.int32),
    np.array([True]),
    np.array([3 - 2j], np.complex64),
]


def run(build, *values):
    """Run the equations that `build(*variables)` writes over these values."""
    invars = [jaxprs.fresh(jax.typeof(jnp.asarray(v))) for v in values]
    eqns, outs = build(*invars)
    outs = outs if isinstance(outs, list) else [outs]
    return jax.jit(lambda *xs: jaxprs.evaluate(jaxprs.build(invars, outs, eqns), *xs))(*values)


@pytest.mark.parametrize("witness", WITNESSES, ids=str)
def test_the_predicate_is_true_for_every_witness(witness):
    assert bool(jax.jit(always)(witness)) is True


@pytest.mark.parametrize("witness", WITNESSES, ids=str)
def test_arrays_that_wait_are_unchanged(witness):
    xs = np.array([[1.0, -0.0], [np.inf, np.nan]], np.float32), np.arange(3, dtype=np.int8)
    outs = run(lambda w, *xs: waiting(xs, w), witness, *xs)
    assert [np.asarray(out).tobytes() for out in outs] == [x.tobytes() for x in xs]


def test_arrays_wait_in_one_branch():
    xs = [jaxprs.fresh(jax.typeof(jnp.zeros(n))) for n in (3, 4)]
    for eqns in (waiting(xs, xs[0])[0], begun(xs[0], xs)[0]):
        assert [eqn.primitive.name for eqn in eqns].count("cond") == 1


def test_what_only_waits_is_not_copied():
    def step(x, w):
        made = jnp.sin(x) * 2
        invar = jaxprs.fresh(jax.typeof(made))
        eqns, held = waiting([invar], invar)
        (made,) = jaxprs.evaluate(jaxprs.build([invar], held, eqns), made)
        return made @ w

    x, w = np.ones((256, 128), np.float32), np.ones((128, 8), np.float32)
    assert jax.jit(step).lower(x, w).compile().memory_analysis().temp_size_in_bytes < 1.5 * x.nbytes


def test_arrays_that_are_tied_are_unchanged_in_value_and_type():
    xs = (np.arange(6, dtype=np.int8), np.array([True, False]), np.full((2, 2), -0.0, np.float32), np.array([2j]))
    outs = run(lambda w, *xs: tied(xs, w), np.float32(7), *xs)
    for x, out in zip(xs, outs, strict=True):
        assert np.asarray(out).tobytes() == np.asarray(jnp.asarray(x)).tobytes()
        assert out.dtype == jnp.asarray(x).dtype


def test_a_number_is_the_first_element():
    def number(w, x):
        eqns, there, held = begun(w, [x])
        return eqns, [there, *held]

    assert run(number, np.array([[4.5, 1.0]], np.float32), np.float32(2)) == [4.5, 2.0]
    assert run(number, np.array([7, 1], np.int32), np.float32(3)) == [7.0, 3.0]


def test_an_equation_in_a_branch_gives_what_it_gave():
    x = np.array([3.0, 1.0, 2.0], np.float32)
    eqn = jaxprs.opened(jax.make_jaxpr(jnp.cumsum)(x))[0].eqns[0]

    def build(x):
        return branched(jaxprs.rebound(eqn, [x], [jaxprs.fresh(v.aval) for v in eqn.outvars]), x)

    np.testing.assert_array_equal(run(build, x)[0], np.cumsum(x))


def test_a_predicate_of_a_batch_is_one_predicate_without_a_derivative():
    """So that a branch on it stays a branch under `jax.vmap`, and costs nothing in a second derivative."""
    x = np.array([[4.5, 1.0], [2.0, 3.0]], np.float32)
    assert jax.vmap(always, out_axes=None)(x)
    assert jax.jit(jax.vmap(always, out_axes=None))(x[:0])
    held = jax.make_jaxpr(jax.vmap(lambda x: jaxprs.first_element(x) * x))(x)
    assert [v.aval.shape for eqn in jaxprs.opened(held)[0].eqns[:1] for v in eqn.outvars] == [()]
    np.testing.assert_array_equal(jax.jvp(jaxprs.first_element, (x,), (x,)), (4.5, 0.0))


def test_programs_that_hold_ours_have_an_identity():
    x = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(8, 8)
    program = jax.make_jaxpr(aot.function(layer).grad)(x, x)
    assert fingerprint(program=program) == fingerprint(program=jax.make_jaxpr(aot.function(layer).grad)(x, x))


def test_only_an_array_with_an_element_can_be_a_witness():
    assert can_witness(jax.typeof(jnp.zeros(3)))
    assert not can_witness(jax.typeof(jnp.zeros((0, 3))))
    assert not can_witness(jax.typeof(jax.random.key(0)))


def pooled(w, x):
    maxima = jax.lax.reduce_window(jnp.sin(x * w), -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID")
    return jnp.sum(maxima**2)


def test_the_gradient_of_a_maximum_pooling_stands_in_a_branch_on_cpu():
    x = np.linspace(0.0, 9.0, 64, dtype=np.float32).reshape(8, 8)
    cut = aot.function(pooled).trace(x, x).partition()

    def names(halves):
        return [eqn.primitive.name for eqn in jaxprs.opened(halves.backward)[0].eqns]

    assert "select_and_scatter_add" in names(cut.split.halves)
    assert "select_and_scatter_add" not in names(cut.split.on_cpu)
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
    assert read_by_products(split.halves.forward)[-1] == ("mul", "input")
    assert read_by_products(split.on_cpu.forward)[-1] == ("optimization_barrier", "input")
    assert read_by_products(split.inlined.forward)[-1] == ("cond", "input")
    assert "mul" in made_for_products(split.halves.backward)
    assert made_for_products(split.on_cpu.backward) == {"input", "optimization_barrier"}
    assert made_for_products(split.inlined.backward) == {"input", "cond"}
    want = jax.grad(layer)(w, x)
    np.testing.assert_allclose(aot.function(layer).grad(w, x), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(aot.function(layer).grad)(w, x), want, rtol=1e-5, atol=1e-6)
