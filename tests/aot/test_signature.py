"""A signature says by names and positions which input, output and gradient is which."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jointcut import aot
from jointcut.wrappers.metadata.schemas import ViewAndMutationMeta
from jointcut.wrappers.metadata.signatures import GraphSignature

X = jnp.arange(6.0).reshape(2, 3)


def signature(function, *args, **options):
    return aot.function(function, **options).trace(*args).partition().signature


def product(a, b):
    return jnp.sum(a * jnp.sin(b))


def test_each_parameter_that_is_the_same_array_keeps_its_path():
    both = signature(product, X, X, argnums=(0, 1))
    assert both.parameters == ("args[0]", "args[1]")
    assert both.inputs_to_parameters == {"primals_1": "args[0]"}
    assert both.same_arrays == {"args[1]": "args[0]"}
    assert both.backward_signature is not None
    assert both.backward_signature.gradients_to_parameters == {"gradient_1": "args[0]", "gradient_2": "args[1]"}


def test_every_result_that_is_named_is_one_of_the_forward():
    def function(x, ref):
        ref[...] = jax.lax.stop_gradient(jnp.max(x))
        return jnp.sum(x)

    cut = aot.function(function).trace(X, jax.new_ref(jnp.float32(0))).partition()
    assert cut.signature.buffers_to_mutate == {}
    assert cut.signature.buffers_mutated_in_place == ("args[1]",)
    assert cut.signature.user_outputs == ("output_1",)


def test_a_reference_that_the_backward_writes_is_written_in_place():
    @jax.custom_vjp
    def tap(ref, x):
        return x

    def backward(ref, g):
        ref[...] = g
        return None, g

    tap.defvjp(lambda ref, x: (x, ref), backward)
    found = signature(lambda x, ref: jnp.sum(tap(ref, x) ** 2), X, jax.new_ref(X))
    assert (found.buffers, found.buffers_mutated_in_place) == (("args[1]",), ("args[1]",))


def test_rows_and_places_of_a_sparse_gradient_are_told_apart():
    def words(table, ids, w):
        return jnp.sum(jnp.tanh(table[ids]) * w)

    args = jnp.ones((5, 3)), jnp.array([1, 2]), jnp.ones(3)
    found = signature(words, *args, argnums=(0, 2), sparse_gradients="args[0]").backward_signature
    assert found is not None
    assert found.gradients_to_parameters == {"gradient_1": "args[0]", "gradient_2": "args[0]", "gradient_3": "args[2]"}
    assert found.parts == {"gradient_1": "rows", "gradient_2": "places"}


def test_a_signature_prints_a_line_for_each_input_output_and_gradient():
    count = jax.new_ref(jnp.int32(0))

    def loss(params, x, same, ids):
        count[...] += 1
        return jnp.sum(jnp.tanh(params["table"][ids] @ params["w"]) * (x + same)), x

    params = {"table": jnp.ones((5, 3)), "w": jnp.ones((3, 3))}
    square, ids = jnp.ones((3, 3)), jnp.array([0, 1, 2])
    options = {"has_aux": True, "argnums": (0, 1, 2), "sparse_gradients": "args[0]['table']"}
    assert (
        str(signature(loss, params, square, square, ids, **options))
        == """\
inputs
  primals_1  buffer      constant 0, written in place
  primals_2  parameter   args[0]['table']
  primals_3  parameter   args[0]['w']
  primals_4  parameter   args[1] = args[2]
  primals_5  user input
outputs
  output_1  the loss
  output_2
gradients
  gradient_1  of args[0]['table']  rows
  gradient_2  of args[0]['table']  places
  gradient_3  of args[0]['w']
  gradient_4  of args[1]
  gradient_5  of args[2]"""
    )


def test_a_signature_of_nothing_says_so():
    assert str(signature(lambda nothing: None, None, argnums=())) == "neither inputs nor outputs"


def test_a_signature_of_an_older_version_is_read():
    found = signature(product, X, X + 1)
    text = found.to_json().replace(', "buffers_mutated_in_place": [], "same_arrays": {"dict": []}', "")
    assert "same_arrays" not in text
    assert GraphSignature.from_json(text.replace(', "parts": {"dict": []}', "")) == found


def test_the_pair_prints_what_it_takes_and_gives_by_number():
    def loss(w, x, n):
        h = jnp.tanh(x @ w)
        return jnp.sum(h**2), h

    cut = aot.function(loss, strategy="min_cut").trace(jnp.ones((3, 3)), X, 1).partition()
    assert (
        str(cut.gradient)
        == """\
  f   takes  inputs 0, 1, 2
      gives  outputs 0, 1
  df  takes  cotangents of outputs 0, 1
             input 1
             result 1 of f
      gives  gradient of input 0"""
    )


def test_temporaries_of_the_pair_are_told_apart_from_outputs():
    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    shown = str(aot.function(loss, strategy="min_cut").trace(jnp.ones((3, 3)), X).partition().gradient)
    assert shown.splitlines()[:3] == [
        "  f   takes  inputs 0, 1",
        "      gives  output 0",
        "             temporaries 1, 2",
    ]


LIBRARIES = {
    "a parameter of Flax": (lambda p: jnp.sum(p[...] ** 2), lambda: nnx.Param(jnp.ones(3))),
    "a state of Flax": (
        lambda s: jnp.sum(s["kernel"][...] ** 2),
        lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
    ),
    "a module of Flax": (lambda module: jnp.sum(module(jnp.ones(2))), lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
    "a layer of Equinox": (
        lambda layer: jnp.sum(layer(jnp.ones(2))),
        lambda: eqx.nn.Linear(2, 3, key=jax.random.key(0)),
    ),
}


@pytest.mark.parametrize(("function", "model"), LIBRARIES.values(), ids=LIBRARIES)
def test_signature_and_metadata_of_libraries_objects_have_a_json_form(function, model):
    cut = aot.function(function).trace(model()).partition()
    assert GraphSignature.from_json(cut.signature.to_json()) == cut.signature
    assert ViewAndMutationMeta.from_json(cut.metadata.to_json()) == cut.metadata
