"""A call becomes flat leaves with paths, and the leaves become the call again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut.partition.errors import TraceError
from jointcut.wrappers.arguments.tree import Bound, Statics, bind, is_array_like, struct
from jointcut.wrappers.built_in.flatten import TreeWrapper
from jointcut.wrappers.metadata.convention import Convention
from jointcut.wrappers.wrapper import Target

NONE = Statics()


class Pair(NamedTuple):
    left: object
    right: object


@jax.tree_util.register_dataclass
@dataclass
class Weights:
    w: object
    b: object = None


def target(function):
    return Target(function, Convention((), ()))


def test_leaves_keep_the_path_by_which_the_user_reaches_them():
    args = ({"w": 1.0, "layers": [2.0, (3.0,)]}, Pair(4.0, None), Weights(5.0))
    bound = bind(args, {"mask": 6.0, "deep": {"er": 7.0}}, NONE)
    assert dict(zip(bound.paths(), bound.leaves, strict=True)) == {
        "args[0]['layers'][0]": 2.0,
        "args[0]['layers'][1][0]": 3.0,
        "args[0]['w']": 1.0,
        "args[1].left": 4.0,
        "args[2].w": 5.0,
        "kwargs['deep']['er']": 7.0,
        "kwargs['mask']": 6.0,
    }


def test_paths_count_static_arguments():
    bound = bind((2, {"w": 1.0}, "fast", 3.0), {}, Statics(frozenset({0, 2})))
    assert bound.paths() == ["args[1]['w']", "args[3]"]
    assert bound.static_args == ((0, 2), (2, "fast"))
    assert bound.spans == (range(0), range(1), range(1, 1), range(1, 2))


@pytest.mark.parametrize(
    ("args", "kwargs", "statics"),
    [
        ((), {}, NONE),
        ((1.0, [2.0, None]), {"k": {"a": 3.0}}, NONE),
        (("s", 1.0), {"n": 3, "k": 2.0}, Statics(frozenset({0}), frozenset({"n"}))),
        ((1.0, "s", 2.0, "t"), {}, Statics(frozenset({1, 3}))),
        ((Weights(1.0, Pair(2.0, 3.0)),), {}, NONE),
    ],
    ids=["nothing", "nested", "static in front", "static between", "nodes"],
)
def test_a_bound_call_is_rebuilt_with_other_leaves(args, kwargs, statics):
    bound = bind(args, kwargs, statics)
    assert bound.rebuilt(bound.leaves)[0] == (list(args), kwargs)
    more_args, more_kwargs = bound.rebuilt([10 * x for x in bound.leaves])[0]
    assert bind(more_args, more_kwargs, statics).leaves == tuple(10 * x for x in bound.leaves)


def f(a, b, *, c=0):
    return a, b, c


def variadic(*args, **kwargs):
    return args, kwargs


@pytest.mark.parametrize(
    ("function", "argnums", "argnames", "positions", "names"),
    [
        (f, None, None, set(), set()),
        (f, 1, None, {1}, {"b"}),
        (f, -1, None, {1}, {"b"}),
        (f, None, "b", {1}, {"b"}),
        (f, None, ["c"], set(), {"c"}),
        (f, (0,), ("c",), {0}, {"c"}),
        (variadic, (1,), "k", {1}, {"k"}),
    ],
)
def test_static_positions_and_names_complete_each_other_as_in_jax_jit(function, argnums, argnames, positions, names):
    statics = Statics.of(function, argnums, argnames)
    assert (statics.argnums, statics.argnames) == (positions, names)


def test_the_signature_tells_calls_apart():
    ones = jnp.ones(3)
    calls = [
        ((ones,), {}),
        ((ones[:2],), {}),
        ((ones.astype(jnp.bfloat16),), {}),
        ((1.0,), {}),
        ((jnp.float32(1),), {}),
        (([ones],), {}),
        ((), {"x": ones}),
        ((ones, ones), {}),
    ]
    signatures = [bind(args, kwargs, NONE).signature() for args, kwargs in calls]
    assert len(set(signatures)) == len(calls)


def test_the_signature_is_blind_to_numbers_and_to_kinds_of_array():
    one = bind((jnp.ones(3), 1.0), {"a": 1.0, "b": 2.0}, NONE).signature()
    assert one == bind((np.zeros(3, np.float32), 2.0), {"b": 5.0, "a": 3.0}, NONE).signature()


def test_an_abstract_call_holds_no_array():
    bound = bind(({"w": jnp.ones((3, 2))}, 1.0), {"key": jax.random.key(0)}, NONE).abstract()
    assert isinstance(bound, Bound)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in bound.leaves)
    assert [(leaf.shape, leaf.weak_type) for leaf in bound.leaves] == [((3, 2), False), ((), True), ((), False)]
    assert jnp.issubdtype(bound.leaves[2].dtype, jax.dtypes.prng_key)


def test_structs_of_structs_are_themselves():
    shape = jax.ShapeDtypeStruct((3,), jnp.int8)
    assert struct(shape) is shape


@pytest.mark.parametrize(
    "leaf",
    [1, 1.0, 1j, np.True_, np.float32(1), np.ones(2), jnp.ones(2), jax.random.key(0), jax.ShapeDtypeStruct((), "int8")],
    ids=str,
)
def test_what_jax_takes_as_an_array(leaf):
    assert is_array_like(leaf)
    assert bind((leaf,), {}, NONE).leaves[0] is leaf


@pytest.mark.parametrize("leaf", ["s", b"s", object(), len, True], ids=["str", "bytes", "object", "function", "flag"])
def test_what_is_no_array_is_fixed(leaf):
    bound = bind(({"at": leaf},), {}, NONE)
    assert bound.leaves == () and bound.rebuilt(())[0] == ([{"at": leaf}], {})
    assert [(path, fixed.value) for path, fixed in bound.fixed_leaves] == [("args[0]['at']", leaf)]


@pytest.mark.parametrize("leaf", [np.array(["s"]), np.array([None]), np.datetime64("2020-01-01")], ids=str)
def test_arrays_of_numpy_that_jax_does_not_have(leaf):
    with pytest.raises(TraceError) as error:
        bind(({"at": leaf},), {}, NONE)
    assert str(error.value) == (
        f"args[0]['at'] has the numpy dtype {leaf.dtype}, which JAX does not have.\n"
        "Pass an array or a number, or name the argument in static_argnums or static_argnames."
    )


def test_law_of_the_wrapper():
    """Around the simpler target's own function, the wrapper gives the original back."""

    def original(n, tree, *, scale, mode):
        assert mode == "fast"
        return {"sum": n * (tree["a"] + tree["b"]) * scale}

    statics = Statics(frozenset({0}), frozenset({"mode"}))
    call = (3, {"a": jnp.ones(2), "b": 2.0}), {"scale": 0.5, "mode": "fast"}
    wrapper = TreeWrapper(bind(*call, statics))
    simpler = wrapper.pre_compile(target(original))
    assert [str(slot) for slot in simpler.convention.inputs] == [
        "args[1]['a']: float32[2]",
        "args[1]['b']: float32[]",
        "kwargs['scale']: float32[]",
    ]
    run = wrapper.post_compile(lambda bound: simpler.function(*bound.leaves), target(original))
    args, kwargs = call
    np.testing.assert_array_equal(run(*args, **kwargs)["sum"], original(*args, **kwargs)["sum"])
