"""Functions of two results, products of two sparse matrices, and functions that are NaN or linear in parts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

from jointcut import aot
from jointcut.aot import derivatives as d
from jointcut.partition.errors import JointcutError

X = jax.random.normal(jax.random.key(0), (3, 4))


@pytest.mark.parametrize(("both", "one"), [(d.var_mean, d.var), (d.std_mean, d.std)])
def test_the_pair_is_both_functions(both, one):
    for axis, ddof, keepdims in ((None, 0, False), (0, 0, False), (1, 1, True)):
        got = jax.vjp(partial(both, axis=axis, ddof=ddof, keepdims=keepdims), X)
        first = jax.vjp(partial(one, axis=axis, ddof=ddof, keepdims=keepdims), X)
        second = jax.vjp(partial(d.mean, axis=axis, keepdims=keepdims), X)
        jax.tree.map(np.testing.assert_array_equal, got[0], (first[0], second[0]))
        ones = jnp.ones_like(first[0])
        want = first[1](ones)[0] + second[1](ones)[0]
        np.testing.assert_allclose(got[1]((ones, ones))[0], want, rtol=1e-6)


def test_the_slope_of_logit_is_nan_where_the_function_is():
    x = jnp.array([-0.5, 0.0, 0.3, 1.0, 1.5])
    value, slope = d.logit(x), jax.vmap(jax.grad(d.logit))(x)
    np.testing.assert_array_equal(jnp.isnan(value), jnp.isnan(slope))
    np.testing.assert_allclose(slope[2], 1 / 0.21, rtol=1e-6)


@pytest.mark.parametrize(("beta", "threshold"), [(1.0, None), (2.0, None), (0.5, 3.0), (-1.0, 2.0)])
def test_softplus_takes_beta_and_a_threshold(beta, threshold):
    x = jnp.array([-200.0, -1.0, 0.0, 5.9, 6.1, 300.0])
    linear = jnp.zeros(6, bool) if threshold is None else beta * x > threshold
    want = jnp.where(linear, x, jax.nn.softplus(beta * x) / beta)
    np.testing.assert_allclose(d.softplus(x, beta, threshold), want, rtol=1e-6)
    slopes = jax.vmap(jax.grad(lambda x: d.softplus(x, beta, threshold)))(x)
    np.testing.assert_allclose(slopes, jnp.where(linear, 1, jax.nn.sigmoid(beta * x)), rtol=1e-6)
    with pytest.raises(JointcutError) as caught:
        d.softplus(x, 0)
    assert (
        str(caught.value) == "derivatives.softplus: beta is 0, and the function is divided by it.\nPass another number."
    )


def test_the_product_of_two_sparse_matrices_has_gradients():
    a = BCOO.fromdense(jnp.array([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]), nse=4)  # one of them is padding
    b = BCOO.fromdense(jnp.array([[0.0, 1.0], [4.0, 0.0], [0.0, 5.0]]))

    def product(x, y):
        pair = d.sparse_sparse_mm(x, a.indices, y, b.indices, (2, 2))
        return jnp.sum(jnp.sin(BCOO(pair, shape=(2, 2)).todense()))

    def dense(x, y):
        left, right = (BCOO((z, m.indices), shape=m.shape).todense() for z, m in ((x, a), (y, b)))
        return jnp.sum(jnp.sin(left @ right))

    want = jax.value_and_grad(dense, (0, 1))(a.data, b.data)
    for got in (
        jax.value_and_grad(product, (0, 1))(a.data, b.data),
        aot.function(product, argnums=(0, 1)).value_and_grad(a.data, b.data),
    ):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, want)
    infinite = jax.grad(
        lambda x: jnp.sum(d.sparse_sparse_mm(x, a.indices, b.data.at[0].set(jnp.inf), b.indices, (2, 2))[0])
    )(a.data)
    assert np.isfinite(infinite[1:]).all()  # values that do not meet the infinite one
