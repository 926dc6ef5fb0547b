"""Gradients are added to references across calls, by functions as by tapes; where something is wrong, nothing is."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jointcut import aot
from jointcut.partition.errors import CallError

P = {"w": jnp.cos(jnp.arange(12.0)).reshape(4, 3), "b": jnp.ones(3)}
X = jnp.sin(jnp.arange(8.0)).reshape(2, 4)


def loss(p, x):
    return jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2)


def zeros(tree):
    return jax.tree.map(lambda leaf: jax.new_ref(jnp.zeros_like(leaf)), tree)


def assert_hold(refs, times, gradients):
    assert jax.tree.structure(refs) == jax.tree.structure(gradients)
    for ref, gradient in zip(jax.tree.leaves(refs), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(ref[...], times * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("made", [aot.function(loss), aot.tape(loss)], ids=["function", "tape"])
def test_each_call_adds_its_gradients_and_returns_the_value(made):
    refs = zeros(P)
    step = made.accumulate_into(refs)
    for _ in range(3):
        np.testing.assert_allclose(step(P, X), loss(P, X), rtol=1e-6)
    assert_hold(refs, 3, jax.grad(loss)(P, X))


def test_the_value_comes_with_aux_and_several_arguments_with_a_tuple():
    def both(p, x, scale):
        return scale * loss(p, x), x[0]

    refs = zeros((X, P))
    value, aux = aot.function(both, argnums=(1, 0), has_aux=True).accumulate_into(refs)(P, X, scale=2.0)
    assert (value, aux.tolist()) == (2 * loss(P, X), X[0].tolist())
    assert_hold(refs, 2, jax.grad(loss, (1, 0))(P, X))


def test_a_loop_of_microbatches_adds_in_one_program():
    made, refs = aot.function(loss), zeros(P)

    @jax.jit
    def step(refs, p, batches):
        return lax.map(lambda x: made.accumulate_into(refs)(p, x), batches)

    batches = jnp.stack([X, 2 * X, X - 1])
    np.testing.assert_allclose(step(refs, P, batches), [loss(P, x) for x in batches], rtol=1e-5)
    assert_hold(refs, 1, jax.grad(lambda p: sum(loss(p, x) for x in batches))(P))


def test_modules_have_references_in_the_tree_of_their_gradients():
    net = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    made = aot.function(lambda net, x: jnp.sum(jax.vmap(net)(x) ** 2))
    refs = zeros(made.grad(net, X))
    made.accumulate_into(refs)(net, X)
    assert_hold(refs, 1, made.grad(net, X))


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.calls = nnx.Linear(4, 3, rngs=rngs), nnx.Variable(jnp.zeros((), int))

    def __call__(self, x):
        self.calls[...] += 1
        return self.layer(x)


def test_a_filter_leaves_the_other_arrays_of_an_nnx_module_without_references():
    net = Counting(nnx.Rngs(0))
    made = aot.function(lambda net, x: jnp.sum(net(x) ** 2), filter=nnx.Param)
    gradients = made.grad(net, X)
    refs = zeros(gradients)
    made.accumulate_into(refs)(net, X)
    assert net.calls[...] == 2
    assert_hold(refs, 1, gradients)


def test_a_method_adds_the_gradients_of_its_instance():
    class Scaled(eqx.Module):
        by: jax.Array

        @aot.function
        def loss(self, x):
            return jnp.sum(self.by * x)

    refs = zeros(Scaled(jnp.ones(4)))
    Scaled(jnp.ones(4)).loss.accumulate_into(refs)(X)
    np.testing.assert_allclose(refs.by[...], X.sum(0), rtol=1e-6)


@pytest.mark.parametrize("made", [aot.function(loss), aot.tape(loss)], ids=["function", "tape"])
def test_nothing_is_added_for_a_none(made):
    refs = {"w": jax.new_ref(jnp.zeros((4, 3))), "b": None}
    made.accumulate_into(refs)(P, X)
    np.testing.assert_allclose(refs["w"][...], jax.grad(loss)(P, X)["w"], rtol=1e-5, atol=1e-6)


def test_numbers_and_arrays_of_numpy_have_references_of_the_types_that_jax_gives_them():
    refs = zeros((0.0, jnp.zeros(2)))
    made = aot.function(lambda scale, x: scale * jnp.sum(x), argnums=(0, 1))
    made.accumulate_into(refs)(2.0, np.ones(2))
    assert [ref[...].tolist() for ref in refs] == [2.0, [2.0, 2.0]]


def test_one_reference_gets_the_sum_for_two_arguments():
    ref = jax.new_ref(jnp.zeros(4))
    aot.function(lambda a, b: a @ b, argnums=(0, 1)).accumulate_into((ref, ref))(X[0], X[1])
    np.testing.assert_allclose(ref[...], X[0] + X[1], rtol=1e-6)


def test_the_rows_of_a_table_are_added_to_a_dense_reference():
    ref = jax.new_ref(jnp.ones((5, 2)))
    made = aot.function(lambda table, rows: jnp.sum(table[rows] ** 2), sparse_gradients="args[0]")
    made.accumulate_into(ref)(jnp.ones((5, 2)), jnp.array([1, 3, 3]))
    assert ref[...][:, 0].tolist() == [1.0, 3.0, 1.0, 5.0, 1.0]


REFUSALS = {
    "another tree": (
        lambda refs: aot.function(loss).accumulate_into({"w": refs["w"]})(P, X),
        "accumulate_into was given references in the structure PyTreeDef({'w': *}), "
        "the gradients are PyTreeDef({'b': *, 'w': *}).\n"
        "Give a jax.Ref for each array, or None where no gradient is wanted.",
    ),
    "another shape": (
        lambda refs: aot.function(loss).accumulate_into({"w": refs["b"], "b": refs["b"]})(P, X),
        "accumulate_into needs a jax.Ref of float32[4,3] for args[0]['w'], but was given float32[3].\n"
        "Make it with jax.new_ref(jnp.zeros_like(array)).",
    ),
    "no reference": (
        lambda refs: aot.function(loss).accumulate_into({**refs, "b": 3})(P, X),
        "accumulate_into needs a jax.Ref of float32[3] for args[0]['b'], but was given a int.\n"
        "Make it with jax.new_ref(jnp.zeros_like(array)).",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_before_anything_is_added(case):
    call, text = REFUSALS[case]
    refs = zeros(P)
    with pytest.raises(CallError) as caught:
        call(refs)
    assert str(caught.value) == text
    assert_hold(refs, 0, P)


def hooked(seen, traced):
    def loss(p, x, scale=1.0):
        w = aot.on_cotangent(p["w"], lambda g: 2 * g, traced=True)
        w = aot.post_accumulate(w, lambda g: seen.append(np.asarray(g).sum()))
        b = aot.post_accumulate(p["b"], lambda g: g / 2, traced=traced)
        return scale * jnp.mean(jnp.tanh(x @ w + b) ** 2)

    return loss


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "called back"])
@pytest.mark.parametrize("made", [aot.function, aot.tape], ids=["function", "tape"])
def test_a_hook_after_the_sum_sees_it_and_may_replace_it(made, traced):
    seen, refs = [], zeros(P)
    step = made(hooked(seen, traced)).accumulate_into(refs)
    gradient, b = jax.grad(loss)(P, X), 0.0
    for count in (1, 2, 3):
        step(P, X)
        b = (b + gradient["b"]) / 2
        np.testing.assert_allclose(refs["w"][...], 2 * count * gradient["w"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(refs["b"][...], b, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(seen[-1], np.sum(refs["w"][...]), rtol=1e-5)
    assert len(seen) == 3


def test_hooks_after_the_sum_stay_in_other_calls_and_go_with_static_arguments_and_jit():
    seen, refs = [], zeros(P)
    function = aot.function(hooked(seen, False), static_argnames="scale")
    function.accumulate_into(refs)(P, X, scale=3.0)
    function.grad(P, X, scale=3.0)
    gradient = jax.grad(loss)(P, X)
    np.testing.assert_allclose(seen, [6 * np.sum(gradient["w"])] * 2, rtol=1e-5)
    jax.jit(lambda refs, p: function.accumulate_into(refs)(p, X, scale=3.0))(refs, P)
    jax.effects_barrier()
    np.testing.assert_allclose(seen[-1], 12 * np.sum(gradient["w"]), rtol=1e-5)
    np.testing.assert_allclose(refs["b"][...], (1.5 + 3) / 2 * gradient["b"], rtol=1e-5, atol=1e-6)


def test_without_a_reference_a_hook_sees_the_gradient_of_its_call():
    seen, refs = [], {"w": None, "b": jax.new_ref(jnp.zeros(3))}
    for _ in range(2):
        aot.function(hooked(seen, True)).accumulate_into(refs)(P, X)
    np.testing.assert_allclose(seen, [2 * np.sum(jax.grad(loss)(P, X)["w"])] * 2, rtol=1e-5)
