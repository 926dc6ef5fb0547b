"""The table of primitives says what it means, and means what JAX calls so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jointcut.partition.prices import counts
from jointcut.partition.program import jaxprs, primitives
from jointcut.partition.program.primitives import TABLE, WORDS, those


def test_each_word_of_the_table_is_explained_and_each_that_is_explained_is_used():
    said = {word for line in TABLE.values() for word in line.split() if not word.isdecimal()}
    assert said == set(WORDS)


def test_each_line_says_what_the_primitive_is_and_then_its_weight():
    for name, line in TABLE.items():
        first, *rest = line.split()
        assert first in WORDS, name
        assert not any(word.isdecimal() for word in rest[:-1]), name


def test_no_primitive_is_of_two_kinds():
    kinds = [those(word) for word in ("elementwise", "moves", "reduces", "multiplies", "communicates", "calls")]
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))


def test_what_is_dear_is_elementwise_and_what_repeats_or_reorders_or_picks_moves():
    assert primitives.DEAR <= primitives.ELEMENTWISE
    assert primitives.REPEATING | primitives.REORDERING | primitives.PICKING <= primitives.MOVEMENT


def test_what_is_counted_by_its_name_has_a_line():
    assert set(TABLE) >= counts.PER_ELEMENT


def test_a_weight_is_read_from_the_end_of_a_line():
    assert primitives.WEIGHTS["exp"] == 20.0
    assert primitives.WEIGHTS["copy"] == 0.0
    assert "add" not in primitives.WEIGHTS


def test_an_unknown_primitive_is_in_no_set():
    assert not any("somebody_elses" in those(word) for word in WORDS)


def names(function, *args):
    return [eqn.primitive.name for eqn in jaxprs.opened(jax.make_jaxpr(function)(*args))[0].eqns]


X = jnp.ones((4, 4))


@pytest.mark.parametrize(
    ("word", "function"),
    {
        "elementwise": lambda: jnp.negative(X),
        "dear": lambda: jax.lax.tanh(X),
        "renames": lambda: jnp.reshape(X, (16,)),
        "repeats": lambda: jax.lax.broadcast(X, (3,)),
        "reorders": lambda: X.T,
        "picks": lambda: jax.lax.slice(X, (0, 0), (2, 2)),
        "updates": lambda: jax.lax.dynamic_update_slice(X, X[:1], (0, 0)),
        "reduces": lambda: jax.lax.reduce_sum(X, (0,)),
        "cumulates": lambda: jax.lax.cumsum(X),
        "multiplies": lambda: jax.lax.dot(X, X),
        "packs": lambda: jax.lax.dot(X, X),
        "solves": lambda: jax.lax.linalg.cholesky(X, symmetrize_input=False),
        "series": lambda: jax.lax.lgamma(X),
        "draws": lambda: jax.random.bits(jax.random.key(0)),
        "opens": lambda: jax.jit(jnp.sin)(X),
        "loops": lambda: jax.lax.scan(lambda c, x: (c, x), X, X),
        "body": lambda: jax.lax.cond(True, jnp.sin, jnp.cos, X),
    }.items(),
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_jax_has_a_primitive_for_which_the_word_holds(word, function):
    assert set(names(function)) & those(word)
