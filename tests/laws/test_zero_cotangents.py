"""With `derivatives="finite"` a cotangent of zero makes a product zero, and every other gradient keeps its bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.derivatives.guards import GUARDS
from benchmarks.eagerly import evaluate
from jointcut import aot
from jointcut.partition.errors import TraceError
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.rewrite import simplify
from jointcut.partition.rewrite.numbers import number_of, numbers_in
from jointcut.partition.rewrite.product import Product
from programs import EVERY_PROGRAM, named

every_guard = pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)


def finite(function, **options):
    return aot.function(function, derivatives="finite", **options)


def assert_near(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=1e-6)


@every_guard
def test_a_guarded_function_has_the_gradient_of_the_double_where(guard):
    own, want = jax.jit(lambda x: (jax.grad(guard.once)(x), jax.grad(guard.twice)(x)))(guard.at)
    assert not np.all(np.isfinite(own)), "JAX's own would do"
    assert np.all(np.isfinite(want))
    assert_near(finite(guard.once).grad(guard.at), want)


def test_plans_see_the_equations_of_a_guarded_product():
    names = [op.name for op in finite(GUARDS[0].once).trace(GUARDS[0].at).graph.ops]
    assert "jit" not in names and names.count("ne") == 1


@pytest.mark.parametrize("guard", GUARDS[2::6], ids=lambda guard: guard.name)
def test_so_has_one_in_a_jit_of_the_caller(guard):
    assert_near(jax.jit(jax.grad(finite(guard.once)))(guard.at), jax.jit(jax.grad(guard.twice))(guard.at))


@pytest.mark.parametrize("guard", GUARDS[::4], ids=lambda guard: guard.name)
def test_its_second_derivative_is_finite_too(guard):
    """Forward over reverse, as `jax.hessian` has it."""
    got, want = (jax.jit(jax.hessian(function))(guard.at) for function in (finite(guard.once), guard.twice))
    assert_near(np.diag(got), np.diag(want))


@pytest.mark.parametrize("guard", GUARDS[1 :: 6 if EVERY_PROGRAM else 12], ids=lambda guard: guard.name)
def test_so_has_one_in_a_loop_a_branch_a_map_and_under_checkpoint(guard):
    def looped(f):
        def step(total, x):
            return total + lax.cond(x < 9, f, jnp.zeros_like, x), None

        return lambda xs: jax.checkpoint(lambda xs: lax.scan(step, jnp.float32(0), xs)[0])(xs)

    want = jax.jit(jax.grad(looped(guard.twice)))(guard.at)
    assert_near(finite(looped(guard.once)).grad(guard.at), want)
    assert_near(jax.jit(jax.vmap(jax.grad(finite(guard.once))))(guard.at), want)


LOOPS = {
    "while": lambda f, x, n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, f(c[1])), (0, x))[1],
    "fori": lambda f, x, n: lax.fori_loop(0, n, lambda i, y: f(y), x),
    "our while": lambda f, x, n: aot.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, f(c[1])), (0, x))[1],
    "our fori": lambda f, x, n: aot.fori_loop(0, n, lambda i, y: f(y), x, memory=1),
    "our scan": lambda f, x, n: aot.scan(lambda y, _: (f(y), None), x, length=2)[0],
    "our stack": lambda f, x, n: aot.while_loop_stack_output(
        lambda c: c[0] < n, lambda c: (c[0] + 1, f(c[1])), (0, x), max_trips=2
    ).carries[1][1],
    "our while in a scan": lambda f, x, n: lax.scan(lambda y, _: (LOOPS["our while"](f, y, n), None), x, length=1)[0],
}


@pytest.mark.parametrize("kind", LOOPS)
def test_the_steps_of_every_loop_are_guarded_to_second_order(kind):
    """They also have the formulas: here a norm at zero."""

    def total(step):
        return lambda x, n: jnp.sum(LOOPS[kind](jax.vmap(step), x, n))

    def once(y):
        return jnp.where(y > 1, jnp.sqrt(y - 1), 0.5 * y) + jnp.linalg.norm(y[None] - y)

    def twice(y):
        return jnp.where(y > 1, jnp.sqrt(jnp.where(y > 1, y - 1, 1)), 0.5 * y)

    x, n = jnp.array([1.0, 3.5, 2.0]), jnp.int32(2)
    for order in (jax.grad, lambda f: jax.grad(lambda x, n: jnp.sum(jax.grad(f)(x, n) ** 2))):
        got = jax.jit(order(finite(total(once))))(x, n)
        assert_near(got, jax.jit(order(lambda x, n: jnp.sum(jax.vmap(twice)(jax.vmap(twice)(x)))))(x, n))


def test_pairs_at_distance_zero_are_left_out_of_a_sum():
    def energy(places):
        apart = places[:, None] - places[None]
        distances = jnp.sqrt(jnp.sum(apart**2, axis=-1))
        return jnp.sum(jnp.where(jnp.eye(len(places), dtype=bool), 0.0, 1 / distances))

    places = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)), jnp.float32)
    assert np.all(np.isnan(jax.grad(energy)(places)))
    got = finite(energy).grad(places)
    step = 1e-3 * np.eye(12, dtype=np.float32).reshape(12, 4, 3)
    want = [(energy(places + s) - energy(places - s)) / 2e-3 for s in step]
    np.testing.assert_allclose(got.ravel(), want, rtol=1e-2, atol=1e-2)


def test_a_mask_among_the_arguments_or_made_of_integers_counts():
    def loss(x, mask, lengths):
        kept = (jnp.arange(4) < lengths).astype(jnp.float32)
        return jnp.sum(mask * jnp.log(x)) + jnp.sum(kept * (1 / x))

    x, mask = jnp.array([1.0, 2.0, 0.0, 0.0]), jnp.array([1.0, 1.0, 0.0, 0.0])
    assert_near(finite(loss).vjp(x, mask, jnp.int32(2))[1](jnp.float32(0))[0], jnp.zeros(4))
    np.testing.assert_array_equal(finite(loss).grad(x, mask, jnp.int32(2)), [0.0, 0.25, 0.0, 0.0])


KEEP_THEIR_BITS = (
    "two_layers", "transformer_block", "layer_norm", "cross_entropy", "energy_and_forces", "bfloat16_weights",
    "scan_with_constants", "nested_scans", "gather_and_scatter", "complex_weights", "float64_weights",
    "dropout_network", "cond_in_scan", "checkpointed_scan_body",
)  # fmt: skip


@pytest.mark.parametrize("name", KEEP_THEIR_BITS[:: 1 if EVERY_PROGRAM else 2])
def test_finite_gradients_keep_their_bits(name):
    """Run op by op: XLA may fuse the two programs differently."""
    program = named(name)

    def gradients(derivatives):
        options = {"argnums": program.argnums, "has_aux": program.has_aux, "derivatives": derivatives}
        traced = aot.function(program.function, **options).trace(*program.args, **program.kwargs)
        return evaluate(traced.joint, [*traced.consts, *jax.tree.leaves(program.args), *traced.call.ones()])

    with program.precision():
        for x, y in zip(gradients("finite"), gradients("jax"), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_numbers_of_the_program_itself_need_no_guard():
    """A variance divides by a number of elements that is tested for zero, and attention by the root of a width."""

    def scaled(x):
        return jnp.sum(jnp.where(x > 0, x / jnp.sqrt(16.0), 0.0)) + jnp.sum(jnp.var(x, ddof=1, axis=0) @ x)

    x = jnp.arange(6.0).reshape(2, 3)[:, :2]
    traced = aot.function(scaled, derivatives="finite").trace(x)
    assert not [change for change in traced.partition().explain(measure=False).derived if "zero" in change.rule]
    np.testing.assert_array_equal(aot.function(scaled, derivatives="finite").grad(x), jax.jit(jax.grad(scaled))(x))


def test_numbers_that_their_type_does_not_hold_are_not_known():
    def made(x):
        half, quotient = jnp.float16(300) * jnp.float16(300), jnp.int32(7) / jnp.int32(0)
        return jnp.sqrt(jnp.float32(64)) - 8, half, quotient, x, half > 0

    jaxpr, _ = jaxprs.opened(simplify.inlined(jax.make_jaxpr(made)(2.0)))
    known = numbers_in(jaxpr, [None] * len(jaxpr.invars))
    assert [number_of(v, known) for v in jaxpr.outvars] == [0.0, None, None, None, None]


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(TraceError) as caught:
        aot.function(jnp.sum, derivatives="finit")
    assert str(caught.value) == (
        "derivatives 'finit' is unknown.\nKnown names: 'finite', 'jax', 'pytorch'. Did you mean 'finite'? "
        "A choice of your own is made by aot.conventions(...)."
    )


def test_a_guarded_product_ends_in_a_product_that_xla_may_add_with_one_rounding():
    """As it does without guards: a choice between a product and a sum would part the two."""
    x = jnp.array([0.0, 0.0, 2.0])
    product = Product(lax.mul_p, (0,))
    jaxpr, _ = jaxprs.opened(jax.make_jaxpr(product)(x, x))
    assert jaxpr.eqns[-1].primitive is lax.mul_p and jaxpr.eqns[-1].outvars == jaxpr.outvars
    np.testing.assert_array_equal(product(x, jnp.array([np.inf, -3.0, np.inf])), [0.0, -0.0, np.inf])


def test_a_factorisation_that_was_not_chosen_takes_no_part():
    """The derivative of QR divides by R, which is singular here."""

    def triangle(x):
        return jnp.sum(jnp.abs(jnp.linalg.qr(x)[1]))

    def guarded(x):
        return jnp.where(jnp.abs(x[0, 0] - x[0, 1]) < 1e-6, jnp.sum(x), triangle(x))

    for x in (jnp.ones((3, 2)).at[1:].set(0), jnp.array([[1.0, 2.0], [0.5, 4.0], [1.0, -1.0]])):
        want = jnp.ones((3, 2)) if x[0, 0] == x[0, 1] else jax.grad(guarded)(x)
        assert np.isfinite(jax.grad(guarded)(x)).all() == (x[0, 0] != x[0, 1])
        np.testing.assert_allclose(finite(guarded).grad(x), want, rtol=1e-6)
