"""Zeros that a scatter fills are read by nothing else, in halves for a GPU, and the numbers stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.lower import verify
from jointcut.partition.plans.backend import GPU, PORTABLE
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.rewrite.fills import zeros_apart


def pooled(w, x):
    h = jax.nn.relu(x @ w)
    h = lax.reduce_window(h, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")
    return jnp.sum(jnp.sin(h))


def summed(w, x):
    rows = jnp.array([0, 2, 2, 1])
    h = jax.nn.relu(x @ w)
    h = jnp.maximum(jax.ops.segment_sum(h[rows], rows, 4) + h, 0.0)
    return jnp.sum(jnp.where(h > 1, h, 0.0) ** 2)


ARGS = jnp.cos(jnp.arange(16.0)).reshape(4, 4), jnp.sin(jnp.arange(16.0)).reshape(4, 4)


def filled(jaxpr):
    """The types that are filled, and the equations that fill them, in bodies too."""
    names = ("select_and_scatter_add", "scatter-add", "scatter")
    return {str(v.aval) for eqn in jaxpr.eqns if eqn.primitive.name in names for v in eqn.outvars}


def zeros_read(jaxpr, types):
    """The zeros of these types that loops over elements read as written in the program."""
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        for inner in jaxprs.inner_jaxprs(eqn):
            yield from zeros_read(jaxprs.opened(inner)[0] if hasattr(inner, "jaxpr") else inner, types)
        if eqn.primitive.name in ("max", "select_n", "mul") and str(eqn.outvars[0].aval) in types:
            for v in eqn.invars:
                maker = None if isinstance(v, jaxprs.Literal) else made.get(v)
                atom = maker.invars[0] if maker is not None and maker.primitive.name == "broadcast_in_dim" else v
                if isinstance(atom, jaxprs.Literal) and not np.any(atom.val) and atom.aval.shape == ():
                    yield eqn


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
@pytest.mark.parametrize("function", [pooled, summed])
def test_what_is_filled_is_read_by_nothing_else_and_the_numbers_are_the_same(function, strategy):
    traced = aot.function(function, argnums=(0, 1)).trace(*ARGS)
    split = traced.partition(strategy).split
    want, got = (split.on(backend).halves for backend in (PORTABLE, GPU))
    types = set().union(*(filled(jaxprs.opened(half)[0]) for half in (got.forward, got.backward)))
    assert types
    before = [eqn for half in (want.forward, want.backward) for eqn in zeros_read(jaxprs.opened(half)[0], types)]
    after = [eqn for half in (got.forward, got.backward) for eqn in zeros_read(jaxprs.opened(half)[0], types)]
    assert before and not after
    runs = [verify.run(halves, split.graph, [*traced.consts, *ARGS], [jnp.float32(1)]) for halves in (want, got)]
    jax.tree.map(np.testing.assert_array_equal, *runs)


def test_the_schedule_says_which_zeros_are_apart():
    traced = aot.function(pooled, argnums=(0, 1)).trace(*ARGS)
    split = traced.partition("min_cut").split
    for half in (text := str(split.on(GPU).schedule)).split("handed"):
        assert half.count("    zeros apart float32[4,4]\n") == 1
    assert "zeros" not in str(split.on(PORTABLE).schedule) and text.startswith("forward:\n    zeros apart")


def test_a_step_that_fills_nothing_stays_as_it_is():
    closed = jax.make_jaxpr(lambda x: jnp.maximum(x, 0.0))(1.0)
    assert zeros_apart(closed, ()) is closed
