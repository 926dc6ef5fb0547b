"""Objects that stand for arrays are opened, described, and closed again around gradients."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

from jointcut import aot
from jointcut.partition.errors import CallError, TraceError
from jointcut.wrappers.metadata.schemas import PlainTensorMeta, SubclassCreationMeta, ViewAndMutationMeta, plain_metas

X = jnp.linspace(0.1, 0.9, 6).reshape(2, 3)


@jax.tree_util.register_dataclass
@dataclass
class Quantised:
    """An array of bytes with a scale."""

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self):
        return self.values.shape

    @property
    def dtype(self):
        return self.scale.dtype

    def dense(self):
        return self.values.astype(self.scale.dtype) * self.scale


@jax.tree_util.register_pytree_node_class
class Two:
    """Two arrays, or two of these, that are added where one number is wanted; with a name."""

    def __init__(self, a, b, name="two"):
        self.a, self.b, self.name = a, b, name

    def __jax_array__(self):
        return jnp.asarray(self.a) + jnp.asarray(self.b)

    def tree_flatten(self):
        return (self.a, self.b), (self.name,)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, *aux)


@jax.tree_util.register_dataclass
@dataclass
class Plain:
    """A node that is no container: it has no shape."""

    w: jax.Array


class Lazy:
    """Not a pytree: it gives an array."""

    def __init__(self, array):
        self.array, self.asked = array, 0

    def __jax_array__(self):
        self.asked += 1
        return self.array


def quantised():
    return Quantised(jnp.array([[1, -2, 3], [0, 5, -7]], jnp.int8), jnp.float32(0.25))


def nested():
    return Two(Two(X, 2 * X, "inner"), Two(3 * X, 4 * X), "outer")


WAYS = {
    "value_and_grad": lambda f, *args: f.value_and_grad(*args),
    "in a jit": lambda f, *args: jax.jit(f.value_and_grad)(*args),
    "compiled": lambda f, *args: f.trace(*args).partition().compile().value_and_grad(*args),
    "compiled in two": lambda f, *args: f.trace(*args).partition().compile(executables=2).value_and_grad(*args),
    "checked": lambda f, *args: checked(f, *args),
}


def checked(f, *args):
    with aot.debug():
        return f.value_and_grad(*args)


ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
def test_a_quantised_array_gets_a_gradient_of_its_scale(way):
    def loss(q, x):
        return jnp.sum(jnp.sin(q.dense() * x))

    value, gradient = way(aot.function(loss), quantised(), X)
    want_value, want = jax.value_and_grad(loss, allow_int=True)(quantised(), X)
    np.testing.assert_allclose(value, want_value, rtol=1e-4)
    assert isinstance(gradient, Quantised)
    np.testing.assert_allclose(gradient.scale, want.scale, rtol=1e-5, atol=1e-6)
    assert (gradient.values.dtype, gradient.values.shape) == (jax.dtypes.float0, (2, 3))


@ways
def test_containers_in_containers(way):
    def loss(t, x):
        return jnp.sum(jnp.tanh(jnp.asarray(t) * x))

    _, gradient = way(aot.function(loss), nested(), X)
    want = jax.grad(loss)(nested(), X)
    assert jax.tree.structure(gradient) == jax.tree.structure(want)
    assert (gradient.name, gradient.a.name) == ("outer", "inner")
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@ways
@pytest.mark.parametrize("kind", [sparse.BCOO, sparse.BCSR])
def test_a_sparse_gradient_has_the_indices_of_its_array(way, kind):
    dense = jnp.array([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])

    def loss(m, x):
        return jnp.sum(jnp.sin(m @ x.T))

    _, gradient = way(aot.function(loss), kind.fromdense(dense), X)
    want = sparse.grad(loss)(kind.fromdense(dense), X)
    assert isinstance(gradient, kind)
    np.testing.assert_allclose(gradient.todense(), want.todense(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(gradient.indices, kind.fromdense(dense).indices)


@pytest.mark.parametrize("way", [way for name, way in WAYS.items() if name != "in a jit"])  # JAX's own refuses it
def test_an_object_that_gives_its_array(way):
    def loss(a, x):
        return jnp.sum(jnp.sin(a * x))

    function, given = aot.function(loss), Lazy(X)
    for _ in range(2):
        value, gradient = way(function, given, X)
        want_value, want = jax.value_and_grad(loss)(X, X)
        np.testing.assert_allclose(value, want_value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-6)
    assert given.asked >= 2


def test_an_object_that_gives_its_array_in_a_call_and_vjp():
    function = aot.function(lambda a, x: jnp.sum(jnp.sin(a * x)))
    np.testing.assert_allclose(function(Lazy(X), X), jnp.sum(jnp.sin(X * X)), rtol=1e-5, atol=1e-6)
    _, pullback = function.vjp(Lazy(X), X)
    np.testing.assert_allclose(pullback(jnp.float32(1))[0], X * jnp.cos(X * X), rtol=1e-5, atol=1e-6)


def test_containers_are_described():
    arguments = {"q": quantised(), "t": nested(), "p": Plain(X), "m": sparse.BCOO.fromdense(jnp.eye(2))}

    def function(a, x):
        out = jnp.sum(a["q"].dense() * jnp.asarray(a["t"]) * a["p"].w) + jnp.sum(a["m"] @ x)
        return out, {"copy": Two(out, x)}

    traced = aot.function(function, has_aux=True).trace(arguments, X)
    found = traced.metadata
    assert [str(meta) for meta in found.subclass_inp_meta] == [
        "BCOO(data: float32[2], indices: int32[2,2])",
        "float32[2,3]",
        "Quantised(values: int8[2,3], scale: float32[])",
        "Two(a: Two(a: float32[2,3], b: float32[2,3]), b: Two(a: float32[2,3], b: float32[2,3]))",
        "float32[2,3]",
    ]
    containers = [meta for meta in found.subclass_inp_meta if isinstance(meta, SubclassCreationMeta)]
    assert [(m.flat_tensor_start_idx, m.arg_count) for m in containers] == [(0, 2), (3, 2), (5, 4)]
    assert [str(meta) for meta in found.subclass_fw_graph_out_meta] == [
        "float32[]",
        "Two(a: float32[], b: float32[2,3])",
    ]
    leaves = jax.tree.leaves((arguments, X))
    for meta, want in zip(containers, (arguments["m"], arguments["q"], arguments["t"]), strict=True):
        made = meta.creation_fn(leaves)
        assert jax.tree.structure(made) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
            assert a is b or np.array_equal(a, b)
    again = ViewAndMutationMeta.from_json(found.to_json())
    assert again == found
    grad_metas = traced.subclass_metadata.grad_input_metas
    assert [str(meta) for meta in grad_metas] == [
        "BCOO(data: float32[2], indices: int32[2,2])",
        "float32[2,3]",
        "Quantised(values: float0[2,3], scale: float32[])",
        "Two(a: Two(a: float32[2,3], b: float32[2,3]), b: Two(a: float32[2,3], b: float32[2,3]))",
    ]
    positions = [p.unwrapped_idx for meta in grad_metas for p in plain_metas(meta)]
    assert positions == [0, None, 1, None, 2, 3, 4, 5, 6]  # the positions of the BCOO are an input, int8 has a zero


def test_a_plain_array_is_plain():
    assert aot.function(lambda x: jnp.sum(x)).trace(X).metadata.subclass_inp_meta == (
        PlainTensorMeta(0, (2, 3), jnp.dtype("float32")),
    )


def test_a_registered_containers_structure_comes_back_as_it_is():
    @jax.tree_util.register_dataclass
    @dataclass
    class Rows:
        """Some rows of a table."""

        rows: jax.Array
        where: jax.Array

        @property
        def shape(self):
            return (10, *self.rows.shape[1:])

        @property
        def dtype(self):
            return self.rows.dtype

    aot.register_container(Rows, structure=("where",))
    given = Rows(X, jnp.array([7, 2]))
    gradient = aot.function(lambda r: jnp.sum(jnp.sin(jnp.zeros((10, 3)).at[r.where].add(r.rows)))).grad(given)
    np.testing.assert_array_equal(gradient.where, [7, 2])
    np.testing.assert_allclose(gradient.rows, jnp.cos(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [int, 3], ids=str)
def test_registering_what_is_no_pytree_class(given):
    with pytest.raises(CallError) as caught:
        aot.register_container(given)
    assert str(caught.value) == (
        f"register_container was given {given!r}, which is no pytree class.\n"
        "Register it first, with jax.tree_util.register_dataclass or register_pytree_with_keys_class."
    )


def test_an_integer_outside_a_container_is_refused_as_before():
    with pytest.raises(TraceError) as caught:
        aot.function(lambda a: jnp.sum(a["q"].dense()) * a["n"]).value_and_grad({"q": quantised(), "n": 3})
    assert str(caught.value) == (
        "args[0]['n'] is int32: value_and_grad differentiates floating-point arguments.\n"
        "Say which arrays are differentiated, as filter=lambda x: x.dtype == jnp.float32, convert it, or use vjp."
    )
