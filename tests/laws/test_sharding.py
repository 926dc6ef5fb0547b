"""On several devices: inside `jax.shard_map`, on explicit meshes, under `jax.pmap`; and what is not cut is told."""

from __future__ import annotations

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from claims import claims_of, failures_of
from jointcut import aot

SCRIPT = Path(__file__).with_name("on_four_devices.py")


@pytest.mark.parametrize("claim", claims_of(SCRIPT))
def test_on_four_devices(claim):
    assert not failures_of(SCRIPT, 4)[claim], failures_of(SCRIPT, 4)[claim]


def curve(x):
    return jnp.sum(jnp.sin(jnp.tanh(x)) ** 2)


X = np.linspace(-1.0, 1.0, 6, dtype=np.float32)


def told_once(run, function, category=aot.UncutWarning):
    """The one warning of a function that is called twice."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results = run(function), run(function)
    np.testing.assert_array_equal(*results)
    (warning,) = told
    assert (warning.category, warning.filename) == (category, __file__)
    return results[0], str(warning.message)


def test_the_gradient_of_a_tangent_is_plain_jax_s_and_says_so():
    def slope(function):
        return jax.grad(lambda x: jax.jvp(function, (x,), (x,))[1])(X)

    got, told = told_once(slope, aot.function(curve))
    np.testing.assert_allclose(got, slope(curve), rtol=1e-5)
    assert told == (
        "curve is not cut here, and plain JAX runs: it is differentiated in forward mode, by jax.jvp, and the result "
        "is differentiated once more.\n"
        "Take the gradient first, jax.jvp of jax.grad, or cut the function that holds both derivatives."
    )


def test_what_keeps_the_cut_or_keeps_nothing_does_not_warn():
    cut = aot.function(curve)
    jax.jvp(cut, (X,), (X,))
    jax.jvp(jax.grad(cut), (X,), (X,))
    jax.grad(lambda x: jnp.sum(jax.grad(cut)(x)))(X)


@pytest.mark.parametrize("way", ["grad", "value_and_grad"])
def test_sizes_that_are_names_are_plain_jax_s_and_say_so(way):
    cut = aot.function(curve)
    (b,) = export.symbolic_shape("b")
    run = jax.jit(jax.grad(cut) if way == "grad" else lambda x: cut.value_and_grad(x)[1])

    def slope(cut):
        return export.export(run)(jax.ShapeDtypeStruct((b,), np.float32)).call(X)

    got, told = told_once(slope, cut)
    np.testing.assert_allclose(got, jax.grad(curve)(X), rtol=1e-5)
    assert told == (
        "curve is not cut here, and plain JAX runs: it has sizes that are names, and a plan needs numbers.\n"
        "Export it with aot.function(...).export(path, ..., sizes={...}), which plans for the sizes that you give."
    )


def test_a_reference_in_a_rule_is_plain_jax_s_and_says_so():
    seen = jax.new_ref(jnp.zeros_like(X))

    @jax.custom_vjp
    def tap(ref, x):
        return x

    def backward(ref, g):
        ref[...] = g
        return None, g

    tap.defvjp(lambda ref, x: (x, ref), backward)

    def tapped(x):
        return curve(tap(seen, x))

    got, told = told_once(lambda function: jax.grad(function)(X), aot.function(tapped))
    np.testing.assert_allclose(got, jax.grad(curve)(X), rtol=1e-5)
    np.testing.assert_allclose(seen[...], got)
    assert told == (
        "tapped is not cut here, and plain JAX runs: it hands a jax.Ref to a function with a derivative of its own, "
        "and JAX has no rule that takes it out.\n"
        "Call its own value_and_grad, grad or vjp outside of jax.grad and jax.jit, or hand over what the reference "
        "holds, ref[...]."
    )
