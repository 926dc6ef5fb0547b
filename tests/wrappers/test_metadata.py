"""The records of a call build what the call takes and returns."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import sparse

from jointcut import aot
from jointcut.partition.program.jax import jaxprs
from jointcut.wrappers.metadata.schemas import OutputType, SubclassCreationMeta, SubclassMeta, plain_metas

X = jnp.linspace(0.1, 1.0, 6).reshape(2, 3)
M = sparse.BCOO.fromdense(jnp.eye(3) * 2)


@jax.tree_util.register_dataclass
@dataclass
class Quantised:
    """A matrix of whole numbers with a scale."""

    values: jax.Array
    scale: jax.Array

    def __jax_array__(self):
        return self.values.astype(self.scale.dtype) * self.scale

    @property
    def shape(self):
        return self.values.shape

    @property
    def dtype(self):
        return self.scale.dtype


Q = Quantised(jnp.arange(6, dtype=jnp.int8).reshape(2, 3), jnp.float32(0.5))


class Layer(nnx.Module):
    """A module with a parameter, and a counter that is written."""

    def __init__(self):
        self.w, self.calls = nnx.Param(X), nnx.BatchStat(jnp.float32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.sum(jnp.sin(x * self.w[...]))


TABLE = {"sparse_gradients": "args[0]"}
CALLS = {
    "a sparse matrix between arrays": (lambda x, m, y: jnp.sum((x @ m) * y), (0, 1, 2), {}, (X, M, X + 1)),
    "a sparse matrix in a tree": (lambda x, t: jnp.sum(x @ t["m"]) * t["a"], 1, {}, (X, {"m": M, "a": 2.0})),
    "a container with integers": (lambda q, x: jnp.sum(jnp.asarray(q) * jnp.sin(x)), (0, 1), {}, (Q, X)),
    "a module": (lambda x, layer: layer(x), (1, 0), {}, (X, Layer())),
    "arguments in another order": (lambda m, x: jnp.sum(x @ m), (1, 0), {}, (M, X)),
    "rows of a table": (lambda t, x: jnp.sum(t[jnp.array([0, 1])] * x), (0, 1), TABLE, (X, X)),
    "a static argument first": (lambda n, m, x: jnp.sum(x @ m) * n, (1, 2), {"static_argnums": 0}, (3, M, X)),
    "a filter": (lambda t: jnp.sum(t["a"] * t["b"]), 0, {"filter": {"a": True, "b": False}}, ({"a": X, "b": X},)),
}  # fmt: skip


def same(got, want):
    got, want = ((jax.tree.leaves(tree), jax.tree.structure(tree)) for tree in (got, want))
    assert got[1] == want[1]
    for a, b in zip(got[0], want[0], strict=True):
        assert a.dtype == b.dtype
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(("function", "argnums", "options", "args"), CALLS.values(), ids=CALLS)
def test_gradients_are_built_by_their_records(function, argnums, options, args):
    made = aot.function(function, argnums=argnums, **options)
    cut = made.trace(*args).partition()
    metas = cut.traced.subclass_metadata.grad_input_metas
    results = jaxprs.opened(cut.backward)[0].outvars
    plains = [plain for meta in metas for plain in plain_metas(meta)]
    assert sorted(p.unwrapped_idx for p in plains if p.unwrapped_idx is not None) == list(range(len(results)))
    for plain in plains:
        if plain.unwrapped_idx is not None:
            aval = results[plain.unwrapped_idx].aval
            assert (plain.shape, plain.dtype) == (aval.shape, aval.dtype)
    compiled = cut.compile()
    inputs = list(compiled._bound(args, {})[1].leaves)  # before the call writes to a module
    flat = compiled.backward(compiled.forward(*args)[1], jnp.float32(1))
    built = [meta.creation_fn(flat, inputs) for meta in metas]
    gradients = made.value_and_grad(*args)[1]
    outermost = jax.tree.leaves(gradients, is_leaf=lambda x: isinstance(x, sparse.BCOO | Quantised | nnx.Param))
    same([jax.tree.leaves(b) for b in built], [jax.tree.leaves(g) for g in outermost])
    again = SubclassMeta.from_json(cut.traced.subclass_metadata.to_json())
    assert again == cut.traced.subclass_metadata


@pytest.mark.parametrize(
    "function",
    [
        lambda x: {"n": jnp.arange(3), "m": sparse.BCOO((x[0], jnp.arange(3)[:, None]), shape=(3,)), "s": jnp.sum(x)},
        lambda x: (jnp.argmax(x), Quantised(jnp.int8(x), jnp.sum(x)), Quantised(jnp.int8(x), jnp.float32(2)), x * 2),
        lambda x: (jnp.sin(x), None, jnp.arange(2)),
    ],
    ids=["sparse", "quantised", "plain"],
)
def test_cotangents_are_built_by_their_records(function):
    made = aot.function(function)
    metadata = made.trace(X).metadata
    flat = [jnp.full(meta.shape, i + 2.0, meta.dtype) for i, meta in enumerate(metadata.traced_tangents)]
    plains = [p for meta in metadata.subclass_tangent_meta for p in plain_metas(meta)]
    assert [p for p in plains if p.unwrapped_idx is not None] == list(metadata.traced_tangents)
    built = [meta.creation_fn(flat) for meta in metadata.subclass_tangent_meta]
    carried = iter(built)
    zeros = jax.tree.map(lambda y: np.zeros(y.shape, jax.dtypes.float0), function(X))
    containers = (sparse.BCOO, Quantised)
    cotangent = jax.tree.map(
        lambda zero, y: zero if not carries(y) else next(carried),
        zeros,
        function(X),
        is_leaf=lambda x: isinstance(x, containers),
    )
    same(made.vjp(X)[1](cotangent), jax.vjp(function, X)[1](cotangent))


def carries(output):
    """Whether an output, an array or a container, holds an array that carries a cotangent."""
    return any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(output))


def test_arguments_are_built_by_their_records():
    for function, argnums, options, args in CALLS.values():
        seen = []

        def looking(*given, seen=seen, function=function):
            seen.append(jax.tree.structure(given))
            return function(*given)

        traced = aot.function(looking, argnums=argnums, **options).trace(*args)
        assert seen[0] == jax.tree.structure(args)
        metas = traced.metadata.subclass_inp_meta
        assert [p.unwrapped_idx for m in metas for p in plain_metas(m)] == list(range(len(traced.bound.leaves)))


@jax.custom_vjp
def doubling_transpose(x):
    """A transpose whose derivative is twice that of a transpose."""
    return x.T


doubling_transpose.defvjp(lambda x: (x.T, None), lambda _, ct: (2 * ct.T,))


@jax.custom_jvp
def doubling_moves(x):
    """The same with a rule for tangents."""
    return x.T


doubling_moves.defjvp(lambda primals, tangents: (primals[0].T, 2 * tangents[0].T))

VIEWS = {
    "a transpose": (lambda x: x.T, OutputType.alias_of_input),
    "a transpose in jit": (lambda x: jax.jit(jnp.transpose)(x), OutputType.alias_of_input),
    "by custom_vjp": (doubling_transpose, OutputType.custom_function_view),
    "by custom_jvp": (doubling_moves, OutputType.custom_function_view),
    "by custom_vjp in jit": (jax.jit(doubling_transpose), OutputType.custom_function_view),
    "a reshape of one": (lambda x: doubling_transpose(x).reshape(6), OutputType.custom_function_view),
    "one of a reshape": (lambda x: doubling_moves(x.reshape(3, 2)), OutputType.custom_function_view),
}


@pytest.mark.parametrize("derivatives", ["jax", "finite"])
@pytest.mark.parametrize(("view", "kind"), VIEWS.values(), ids=VIEWS)
def test_a_view_with_its_own_derivative_is_told(view, kind, derivatives):
    made = aot.function(lambda x: (jnp.sum(x**2), view(x)), derivatives=derivatives)
    info = made.trace(X).metadata.output_info[1]
    assert (info.output_type, info.base_idx, info.requires_grad) == (kind, 0, True)
    says_so = " with its own derivative" in info.words
    assert says_so == (kind is OutputType.custom_function_view)


def test_a_view_without_a_gradient_needs_no_second_trace():
    runs = []

    def function(x, y):
        runs.append(0)
        return jnp.sum(x * y), x.T

    info = aot.function(function, has_aux=True).trace(X, X).metadata.output_info[1]
    assert (info.output_type, info.requires_grad, len(runs)) == (OutputType.alias_of_input, False, 1)


def test_only_one_real_number_is_the_loss():
    def loss(function, **options):
        return aot.function(function, **options).trace(X).partition().signature.backward_signature.loss_output

    assert loss(lambda x: jnp.sum(x**2)) == "output_1"
    assert loss(lambda x: (jnp.arange(3), jnp.sum(x**2))) == "output_2"
    assert loss(lambda x: (jnp.sum(x**2), x), has_aux=True) == "output_1"
    assert loss(lambda x: x * 2) == ""
    assert loss(lambda x: jax.lax.complex(jnp.sum(x), jnp.sum(x))) == ""
    assert "the loss" not in str(aot.function(lambda x: x * 2).trace(X).partition().signature)


def test_the_backward_overwrites_the_residuals_that_the_metadata_names():
    def function(x, w):
        return jnp.tanh(jnp.sin(x) @ w)

    cut = (
        aot.function(function, argnums=(0, 1)).trace(jnp.ones((4, 4)), jnp.ones((4, 4))).partition(strategy="save_all")
    )
    (positions,) = {cut.metadata.bw_donated_idxs}
    compiled = cut.compile()
    _, residuals = compiled.forward(jnp.ones((4, 4)), jnp.ones((4, 4)))
    compiled.backward(residuals, jnp.ones((4, 4)))
    assert positions
    assert tuple(i for i, x in enumerate(residuals) if x.is_deleted()) == positions


def test_a_container_without_flat_arrays_has_no_start():
    metas = aot.function(lambda q, x: jnp.sum(x * 2.0), argnums=(0, 1)).trace(
        Quantised(jnp.int8(X), jnp.int8(3)), X
    ).subclass_metadata.grad_input_metas  # fmt: skip
    assert isinstance(metas[0], SubclassCreationMeta)
    assert (metas[0].flat_tensor_start_idx, metas[0].arg_count, str(metas[0])) == (
        None,
        0,
        "Quantised(values: float0[2,3], scale: float0[])",
    )


def test_there_is_one_token_for_each_kind_of_ordered_effect():
    def noisy(x):
        jax.debug.print("first {}", x[0, 0], ordered=True)
        jax.debug.print("second {}", x[0, 1], ordered=True)
        jax.debug.print("in any order {}", x[0, 2])
        return jnp.sum(x**2)

    metadata = aot.function(noisy).trace(X).metadata
    assert (metadata.tokens, metadata.num_backward_tokens) == (("OrderedDebug",), 0)
    assert len(metadata.effects) == 2
