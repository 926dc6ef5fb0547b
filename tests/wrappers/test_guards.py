"""A compiled program refuses a call that it was not made for, before anything runs, and says what differs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut.partition.errors import CallError
from jointcut.wrappers.arguments.tree import Statics, bind
from jointcut.wrappers.built_in.guards import GuardsWrapper
from jointcut.wrappers.metadata.convention import Convention, slots
from jointcut.wrappers.wrapper import Target

STATICS = Statics(frozenset({2}), frozenset({"mode"}))
ARGS = ({"w": jnp.ones((3, 2)), "n": 4}, jnp.ones(3), 7)
CURE = "Trace and compile for this signature too, or call the function itself, which does so by need."


def guarded(args=ARGS, **kwargs):
    """A call that returns its bound arguments, guarded by one signature."""
    bound = bind(args, kwargs, STATICS)
    convention = Convention(slots(bound.paths(), bound.leaves), (), bound.tree)
    wrapper = GuardsWrapper(bound.abstract(), bound.input_info())
    target = Target(len, convention)
    assert wrapper.pre_compile(target) is target
    return wrapper.post_compile(lambda bound: bound, target)


def complaint(call, *args, **kwargs):
    with pytest.raises(CallError) as caught:
        call(bind(args, kwargs, STATICS))
    what, cure = str(caught.value).split("\n")
    assert cure == CURE
    return what


def test_a_call_that_fits_passes_unchanged():
    bound = bind(ARGS, {}, STATICS)
    assert guarded()(bound) is bound


@pytest.mark.parametrize(
    "x", [np.zeros(3, np.float32), jax.ShapeDtypeStruct((3,), jnp.float32)], ids=["numpy", "shape"]
)
def test_numbers_do_not_matter(x):
    guarded()(bind(({"w": np.zeros((3, 2), np.float32), "n": 9}, x, 7), {}, STATICS))


def test_a_shape_that_changed():
    args = ({"w": jnp.ones((3, 5)), "n": 4}, *ARGS[1:])
    assert complaint(guarded(), *args) == "args[0]['w'] is float32[3,5], but float32[3,2] was traced."


def test_a_dtype_that_changed():
    args = (ARGS[0], jnp.ones(3, jnp.bfloat16), 7)
    assert complaint(guarded(), *args) == "args[1] is bfloat16[3], but float32[3] was traced."


def test_a_key_in_the_place_of_numbers():
    args = (ARGS[0], jax.random.split(jax.random.key(0), 3), 7)
    assert complaint(guarded(), *args) == "args[1] is key<fry>[3], but float32[3] was traced."


@pytest.mark.parametrize(
    ("first", "what"),
    [
        ({"w": jnp.ones((3, 2)), "n": 4, "b": 1.0}, "hold args[0]['b'], which was not there when traced."),
        ({"n": 4}, "lack args[0]['w'], which was there when traced."),
        ({"w": None, "n": 4}, "lack args[0]['w'], which was there when traced."),
    ],
    ids=["more", "fewer", "None"],
)
def test_a_tree_that_changed(first, what):
    assert complaint(guarded(), first, *ARGS[1:]) == f"The arguments {what}"


def test_keywords_that_changed():
    assert complaint(guarded(), *ARGS, scale=1.0) == (
        "The arguments hold kwargs['scale'], which was not there when traced."
    )
    assert complaint(guarded(scale=1.0), *ARGS) == "The arguments lack kwargs['scale'], which was there when traced."


def test_static_values_that_changed():
    assert complaint(guarded(), *ARGS[:2], 8)
    assert complaint(guarded(mode="fast"), *ARGS, mode="slow")
    assert complaint(guarded(mode="fast"), *ARGS)
