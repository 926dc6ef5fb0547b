"""What may go in and come out: numbers, trees, nothing at all; and what is named, registered or given a derivative."""

from __future__ import annotations

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax import lax

from behaviours.behaviour import assert_as_jax, assert_near, assert_pulls_back_as_jax, behaviour, primitives
from corpus.program import integers, normal
from jointcut import aot

X, Y = normal(0, 3), normal(1, 3)
ONE = jnp.float32(1)

# ------------------------------------------------------------------------------------------------ plain I/O


@behaviour("plain I/O / one input, one output", "An array goes in and comes out.")
def one_array_in_and_one_out():
    assert_pulls_back_as_jax(jnp.sin, X)


@behaviour("plain I/O / inputs that are None", "None is an empty tree: it has no leaf and its gradient is None.")
def none_goes_in_and_is_its_own_gradient():
    def loss(weights, mask):
        assert mask is None and weights["bias"] is None
        return jnp.sum(jnp.sin(weights["w"]))

    assert_as_jax(loss, {"w": X, "bias": None}, None, argnums=(0, 1))


@behaviour("plain I/O / inputs that are integers", "A Python int is an int32 scalar without derivative.")
def a_python_integer_goes_in():
    def scaled(x, n):
        return jnp.sum(jnp.sin(x)) * jnp.asarray(n, x.dtype)

    assert_as_jax(scaled, X, 3)
    assert_pulls_back_as_jax(scaled, X, 3)


@behaviour("plain I/O / inputs that are Booleans", "A Python bool is traced; as a static argument it is not.")
def a_python_boolean_goes_in_traced_or_static():
    def chosen(x, flag):
        return jnp.sum(jnp.where(flag, jnp.sin(x), x))

    def branched(x, flag):
        return jnp.sum(jnp.sin(x) if flag else x)

    for flag in (True, False):
        assert_as_jax(chosen, X, flag)
        got = aot.function(branched, static_argnums=1).value_and_grad(X, flag)
        assert_near(got, jax.value_and_grad(branched)(X, flag))


@behaviour("plain I/O / inputs that are floats", "A Python float is a weakly typed scalar and is differentiated.")
def a_python_float_goes_in_and_stays_weak():
    value, gradient = aot.function(lambda x: x * jnp.sin(x)).value_and_grad(0.5)
    assert value.weak_type and gradient.weak_type
    assert_as_jax(lambda x: x * jnp.sin(x), 0.5)


@behaviour("plain I/O / several outputs", "A tuple comes out as a tuple, and each output has its cotangent.")
def a_tuple_comes_out():
    assert_pulls_back_as_jax(lambda x, y: (jnp.sin(x) * y, jnp.exp(y), x * y), X, Y)


@behaviour("plain I/O / a list comes out as a list", "The tree of the result is that of the function.")
def a_list_comes_out_as_a_list():
    assert type(aot.function(lambda x: [x * 2, x * 3])(X)) is list
    assert_pulls_back_as_jax(lambda x: [jnp.sin(x), [x * 3]], X)


@behaviour("plain I/O / lists of inputs", "A list of arrays goes in, and its gradient is a list.")
def a_list_goes_in_and_its_gradient_is_a_list():
    assert_as_jax(lambda xs: jnp.sum(xs[0] * jnp.sin(xs[1])), [X, Y])


@behaviour("plain I/O / a dict comes out", "Keys in the order of JAX's trees; cotangents by key.")
def a_dict_comes_out():
    assert_pulls_back_as_jax(lambda x, y: {"z": jnp.sin(x), "a": x * y}, X, Y)


@behaviour("plain I/O / nested outputs", "Trees in trees, with None and an empty tuple among them.")
def nested_trees_come_out():
    assert_pulls_back_as_jax(lambda x, y: ({"a": [jnp.sin(x), None]}, ((), (x * y,))), X, Y)


@behaviour("plain I/O / no output", "A function may return an empty tree; what it is pulled back to is zero.")
def nothing_comes_out():
    assert aot.function(lambda x: {})(X) == {}
    assert aot.function(lambda x: None)(X) is None
    assert_pulls_back_as_jax(lambda x: {}, X)
    assert_pulls_back_as_jax(lambda x: None, X)


@behaviour("plain I/O / no input", "A function without arguments can be called, and pulled back to nothing.")
def nothing_goes_in():
    made = aot.function(lambda: jnp.ones(2))
    assert_near(made(), jnp.ones(2))
    out, pullback = made.vjp()
    assert_near(out, jnp.ones(2))
    assert pullback(jnp.ones(2)) == ()


@behaviour("plain I/O / an empty tree is an input", "It is differentiated to an empty tree.")
def an_empty_tree_goes_in():
    assert_as_jax(lambda weights, x: jnp.sum(jnp.sin(x)), {}, X)
    assert_as_jax(lambda weights, x: jnp.sum(jnp.sin(x)), {}, X, argnums=(0, 1))


@behaviour("plain I/O / arrays without elements", "Shapes with a zero in them have gradients of that shape.")
def arrays_without_elements_go_in():
    assert_as_jax(lambda x, y: jnp.sum(jnp.sin(x)) + jnp.sum(y**2), jnp.zeros((0, 3)), X, argnums=(0, 1))


@behaviour("plain I/O / complex inputs and outputs", "Gradients are conjugated as JAX conjugates them.")
def complex_numbers_go_in_and_come_out():
    z = lax.complex(X, Y)
    assert_as_jax(lambda z: jnp.sum(jnp.abs(jnp.sin(z)) ** 2), z)
    assert_pulls_back_as_jax(lambda z: z * jnp.exp(jnp.sin(z)), z)
    assert_pulls_back_as_jax(lambda x, z: (jnp.real(z * z) + x, jnp.conj(z) * lax.complex(x, x)), X, z)


@behaviour("plain I/O / embedding bag", "Rows that are looked up twice get the sum of both cotangents.")
def rows_of_a_table_are_looked_up():
    table, places = normal(2, 4, 2), jnp.array([[0, 3, 0], [1, 0, 0]])
    assert_as_jax(lambda table, places: jnp.sum(jnp.sin(jnp.sum(table[places], 1))), table, places)


@behaviour("plain I/O / squeeze in place", "Shapes are changed by making another array.")
def a_squeezed_array_comes_out():
    assert_pulls_back_as_jax(lambda x: jnp.squeeze(jnp.sin(x), 0), normal(3, 1, 3))


@behaviour(
    "plain I/O / composite ops are taken apart", "Functions that JAX jits itself are opened in the joint program."
)
def functions_of_jax_are_opened():
    def loss(x):
        return jnp.sum(jax.nn.gelu(jax.nn.softmax(x)) * jax.jit(jax.nn.silu)(x))

    traced = aot.function(loss).trace(X)
    assert not {"pjit", "jit", "closed_call"} & set(primitives(traced.joint))
    assert_as_jax(loss, X)


@behaviour("plain I/O / keyword arguments", "They are passed on, and are not differentiated.")
def keywords_go_in():
    def loss(x, *, y, power=2):
        return jnp.sum(jnp.sin(x * y)) ** power

    made = aot.function(loss, static_argnames="power")
    assert_near(made.value_and_grad(X, y=Y, power=3), jax.value_and_grad(loss)(X, y=Y, power=3))
    assert_near(made.vjp(X, y=Y)[1](ONE), jax.vjp(lambda x: loss(x, y=Y), X)[1](ONE))


@behaviour("plain I/O / inputs of another library", "Numpy arrays go in as arrays, and JAX arrays come out.")
def numpy_arrays_go_in():
    made = aot.function(lambda x, y: (x, jnp.sin(x) * y))
    first, second = made(np.asarray(X), np.float32(2))
    assert isinstance(first, jax.Array) and isinstance(second, jax.Array)
    assert_near((first, second), (X, jnp.sin(X) * 2))
    assert_as_jax(lambda x, y: jnp.sum(jnp.sin(x) * y), np.asarray(X), np.asarray(Y), argnums=(0, 1))


@behaviour("plain I/O / an input that is no tensor", "A leaf that is no array is fixed: the function gets it as it is.")
def something_else_than_an_array_is_fixed():
    made = aot.function(lambda x, y: jnp.sum(getattr(jnp, y["name"])(x)))
    for name in ("tanh", "sin"):
        value, gradient = made.value_and_grad(X, {"name": name})
        want = jax.jit(jax.value_and_grad(lambda x, name=name: jnp.sum(getattr(jnp, name)(x))))(X)
        np.testing.assert_allclose(value, want[0], rtol=1e-6)
        np.testing.assert_allclose(gradient, want[1], rtol=1e-6)


# ------------------------------------------------------------------------------------------------ modules


@behaviour("misc / the parameters of a module are inputs", "Flax Linen: a tree of parameters, differentiated as it is.")
def parameters_of_linen():
    layer = linen.Dense(2)
    weights = layer.init(jax.random.key(0), X)
    assert_as_jax(lambda weights, x: jnp.sum(jnp.tanh(layer.apply(weights, x))), weights, X)


@behaviour("misc / a module is called", "Equinox: the module is a tree, and its gradient a module.")
def a_module_of_equinox():
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    loss = aot.function(lambda model, x: jnp.sum(jnp.tanh(model(x))))
    gradient = loss.grad(model, X)
    assert isinstance(gradient, eqx.nn.Linear)
    assert_near(gradient, jax.jit(jax.grad(lambda model, x: jnp.sum(jnp.tanh(model(x)))))(model, X))


@behaviour("misc / a module with state", "Haiku: state goes in and comes out as aux.")
def a_module_of_haiku_with_state():
    def forward(x):
        count = hk.get_state("count", (), jnp.float32, jnp.zeros)
        hk.set_state("count", count + 1)
        return jnp.sum(jnp.tanh(hk.Linear(2)(x)) ** 2) + count

    network = hk.transform_with_state(forward)
    weights, state = network.init(jax.random.key(0), X)
    assert_as_jax(lambda w, s, x: network.apply(w, s, None, x), weights, state, X, has_aux=True)


@behaviour("misc / several optimiser steps", "Optax: ten steps end where plain JAX ends, from one trace.")
def several_steps_of_an_optimiser():
    traces = []

    def loss(w, x):
        traces.append(None)
        return jnp.sum((jnp.tanh(x * w) - 1) ** 2)

    def trained(value_and_grad):
        w, rule = X, optax.sgd(0.1, momentum=0.9)
        state = rule.init(w)
        for _ in range(10):
            _, gradient = value_and_grad(w, Y)
            updates, state = rule.update(gradient, state)
            w = optax.apply_updates(w, updates)
        return w

    got = trained(aot.function(loss).value_and_grad)
    assert len(traces) <= 2
    assert_near(got, trained(jax.jit(jax.value_and_grad(loss))), rtol=1e-4)


# ------------------------------------------------------------------------------------------------ custom derivatives


@behaviour("misc / a custom autograd Function", "jax.custom_vjp: its own backward is run, not that of its body.")
def a_custom_vjp_keeps_its_own_backward():
    @jax.custom_vjp
    def clipped(x):
        return jnp.sin(x)

    clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct, -0.5, 0.5) * 7,))
    assert_as_jax(lambda x: jnp.sum(clipped(x) * 3), X)


@behaviour(
    "misc / a custom Function with several outputs", "Outputs that are not used have a zero cotangent in its rule."
)
def a_custom_vjp_with_an_unused_output():
    @jax.custom_vjp
    def both(x):
        return jnp.sin(x), jnp.cos(x)

    both.defvjp(lambda x: (both(x), x), lambda x, cts: (cts[0] * 2 + cts[1] * 100 + x,))
    assert_as_jax(lambda x: jnp.sum(both(x)[0]), X)


@behaviour("misc / a custom Function whose forward rule is another", "jax.custom_jvp: the rule is transposed.")
def a_custom_jvp_keeps_its_own_rule():
    @jax.custom_jvp
    def doubled(x):
        return jnp.sin(x)

    doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))
    assert_as_jax(lambda x: jnp.sum(doubled(x) ** 2), X)


@behaviour("misc / saved values that are no tensors", "What a custom rule keeps may be a tree with integers and keys.")
def a_custom_rule_keeps_a_tree():
    @jax.custom_vjp
    def noisy(x, key):
        return x * jax.random.normal(key, x.shape)

    noisy.defvjp(
        lambda x, key: (noisy(x, key), {"key": key, "n": jnp.int32(2)}),
        lambda kept, ct: (ct * jax.random.normal(kept["key"], ct.shape) * kept["n"].astype(ct.dtype), None),
    )
    key = jax.random.key(0)
    assert_as_jax(lambda x: jnp.sum(noisy(x, key) ** 2), X)


# ------------------------------------------------------------------------------------------------ names


@behaviour("misc / names of compilation contexts", "Stages and messages call the function by its name.")
def a_function_is_called_by_its_name():
    def attention(x):
        return jnp.sum(x) if jnp.all(x > 0) else x

    made = aot.function(attention)
    assert repr(made) == f"<aot.function {attention.__qualname__}: best>"
    assert made.__name__ == "attention"
    assert aot.function(jnp.sum).trace(X).name == "sum"
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        made.value_and_grad(X)
    assert any("while jointcut traced attention." in note for note in caught.value.__notes__)


@behaviour("misc / a compiled function is compiled once", "A second call with arrays of the same types traces nothing.")
def a_second_call_traces_nothing():
    traces = []

    def loss(x):
        traces.append(None)
        return jnp.sum(jnp.sin(x))

    made = aot.function(loss)
    for ways in (made, made.value_and_grad, made.grad, made.vjp):
        ways(X)
        count = len(traces)
        ways(X + 1)
        assert len(traces) == count


@behaviour("misc / gradients of losses in a loop", "A scan over blocks has JAX's gradient.")
def a_loop_is_differentiated():
    def loss(x, weights):
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h * w), jnp.sum(h)), x, weights)[0] ** 2)

    assert_as_jax(loss, X, normal(4, 4, 3), argnums=(0, 1))


@behaviour("misc / higher-order ops", "Branches and maps inside the function have JAX's gradient.")
def branches_and_maps_are_differentiated():
    def loss(x):
        y = lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.exp, x)
        z = lax.map(lambda v: v * jnp.cos(v), x)
        return jnp.sum(y * z) + jnp.sum(lax.switch(integers(0, below=2), [jnp.sin, jnp.tanh], x))

    assert_as_jax(loss, X)
    assert_as_jax(loss, -jnp.abs(X))
