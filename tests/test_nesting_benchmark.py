"""`benchmarks/nesting.py` nests `jax.checkpoint` as a user would by hand, and changes no value."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.methods import inner_jaxprs
from benchmarks.nesting import MARKS, checkpoint, nested, nested_for
from benchmarks.programs import load
from programs import undrawn

WEIGHTS = jnp.linspace(0.5, 1.5, 10)
START = jnp.linspace(0.1, 0.9, 4)


def layer(w, x):
    return jnp.sin(w * x)


def stacked(weights, x):
    """Ten blocks between an op before and one after, and one op between each two."""
    x = x + 1.0
    for w in weights:
        x = 2.0 * checkpoint(layer)(w, x)
    return jnp.sum(x)


def looped(weights, x, reverse):
    """A scan of ten steps that hands back what each made."""

    def step(x, w):
        return (x := layer(w, x)), x * w

    x, found = lax.scan(checkpoint(step), x, weights, reverse=reverse)
    return jnp.sum(x) + jnp.sum(found * jnp.arange(10.0)[:, None])


def shape(jaxpr):
    """The marks and scans in a jaxpr, as a list of what they hold."""
    found = []
    for eqn in jaxpr.eqns:
        inside = [mark for inner in inner_jaxprs(eqn.params) for mark in shape(getattr(inner, "jaxpr", inner))]
        if eqn.primitive.name in MARKS:
            found.append(("mark", inside))
        elif eqn.primitive.name == "scan":
            found.append((eqn.params["length"], inside))
        else:
            found += inside
    return found


@pytest.mark.parametrize(("twice", "inside"), [(False, []), (True, [("mark", [])])])
def test_blocks_stand_in_groups_of_about_their_square_root(twice, inside):
    jaxpr = jax.make_jaxpr(nested(stacked, twice))(WEIGHTS, START).jaxpr
    assert shape(jaxpr) == [("mark", 4 * inside), ("mark", 4 * inside), ("mark", 2 * inside)]
    assert jaxpr.eqns[0].primitive.name == "add", "what stands before the first block and after the last is in no group"


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("twice", "inside"), [(False, []), (True, [("mark", [])])])
def test_a_scan_becomes_a_scan_of_scans_and_one_for_the_rest(reverse, twice, inside):
    jaxpr = jax.make_jaxpr(lambda w, x: nested(lambda w, x: looped(w, x, reverse), twice)(w, x))(WEIGHTS, START).jaxpr
    assert shape(jaxpr) == [(3, [("mark", [(3, inside)])]), ("mark", [(1, inside)])]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("loss", [stacked, lambda w, x: looped(w, x, False), lambda w, x: looped(w, x, True)])
def test_no_value_changes(loss, twice):
    wanted, got = (jax.jit(jax.value_and_grad(f, (0, 1)))(WEIGHTS, START) for f in (loss, nested(loss, twice)))
    assert jax.tree.structure(wanted) == jax.tree.structure(got)
    for want, have in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5)


def test_a_program_is_nested_at_each_of_its_places():
    program, other = (undrawn(partial(load, name, "tiny")) for name in ("gpt-scan", "maml"))
    names = {re.sub(r" \+ barriers$", "", name) for name in nested_for(program)}
    assert names == {"checkpoint block in groups: nothing", "checkpoint block nested: nothing"}
    assert nested_for(other).keys().isdisjoint(nested_for(program))
