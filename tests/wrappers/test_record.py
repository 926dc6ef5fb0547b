"""A record becomes JSON and comes back equal, or is refused by name."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jointcut.partition.errors import RecordError
from jointcut.wrappers.arguments.fixed import Fixed
from jointcut.wrappers.metadata.schemas import InputAliasInfo, OutputType, PlainTensorMeta
from jointcut.wrappers.metadata.signatures import GraphSignature
from jointcut.wrappers.record import Record, choice


@choice
class Colour(enum.Enum):
    """A choice among two."""

    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Box(Record):
    """A record that holds anything."""

    held: Any


class Pair(NamedTuple):
    """A tree node of two."""

    left: Any
    right: Any


HELD = {
    "nothing": None,
    "a truth": True,
    "a number": 3,
    "a float": 0.1,
    "a text": "Ä\n",
    "infinity": -math.inf,
    "a tuple": (1, ("a", ()), None),
    "a list": [1, (2,)],
    "a dict": {"a": (1, 2), 3: {"b": None}},
    "a choice": Colour.BLUE,
    "a record": Box(Box(())),
    "float32": np.dtype("float32"),
    "bfloat16": jnp.dtype("bfloat16"),
    "int4": jnp.dtype("int4"),
    "float0": jax.dtypes.float0,
    "a key": jax.random.key(0).dtype,
    "another key": jax.random.key(0, impl="rbg").dtype,
    "an unsafe key": jax.random.key(0, impl="unsafe_rbg").dtype,
    "a class": Pair,
    "a tree": jax.tree.structure({"a": (1, [2, None]), "b": Pair(1, {"c": 2})}),
    "a leaf": jax.tree.structure(0),
    "a function": jnp.tanh,
    "a flag that is fixed": jax.tree.structure((Fixed(True, has_zero=True), Fixed(jax.nn.relu))),
    "parameters of Flax": jax.tree.structure(nnx.Param(jnp.ones(3))),
    "a module of Equinox": jax.tree.structure(eqx.nn.Linear(2, 3, key=jax.random.key(0))),
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_what_a_record_holds_comes_back_equal(held):
    again = Box.from_json(Box(held).to_json())
    assert again == Box(held)
    assert type(again.held) is type(held)


def test_a_record_prints_on_one_screen():
    shown = str(Box(tuple(range(1000)))).splitlines()
    assert shown == ["Box", f"  held: {repr(tuple(range(1000)))[:82]}... (1000 entries)"]
    assert str(Box({"a": 1})) == "Box\n  held: {'a': 1}"


def test_not_a_number_comes_back():
    assert math.isnan(Box.from_json(Box(math.nan).to_json()).held)


def test_the_text_is_plain_json():
    text = PlainTensorMeta(0, (2, 3), np.dtype("float32")).to_json()
    inner = {"unwrapped_idx": 0, "shape": [2, 3], "dtype": {"dtype": "float32"}, "weak_type": False}
    assert json.loads(text) == {"PlainTensorMeta": {**inner, "sharding": None, "of_input": None}}


def test_what_json_cannot_hold_is_named_by_its_place():
    with pytest.raises(RecordError) as caught:
        Box(({"deep": object()},)).to_json()
    assert str(caught.value) == (
        "Box.held[0]['deep'] is a object, which has no JSON form.\n"
        "Give the class auxiliary data of numbers, strings, tuples and dicts, so that it can be written."
    )


def test_a_function_without_a_name_is_refused():
    with pytest.raises(RecordError) as caught:
        Box(lambda: 0).to_json()
    assert str(caught.value) == (
        "Box.held is a function, which has no JSON form.\n"
        "Give the class auxiliary data of numbers, strings, tuples and dicts, so that it can be written."
    )


@pytest.mark.parametrize(
    ("held", "what"),
    [
        ('{"node": "*"}', 'holds no node without leaves: "*".'),
        (
            '{"node": {"class": "builtins:tuple", "data": null, "children": ["*"]}}',
            'holds no node without leaves: {"class": "builtins:tuple", "data": null, "children": ["*"]}.',
        ),
    ],
)
def test_a_node_with_leaves_is_refused(held, what):
    with pytest.raises(RecordError) as caught:
        Box.from_json(f'{{"Box": {{"held": {held}}}}}')
    assert str(caught.value) == f"Box.held {what}\nRead what to_json of the same class and version wrote."


def test_a_function_that_is_not_at_hand_is_refused():
    with pytest.raises(RecordError) as caught:
        Box.from_json('{"Box": {"held": {"function": "nowhere:f"}}}')
    assert str(caught.value) == "Box.held names the function nowhere:f, which is not at hand.\nImport nowhere first."


def broken(change):
    found = json.loads(InputAliasInfo("args[0]", True, False).to_json())
    return json.dumps(change(found))


BROKEN = {
    "no JSON": (
        "{",
        "InputAliasInfo is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1).",
    ),
    "a number": ("3", "InputAliasInfo was asked for, but the text holds 3."),
    "two tags": ('{"a": 1, "b": 2}', "InputAliasInfo is an object with 2 keys, not one tagged value."),
    "an unknown tag": ('{"Culprit": {}}', "InputAliasInfo has the unknown tag 'Culprit'."),
    "another record": (
        PlainTensorMeta(0, (), np.dtype("int8")).to_json(),
        "InputAliasInfo was asked for, but the text holds "
        '{"PlainTensorMeta": {"unwrapped_idx": 0, "shape": [], "dt....',
    ),
    "a field missing": (
        broken(lambda f: {"InputAliasInfo": {k: v for k, v in f["InputAliasInfo"].items() if k != "path"}}),
        "InputAliasInfo is no InputAliasInfo: missing ['path'], unknown [].",
    ),
    "a field too many": (
        broken(lambda f: {"InputAliasInfo": f["InputAliasInfo"] | {"evil": 1}}),
        "InputAliasInfo is no InputAliasInfo: missing [], unknown ['evil'].",
    ),
    "no member": (
        broken(lambda f: {"InputAliasInfo": f["InputAliasInfo"] | {"path": {"OutputType": "alias"}}}),
        "InputAliasInfo.path names no OutputType: 'alias'.",
    ),
    "no dtype": (
        broken(lambda f: {"InputAliasInfo": f["InputAliasInfo"] | {"path": {"dtype": "float33"}}}),
        "InputAliasInfo.path names the unknown dtype 'float33'.",
    ),
    "no number": (
        broken(lambda f: {"InputAliasInfo": f["InputAliasInfo"] | {"path": {"float": "1e5"}}}),
        "InputAliasInfo.path is no number: '1e5'.",
    ),
    "no tree": (
        broken(lambda f: {"InputAliasInfo": f["InputAliasInfo"] | {"path": {"tree": 1}}}),
        "InputAliasInfo.path holds no tree: 1.",
    ),
    "no pairs": (
        broken(lambda f: {"InputAliasInfo": f["InputAliasInfo"] | {"path": {"dict": [[1]]}}}),
        "InputAliasInfo.path holds no pairs: [[1]].",
    ),
}


@pytest.mark.parametrize(("text", "what"), BROKEN.values(), ids=BROKEN)
def test_a_text_that_is_none_of_ours_is_refused(text, what):
    with pytest.raises(RecordError) as caught:
        InputAliasInfo.from_json(text)
    assert str(caught.value) == f"{what}\nRead what to_json of the same class and version wrote."


@pytest.mark.parametrize(
    ("name", "module"), [("os:system", "os"), ("nowhere:Thing", "nowhere"), ("tests.gone:A", "tests.gone")]
)
def test_reading_imports_nothing_and_takes_classes_only(name, module):
    with pytest.raises(RecordError) as caught:
        Box.from_json(json.dumps({"Box": {"held": {"class": name}}}))
    assert str(caught.value) == f"Box.held names the class {name}, which is not at hand.\nImport {module} first."


def test_a_class_that_is_no_tree_node_is_refused():
    tree = {"class": "builtins:int", "data": None, "children": []}
    with pytest.raises(RecordError, match=r"^Box\.held needs the tree node int, which is none: "):
        Box.from_json(json.dumps({"Box": {"held": {"tree": tree}}}))


def test_members_of_the_schema_are_written_by_name():
    assert Box(OutputType.is_input).to_json() == '{"Box": {"held": {"OutputType": "is_input"}}}'


def test_a_dict_with_other_than_one_key_for_each_child_is_refused():
    text = GraphSignature((), (), (), (), {}, {}, {}, jax.tree.structure({"a": 0}), None, None).to_json()
    assert GraphSignature.from_json(text).in_spec == jax.tree.structure({"a": 0})
    with pytest.raises(RecordError) as error:
        GraphSignature.from_json(text.replace('{"list": ["a"]}', '{"list": []}'))
    assert str(error.value) == (
        "GraphSignature.in_spec holds a dict of 1 entries whose keys are [].\n"
        "Read what to_json of the same class and version wrote."
    )
