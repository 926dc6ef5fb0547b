"""The law of every wrapper, alone and with each other it can meet: post(pre(f)) behaves as f.

The compiled call is played by the simpler target's own function: whatever a wrapper takes away before compiling, it
must put back after. The wrappers for trees, guards and aliases stand in one stack; the one for references works on the
flat jaxpr, and meets them where that jaxpr is the stack's target.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut.partition.errors import CallError
from jointcut.partition.program.jax import jaxprs, runtime
from jointcut.wrappers import stack
from jointcut.wrappers.arguments.tree import Statics, bind
from jointcut.wrappers.built_in.alias import AliasWrapper
from jointcut.wrappers.built_in.flatten import TreeWrapper
from jointcut.wrappers.built_in.guards import GuardsWrapper
from jointcut.wrappers.built_in.refs import RefsWrapper
from jointcut.wrappers.metadata.convention import Convention, slots
from jointcut.wrappers.wrapper import Target

X, Y = jnp.arange(3.0), jnp.linspace(0.5, 1.0, 3)


def scaled(tree, x, *, scale=2.0):
    return {"sum": tree["a"] * scale + x, "same": tree["a"], "twice": (x * 3, tree["b"][0].T)}


def nothing(tree, x):
    return None


def passed(tree, x):
    return x, tree, x


FUNCTIONS = {"scaled": scaled, "nothing": nothing, "passed": passed}
CALLS = {
    "distinct": (({"a": X, "b": [jnp.ones((2, 3))]}, Y), {}),
    "an array twice": (({"a": X, "b": [jnp.ones((2, 3))]}, X), {}),
    "an array three times": (({"a": X, "b": [X]}, X), {}),
    "numbers": (({"a": 1.0, "b": [np.ones((2, 2), np.float32)]}, 1.0), {}),
}
INNER = {
    "guards": lambda shapes: GuardsWrapper(shapes, shapes.input_info()),
    "alias": lambda shapes: AliasWrapper(shapes.input_info()),
}


def orders():
    """Every choice and order of the wrappers inside the tree's."""
    for count in range(len(INNER) + 1):
        yield from itertools.permutations(INNER, count)


def same(got, want):
    """Equal trees of equal arrays, and the very same array wherever one is handed back."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def played(target):
    """The simpler target's own function in the place of a compiled one."""

    def run(bound):
        return target.entered(*(bound.leaves if target.places is None else bound.unique))

    return run


@pytest.mark.parametrize("order", list(orders()), ids=lambda order: " then ".join(order) or "tree alone")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_stack_behaves_as_the_function(function, call, order):
    args, kwargs = call
    bound = bind(args, kwargs, Statics())
    shapes = bound.abstract()
    wrappers = [TreeWrapper(shapes), *(INNER[name](shapes) for name in order)]
    wrapped = stack.pre_compile(wrappers, Target(function, Convention((), ())))
    again = wrapped.post_compile(played(wrapped.target))
    same(again(*args, **kwargs), function(*args, **kwargs))


def test_the_alias_wrapper_lets_an_array_enter_once_and_hands_it_back():
    bound = bind((X, {"a": X}, Y), {}, Statics()).abstract()
    wrapped = stack.pre_compile(
        [TreeWrapper(bound), AliasWrapper(bound.input_info())],
        Target(lambda x, t, y: (x, t["a"] + y, y), Convention((), ())),
    )
    assert [slot.path for slot in wrapped.target.convention.inputs] == ["args[0]", "args[2]"]
    assert wrapped.target.places == (0, 0, 1)
    first, total, last = wrapped.post_compile(played(wrapped.target))(X, {"a": X}, Y)
    assert first is X
    assert last is Y
    np.testing.assert_array_equal(total, X + Y)


def test_arrays_that_are_no_longer_the_same_are_refused():
    bound = bind((X, {"a": X}), {}, Statics()).abstract()
    wrappers = [TreeWrapper(bound), AliasWrapper(bound.input_info())]
    wrapped = stack.pre_compile(wrappers, Target(lambda x, t: x, Convention((), ())))
    with pytest.raises(CallError) as caught:
        wrapped.post_compile(played(wrapped.target))(X, {"a": Y})
    assert str(caught.value) == (
        "args[1]['a'] was the same array as args[0] when traced, and is another one now.\n"
        "Trace and compile for this call too, or call the function itself, which does so by need."
    )


# ------------------------------------------------------------------------------------------------- references


def counted(count, x):
    count[...] += 1
    return x * jnp.float32(count[...]), x


def in_a_scan(total, x):
    def step(carry, item):
        total[...] += item
        return carry * item, total[...]

    return jax.lax.scan(step, jnp.float32(1), x)


def in_a_cond(ref, x):
    def write():
        ref[0] = 7.0
        return jnp.sum(ref[...])

    return jax.lax.cond(x[0] > 0, write, lambda: jnp.sum(x))


def only_read(ref, x):
    return ref[...] + x


REFERENCES = {
    "a counter": (counted, lambda: jnp.int32(4), X),
    "in a scan": (in_a_scan, lambda: jnp.float32(0), X),
    "in a cond, written": (in_a_cond, lambda: jnp.zeros(3), Y),
    "in a cond, not written": (in_a_cond, lambda: jnp.zeros(3), X),
    "only read": (only_read, lambda: jnp.ones(3), X),
}


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "in a tree, with an array twice"])
@pytest.mark.parametrize(("function", "start", "x"), REFERENCES.values(), ids=REFERENCES)
def test_a_function_of_references_behaves_as_itself(function, start, x, nested):
    def whole(state, first, second):
        return function(state["r"], first) if nested else function(state, first)

    def arguments(ref):
        return ({"r": ref} if nested else ref, x, x if nested else Y)

    mine, theirs = jax.new_ref(start()), jax.new_ref(start())
    bound = bind(arguments(mine), {}, Statics())
    flat = TreeWrapper(bound).flat(whole)
    shape = jax.eval_shape(flat, *bound.leaves)
    closed = jax.make_jaxpr(lambda *xs: jax.tree.leaves(flat(*xs)))(*bound.leaves)
    inner, consts = jaxprs.opened(closed)
    assert not consts
    wrapper = RefsWrapper(jaxprs.build(inner.invars, inner.outvars, inner.eqns))
    convention = Convention(slots(bound.paths(), bound.leaves), ())
    target = wrapper.pre_compile(Target(functools.partial(runtime.evaluate, closed), convention))
    assert not any(map(jaxprs.touches_references, jaxprs.opened(wrapper.pure)[0].eqns))
    assert target.convention.states == (() if function is only_read else (0,))
    call = wrapper.post_compile(target.function, target)
    for _ in range(2):
        results = jax.tree.unflatten(jax.tree.structure(shape), call(*bound.leaves))
        same(results, whole(*arguments(theirs)))
        np.testing.assert_array_equal(mine[...], theirs[...])
