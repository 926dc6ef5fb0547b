"""What waits on a CPU: the stacks of a backward's loops, regions that run again as a whole, keys of random bits."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.nesting.stacks import made_late
from jointcut.partition.plans import backend
from jointcut.partition.plans.backend import CPU, PORTABLE
from jointcut.partition.program import jaxprs
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.primitives import BARRIER
from jointcut.partition.rewrite.habits.draws import drawn_late
from jointcut.partition.rewrite.simplify import inlined
from jointcut.partition.split import split

SIDE, STEPS, LAYERS = 64, 16, 4
STACK = 4 * STEPS * SIDE * SIDE  # bytes of the stack of one matrix
X = np.linspace(-1, 1, SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)
ROWS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="nothing waits so elsewhere")


def recurrent(weights, x):
    """Layers of a recurrent network: each one reads the stack that the one before it makes."""
    xs = jnp.stack([x] * STEPS)
    for w in weights:
        _, xs = lax.scan(lambda h, x, w=w: (jnp.tanh(h @ w + x),) * 2, jnp.zeros_like(x), xs)
    return jnp.sum(xs[-1])


@jax.checkpoint
def repeated(w, x):
    """Steps of one layer, in a region that stays closed: it holds a loop."""
    return lax.scan(lambda h, _: (jnp.tanh(h @ w) + jnp.sin(h), None), x, None, length=STEPS)[0]


def repeating(weights, x):
    """Layers that run again as a whole."""
    for w in weights:
        x = repeated(w, x)
    return jnp.sum(x)


def dropping(weights, x):
    """Layers with a dropout, of many arrays' size each."""
    keys = jax.random.split(jax.random.key(0), len(weights))
    for w, key in zip(weights, keys, strict=True):
        wide = jnp.concatenate([x @ w] * STEPS)
        wide = jnp.where(jax.random.bernoulli(key, 0.9, wide.shape), jnp.tanh(wide), 0.0)
        x = x + sum(jnp.split(wide, STEPS)) / STEPS
    return jnp.sum(x)


def step(function):
    """A compiled step of some layers."""
    return aot.function(function).trace([X / (i + 2) for i in range(LAYERS)], X).partition("min_cut").compile()


LAYERED = {"recurrent": recurrent, "repeating": repeating, "dropping": dropping}


@on_cpu
@pytest.mark.parametrize("name", LAYERED)
def test_what_waits_spares_a_stack_or_the_bits_of_each_layer_but_two(name, monkeypatch):
    waiting = step(LAYERED[name])
    monkeypatch.setattr(backend, "CPU", replace(CPU, runs_early=False))
    early = step(LAYERED[name])
    assert waiting.cut.plan.bytes_saved == early.cut.plan.bytes_saved
    assert early.activation_bytes - waiting.activation_bytes >= (LAYERS - 2) * STACK


@on_cpu
@pytest.mark.parametrize("name", LAYERED)
def test_the_model_of_the_compiler_knows_what_waits(name):
    made = step(LAYERED[name])
    predicted = made.cut.traced.planner.replay(made.cut.plan).peak_bytes
    assert 0.95 <= predicted / made.activation_bytes <= 1.05


@pytest.mark.parametrize("name", LAYERED)
def test_the_gradients_are_those_of_jax(name):
    weights = [X / (i + 2) for i in range(LAYERS)]
    value, grads = step(LAYERED[name]).value_and_grad(weights, X)
    wanted, wanted_grads = jax.value_and_grad(LAYERED[name])(weights, X)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.max(np.abs(want)))


# ---------------------------------------------------------------------------------------- which stacks, and which not


def stacked(x):
    """A scan of something computed, and what is made of its stacks."""
    last, (rows, tests) = lax.scan(lambda h, row: (h + row, (h * row, h > row)), x[0] * 2, x + 1)
    return last, jnp.sum(jnp.where(tests, rows, 0.0))


def backwards(x):
    """From the last row to the first, with one stack that is not read, and another of whole numbers."""
    last, (_, rows, counts) = lax.scan(
        lambda h, row: (h * row, (h, row, row.astype(int))), x[0] * 2, x + 1, reverse=True
    )
    return last, jnp.sum(rows), jnp.sum(counts)


def returning(x):
    """A scan of something computed, of whose stacks one is returned."""
    _, (first, second) = lax.scan(lambda h, row: (h * row, (h + row, h - row)), x[0] * 2, x + 1)
    return first, jnp.sum(second)


def once(x):
    """A scan of one step."""
    return jnp.sum(lax.scan(lambda h, row: (h * row, h + row), x[0] * 2, x[:1] + 1)[1])


def first(x):
    """A scan that reads the program's own input alone."""
    return jnp.sum(lax.scan(lambda h, _: (h * 0.5, h + 1.0), x, length=2)[1])


def carries_and_stacks(program):
    """How many values each scan at the top of a program carries, and how many it stacks."""
    jaxpr, _ = jaxprs.opened(program)
    scans = [jaxprs.scan_layout(eqn) for eqn in jaxpr.eqns if eqn.primitive.name == SCAN]
    return [(layout.num_carry, len(layout.body.outvars) - layout.num_carry) for layout in scans]


#: Each with what its scan carries and stacks, as JAX writes it and if stacks wait.
SCANS = {
    "stacked": (stacked, (1, 2), (3, 0)),
    "backwards": (backwards, (1, 2), (3, 0)),
    "what is returned does not wait": (returning, (1, 2), (2, 1)),
    "nothing waits in a scan of one step": (once, (1, 1), (1, 1)),
    "nothing to wait for": (first, (1, 1), (1, 1)),
}


@pytest.mark.parametrize("name", SCANS)
def test_a_loop_carries_the_stacks_that_wait_and_means_the_same(name):
    function, before, after = SCANS[name]
    program = inlined(jax.make_jaxpr(function)(ROWS))
    late = made_late(program)
    assert (carries_and_stacks(program), carries_and_stacks(late)) == ([before], [after])
    for got, want in zip(jaxprs.evaluate(late, ROWS), jaxprs.evaluate(program, ROWS), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


# ------------------------------------------------------------------------------------------------------ random bits


def before(x):
    """Bits before any product."""
    return jax.random.bits(jax.random.key(0), (3, 3)), jnp.sin(x) @ x.T


def after(x):
    """Bits after a product of what is computed."""
    return jnp.sin(x) @ x.T, jax.random.bits(jax.random.key(0), (3, 3))


def after_one_of_inputs(x):
    """Bits after a product of what is computed, and another one of inputs alone."""
    return jnp.sin(x) @ x.T, jnp.exp(x @ x.T), jax.random.bits(jax.random.key(0), (3, 3))


@pytest.mark.parametrize(("function", "wanted"), [(before, []), (after, ["sin"]), (after_one_of_inputs, ["sin"])])
def test_a_key_waits_for_what_the_last_product_before_it_reads(function, wanted):
    program = inlined(jax.make_jaxpr(function)(ROWS))
    late = drawn_late(program)
    eqns = jaxprs.opened(late)[0].eqns
    makers = {v: eqn.primitive.name for eqn in eqns for v in eqn.outvars}
    assert [makers[eqn.invars[1]] for eqn in eqns if eqn.primitive.name == BARRIER] == wanted
    for got, want in zip(jaxprs.evaluate(late, ROWS), jaxprs.evaluate(program, ROWS), strict=True):
        np.testing.assert_array_equal(got, want)


def test_nothing_waits_so_on_other_backends():
    joint = aot.function(recurrent).trace([X, X], X)

    def stacks(platform):
        halves = split(joint.joint, joint.program.roles, "save_all", backend=platform).halves
        return [count for _, count in carries_and_stacks(halves.backward)]

    assert (stacks(CPU), stacks(PORTABLE)) == ([0, 0], [1, 0])
