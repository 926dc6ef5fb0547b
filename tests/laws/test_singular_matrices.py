"""With `derivatives="finite"` a singular matrix that was not chosen takes no part, alone or in a batch of others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.linalg as linalg
import numpy as np
import pytest

from benchmarks.eagerly import evaluate
from jointcut import aot
from programs import EVERY_PROGRAM

DRAWN = np.random.default_rng(0)
WEIGHTS, SIDES, ROOT = (DRAWN.standard_normal(shape) for shape in ((3, 3), (3, 2), (3, 3)))
REGULAR, OTHER = ROOT @ ROOT.T + np.eye(3), ROOT @ ROOT.T + 2 * np.eye(3)
SINGULAR = np.zeros((3, 3))

FUNCTIONS = {
    "cholesky": lambda x: jnp.sum(WEIGHTS * jnp.linalg.cholesky(x)),
    "cho_solve": lambda x: jnp.sum(linalg.cho_solve(linalg.cho_factor(x), SIDES)),
    "determinant by cholesky": lambda x: 2 * jnp.sum(jnp.log(jnp.diag(jnp.linalg.cholesky(x)))),
    "inv": lambda x: jnp.sum(WEIGHTS * jnp.linalg.inv(x)),
    "solve": lambda x: jnp.sum(SIDES * jnp.tanh(jnp.linalg.solve(x, SIDES))),
    "solve for a vector": lambda x: SIDES[:, 1] @ jnp.linalg.solve(x, SIDES[:, 0]),
    "triangular": lambda x: jnp.sum(SIDES * linalg.solve_triangular(x, SIDES, trans=1)),
    "from the right": lambda x: jnp.sum(WEIGHTS * jax.lax.linalg.triangular_solve(x, WEIGHTS, lower=True)),
    "tridiagonal": lambda x: jnp.sum(SIDES * jax.lax.linalg.tridiagonal_solve(x[0], x[1], x[2], SIDES)),
    "lu": lambda x: sum(jnp.sum(WEIGHTS * part) for part in linalg.lu(x)[1:]),
    "det": jnp.linalg.det,
    "slogdet": lambda x: jnp.linalg.slogdet(x)[1],
    "eigenvectors": lambda x: jnp.sum(WEIGHTS * jnp.linalg.eigh(x)[1]),
    "a product with an inverse": lambda x: jnp.sum(WEIGHTS * jnp.tanh(WEIGHTS @ jnp.linalg.inv(x) @ x.T)),
    "normal density": lambda x: jax.scipy.stats.multivariate_normal.logpdf(SIDES[:, 0], SIDES[:, 1], x),
}


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def chosen(function):
    """The function of the matrices of a batch but the second."""
    return lambda xs: jnp.sum(jnp.where(jnp.array([True, False, True]), jax.vmap(function)(xs), 0.0))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_of_a_batch_that_was_not_chosen_has_the_gradient_zero_and_the_others_have_jaxs(name):
    function, xs = FUNCTIONS[name], jnp.stack([REGULAR, SINGULAR, OTHER])
    got = aot.function(chosen(function), derivatives="finite").grad(xs)
    np.testing.assert_array_equal(got[1], np.zeros((3, 3)))
    want = jax.jit(jax.vmap(jax.grad(function)))(xs[::2])
    np.testing.assert_allclose(got[::2], want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("number", "name"), list(enumerate(["cholesky", "solve", "slogdet", "from the right"])))
def test_so_have_second_derivatives_in_both_orders(number, name):
    """In one of the two in turn, and in both with JOINTCUT_EVERY_PROGRAM."""
    function, xs = FUNCTIONS[name], jnp.stack([REGULAR, SINGULAR, OTHER])
    gradient = jax.grad(aot.function(chosen(function), derivatives="finite"))
    along = jnp.broadcast_to(WEIGHTS, xs.shape)

    def forward(gradient):
        return lambda x: jax.jvp(gradient, (x,), (along[: len(x)],))[1]

    def reverse(gradient):
        return jax.grad(lambda x: jnp.vdot(gradient(x), along[: len(x)]))

    for mode in (forward, reverse) if EVERY_PROGRAM else [(forward, reverse)[number % 2]]:
        got = jax.jit(mode(gradient))(xs)
        np.testing.assert_array_equal(got[1], np.zeros((3, 3)))
        want = jax.jit(mode(jax.vmap(jax.grad(function))))(xs[::2])
        np.testing.assert_allclose(got[::2], want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["cholesky", "solve", "lu"])
def test_gradients_at_regular_matrices_keep_their_bits(name):
    """Run op by op."""

    def values_of(derivatives):
        traced = aot.function(FUNCTIONS[name], derivatives=derivatives).trace(REGULAR)
        return evaluate(traced.joint, [*traced.consts, REGULAR, *traced.call.ones()])

    for got, want in zip(values_of("finite"), values_of("jax"), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_singular_matrix_that_was_chosen_keeps_its_nan():
    grads = aot.function(FUNCTIONS["inv"], derivatives="finite").grad(SINGULAR)
    assert not np.isfinite(grads).any()


def test_least_squares_of_a_batch_have_jaxs_derivative():
    def least(xs):
        return jnp.sum(jax.vmap(lambda x: jnp.linalg.lstsq(x, SIDES)[0])(xs))

    xs = jnp.stack([REGULAR, OTHER])
    np.testing.assert_allclose(aot.function(least, derivatives="finite").grad(xs), jax.jit(jax.grad(least))(xs))
