"""An artefact writes the states of objects into what stands for them: the object, a dict, or a `State`."""

from __future__ import annotations

from types import MappingProxyType

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jointcut import aot
from jointcut.partition.errors import CallError

X = jnp.ones(3)


class Counted(nnx.Module):
    """A weight, and how often it was used."""

    def __init__(self):
        self.inner = nnx.List([nnx.Param(jnp.ones(3))])
        self.uses = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.uses[...] += 1
        return jnp.sum(self.inner[0] * x)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    path = tmp_path_factory.mktemp("artefact") / "counted"
    return aot.load(aot.function(lambda m, x: m(x)).export(path, Counted(), X, platforms="cpu"))


def test_the_contract_tells_of_states(loaded):
    assert [(o.name, o.kind, o.path) for o in loaded.contract.outputs] == [
        ("output_1", "output", "result"),
        ("output_2", "state", "args[0].uses"),
    ]
    assert [(i.path, i.kind) for i in loaded.contract.inputs] == [
        ("args[0].inner[0]", "parameter"),
        ("args[0].uses", "buffer"),
        ("args[1]", "user_input"),
    ]
    assert loaded.contract.graph_signature.buffers_to_mutate == {"output_2": "args[0].uses"}


def test_the_object_is_written(loaded):
    model = Counted()
    assert loaded(model, X) == 3 and loaded.value_and_grad(model, X)[0] == 3
    out, pullback = loaded.vjp(model, X)
    assert out == 3 and model.uses[...] == 3
    assert isinstance(pullback(jnp.float32(1)), Counted)


def test_a_dict_and_a_state_are_written_in_its_place(loaded):
    pure = nnx.to_pure_dict(nnx.state(Counted()))
    value, gradient = loaded.value_and_grad(pure, X)
    assert value == 3 and pure["uses"] == 1 and gradient["inner"][0].shape == (3,)
    state = nnx.state(Counted())
    loaded.value_and_grad(state, X)
    assert state["uses"][...] == 1


def test_inside_jit_the_dict_of_the_trace_is_written(loaded):
    def twice(pure):
        loaded(pure, X)
        loaded(pure, X)
        return pure["uses"]

    pure = nnx.to_pure_dict(nnx.state(Counted()))
    assert jax.jit(twice)(pure) == 2 and pure["uses"] == 0


def test_what_cannot_be_written_is_refused_before_anything_is(loaded):
    pure = nnx.to_pure_dict(nnx.state(Counted()))
    jax.tree_util.register_pytree_with_keys(
        MappingProxyType,
        lambda m: ([(jax.tree_util.DictKey(k), m[k]) for k in sorted(m)], tuple(sorted(m))),
        lambda keys, children: MappingProxyType(dict(zip(keys, children, strict=True))),
    )
    with pytest.raises(CallError) as error:
        loaded(MappingProxyType(pure), X)
    assert str(error.value) == (
        "args[0]['uses'] is written by the function, and a mappingproxy cannot be.\n"
        "Pass a dict there, which gets the new value, or the object that was exported."
    )
