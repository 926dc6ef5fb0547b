"""XLA's options reach every program of a function, and its plans and cache; where they cannot, that is said."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.cache.store import Store
from jointcut.partition.errors import CallError

X = jnp.linspace(0.1, 1.0, 64)


def loss(w):
    return jnp.sum(jnp.exp(jnp.sin(w)) / jnp.tanh(w))


def compiled_with_options(folder):
    """The names of the programs that XLA wrote to a folder, which only an option tells it to."""
    found = (re.search(r"\.jit_(\w+)\.", path.name) for path in folder.iterdir())
    return {match[1] for match in found if match}


def dumping(folder, **options):
    return aot.function(loss, compiler_options={"xla_dump_to": str(folder)}, **options)


CALLS = {
    "call": (lambda f: f(X), {"alone"}),
    "value_and_grad": (lambda f: f.value_and_grad(X), {"step"}),
    "vjp": (lambda f: f.vjp(X)[1](jnp.float32(1)), {"forward", "backward"}),
    "compile": (lambda f: f.trace(X).partition().compile(2), {"forward", "backward"}),
    "plain JAX": (lambda f: f.trace(X).plain_program, {"whole"}),
    "update": (lambda f: f.value_and_update(jnp.copy(X), (), update=lambda g, s, p: (p - g, s)), {"step"}),
}


@pytest.mark.parametrize("call, programs", CALLS.values(), ids=CALLS)
def test_each_way_of_calling_compiles_with_the_options(tmp_path, call, programs):
    call(dumping(tmp_path))
    assert programs <= compiled_with_options(tmp_path)


def test_without_the_option_nothing_is_written(tmp_path):
    aot.function(loss, compiler_options={"xla_cpu_enable_fast_math": False}).value_and_grad(X)
    assert compiled_with_options(tmp_path) == set()


def test_the_gradient_is_that_of_plain_jax_within_what_fast_math_may_change():
    fast = aot.function(loss, compiler_options={"xla_cpu_enable_fast_math": True})
    np.testing.assert_allclose(fast.grad(X), jax.grad(loss)(X), rtol=1e-5)


def test_a_budget_weighs_with_the_options_and_holds():
    unfused, x = {"xla_disable_hlo_passes": "fusion"}, jnp.linspace(0.1, 1.0, 4096)
    steps = [jax.jit(jax.value_and_grad(loss), compiler_options=options) for options in (None, unfused)]
    usual, plain = (step.lower(x).compile().memory_analysis().temp_size_in_bytes for step in steps)
    traced = aot.function(loss, budget=0.8, compiler_options=unfused).trace(x)
    assert traced.plain_memory.temp_bytes == plain > usual
    made = traced.partition().compile()
    assert made.activation_bytes == made.memory.step.temp_bytes <= 0.8 * plain


def test_other_options_are_another_entry_of_the_cache(tmp_path):
    for options in (None, {}, {"xla_cpu_enable_fast_math": True}, {"xla_cpu_enable_fast_math": False}):
        aot.function(loss, cache=tmp_path, compiler_options=options).grad(X)
    assert len(Store.at(tmp_path).entries()) == 3


def test_the_order_of_options_does_not_count():
    one = aot.function(loss, compiler_options={"b": 1, "a": 2}).trace(X).options
    other = aot.function(loss, compiler_options={"a": 2, "b": 1}).trace(X).options
    assert one == other and one.compiler_options == (("a", 2), ("b", 1))
    assert type(one).from_json(one.to_json()) == one


INSIDE = {
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(f)(X),
    "value_and_grad in jit": lambda f: jax.jit(f.value_and_grad)(X),
    "tape": lambda f: aot.tape(f).grad(X),
    "update in jit": lambda f: jax.jit(lambda w: f.value_and_update(w, (), update=lambda g, s, p: (p - g, s)))(X),
}


@pytest.mark.parametrize("call", INSIDE.values(), ids=INSIDE)
def test_a_call_inside_a_transformation_is_refused_as_in_jax(call):
    made = aot.function(loss, compiler_options={"xla_cpu_enable_fast_math": True})
    with pytest.raises(CallError) as caught:
        call(made)
    assert str(caught.value) == (
        "loss has compiler_options and is called inside a transformation of JAX, which XLA compiles as a whole.\n"
        "Give them to the outer jax.jit(..., compiler_options=...), or call loss's own value_and_grad."
    )


BAD = {
    "no dict": (3, "compiler_options is of type int, not a dict."),
    "no name": ({1: True}, "compiler_options has the key 1, not a name."),
    "no value": ({"xla_dump_to": [1]}, "compiler_options['xla_dump_to'] is of type list, not a plain value."),
}


@pytest.mark.parametrize("given, told", BAD.values(), ids=BAD)
def test_options_that_are_none_are_refused(given, told):
    with pytest.raises(TypeError) as caught:
        aot.function(loss, compiler_options=given)
    assert str(caught.value) == f'{told}\nGive a dict, such as {{"xla_cpu_enable_fast_math": True}}.'


def test_an_option_that_xla_does_not_have_is_named():
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_nope'"):
        aot.function(loss, compiler_options={"xla_nope": True}).grad(X)


def test_a_tape_does_not_have_the_option():
    with pytest.raises(TypeError) as caught:
        aot.tape(loss, compiler_options={"xla_cpu_enable_fast_math": True})
    what = "compiler_options is an option of aot.function, and a tape does not have it."
    assert str(caught.value) == f"{what}\nLeave it out."
