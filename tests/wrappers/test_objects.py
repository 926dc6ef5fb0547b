"""What is refused of objects, of leaves that are no arrays, and of filters, with the whole text."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jointcut import aot
from jointcut.partition.errors import CallError, TraceError
from jointcut.wrappers.arguments.fixed import Fixed
from jointcut.wrappers.arguments.tree import Statics, bind
from jointcut.wrappers.metadata.schemas import MutationType

X = jnp.ones(3)


class Counted(nnx.Module):
    """A weight, and how often it was used."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
        self.uses = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.uses[...] += 1
        return jnp.sum(self.w * x)


def used(model, x):
    return model(x)


# ------------------------------------------------------------------------------------------------- what is told


def test_metadata_and_signature_tell_of_what_is_written():
    cut = aot.function(used).trace(Counted(), X).partition()
    uses, weight, x = cut.metadata.input_info
    assert [i.path for i in (uses, weight, x)] == ["args[0].uses.value", "args[0].w.value", "args[1]"]
    assert [i.mutation_type for i in (uses, weight)] == [MutationType.MUTATED_OUT_GRAPH, MutationType.NOT_MUTATED]
    assert str(uses) == "args[0].uses.value: read, written"
    assert cut.metadata.num_outputs == 1
    assert cut.signature.buffers == ("args[0].uses.value",)
    assert cut.signature.buffers_to_mutate == {"output_2": "args[0].uses.value"}
    assert cut.signature.user_outputs == ("output_1",)


def test_an_optimizer_and_a_metric_are_written_too():
    def step(model, optimizer, metric, x):
        gradient = nnx.grad(lambda m: jnp.square(m(x)))(model)
        optimizer.update(model, gradient)
        metric.update(values=x)
        return jnp.sum(model.w[...])

    made = []
    for function in (step, aot.function(step, argnums=())):
        model = Counted()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        metric = nnx.metrics.Average()
        with jax.numpy_dtype_promotion("standard"):  # Flax's own metrics mix integers and floats
            result = [function(model, optimizer, metric, X) for _ in range(2)]
            made.append((result, metric.compute(), optimizer.step[...], model.uses[...], model.w[...]))
    for ours, theirs in zip(*made, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_function_that_returns_a_module_gives_one_back():
    model = aot.function(lambda m, x: (m(x), m), argnums=())(Counted(), X)[1]
    assert isinstance(model, Counted) and model.uses[...] == 1


def test_calls_share_a_program_where_fixed_leaves_are_equal():
    traced = []

    def loss(x, how):
        traced.append(how)
        return jnp.sum(how["f"](x)) * (2 if how["flag"] else 1)

    cut = aot.function(loss)
    counts = []
    for flag in (True, True, False):
        before = len(traced)
        value, _ = cut.value_and_grad(X, {"f": jnp.sin, "flag": flag})
        counts.append(len(traced) - before)
        np.testing.assert_allclose(value, jnp.sum(jnp.sin(X)) * (2 if flag else 1), rtol=1e-6)
    assert counts[0] > 0 and counts[1] == 0 and counts[2] > 0


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), ("a", b"a"), ([1], [1])],
    ids=["int", "float", "sign", "b", "l"],
)
def test_what_is_equal_but_not_the_same_is_told_apart(one, other):
    assert Fixed(one) != Fixed(other)
    assert Fixed(one) == Fixed(one) and hash(Fixed(one)) == hash(Fixed(one))


def test_a_leaf_without_a_hash_is_the_same_only_as_itself(caplog):
    class Unhashable:
        __hash__ = None

    caplog.set_level("INFO", logger="jointcut")
    one, other = Unhashable(), Unhashable()
    trees = [bind((X, {"at": leaf}), {}, Statics()).tree for leaf in (one, one, other)]
    assert trees[0] == trees[1] != trees[2]
    told = [record.message for record in caplog.records]
    assert told == ["a Unhashable has no hash: calls share a program only where they pass the same one"]


def test_flags_and_integers_stay_python_values_inside_a_transformation():
    def loss(p, flag, count):
        assert flag is True and type(count) is int
        return jnp.sum(p) * count

    gradient = jax.grad(aot.function(loss))(X, True, 3)
    np.testing.assert_array_equal(gradient, 3 * X)


def test_the_gradient_of_a_flag_is_that_of_jax():
    cut = aot.function(lambda p, flag: jnp.sum(p) if flag else jnp.prod(p))
    _, pullback = cut.vjp(X, True)
    assert pullback(jnp.float32(1))[1].dtype == jax.dtypes.float0


# ---------------------------------------------------------------------------------------------------- filters


class Affine(eqx.Module):
    """Arrays of two dtypes, a number and a function."""

    weight: jax.Array
    table: jax.Array
    scale: float
    f: object

    def __call__(self, x):
        return self.f(self.weight * x) * self.scale + self.table[0].astype(jnp.float32)


def affine():
    return Affine(jnp.ones(3), jnp.arange(3), 2.0, jnp.tanh)


def total(model, x):
    return jnp.sum(model(x))


@pytest.mark.parametrize("given", [None, eqx.is_inexact_array], ids=["as it comes", "filter"])
def test_a_gradient_is_none_where_nothing_is_differentiated(given):
    _, gradient = aot.function(total, filter=given).value_and_grad(affine(), X)
    _, want = eqx.filter_value_and_grad(total)(affine(), X)
    assert jax.tree.structure(gradient) == jax.tree.structure(want)
    np.testing.assert_allclose(gradient.weight, want.weight, rtol=1e-6)


def test_a_tree_of_booleans_and_a_class_filter_too():
    params = {"a": X, "b": {"c": X, "d": X}}

    def loss(p):
        return jnp.sum(p["a"] * p["b"]["c"] + p["b"]["d"])

    _, gradient = aot.function(loss, filter={"a": True, "b": False}).value_and_grad(params)
    assert gradient["b"] == {"c": None, "d": None} and gradient["a"].shape == (3,)
    _, gradient = aot.function(used, filter=nnx.Param).value_and_grad(Counted(), X)
    assert gradient.uses.get_raw_value() is None and gradient.w.shape == (3,)


def test_filters_that_select_nothing_or_do_not_fit_are_refused():
    with pytest.raises(TraceError) as error:
        aot.function(total, filter=lambda leaf: False).value_and_grad(affine(), X)
    assert str(error.value) == "filter selects no array of argnums=0.\nLet it hold for at least one array."
    with pytest.raises(TraceError) as error:
        aot.function(lambda p: p["a"].sum(), filter={"b": True}).value_and_grad({"a": X})
    text = str(error.value)
    assert text.startswith("filter does not fit the argument: ") and text.endswith(
        "\nGive a predicate on arrays, a class that holds arrays (nnx.Param), or a tree of booleans that the argument "
        "begins with."
    )


# --------------------------------------------------------------------------------------------------- bad input


def refused(kind, run):
    with pytest.raises(kind) as error:
        run()
    return str(error.value)


def test_an_argument_without_an_array_cannot_be_differentiated():
    text = refused(TraceError, lambda: aot.function(lambda p, x: x.sum()).value_and_grad({"w": "s"}, X))
    assert text == (
        "args[0]['w'] is a str: value_and_grad differentiates floating-point arguments.\n"
        "Leave it out of argnums=0, or pass an array."
    )


def test_a_leaf_whose_equality_is_an_array_is_refused():
    class Vague:
        def __eq__(self, other):
            return np.ones(3)

        __hash__ = object.__hash__

    text = refused(CallError, lambda: aot.function(lambda x, s: x.sum()).value_and_grad(X, {"b": Vague()}))
    assert text == (
        "args[1]['b'] is a Vague, no array of JAX's, and comparing two of them gives a ndarray, not True or False.\n"
        "Pass it as an array, or wrap it in an object with an == of its own."
    )


class Reshaped(Counted):
    """A variable of it gets another shape when it is called."""

    def __call__(self, x):
        self.uses.set_value(jnp.zeros(2, jnp.int32))
        return jnp.sum(self.w * x)


def test_a_variable_that_gets_another_shape_is_refused():
    text = refused(TraceError, lambda: aot.function(used).value_and_grad(Reshaped(), X))
    assert text == (
        "args[0].uses.value is int32[], and the function writes int32[2] there.\n"
        "Keep its shape and dtype: a compiled program is made for them."
    )


@pytest.mark.parametrize("way", ["call", "value_and_grad"])
def test_a_module_of_another_trace_is_not_written(way):
    cut, model = aot.function(used), Counted()
    call = cut if way == "call" else cut.value_and_grad
    text = refused(CallError, lambda: jax.vmap(lambda x: call(model, x))(jnp.ones((2, 3))))
    assert text == (
        "args[0].uses is written by the function, but was made outside of the transformation that calls it.\n"
        "Use Flax's own transformation (nnx.grad, nnx.vmap, nnx.scan, nnx.jit), which hands it in and out, or pass it "
        "as an argument of the function that is transformed."
    )
    assert model.uses[...] == 0


def test_a_shared_variable_in_two_arguments_is_refused():
    model = Counted()
    text = refused(CallError, lambda: aot.function(lambda m, n, x: m(x) + n(x)).value_and_grad(model, model, X))
    assert text == (
        "args[1].uses is the same as args[0].uses, and one of them is differentiated: its gradient belongs to one "
        "argument.\nPass what they share once, or take it out of argnums."
    )


def test_an_object_is_not_donated():
    text = refused(CallError, lambda: aot.function(used, donate_argnums=0).value_and_grad(Counted(), X))
    assert text == (
        "args[0].uses.value belongs to an object that the function can write, and its argument is donated.\n"
        "Take it out of donate_argnums and donate_argnames: the object keeps the arrays that are not written."
    )


def test_a_traced_value_that_escapes_is_refused():
    class Model:
        def __init__(self):
            self.total = {"sum": 0.0}

        def loss(self, w):
            self.total["sum"] = jnp.sum(w)
            return self.total["sum"]

    expected = (
        "self.total['sum'] was written while loss was traced, and holds a traced value now, which has no number.\n"
        "Return it (as aux, with has_aux=True), or print it with jax.debug.print: a compiled function runs no Python "
        "and writes to no object. A Flax NNX module is written where it is an argument."
    )
    for call in (
        lambda: aot.function(Model().loss)(X),
        lambda: aot.function(Model().loss).value_and_grad(X),
        lambda: jax.grad(aot.function(Model().loss))(X),
    ):
        assert refused(TraceError, call) == expected
    last = None

    def rebinds(w):
        nonlocal last
        last = jnp.sum(w)
        return last

    assert refused(TraceError, lambda: aot.function(rebinds).grad(X)).startswith("last was written while rebinds was")
    seen = []

    def loss(w):
        seen.append(w.shape)  # a tuple of numbers is nothing that escapes
        return jnp.sum(w)

    aot.function(loss).value_and_grad(X)
    assert seen


class Keeper:
    """An object that keeps what it saw."""

    def __init__(self):
        self.seen = []

    @aot.function(argnums=1)
    def loss(self, w):
        self.seen.append(jnp.sum(w))
        return self.seen[-1]


@pytest.mark.parametrize("static", [(), (0,)], ids=["fixed", "static"])
def test_a_traced_value_that_is_kept_in_an_argument_is_refused(static):
    def loss(keeper, w):
        return Keeper.loss.__wrapped__(keeper, w)

    expected = (
        "args[0].seen[0] was written while loss was traced, and holds a traced value now, which has no number.\n"
        "Return it (as aux, with has_aux=True), or print it with jax.debug.print: a compiled function runs no Python "
        "and writes to no object. A Flax NNX module is written where it is an argument."
    )
    function = aot.function(loss, argnums=1, static_argnums=static)
    for call in (
        lambda: function(Keeper(), X),
        lambda: function.value_and_grad(Keeper(), X),
        lambda: jax.grad(function, argnums=1)(Keeper(), X),
        lambda: Keeper().loss.value_and_grad(X),
        lambda: jax.jit(jax.grad(Keeper().loss))(X),
    ):
        assert refused(TraceError, call) == expected


@jax.tree_util.register_pytree_with_keys_class
class Statistics:
    """A pytree class that somebody wrote, which JAX copies."""

    def __init__(self, count):
        self.count = count

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("count"), self.count)], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def test_a_write_to_a_copy_is_refused():
    def loss(w, batch, statistics):
        labels = batch.pop("labels")  # its own dict
        statistics.count = statistics.count + 1
        return jnp.sum(w * labels)

    text = refused(TraceError, lambda: aot.function(loss).value_and_grad(X, {"labels": X}, Statistics(jnp.float32(0))))
    assert text == (
        "args[2] is a Statistics, which the function writes: that would be lost after the call.\n"
        "Return the new object, as aux with has_aux=True, and put it in the place of the old one."
    )


def test_an_error_of_jax_names_the_users_argument():
    def loss(params, x, threshold):
        return jnp.sum(params["a"] * x) if threshold > 1 else jnp.sum(params["b"])

    params = {"a": X, "b": X}  # one array: three distinct ones, as many as there are parameters
    for call in (aot.function(loss).value_and_grad, jax.grad(aot.function(loss))):
        text = refused(jax.errors.TracerBoolConversionError, lambda call=call: call(params, 2.0, 2.0))
        assert "depends on the value of the argument args[2]" in text
