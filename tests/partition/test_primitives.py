"""The table of primitives says what it means, and means what JAX calls so."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import facts
from benchmarks.programs import PROGRAMS, load
from house import house_at
from jointcut import aot
from jointcut.partition.errors import TraceError
from jointcut.partition.prices import counts
from jointcut.partition.program import primitives
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.primitives import TABLE, WORDS, those
from programs import CORPUS

ROOT = Path(__file__).parents[2]


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


# ------------------------------------------------------------------------------------------------ all that occurs


def in_program(closed):
    """The names of all primitives of a program, however deep."""
    return {eqn.primitive.name for eqn in jaxprs.opened(closed)[0].eqns}.union(
        *map(jaxprs.inner_primitives, jaxprs.opened(closed)[0].eqns)
    )


@pytest.mark.parametrize("program", CORPUS, ids=lambda program: program.name)
def test_every_primitive_of_the_corpus_has_a_line(program):
    function = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux)
    with program.precision(), jax.enable_checks(False):
        try:
            traced = function.trace(*program.args, **program.kwargs)
        except TraceError:  # it has no gradient
            return
    assert in_program(traced.joint) <= set(TABLE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_primitive_of_the_suite_has_a_line(name):
    with jax.numpy_dtype_promotion("standard"), jax.enable_checks(False):
        program = load(name, "tiny")
        traced = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments)
    assert in_program(traced.joint) <= set(TABLE)


#: The tables that are left: names that one file looks for in what it or a rule of JAX's has written, and keys of rules.
LEFT = {
    "aot/trace/formulas/spectra.py": 1,  # what the derivative of a decomposition is made of
    "partition/program/jax/callers.py": 1,  # what lies as its operand does: the door stands above the table
    "partition/rewrite/slopes.py": 1,  # what stands between a test of ours and the choice
    "partition/rewrite/sparse.py": 1,  # what JAX spreads zeros by
    "partition/search/forms/indices.py": 1,  # the names of a function's cases
    "wrappers/built_in/checks.py": 2,  # the parameter that holds what is called
}


def test_facts_of_primitives_stand_in_the_table_alone():
    tables, _ = facts.counted(house_at(ROOT))
    found = [table.path for table in tables]
    assert {path: found.count(path) for path in found} == LEFT, "\n".join(map(str, tables))


def test_a_private_table_is_found(tmp_path):
    (tmp_path / "aot").mkdir()
    (tmp_path / "aot/one.py").write_text('A = {"tanh", "exp"}\nB = ["one", "two"]\nC = x.name in ("tanh", "exp")\n')
    tables, comparisons = facts.counted(house_at(tmp_path))
    assert [str(x) for x in (*tables, *comparisons)] == [
        "aot/one.py:1: {'tanh', 'exp'}",
        "aot/one.py:3: x.name in ('tanh', 'exp')",
    ]


# ------------------------------------------------------------------------------------------------ facts that can be run


def values(name, *xs):
    """What a function of `lax` of this name makes of as many of some arrays as it takes; None where there is none."""
    for count in (1, 2):
        try:
            return getattr(lax, name)(*xs[:count])
        except (AttributeError, TypeError, ValueError):
            continue
    return None


RUN = [name for name in sorted(primitives.ELEMENTWISE) if values(name, *jnp.ones((2, 3))) is not None]


def test_most_of_what_is_said_of_elements_can_be_run():
    assert len(RUN) > 50


@pytest.mark.parametrize("name", RUN)
def test_what_is_said_of_sums_and_zeros_holds(name):
    rows = jnp.array([[0.3, 0.5, 0.2], [0.1, 0.4, 0.6], [0.2, 0.3, 0.1], [0.6, 0.2, 0.3]])
    (a, b), (c, d) = rows[:2], rows[2:]
    if name in primitives.LINEAR:
        np.testing.assert_allclose(values(name, a + c, b + d), values(name, a, b) + values(name, c, d), rtol=1e-6)
    if name in primitives.BILINEAR | primitives.LINEAR_FIRST:
        np.testing.assert_allclose(values(name, a + c, b), values(name, a, b) + values(name, c, b), rtol=1e-6)
    if name in primitives.BILINEAR:
        np.testing.assert_allclose(values(name, a, b + d), values(name, a, b) + values(name, a, d), rtol=1e-6)
    if name in primitives.ZERO_OF_ZEROS:
        assert not jnp.any(values(name, jnp.zeros(3), jnp.zeros(3)))


@pytest.mark.parametrize("name", sorted(primitives.COMPARING))
def test_what_compares_gives_truth_values(name):
    made = values(name, *jnp.ones((2, 3)))
    assert made is not None and made.dtype == bool
