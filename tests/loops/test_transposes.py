"""Loops that are linear in an argument have transposes; so have functions that hold a `lax.while_loop`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot

X = jnp.array([0.5, 0.7])


def mixed(c):
    return 2.0 * c + 0.3 * jnp.flip(c)


def a_for(x):
    return aot.fori_loop(0, jnp.int32(4), lambda i, c: mixed(c) * (i + 1), x)


def a_while(x):
    return aot.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, mixed(c[1])), (0, x))[1]


def a_scan(x):
    return aot.scan(lambda c, w: (mixed(c) * w, c), x, jnp.arange(1.0, 4.0))


def of_jax(x):
    return lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, mixed(c[1])), (0, x))[1]


LINEAR = [
    a_for,
    a_while,
    a_scan,
    jax.jit(a_for),
    jax.vmap(a_while, in_axes=0),
    aot.function(of_jax),
    aot.function(a_for),
]


@pytest.mark.parametrize("number", range(len(LINEAR)))
def test_the_transpose_is_the_matrix_turned_around(number):
    function = LINEAR[number]
    x = jnp.stack([X, 2 * X]) if number == 4 else X
    out = function(x)
    cotangents = jax.tree.map(lambda y: jnp.cos(y) + 1, out)
    (back,) = jax.linear_transpose(function, x)(cotangents)
    for i in range(x.size):
        unit = jnp.zeros(x.size).at[i].set(1.0).reshape(x.shape)
        column = jax.tree.leaves(function(unit))
        want = sum(jnp.vdot(a, b) for a, b in zip(column, jax.tree.leaves(cotangents), strict=True))
        np.testing.assert_allclose(back.ravel()[i], want, rtol=1e-5)


def test_it_works_inside_a_jit_and_again():
    def turned(ct):
        return jax.linear_transpose(a_for, X)(ct)[0]

    np.testing.assert_allclose(jax.jit(turned)(X), turned(X), rtol=1e-6)
    (again,) = jax.linear_transpose(turned, X)(X)
    np.testing.assert_allclose(again, a_for(X), rtol=1e-5)
