"""A path names what the user wrote: no transformation, no library, no lambda."""

from __future__ import annotations

import os
from importlib import import_module

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jointcut.partition.program.places import (
    NOWHERE,
    Name,
    Place,
    calls_of,
    modules_of,
    names,
    our_folders,
    place,
    place_of,
)

quick = settings(deadline=None, max_examples=80, derandomize=True, database=None)

words = st.sampled_from(["encoder", "Dense_0", "block", "attention", "LayerNorm_1", "f(x)"])
wrappings = st.lists(st.sampled_from(["jit", "jvp", "transpose", "vmap", "remat", "checkpoint"]), max_size=3)


@quick
@given(st.lists(st.tuples(words, wrappings), max_size=5), wrappings)
def test_the_modules_are_the_names_without_the_transformations_around_them(path, around):
    parts = [wrapped(name, by) for name, by in path]
    whole = wrapped("/".join(parts), around)
    assert modules_of(whole) == tuple(name for name, _ in path)


def wrapped(text: str, by: list[str]) -> str:
    for name in by:
        text = f"{name}({text})"
    return text


@pytest.mark.parametrize("nobody", ["while", "body", "closed_call", "checkpoint", "rematted_computation", "cond"])
def test_the_names_that_jax_itself_gives_are_nobodys(nobody):
    assert modules_of(f"encoder/{nobody}/block") == ("encoder", "block")


def test_a_call_of_an_object_is_its_class_and_a_method_its_own_name_outermost_first():
    calls = "m.py:9 (Norm.apply)", "m.py:7 (Block.__call__)", "m.py:5 (<lambda>)", "m.py:3 (loss.<locals>.inner)"
    assert calls_of(calls) == (
        Name("call", "inner", "m.py:3"),
        Name("call", "Block", "m.py:7"),
        Name("call", "apply", "m.py:9"),
    )


def helper(x):
    return jnp.sin(x)


def test_an_equation_comes_from_the_users_lines_and_not_from_jaxs_or_ours():
    def model(x):
        with jax.named_scope("head"):
            return helper(x) @ x

    for eqn in jax.make_jaxpr(model)(jnp.ones((2, 2))).eqns:
        found = place_of(eqn)
        assert found.modules == ("head",)
        assert all(call.at.startswith(__file__) for call in found.calls)
        assert found.line.startswith(f"{__file__}:")
        own = [call.text for call in found.calls]
        assert own[-2:] == (["model", "helper"] if eqn.primitive.name == "sin" else own[-3:-2] + ["model"])


def test_a_library_that_calls_nobody_of_the_users_is_named_by_its_own_line():
    library = f"{jnp.__file__}:10 (norm)"
    assert place("", [library]) == Place((), (), library)
    assert place("", [library, "model.py:3 (loss)"]).line == "model.py:3 (loss)"


@quick
@given(st.lists(st.sampled_from([NOWHERE, Place(("Bert", "block"), (Name("call", "loss", "m.py:3"),), "m.py:3")])))
def test_where_most_stands_below_one_module_the_modules_alone_are_the_path(some):
    assert names(some) == [tuple(Name("module", m) for m in p.modules) for p in some]


@quick
@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=3).filter(lambda own: most_of(own) < 0.6))
def test_elsewhere_the_modules_come_below_the_users_calls(own):
    calls = (Name("call", "loss", "m.py:3"),)
    found = names([Place((module,), calls, "m.py:3") for module in own])
    assert found == [(*calls, Name("module", module)) for module in own]


def most_of(own: list[str]) -> float:
    return max(map(own.count, own)) / len(own)


@pytest.mark.parametrize("package", ["aot", "partition", "wrappers"])
def test_our_folders_are_those_that_hold_our_packages(package):
    folder = import_module(f"jointcut.{package}").__path__[0]
    assert f"{folder}{os.sep}" in our_folders()
