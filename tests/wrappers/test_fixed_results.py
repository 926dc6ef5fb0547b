"""Leaves of a result that are not arrays come back as they are: functions, strings, numbers of an Equinox module."""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.partition.errors import TraceError

X = jnp.arange(1.0, 7.0).reshape(2, 3)


class Model(eqx.Module):
    layer: eqx.nn.Linear
    activation: object
    scale: float
    name: str
    on: bool

    def __call__(self, x):
        return self.activation(self.layer(x)) * self.scale


MODEL = Model(eqx.nn.Linear(3, 1, key=jax.random.key(0)), jax.nn.gelu, 2.0, "a", True)


def moved(model, x):
    """A loss, and the model with another bias, as functions that track an average return it."""
    loss = jnp.mean(jax.vmap(model)(x) ** 2)
    return loss, eqx.tree_at(lambda m: m.layer.bias, model, model.layer.bias + loss)


by_equinox = eqx.filter_jit(eqx.filter_value_and_grad(moved, has_aux=True))


def compiled(cut):
    return cut.trace(MODEL, X).partition().compile(2).value_and_grad


def within(cut):
    return eqx.filter_value_and_grad(lambda model, x: cut(model, x), has_aux=True)


#: Each makes a step of a function that returns (loss, model).
WAYS = {
    "value_and_grad": lambda: aot.function(moved, has_aux=True).value_and_grad,
    "in filter_jit": lambda: eqx.filter_jit(aot.function(moved, has_aux=True).value_and_grad),
    "filter_value_and_grad": lambda: eqx.filter_value_and_grad(aot.function(moved), has_aux=True),
    "called within": lambda: eqx.filter_jit(within(aot.function(moved))),
    "two programs": lambda: compiled(aot.function(moved, has_aux=True)),
    "in a budget": lambda: aot.function(moved, has_aux=True, budget="1 MB").value_and_grad,
}


def assert_as_by_equinox(step):
    for _ in range(2):
        (got, want) = (function(MODEL, X) for function in (step, by_equinox))
        assert jax.tree.structure(got) == jax.tree.structure(want)
        model = got[0][1]
        assert (model.activation, model.scale, model.name, model.on) == (jax.nn.gelu, 2.0, "a", True)
        assert type(model.scale) is float and model.on is True
        for a, b in zip(*(jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_module_comes_back_with_its_functions_and_numbers(way):
    assert_as_by_equinox(WAYS[way]())


def test_cached_programs_give_such_a_module_too(tmp_path):
    for _ in range(2):
        assert_as_by_equinox(aot.function(moved, has_aux=True, cache=tmp_path).value_and_grad)


def test_what_is_no_array_comes_back_in_any_tree():
    out = aot.function(lambda x: {"x": jnp.sin(x), "how": "sine", "f": jnp.sin, "none": None})(X)
    assert (out["how"], out["f"], out["none"]) == ("sine", jnp.sin, None)
    assert out["x"].shape == X.shape


def test_a_cotangent_has_none_where_the_output_is_no_array():
    out, pullback = aot.function(lambda m, x: moved(m, x)[1]).vjp(MODEL, X)
    ones = jax.tree.map(jnp.ones_like, eqx.filter(out, eqx.is_inexact_array))
    gradient, _ = pullback(ones)
    _, plain = eqx.filter_vjp(lambda m, x: moved(m, x)[1], MODEL, X)
    np.testing.assert_allclose(gradient.layer.weight, plain(ones)[0].layer.weight, rtol=1e-5)


def test_an_artefact_gives_the_arrays_of_such_a_result(tmp_path):
    path = aot.function(lambda x: (jnp.sum(x), {"name": "a", "x": x + 1}), has_aux=True).export(tmp_path / "a", X)
    (value, aux), _ = aot.load(path).value_and_grad(X)
    assert value == jnp.sum(X) and aux["x"].shape == X.shape


class Box:
    def __init__(self, y):
        self.y = y


@pytest.mark.parametrize("made", [lambda y: lambda x: x * y, lambda y: partial(jnp.add, y), Box])
def test_what_holds_a_traced_value_is_refused(made):
    with pytest.raises(TraceError) as told:
        aot.function(lambda x: (jnp.sum(x), {"f": made(x * 2)}), has_aux=True).value_and_grad(X)
    kind = type(made(X)).__name__
    assert str(told.value).splitlines() == [
        f"result[1]['f'] is a {kind} that holds a traced value, which has no number after the trace.",
        "Return that value itself, and make the object of it outside of the function.",
    ]
