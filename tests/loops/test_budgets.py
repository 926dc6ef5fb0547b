"""Under a budget the number of checkpoints follows from it, where nobody said how many there are."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.choices.limits import Limit
from jointcut.aot.fitting.attempts import Fitted, Weighed
from jointcut.aot.fitting.checkpoints import in_budget
from jointcut.partition.errors import BudgetError

X, N = jnp.linspace(0.1, 1.0, 4096), jnp.int32(60)  # a carry of 16 kB, of which 128 are kept where nobody says


def loss(x, n):
    return (lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1]) * 1.1), (0, x))[1] ** 2).sum()


def ours(x, n):
    return (aot.fori_loop(0, n, lambda i, y: jnp.sin(y) * 1.1, x) ** 2).sum()


def by_python(x):
    for _ in range(60):
        x = jnp.sin(x) * 1.1
    return (x**2).sum()


def checkpoints(plan):
    return plan.nested[0].checkpoints


@pytest.mark.parametrize("function", [loss, ours])
def test_a_budget_in_bytes_holds_with_as_many_checkpoints_as_it_has_room_for(function):
    cut = aot.function(function, budget="800 kB").trace(X, N).partition()
    run = cut.compile()
    assert 10 < checkpoints(cut.plan) < 60 and run.peak_bytes <= 800_000
    np.testing.assert_allclose(run.value_and_grad(X, N)[1], jax.grad(by_python)(X), rtol=2e-5, atol=1e-6)


def test_a_budget_inside_a_jit_of_the_user():
    cut = aot.function(loss, budget="400 kB")
    step = jax.jit(jax.grad(lambda x: cut(x, N))).lower(X).compile()
    assert step.memory_analysis().temp_size_in_bytes < 400_000
    np.testing.assert_allclose(step(X), jax.grad(by_python)(X), rtol=2e-5, atol=1e-6)


def test_a_fraction_is_of_what_the_loop_keeps_where_nobody_says():
    traced = aot.function(loss).trace(X, N)
    cut = traced.partition(budget=0.5)
    assert cut.compile().activation_bytes <= 0.5 * traced.plain_memory.temp_bytes
    assert checkpoints(traced.partition().plan) == 128 and 40 < checkpoints(cut.plan) <= 64
    assert checkpoints(traced.partition(budget=0.0).plan) == 1


@pytest.mark.parametrize("budget", [Limit(0.0), Limit(0.001), Limit(0.3), Limit(None, 10**6), Limit(of_device=True)])
def test_before_a_budget_is_refused_one_checkpoint_is_tried_and_so_it_is_for_the_least(budget):
    tried = []

    def search(form):
        rows = (v.aval.shape[0] for eqn in form.closed.eqns for v in eqn.outvars if v.aval.ndim == 2)
        tried.append(max(rows) - 1)  # one is for the sweep
        if budget.fraction != 0.0:
            raise BudgetError("refused")
        return Fitted(None, Weighed(None, tried[-1], tried[-1], 0.0), ())

    with nullcontext() if budget.fraction == 0.0 else pytest.raises(BudgetError):
        assert in_budget(aot.function(loss).trace(X, N).program, budget, search).measured.peak_bytes == 1
    assert tried[-1] == 1 and tried == sorted({*tried}, reverse=True) and len(tried) <= 5


def test_a_budget_that_is_large_enough_changes_nothing():
    traced = aot.function(loss).trace(X, N)
    assert checkpoints(traced.partition(budget="1GB").plan) == 128


def test_a_number_that_was_given_stays():
    def given(x, n):
        return (aot.fori_loop(0, n, lambda i, y: jnp.sin(y) * 1.1, x, memory=40) ** 2).sum()

    traced = aot.function(given).trace(X, N)
    assert checkpoints(traced.partition(budget="2 MB").plan) == 40
    with pytest.raises(BudgetError, match="budget of 300,000 bytes cannot be met"):
        traced.partition(budget=300_000)


def test_two_loops_share_a_budget():
    def both(x, n):
        return loss(x, n) + ours(jnp.cos(x), n)

    cut = aot.function(both).trace(X, N).partition(budget="900 kB")
    assert cut.compile().peak_bytes <= 900_000
    assert {loop.checkpoints for loop in cut.plan.nested} == {checkpoints(cut.plan)}
