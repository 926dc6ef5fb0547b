"""Where the state that a step finds is what the step before has made, one stack of both is kept."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition import Plan
from jointcut.partition.plans import planfile
from jointcut.partition.search.forms.before import OUTERMOST
from jointcut.partition.search.mincut import min_cut

T, B, D = 64, 32, 16
KEYS = jax.random.split(jax.random.key(0), 4)
W, U = (jax.random.normal(k, (D, D)) / 4 for k in KEYS[:2])
XS, H = jax.random.normal(KEYS[2], (T, B, D)), jax.random.normal(KEYS[3], (B, D))
STACK = 4 * T * B * D
ARGS = (W, U, XS, H)


def step(w, u, h, x):
    return jnp.tanh(h @ w + x @ u)


def last(w, u, xs, h, reverse=False):
    return jnp.sum(lax.scan(lambda h, x: (step(w, u, h, x), None), h, xs, reverse=reverse)[0] ** 2)


def every(w, u, xs, h):
    return jnp.sum(lax.scan(lambda h, x: (step(w, u, h, x),) * 2, h, xs)[1] ** 2)


def two_layers(w, u, xs, h):
    once = lax.scan(lambda h, x: (step(w, u, h, x),) * 2, h, xs)[1]
    return jnp.sum(lax.scan(lambda h, x: (step(u, w, h, x), None), h, once)[0] ** 2)


def in_a_branch(w, u, xs, h):
    return lax.cond(h[0, 0] < 9.0, partial(last, w, u, xs), jnp.sum, h)


def of_a_literal(w, u, xs, h):
    return last(w, u, xs, jnp.zeros_like(h)) + jnp.sum(h)


#: Programs, with the stacks that plain JAX keeps twice.
PROGRAMS = {
    "last": (last, 1), "in reverse": (partial(last, reverse=True), 1), "every": (every, 1),
    "two layers": (two_layers, 2),
    "of a literal": (of_a_literal, 1), "in jit": (jax.jit(last), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_stack_that_is_another_one_moved_is_kept_once(name):
    function, twice = PROGRAMS[name]
    traced = aot.function(function, argnums=(0, 1, 2, 3)).trace(*ARGS)
    cut, before = traced.partition(), traced.partition(plan=min_cut(traced.graph))
    less = before.plan.bytes_saved - cut.plan.bytes_saved
    assert twice * (STACK - 4 * B * D) <= less <= twice * STACK, cut.plan
    assert [form.kind for form in cut.split.graph.forms] == [OUTERMOST] * twice
    assert f"a carried value from the row before: {twice} value" in str(cut.plan)
    got, want = cut.compile(2).value_and_grad(*ARGS), before.compile(2).value_and_grad(*ARGS)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    plain = jax.value_and_grad(function, (0, 1, 2, 3))(*ARGS)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, plain)


def test_the_step_takes_less_memory_by_the_stack():
    xs, h = jnp.ones((256, 64, D)), jnp.ones((64, D))
    traced = aot.function(last).trace(W, U, xs, h)
    cuts = traced.partition(), traced.partition(plan=min_cut(traced.graph))
    temps = [cut.compile().activation_bytes for cut in cuts]
    assert temps[1] - temps[0] >= 0.9 * 4 * 256 * 64 * D


def test_a_step_that_changes_what_it_hands_on_keeps_both_stacks():
    def loss(w, u, xs, h):
        return jnp.sum(lax.scan(lambda h, x: (h + jnp.sin(step(w, u, h, x)), None), h, xs)[0])

    cut = aot.function(loss).trace(*ARGS).partition()
    assert OUTERMOST not in {form.kind for form in cut.split.graph.forms}


@pytest.mark.parametrize("name", ["last", "two layers"])
def test_budgets_reach_as_low_as_before_and_take_the_default_where_it_holds(name):
    traced = aot.function(PROGRAMS[name][0]).trace(*ARGS)
    default = traced.partition()
    peak = default.compile().peak_bytes
    for _ in range(2):  # searched, and known
        assert traced.partition(budget=peak + 1000).plan.values == default.plan.values
    least = traced.partition(budget=0.0)
    assert least.compile().peak_bytes <= peak and (least.plan.segments or name != "last")
    assert traced.partition(budget=least.compile().peak_bytes).plan.segments == least.plan.segments


def among_layers(w, u, xs, h):
    """A recurrence between layers whose values may be computed again."""
    for _ in range(4):
        xs = jnp.tanh(xs @ u)
    ys = lax.scan(lambda h, x: (step(w, u, h, x),) * 2, h, xs)[1]
    for _ in range(4):
        ys = jnp.tanh(jnp.sin(ys) @ w)
    return jnp.sum(ys**2)


def test_a_budget_below_the_default_searches_the_program_that_keeps_one_stack():
    traced = aot.function(among_layers, tiles=False).trace(*ARGS)
    assert traced.request.moved is not traced.request
    default = traced.partition().compile().activation_bytes
    cut = traced.partition(budget=(default - STACK) / traced.plain_memory.temp_bytes)
    assert OUTERMOST in {form.kind for form in cut.split.graph.forms} and cut.plan.runs_again
    run = cut.compile()
    assert run.activation_bytes <= default - STACK
    want = jax.value_and_grad(among_layers)(*ARGS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), run.value_and_grad(*ARGS), want)


def test_its_plan_is_taken_and_told_like_any_other(tmp_path):
    traced = aot.function(last).trace(*ARGS)
    cut = traced.partition()
    plans = cut.plan, planfile.dumps(cut.plan, cut.split.graph), Plan.of(traced.graph, [5, 6, 7])
    again = [traced.partition(plan=plan) for plan in plans]
    assert [made.plan.bytes_saved for made in again[:2]] == [cut.plan.bytes_saved] * 2
    assert again[2].plan.bytes_saved > cut.plan.bytes_saved
    report = cut.explain(measure=False)
    assert (
        sum(row.bytes for row in report.saved) == cut.plan.bytes_saved
        and cut.pareto().chosen.plan.values == cut.plan.values
    )
