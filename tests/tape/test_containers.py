"""A sparse array on a tape has the gradient that it has in an `aot.function`: the same indices, other numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

from jointcut import aot
from jointcut.partition.errors import TraceError

W = jnp.arange(3.0)
MATRIX = sparse.BCOO.fromdense(2 * jnp.eye(3))


def loss(params, w):
    return jnp.sum(jnp.sin(params["m"] @ w))


def equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        if x.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_gradients_keep_the_indices(argnums):
    params = {"m": MATRIX}
    value, grad = aot.tape(loss, argnums=argnums).value_and_grad(params, W)
    equal((value, grad), aot.function(loss, argnums=argnums).value_and_grad(params, W))
    equal(grad, sparse.grad(loss, argnums=argnums)(params, W))


def test_a_pullback_gives_zeros_for_indices_as_jax_does():
    outs = [by(loss, {"m": MATRIX}, W)[1](jnp.float32(2)) for by in (lambda f, *xs: aot.tape(f).vjp(*xs), jax.vjp)]
    equal(*outs)


def test_numbers_are_added_to_a_reference():
    total = jax.new_ref(jnp.ones(3))
    refs = {"m": jax.tree.unflatten(jax.tree.structure(MATRIX), [total, None])}
    aot.tape(loss).accumulate_into(refs)({"m": MATRIX}, W)
    np.testing.assert_allclose(total[...], 1 + sparse.grad(loss)({"m": MATRIX}, W)["m"].data, rtol=1e-6)


def test_plain_integers_are_refused_as_before():
    with pytest.raises(TraceError) as caught:
        aot.tape(lambda tree: jnp.sum(tree["w"])).grad({"w": W, "i": jnp.arange(3)})
    assert str(caught.value) == (
        "args[0]['i'] is int32[3]: value_and_grad differentiates floating-point arguments.\n"
        "Leave its argument out of argnums, convert it, or use vjp."
    )


def test_an_update_of_a_sparse_array_is_refused():
    with pytest.raises(TraceError) as caught:
        aot.tape(loss).value_and_update({"m": MATRIX}, (), W, update=lambda g, s, p: (p, s))
    assert str(caught.value) == (
        "args[0]['m'].indices is a part of an array-like object that has no gradient, and value_and_update updates all "
        "parts.\nTake value_and_grad, and update after it."
    )
