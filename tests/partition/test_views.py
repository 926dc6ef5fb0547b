"""A value of which an output is a view is read back from the output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot

W = jnp.linspace(-0.4, 0.5, 12).reshape(4, 3)
X = jnp.linspace(0.1, 0.9, 20).reshape(5, 4)

VIEWS = {
    "reshape": lambda h: h.reshape(-1),
    "transpose": lambda h: h.T,
    "two transposes": lambda h: jnp.transpose(h.reshape(5, 3, 1), (2, 0, 1)).transpose(1, 2, 0),
    "reversed": lambda h: lax.rev(h, (0,)),
    "a new axis": lambda h: h[None],
    "an axis in the middle": lambda h: lax.broadcast_in_dim(h, (5, 1, 3), (0, 2)),
    "reversed and turned": lambda h: lax.rev(h, (1,)).T.reshape(3, 5, 1),
}
NO_VIEWS = {
    "a slice": lambda h: h[1:],
    "repeated": lambda h: jnp.broadcast_to(h[None], (2, 5, 3)),
    "in Fortran's order": lambda h: jnp.ravel(h, order="F"),
    "in Fortran's order, of the same shape": lambda h: jnp.reshape(h, (5, 3), order="F"),
    "another dtype": lambda h: h.astype(jnp.bfloat16).reshape(-1),
}


def with_view(view):
    def function(w, x):
        h = jnp.tanh(x @ w)
        return view(h)

    return function


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_that_is_an_output_saves_the_value(view):
    cut = aot.function(with_view(view)).trace(W, X).partition()
    assert cut.plan.bytes_saved == 0
    assert "output" in [residual.kind for residual in cut.residuals]


@pytest.mark.parametrize("view", NO_VIEWS.values(), ids=NO_VIEWS)
def test_what_lost_elements_or_precision_is_not_read_back(view):
    cut = aot.function(with_view(view)).trace(W, X).partition()
    assert cut.plan.bytes_saved == X.shape[0] * W.shape[1] * 4


@pytest.mark.parametrize("view", {**VIEWS, **NO_VIEWS}.values(), ids=[*VIEWS, *NO_VIEWS])
def test_gradients_are_those_of_jax(view):
    function = with_view(view)
    out, pullback = aot.function(function).vjp(W, X)
    want, jax_pullback = jax.vjp(function, W, X)
    np.testing.assert_array_equal(out, want)
    cotangent = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    for got, expected in zip(pullback(cotangent), jax_pullback(cotangent), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_two_views_of_one_value_need_it_once():
    def function(w, x):
        h = jnp.tanh(x @ w)
        return h.reshape(-1), h.T, h

    cut = aot.function(function).trace(W, X).partition()
    assert cut.plan.bytes_saved == 0
    assert [residual.kind for residual in cut.residuals].count("output") == 1


def test_a_view_of_an_input_is_left_alone():
    cut = aot.function(lambda w: (w.T, jnp.sum(jnp.sin(w)))).trace(W).partition()
    assert [residual.kind for residual in cut.residuals] == ["input"]
