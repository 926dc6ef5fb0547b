"""A report says where derivatives may differ from JAX's, by which rule, and how many times."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.options.conventions import CHOICES
from jointcut.aot.report.derived import _GIVES


def loss(x):
    norm = jnp.linalg.norm(x)
    kept = jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))
    return norm + kept + lax.scan(lambda c, row: (c + jnp.linalg.norm(row), None), 0.0, x.reshape(2, 2))[0]


def report(derivatives):
    function = aot.function(loss, derivatives=derivatives)
    return function.trace(jnp.zeros(4)).partition().explain(measure=False)


@pytest.fixture(scope="module")
def finite():
    return report("finite")


def test_rules_are_told_with_their_lines(finite):
    first = loss.__code__.co_firstlineno
    told = [(row.rule, int(row.line.split(":")[1].split()[0]) - first) for row in finite.derived]
    assert told[:2] == [("norm_at_zero", 1), ("norm_at_zero", 3)]
    assert {line for rule, line in told if rule == "zero_cotangent"} == {1, 2, 3}
    assert finite.derived[0].gives == "norm at zero: 0 where JAX gives NaN"


def test_the_text_says_it_in_a_sentence(finite):
    line = loss.__code__.co_firstlineno
    guards = sum(row.count for row in finite.derived if row.rule == "zero_cotangent")
    text = " ".join(finite.table(everything=True, in_colour=False).split())
    assert f"Derivatives: 2 formulas, {guards} guarded products (test_derived.py:{line + 1} norm at zero: 0" in text


def test_the_page_and_the_json_have_the_rows(finite):
    section = next(s for s in finite.sections if s["id"] == "derivatives")
    assert len(section["rows"]) == len(finite.derived) == len(finite.to_dict()["derivatives"])
    assert set(finite.to_dict()["derivatives"][0]) == {"rule", "value", "line", "count", "gives"}


def test_with_jaxs_derivatives_nothing_is_said():
    plain = report("jax")
    assert plain.derived == () and "erivatives:" not in str(plain)
    assert all(s["id"] != "derivatives" for s in plain.sections)


def test_a_choice_is_told_by_its_value():
    (row,) = report(aot.conventions(norm_at_zero="zero")).derived[:1]
    assert (row.rule, row.value) == ("norm_at_zero", "zero")


def test_every_choice_that_changes_something_has_its_words():
    every = {(name, value) for name, known in CHOICES.items() for value in known if value != "jax"}
    assert set(_GIVES) == every - {("max_ties", "shared")}, "which is JAX's"
