"""Pullbacks of tapes and of functions add gradients to references, across calls, and take JAX's marks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot

PARAMS = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
X = jnp.full(3, 2.0)
MADE = pytest.mark.parametrize("made", [aot.tape, aot.function])


def loss(p, x, n):
    return jnp.sum(p["a"] * x) * jnp.sum(p["b"]) * n


def ref(*shape, dtype=jnp.float32):
    return jax.new_ref(jnp.zeros(shape, dtype))


def pull(made, *args):
    return made(loss).vjp(*(args or (PARAMS, X, 3)))[1]


@MADE
def test_gradients_add_up_across_calls_and_pullbacks(made):
    refs = {"a": jax.new_ref(jnp.ones(3)), "b": ref(2)}
    for x in (X, 2 * X):
        assert pull(made, PARAMS, x, 3).accumulate_into((refs, None, None))(2.0) is None
    want = [jax.grad(loss)(PARAMS, x, 3) for x in (X, 2 * X)]
    np.testing.assert_allclose(refs["a"][...], 1 + 2 * (want[0]["a"] + want[1]["a"]), rtol=1e-6)
    np.testing.assert_allclose(refs["b"][...], 2 * (want[0]["b"] + want[1]["b"]), rtol=1e-6)


@MADE
def test_none_leaves_a_gradient_out_wherever_it_stands(made):
    a, x = ref(3), ref(3)
    pull(made).accumulate_into(({"a": a, "b": None}, x, None))(1.0)
    want = jax.grad(loss, (0, 1))(PARAMS, X, 3)
    np.testing.assert_allclose(a[...], want[0]["a"], rtol=1e-6)
    np.testing.assert_allclose(x[...], want[1], rtol=1e-6)


@MADE
def test_references_and_marks_mean_what_they_mean_in_jax(made):
    def called(pull):
        refs = {"a": jax.new_ref(jnp.ones(3)), "b": jax.ad.GradValue()}
        results = [pull.with_refs(refs, jax.ad.DontWant(), jax.ad.GradValue())(ct) for ct in (1.0, 2.0)]
        return np.asarray(refs["a"][...]).tolist(), jax.tree.map(lambda x: np.asarray(x).tolist(), results)

    assert called(pull(made)) == called(jax.vjp(loss, PARAMS, X, 3)[1])


def test_a_compiled_pullback_keeps_its_residuals_on_request():
    b = ref(2)
    compiled = aot.function(loss).trace(PARAMS, X, 3).partition().compile()
    _, pulled = compiled.vjp(PARAMS, X, 3)
    for keeps in (True, False):
        pulled.accumulate_into({"a": None, "b": b})(1.0, keep_residuals=keeps)
    np.testing.assert_allclose(b[...], 2 * jax.grad(loss)(PARAMS, X, 3)["b"], rtol=1e-6)


def test_sparse_gradients_are_added_to_a_dense_reference():
    table, places = jnp.ones((5, 2)), jnp.array([1, 3, 1])
    made = aot.function(lambda table: jnp.sum(table[places] ** 2), sparse_gradients="args[0]")
    sums = ref(5, 2)
    made.vjp(table)[1].accumulate_into((sums,))(1.0)
    np.testing.assert_allclose(sums[...], jax.grad(lambda t: jnp.sum(t[places] ** 2))(table), rtol=1e-6)


def test_a_pullback_adds_inside_jit():
    a, (_, pulled) = ref(3), aot.function(loss).vjp(PARAMS, X, 3)
    step = jax.jit(lambda pulled, a: pulled.accumulate_into(({"a": a, "b": None}, None, None))(1.0))
    for _ in range(2):
        step(pulled, a)
    np.testing.assert_allclose(a[...], 2 * jax.grad(loss)(PARAMS, X, 3)["a"], rtol=1e-6)


TREES = (
    "accumulate_into was given references in the structure {}, the gradients are PyTreeDef(({'a': *, 'b': *}, *, *)).\n"
    "Give a jax.Ref for each array, or None where no gradient is wanted."
)
REFUSED = {
    "an argument too few": (
        ({"a": ref(3), "b": None}, None),
        TREES.replace("{}", "PyTreeDef(({'a': *, 'b': None}, None))", 1),
    ),
    "none": ((), TREES.replace("{}", "PyTreeDef(())", 1)),
    "one for many": ((ref(3), None, None), TREES.replace("{}", "PyTreeDef((*, None, None))", 1)),
    "another shape": (
        ({"a": ref(2, 3), "b": None}, None, None),
        "accumulate_into needs a jax.Ref of float32[3] for args[0]['a'], but was given float32[2,3].\n"
        "Make it with jax.new_ref(jnp.zeros_like(array)).",
    ),
    "another dtype": (
        (None, ref(3, dtype=jnp.bfloat16), None),
        "accumulate_into needs a jax.Ref of float32[3] for args[1], but was given bfloat16[3].\n"
        "Make it with jax.new_ref(jnp.zeros_like(array)).",
    ),
    "an array": (
        (None, X, None),
        "accumulate_into needs a jax.Ref of float32[3] for args[1], but was given an array.\n"
        "Make it with jax.new_ref(jnp.zeros_like(array)).",
    ),
    "no gradient": (
        (None, None, ref()),
        "accumulate_into was given a reference for args[2], which is int32[] and has no gradient.\n"
        "Give None for it, or jax.ad.DontWant() to with_refs.",
    ),
}


@MADE
@pytest.mark.parametrize("name", REFUSED)
def test_refused(made, name):
    refs, text = REFUSED[name]
    with pytest.raises(ValueError) as raised:
        pull(made).accumulate_into(refs)
    assert str(raised.value) == text


@MADE
def test_entries_in_another_tree(made):
    with pytest.raises(ValueError) as raised:
        pull(made).with_refs(PARAMS, None)
    assert str(raised.value) == (
        "with_refs was given entries in the structure PyTreeDef(({'a': *, 'b': *}, None)), "
        "the arguments are PyTreeDef(({'a': *, 'b': *}, *, *)).\n"
        "Give a jax.Ref, jax.ad.GradValue() or jax.ad.DontWant() for each array."
    )
