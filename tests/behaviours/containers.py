"""Objects that stand for an array and hold several: sparse, quantised, nested, a parameter, or any that converts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import sparse

from behaviours.behaviour import assert_as_jax, assert_near, assert_pulls_back_as_jax, behaviour, refusal
from corpus.program import normal
from jointcut import aot
from jointcut.partition.errors import CallError
from jointcut.wrappers.arguments import containers
from jointcut.wrappers.metadata.schemas import PlainTensorMeta, SubclassCreationMeta, ViewAndMutationMeta

X, Y = normal(50, 3), normal(51, 3)
ONE = jnp.float32(1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """A matrix in int8 with one scale for each row."""

    values: Any
    scale: Any
    bits: int = field(metadata={"static": True}, default=8)

    @property
    def shape(self):
        return self.values.shape

    @property
    def dtype(self):
        return self.scale.dtype

    def dense(self):
        return self.values.astype(self.dtype) * self.scale


@jax.tree_util.register_pytree_with_keys_class
class Two:
    """Two arrays, or two of its own kind, that stand for their sum."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    @property
    def shape(self):
        return self.a.shape

    @property
    def dtype(self):
        return self.a.dtype

    def sum(self):
        first, second = (part.sum() if isinstance(part, Two) else part for part in (self.a, self.b))
        return jnp.sin(first) * 2 + second

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("a"), self.a), (jax.tree_util.GetAttrKey("b"), self.b)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class Convertible:
    """No pytree, but an object that gives its array."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


def quantised():
    """A matrix of two rows."""
    return Quantised(jnp.array([[1, -2, 3], [4, 5, -6]], jnp.int8), jnp.array([[0.5], [0.25]]))


def sparse_matrix():
    """Three numbers in a matrix of two rows."""
    return sparse.BCOO.fromdense(jnp.array([[0.3, 0.0, -0.2], [0.0, 0.0, 0.7]]))


def multiplied(matrix, x):
    """A loss of a quantised matrix."""
    return jnp.sum(jnp.tanh(matrix.dense() @ x) ** 2)


def sparse_loss(matrix, x):
    """A loss of a sparse matrix."""
    return jnp.sum(jnp.sin(matrix @ x) ** 2)


# ------------------------------------------------------------------------------------------------ gradients


@behaviour("subclasses / a subclass is an input", "A two-array class goes in, its gradient is one of the class.")
def a_class_of_two_arrays():
    def loss(two, x):
        return jnp.sum(two.sum() * x)

    gradient = aot.function(loss).grad(Two(X, Y), Y)
    assert type(gradient) is Two
    assert_as_jax(loss, Two(X, Y), Y, argnums=(0, 1))
    assert_pulls_back_as_jax(loss, Two(X, Y), Y)


@behaviour("subclasses / nested subclasses", "A class nested in itself comes back nested in the same way.")
def a_class_nested_in_itself():
    def loss(two, x):
        return jnp.sum(two.sum() * x)

    nested = Two(Two(X, Y), Two(Two(Y, X), X + Y))
    gradient = aot.function(loss).grad(nested, Y)
    assert type(gradient.b.a) is Two and not isinstance(gradient.b.b, Two)
    assert_as_jax(loss, nested, Y)
    assert_pulls_back_as_jax(loss, nested, Y)


@behaviour("subclasses / subclasses and plain tensors mixed", "In one tree, next to integers and None.")
def containers_among_other_leaves():
    def loss(tree, x):
        return jnp.sum(tree["two"].sum() * tree["w"] * x) + multiplied(tree["more"][0], x)

    tree = {"w": X, "two": Two(X, Y), "more": [quantised(), None]}
    want_value, want = jax.jit(jax.value_and_grad(loss, allow_int=True))(tree, Y)
    value, gradient = aot.function(loss).value_and_grad(tree, Y)
    assert_near((value, gradient), (want_value, want))


@behaviour(
    "subclasses / quantised weights", "The scale has a gradient, the int8 numbers a float0 zero, in the container."
)
def a_quantised_matrix():
    matrix = quantised()
    want = jax.jit(jax.value_and_grad(multiplied, allow_int=True))(matrix, X)
    made = aot.function(multiplied)
    compiled = [made.trace(matrix, X).partition().compile(n) for n in (1, 2)]
    for way in (made.value_and_grad, *(run.value_and_grad for run in compiled)):
        value, gradient = way(matrix, X)
        assert (type(gradient), gradient.bits) == (Quantised, 8)
        assert gradient.values.dtype == jax.dtypes.float0
        assert_near((value, gradient), want)
    assert_pulls_back_as_jax(multiplied, matrix, X)


@behaviour("subclasses / a sparse matrix", "The gradient is a BCOO at the same indices, as in jax.experimental.sparse.")
def a_sparse_matrix():
    matrix = sparse_matrix()
    want_value, want = sparse.value_and_grad(sparse_loss)(matrix, X)
    value, gradient = aot.function(sparse_loss).value_and_grad(matrix, X)
    assert isinstance(gradient, sparse.BCOO)
    assert_near(value, want_value)
    assert_near((gradient.data, gradient.indices), (want.data, want.indices))
    assert gradient.indices.dtype == jnp.int32
    assert_near(gradient.todense(), want.todense())


@behaviour("subclasses / a sparse matrix in vjp", "jax.vjp gives float0 indices, and so does ours.")
def a_sparse_matrix_is_pulled_back():
    matrix = sparse_matrix()
    assert_pulls_back_as_jax(sparse_loss, matrix, X)
    _, gradient = aot.function(sparse_loss, argnums=1).value_and_grad(matrix, X)
    assert_near(gradient, jax.grad(lambda x: jnp.sum(jnp.sin(matrix.todense() @ x) ** 2))(X))


@behaviour("subclasses / under JAX's own transformations", "sparse.grad of a function of ours is that of the function.")
def a_sparse_matrix_in_sparse_grad():
    matrix = sparse_matrix()
    got, want = (sparse.grad(f)(matrix, X) for f in (aot.function(sparse_loss), sparse_loss))
    assert_near((got.data, got.indices), (want.data, want.indices))


@behaviour("subclasses / a parameter", "An nnx.Param has an nnx.Param for its gradient.")
def a_parameter_of_nnx():
    def loss(param, x):
        return jnp.sum(jnp.sin(param[...]) * x)

    param = nnx.Param(X)
    value, gradient = aot.function(loss).value_and_grad(param, Y)
    assert isinstance(gradient, nnx.Param)
    assert_near((value, gradient[...]), jax.value_and_grad(lambda w: jnp.sum(jnp.sin(w) * Y))(X))
    (pulled, _) = aot.function(loss).vjp(param, Y)[1](ONE)
    assert isinstance(pulled, nnx.Param)
    assert_near(pulled[...], Y * jnp.cos(X))


@behaviour("subclasses / a module of parameters", "A split nnx module: its state of Params is differentiated.")
def a_state_of_parameters():
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer, nnx.Param)

    def loss(params, x):
        return jnp.sum(jnp.tanh(nnx.merge(graph, params)(x)) ** 2)

    want = jax.jit(jax.value_and_grad(loss))(params, X)
    got = aot.function(loss).value_and_grad(params, X)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_near(jax.tree.leaves(got), jax.tree.leaves(want))


@behaviour(
    "subclasses / an object that gives its array", "What has __jax_array__ and is no pytree enters as that array."
)
def an_object_that_gives_its_array():
    def loss(x, y):
        return jnp.sum(jnp.sin(x) * y)

    given, want = Convertible(X), jax.jit(jax.value_and_grad(loss))(X, Y)
    made = aot.function(loss)
    assert_near(made(given, Y), want[0])
    assert_near(made.value_and_grad(given, Y), want)
    assert_near(made.vjp(given, Y)[1](ONE), jax.vjp(loss, X, Y)[1](ONE))
    for executables in (1, 2):
        compiled = made.trace(given, Y).partition().compile(executables)
        assert_near(compiled.value_and_grad(given, Y), want)
        assert_near(compiled.value_and_grad(X, Y), want)
    assert_near(made.value_and_grad(X, Y), want)


@behaviour("subclasses / an object is the same array as another input", "What two objects hold may be one array.")
def an_object_and_its_array_are_one():
    def loss(a, b):
        return jnp.sum(a * jnp.sin(b))

    want = jax.jit(jax.value_and_grad(loss, (0, 1)))(X, X)
    made = aot.function(loss, argnums=(0, 1))
    assert_near(made.value_and_grad(Convertible(X), X), want)
    assert_near(made.value_and_grad(Convertible(X), Convertible(X)), want)
    assert made.trace(Convertible(X), X).metadata.input_info[1].duplicate_of == 0


@behaviour("subclasses / an object is returned", "It comes back as its array, the very same.")
def an_object_comes_back_as_its_array():
    assert aot.function(lambda x, y: (x, x * y))(Convertible(X), Y)[0] is X


# ------------------------------------------------------------------------------------------------ metadata


@behaviour("subclasses / creation metadata", "Start, count and names of a container's arrays, and its auxiliary data.")
def creation_metadata_of_inputs():
    args = X, quantised(), Two(X, Two(Y, X))
    plain, q, two = aot.function(lambda x, q, two: jnp.sum(x)).trace(*args).metadata.subclass_inp_meta
    assert isinstance(plain, PlainTensorMeta) and plain.unwrapped_idx == 0
    assert (q.flat_tensor_start_idx, q.arg_count, q.original_subclass_type) == (1, 2, Quantised)
    assert [(name, str(part)) for name, part in q.attrs] == [("values", "int8[2,3]"), ("scale", "float32[2,1]")]
    assert q.meta == (8,)
    assert (two.flat_tensor_start_idx, two.arg_count) == (3, 3)
    (first, a), (second, b) = two.attrs
    assert (first, second) == ("a", "b")
    assert isinstance(a, PlainTensorMeta) and a.unwrapped_idx == 3
    assert isinstance(b, SubclassCreationMeta) and (b.flat_tensor_start_idx, b.arg_count) == (4, 2)


@behaviour("subclasses / creation_fn", "The container is made of its arrays among the flat ones.")
def a_container_is_made_again():
    args = X, quantised(), Two(X, Two(Y, X)), sparse_matrix()
    _, q, two, m = aot.function(lambda *args: jnp.sum(args[0])).trace(*args).metadata.subclass_inp_meta
    flat = jax.tree.leaves(args)
    for meta, want in ((q, args[1]), (two, args[2]), (m, args[3])):
        made = meta.creation_fn(flat)
        assert type(made) is type(want)
        assert_near(made, want)
    doubled = two.creation_fn([leaf * 2 if leaf.dtype == X.dtype else leaf for leaf in flat])
    assert_near(doubled.b.a, 2 * Y)


@behaviour(
    "subclasses / a container of trees", "What a container holds inside, a tuple say, is described and made again too."
)
def a_container_of_a_tuple():
    given = Quantised(jnp.ones((2, 3), jnp.int8), jnp.ones((2, 1)))
    nested = Two(given, given)
    (meta,) = aot.function(lambda two: jnp.sum(two.a.scale)).trace(nested).metadata.subclass_inp_meta
    assert_near(meta.creation_fn(jax.tree.leaves(nested)), nested)


@behaviour("subclasses / the gradient's containers", "grad_input_metas are those of the differentiated arguments.")
def metadata_of_gradients():
    made = aot.function(lambda two, x, q: jnp.sum(two.sum() * x) + multiplied(q, x), argnums=(0, 2))
    traced = made.trace(Two(X, Y), X, quantised())
    two, q = traced.subclass_metadata.grad_input_metas
    assert (two.original_subclass_type, q.original_subclass_type) == (Two, Quantised)
    assert traced.subclass_metadata.fw_metadata == traced.metadata


@behaviour(
    "subclasses / a class is registered as a container",
    "Named parts keep their numbers in the gradient, as indices do.",
)
def a_class_of_our_own_has_structure():
    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Rows:
        """Some rows of a table."""

        places: Any
        rows: Any

    given = Rows(jnp.array([2, 0]), normal(52, 2, 3))
    aot.register_container(Rows, structure=("places",))

    def loss(given):
        return jnp.sum(jnp.sin(jnp.zeros((4, 3)).at[given.places].add(given.rows)) ** 2)

    gradient = aot.function(loss).grad(given)
    assert_near(gradient.places, given.places)
    assert_near(gradient.rows, jax.grad(lambda rows: loss(Rows(given.places, rows)))(given.rows))


@behaviour("subclasses / a class that is no container", "Refused, with the way out.")
def a_class_that_is_no_pytree_is_no_container():
    assert refusal(CallError, containers.register_container, Convertible) == (
        f"register_container was given {Convertible!r}, which is no pytree class.\n"
        "Register it first, with jax.tree_util.register_dataclass or register_pytree_with_keys_class."
    )


# ------------------------------------------------------------------------------------------------ outputs


@behaviour("subclasses / a subclass is an output", "It comes out as its class, and its cotangent is one of the class.")
def a_container_comes_out():
    def scaled(q, x):
        return {"x": x * 2, "q": Quantised(q.values, jnp.sin(q.scale) * x[0], q.bits)}

    out = aot.function(scaled)(quantised(), X)["q"]
    assert type(out) is Quantised
    assert_pulls_back_as_jax(scaled, quantised(), X)


@behaviour(
    "subclasses / parts of an input are returned in another container", "Arrays keep their identity through containers."
)
def parts_keep_their_identity():
    given = quantised()
    out = aot.function(lambda q, x: Quantised(q.values, jnp.sin(q.scale)))(given, X)
    assert out.values is given.values


@behaviour("metadata of subclass outputs / outputs in containers", "Which flat outputs belong together, by name.")
def metadata_of_outputs_in_containers():
    def scaled(q, x):
        return {"a": x * 2, "q": Quantised(q.values, jnp.sin(q.scale) * x[0]), "z": Two(x, Two(x * 3, x * 4))}

    metadata = aot.function(scaled).trace(quantised(), X).metadata
    plain, q, two = metadata.subclass_fw_graph_out_meta
    assert isinstance(plain, PlainTensorMeta)
    assert (q.flat_tensor_start_idx, q.arg_count) == (1, 2)
    assert (two.flat_tensor_start_idx, two.arg_count) == (3, 3)
    assert metadata.num_outputs == 6


@behaviour(
    "metadata of subclass outputs / tangents in containers", "A container has a cotangent if one of its arrays has."
)
def metadata_of_cotangents_in_containers():
    def several(q, x):
        return q, x * 2, Quantised(q.values, q.scale * 2), jnp.arange(3), Quantised(q.values, q.values)

    metadata = aot.function(several).trace(quantised(), X).metadata
    kinds = [type(m).__name__ for m in metadata.subclass_tangent_meta]
    assert kinds == ["SubclassCreationMeta", "PlainTensorMeta", "SubclassCreationMeta"]


@behaviour("metadata of subclass outputs / written to disk", "Metadata with containers comes back equal from JSON.")
def metadata_of_containers_in_json():
    def scaled(q, two, m):
        return Two(two.a, q.scale), jnp.sum(m @ X)

    metadata = aot.function(scaled).trace(quantised(), Two(X, Y), sparse_matrix()).metadata
    back = ViewAndMutationMeta.from_json(metadata.to_json(indent=1))
    assert back == metadata
    assert back.subclass_inp_meta[0].original_subclass_type is Quantised
