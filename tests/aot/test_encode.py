"""A value is written by a name that every process knows or by its content, and is otherwise refused."""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import math
import struct
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend import core as jex
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jointcut.aot.cache.encode import pack
from jointcut.aot.cache.fingerprint import fingerprint
from jointcut.partition.errors import IdentityError

CURE = (
    "Give it an attribute `cache_key`, a string that changes whenever its behaviour does, or switch the cache off for "
    "this function."
)
NAMELESS = "which has no name that another process would know it by."
X = np.arange(4, dtype=np.float32)


def refusal(**parts):
    with pytest.raises(IdentityError) as caught:
        fingerprint(**parts)
    return str(caught.value)


def with_key(function, key):
    function.cache_key = key
    return function


def calling_back(function):
    def program(x):
        return jax.pure_callback(function, x, x)

    return program


def key_of_program(function):
    return fingerprint(program=jax.make_jaxpr(function)(X))


@functools.cache
def mesh():
    return jax.make_mesh((1, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


@functools.cache
def random_keys():
    return jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg")


# ---------------------------------------------------------------- data


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(max_size=80), st.binary()
)
HASHABLE = st.one_of(st.booleans(), st.integers(-3, 3), st.text(max_size=2))
DATA = st.recursive(
    st.one_of(st.sampled_from([None, True, False, 0, 1, 0.0, -0.0, 1.0, 1j, "", "1", b"", b"1", ()]), SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
    ),
    max_leaves=6,
)


def spelt(x):
    """A text that two values share if and only if they are the same, bit for bit."""
    if isinstance(x, tuple | list):
        return f"{type(x).__name__}({', '.join(map(spelt, x))})"
    if isinstance(x, dict):
        return f"dict({sorted((spelt(k), spelt(v)) for k, v in x.items())})"
    if isinstance(x, frozenset):
        return f"set({sorted(map(spelt, x))})"
    if isinstance(x, float | complex):
        return f"{type(x).__name__}({struct.pack('dd', complex(x).real, complex(x).imag).hex()})"
    return f"{type(x).__name__}({x!r})"


@given(DATA, DATA)
@settings(deadline=None, max_examples=200)
def test_data_has_one_fingerprint_if_and_only_if_it_is_the_same_bit_for_bit(one, other):
    assert (fingerprint(it=one) == fingerprint(it=other)) == (spelt(one) == spelt(other))
    assert fingerprint(it=one) == fingerprint(it=copy.deepcopy(one))


def test_values_that_python_holds_for_equal_have_fingerprints_of_their_own():
    numbers = [0, 0.0, -0.0, False, 0j, complex(-0.0, 0.0), complex(0.0, -0.0), 1, 1.0, True, 1 + 0j, np.float32(1)]
    empty = [None, "", b"", (), [], {}, frozenset()]
    others = ["0", b"0", (0,), [0], {0: 0}, frozenset({0}), "None", "Ellipsis", ..., np.nan]
    values = [*numbers, *empty, *others, *([v] for v in numbers[1:]), *({0: v} for v in numbers[1:])]
    keys = [fingerprint(it=value) for value in values]
    assert len(set(keys)) == len(keys)


def test_parts_can_be_told_from_the_bytes_they_are_packed_into():
    texts = [b"", b"a", b"b", b"ab", b"ba", b"aba"]
    parts = [p for count in range(4) for p in itertools.product(texts, repeat=count)]
    packed = {pack(tag, *p) for tag in ("a", "b", "ab", "aba") for p in parts}
    assert len(packed) == 4 * len(parts)


def test_the_order_of_a_set_does_not_count():
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)
    assert fingerprint(it=one) == fingerprint(it=other) != fingerprint(it={0})


@given(st.dictionaries(HASHABLE, DATA, min_size=2, max_size=4))
@settings(deadline=None)
def test_the_order_of_a_dict_does_not_count(given_dict):
    assert fingerprint(it=given_dict) == fingerprint(it=dict(reversed(given_dict.items())))


@given(st.lists(st.text(max_size=4), min_size=2, max_size=4))
@settings(deadline=None)
def test_where_one_value_ends_and_the_next_begins_counts(words):
    joined = ["".join(words[:2]), *words[2:]]
    assert fingerprint(it=words) != fingerprint(it=joined)
    assert fingerprint(it=words) != fingerprint(it=[words])
    assert (fingerprint(a=words[0], b=words[1]) == fingerprint(a=words[0] + words[1], b="")) == (words[1] == "")
    assert fingerprint(a=words) != fingerprint(b=words)


DTYPES = (np.float32, np.float16, np.int32, np.uint32, np.int64, np.bool_, np.complex64, ml_dtypes.bfloat16)


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_an_array_counts_by_dtype_shape_and_every_byte(dtype, shape, random):
    zeros_and_ones = np.array(random.choices(range(2), k=int(np.prod(shape)))).reshape(shape)
    array = zeros_and_ones.astype(dtype)
    key = fingerprint(it=array)
    assert key == fingerprint(it=np.array(array, order="F")) == fingerprint(it=np.repeat(array[None], 2, 0)[1, ...])
    assert key != fingerprint(it=array[None])
    assert key != fingerprint(it=array.tolist())
    assert all(key != fingerprint(it=zeros_and_ones.astype(d)) for d in DTYPES if d is not dtype)
    assume(array.size)
    raw = bytearray(array.tobytes())
    raw[random.randrange(len(raw))] ^= 1
    assert key != fingerprint(it=np.frombuffer(bytes(raw), dtype).reshape(shape))


def test_an_array_of_jax_counts_by_type_and_place_as_well():
    one = jnp.ones(3)
    placed = jax.device_put(one, NamedSharding(mesh(), P("a")))
    weak = lax.full_like(1.0, 1.0, shape=(3,))
    keys = [fingerprint(it=x) for x in (np.ones(3, np.float32), one, placed, weak, *random_keys())]
    assert weak.weak_type
    assert len(set(keys)) == len(keys)
    assert keys[1] == fingerprint(it=jnp.ones(3))


def test_types_of_arrays_and_dtypes_are_told_apart():
    structs = [
        jax.ShapeDtypeStruct((3,), np.float32),
        jax.ShapeDtypeStruct((3,), np.int32),
        jax.ShapeDtypeStruct((3,), np.float32, weak_type=True),
        jax.ShapeDtypeStruct((3,), np.float32, sharding=NamedSharding(mesh(), P("a"))),
        jax.ShapeDtypeStruct((3,), random_keys()[0].dtype),
        jax.typeof(X),
        jax.typeof(jnp.ones(4)).update(memory_space=jax.memory.Space.Host),
    ]
    dtypes = [jnp.dtype(d) for d in (*DTYPES, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, ">f4")]
    kinds = [
        *structs,
        *dtypes,
        random_keys()[0].dtype,
        random_keys()[2].dtype,
        jax.dtypes.float0,
        jnp.float32,
        np.float32,
    ]
    keys = [fingerprint(it=x) for x in kinds]
    assert len(set(keys)) == len(keys)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Shade(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    left: Any
    right: Any


class Twin(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Box:
    held: Any


@dataclass(frozen=True)
class Crate:
    held: Any


@dataclass(frozen=True)
class Scale:
    by: float
    cache_key: str | None = None

    def __call__(self, x):
        return x * self.by


@dataclass(frozen=True)
class Marked:
    held: int
    cache_key: ClassVar[str] = "1"


def test_records_choices_and_trees_count_by_class_and_content():
    jax.tree_util.register_static(Box)
    values = [
        *(Colour.RED, Colour.BLUE, Shade.RED, 1),
        *(Pair(1, 2), Pair(2, 1), Twin(1, 2), (1, 2), [1, 2]),
        *(Box(1), Box(1.0), Crate(1), Box(Box(1)), Colour, Box, Pair),
    ]
    trees = [(1, 2), [1, 2], {"a": 1, "b": 2}, {"a": 1, "c": 2}, Pair(1, 2), Twin(1, 2), (1, None), (1, ()), (1, (2,))]
    values += [jax.tree.structure(t) for t in [*trees, Box(1), Box(2), None, 1]]
    keys = [fingerprint(it=x) for x in values]
    assert len(set(keys)) == len(keys)
    assert keys == [fingerprint(it=x) for x in copy.deepcopy(values)]


# ---------------------------------------------------------------- behaviour


def test_a_partial_or_record_with_a_cache_key_counts_by_its_content_too():
    function = with_key(lambda by, x: x * by, "1")
    partials = [key_of_program(calling_back(functools.partial(function, by))) for by in (2.0, 3.0, 2.0)]
    records = [key_of_program(calling_back(Scale(by, key))) for by, key in ((2.0, "1"), (3.0, "1"), (2.0, "2"))]
    assert partials[0] == partials[2] != partials[1]
    assert len(set(records)) == 3
    marks = []
    for Marked.cache_key in ("1", "2"):
        marks += [fingerprint(it=Marked(1)), fingerprint(it=Marked(2))]
    assert len(set(marks)) == 4
    assert key_of_program(calling_back(Scale(2.0, "1"))) == records[0]


def test_a_wrapper_does_not_take_the_cache_key_of_what_it_wraps():
    inner = with_key(lambda x: x, "1")

    @functools.wraps(inner)
    def wrapper(x):
        return 2 * x

    where = "test_a_wrapper_does_not_take_the_cache_key_of_what_it_wraps.<locals>.<lambda>"
    assert refusal(it=wrapper) == (
        f"it is the function {__name__}.{where}, whose cache_key is that of the function it wraps.\n"
        "Give the wrapper a `cache_key` of its own, or switch the cache off for this function."
    )
    assert fingerprint(it=with_key(wrapper, "2")) != fingerprint(it=inner)


def test_functions_of_jax_itself_count_by_code_defaults_and_what_they_close_over():
    def key(text):
        return fingerprint(it=eval(text, {"__name__": "jax.made"}))

    texts = [
        "lambda x: x",
        "lambda x: x + 1",
        "lambda x: x + 2",
        "lambda x, y=1: x",
        "lambda x, y=2: x",
        "\nlambda x: x",
    ]
    texts += ["lambda x, *, y=1: x", "lambda x, *, y=2: x", "(lambda y: lambda x: y)(1)", "(lambda y: lambda x: y)(2)"]
    keys = list(map(key, texts))
    assert len(set(keys)) == len(keys)
    assert keys == list(map(key, texts))


def test_a_function_that_only_says_that_it_is_of_jax_is_refused():
    disguised = functools.wraps(jnp.sin)(lambda x: x)
    assert refusal(it=disguised) == f"it is the function {jnp.sin.__module__}.sin, {NAMELESS}\n{CURE}"


class Holder:
    """An object with behaviour of its own."""

    def act(self, x):
        return x


REFUSED = {
    "a function": (lambda: refusal, f"it is the function {__name__}.refusal, {NAMELESS}"),
    "an object": (Holder, f"it is a {__name__}.Holder, {NAMELESS}"),
    "a record that can be called": (lambda: Scale(2.0), f"it is a {__name__}.Scale, {NAMELESS}"),
    "a method": (lambda: Holder().act, f"it is the function {__name__}.Holder.act, {NAMELESS}"),
    "a NumPy function of the user's": (
        lambda: np.frompyfunc(lambda x: x, 1, 1),
        "it is a numpy.ufunc, which cannot be written down.",
    ),
    "a function of another library": (
        lambda: math.sin,
        "it is a builtins.builtin_function_or_method, which cannot be written down.",
    ),
    "an iterator of the user's": (lambda: (x for x in ()), "it is a builtins.generator, which cannot be written down."),
    "a record in a program": (
        lambda: jax.make_jaxpr(calling_back(functools.partial(with_key(lambda box, x: x, "1"), Box(1))))(X),
        None,
    ),
    "a choice in a program": (
        lambda: jax.make_jaxpr(calling_back(functools.partial(with_key(lambda box, x: x, "1"), Colour.RED)))(X),
        None,
    ),
    "a class that a function made": (
        lambda: type("Local", (), {"__module__": "jax.made", "__qualname__": "f.<locals>.Local"})(),
        f"it is a jax.made.f.<locals>.Local, {NAMELESS}",
    ),
    "a class in a program": (
        lambda: jax.make_jaxpr(lambda x: jax.debug.callback(Holder, x))(X),
        None,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_identity_is_refused(name):
    make, text = REFUSED[name]
    found = refusal(it=make())
    assert found.endswith(f"\n{CURE}")
    assert text is None or found == f"{text}\n{CURE}"


def test_a_cache_key_must_be_a_string():
    assert refusal(it=with_key(lambda x: x, 1)) == "it has a cache_key that is a int.\nMake it a string."


def test_a_primitive_that_is_called_like_one_of_jax_is_refused():
    impostor = jex.Primitive("sin")
    impostor.def_abstract_eval(lambda x: x)
    closed = jax.make_jaxpr(lambda x: impostor.bind(x))(X)
    assert refusal(program=closed).endswith(f"is the primitive sin, {NAMELESS}\n{CURE}")
    keys = [key_of_program(lambda x: lax.sin_p.bind(x, accuracy=None))]
    for key in ("1", "2"):
        impostor.cache_key = key
        keys.append(fingerprint(program=closed))
    assert len(set(keys)) == len(keys)


def test_values_of_a_trace_and_references_are_refused():
    found = []
    jax.make_jaxpr(lambda x: found.append(refusal(it=[x])) or x)(X)
    assert found == [
        "it is a value that is still being traced.\nTake the fingerprint outside of jit, grad and the like."
    ]
    reference = jax.new_ref(jnp.ones(3))
    assert refusal(it=reference) == "it is a jax.Ref, whose content can change.\nPass it as an argument."
