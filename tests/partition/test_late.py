"""What waits on a CPU: the stacks of a backward's loops, regions that run again as a whole, keys of random bits."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.bodies.stacks import made_late
from jointcut.partition.lower.steps import Delay, Hold, Run, Wait
from jointcut.partition.plans import backend
from jointcut.partition.plans.backend import CPU, PORTABLE
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jax import jaxprs, runtime
from jointcut.partition.program.primitives import DRAWN
from jointcut.partition.rewrite.simplify import inlined, named
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


def delayed(program):
    """The program, its scan's stacks waiting for what is computed before, but for those that it returns."""
    jaxpr, _ = jaxprs.opened(program)
    ahead = next(i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == SCAN)
    late = [v for eqn in jaxpr.eqns[:ahead] for v in eqn.outvars]
    eqns, names = made_late(jaxpr.eqns, late, jaxpr.outvars)
    return jaxprs.build(jaxpr.invars, [named(names, v) for v in jaxpr.outvars], eqns)


@pytest.mark.parametrize("name", SCANS)
def test_a_loop_carries_the_stacks_that_wait_and_means_the_same(name):
    function, before, after = SCANS[name]
    program = inlined(jax.make_jaxpr(function)(ROWS))
    late = delayed(program)
    assert (carries_and_stacks(program), carries_and_stacks(late)) == ([before], [after])
    for got, want in zip(runtime.evaluate(late, ROWS), runtime.evaluate(program, ROWS), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


# ---------------------------------------------------------------------------------------- what the schedule says of it


def cut(function, *args, strategy="min_cut", platform=CPU):
    """A function cut for a backend."""
    traced = aot.function(function).trace(*args)
    return split(traced.joint, traced.program.roles, strategy, backend=platform)


def waits(made, steps, kind):
    """The steps of a kind, each with the name of the op that follows it and of those that make what it waits for."""
    graph = made.graph
    for i, step in enumerate(steps):
        if isinstance(step, kind):
            op = next(s.op for s in steps[i:] if hasattr(s, "op"))
            values = (step.cotangent,) if kind is Wait else step.values
            yield graph.ops[op].name, [None if (m := graph.maker_of(v)) is None else m.name for v in values]


def test_a_loop_of_the_backward_waits_for_the_cotangents_that_it_reads():
    made = cut(recurrent, [X, X, X], X)
    (first, second) = waits(made, made.schedule.backward, Delay)
    assert first[0] == second[0] == "loop"
    assert [*waits(made, made.schedule.forward, Delay)] == []
    assert "    stacks after %" in str(made.schedule) and "test_late.py:" in str(made.schedule).partition("stacks")[2]


def test_a_region_holds_all_that_it_reads_and_the_stacks_in_it_wait():
    made = cut(repeating, [X, X], X)
    assert [op for op, _ in waits(made, made.schedule.backward, Hold)] == ["remat2", "remat2"]
    assert [op for op, _ in waits(made, made.schedule.backward, Delay)] == ["remat2", "remat2"]
    assert [*waits(made, made.schedule.forward, Hold)] == []


# ------------------------------------------------------------------------------------------------------ random bits


def drawn(x, first=lambda x: jnp.sin(x) @ x.T, last=lambda x: x):
    """A sum with random bits, behind one product and ahead of another."""
    mask = jax.random.bits(jax.random.key(0), (3, 3)) if first is None else None
    y = jnp.sin(x) @ x.T if first is None else first(x)
    mask = jax.random.bits(jax.random.key(0), (3, 3)) if mask is None else mask
    return jnp.sum(last(jnp.where(mask > 7, y, 0.0)))


DRAWS = {
    "before any product": (functools.partial(drawn, first=None), []),
    "after a product of what is computed": (drawn, ["sin"]),
    "after another one of inputs alone": (
        functools.partial(drawn, first=lambda x: (jnp.sin(x) @ x.T) * jnp.exp(x @ x.T)),
        ["sin"],
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_key_waits_for_what_the_last_product_before_it_reads(name):
    function, wanted = DRAWS[name]
    made = cut(function, ROWS, strategy="save_all")
    assert [names for op, names in waits(made, made.schedule.forward, Wait)] == [wanted] * bool(wanted)
    keys = [step.value for step in made.schedule.forward if isinstance(step, Wait)]
    assert keys == [made.graph.ops[s.op].inputs[0] for s in made.schedule.forward if is_draw(made, s)] * bool(wanted)
    outs, _ = jax.value_and_grad(function)(ROWS)
    np.testing.assert_allclose(aot.function(function)(ROWS), outs, rtol=1e-6)


def is_draw(made, step):
    return isinstance(step, Run) and made.graph.ops[step.op].name == DRAWN


def test_nothing_waits_so_on_other_backends():
    def stacks(platform):
        made = cut(recurrent, [X, X], X, strategy="save_all", platform=platform)
        return [count for _, count in carries_and_stacks(made.backward)]

    assert (stacks(CPU), stacks(PORTABLE)) == ([0, 0], [1, 0])
