"""What offloading costs: how long copies take, what they hide behind, and that bounds hold for plans that offload."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition import Plan, Planner, Problem, Roofline
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.plans.backend import PORTABLE
from jointcut.partition.program.text import parse

RATES = Roofline(flops_per_s=1e9, elementwise_per_s=1e8, bytes_per_s=1e9, host_bytes_per_s=1e8)


def unrolled(w, x):
    for row in w:
        x = jnp.tanh(x @ row)
    return jnp.sum(x)


def looped(w, x):
    return jnp.sum(lax.scan(lambda h, row: (jnp.tanh(h @ row), None), x, w)[0])


W, X = np.full((5, 32, 32), 0.1, np.float32), np.full((16, 32), 0.5, np.float32)


def planner(function, host_bytes_per_s=RATES.host_bytes_per_s):
    problem = Problem.of(aot.function(function, argnums=(0, 1)).trace(W, X).graph, RATES, backend=PORTABLE)
    return Planner(problem, host_bytes_per_s=host_bytes_per_s)


def all_away(mine):
    plan = mine.default()
    away = [v for v in plan.values if not mine.problem.not_offloaded(v)]
    return Plan.of(mine.problem, plan.values, offloaded=away)


@pytest.mark.parametrize("function", [unrolled, looped])
def test_copies_hide_behind_computing_on_a_fast_link_and_take_their_time_on_a_slow_one(function):
    fast, slow = (planner(function, rate) for rate in (1e15, 1.0))
    plan = all_away(fast)
    assert plan.bytes_offloaded > 0
    assert fast.copies(plan).waiting_seconds <= 1e-6 * sum(fast.halves_seconds)
    assert fast.copies(plan).hidden == pytest.approx(1, abs=1e-2) or fast.copies(plan).busy_seconds < 1e-9
    taken = slow.copies(plan)
    assert taken.busy_seconds == pytest.approx(plan.bytes_offloaded)  # one byte a second
    assert taken.waiting_seconds == pytest.approx(2 * plan.bytes_offloaded, rel=1e-3) and taken.hidden < 1e-3


def test_a_fetch_stands_a_product_ahead_of_its_reader_and_waits_for_what_that_one_reads():
    graph = parse("""
        primal %0:float32[8,8]
        cotangent %1:float32[8,8]
        %2:float32[8,8] = tanh %0
        %3:float32[8,8] = sin %2
        backward:
        %4:float32[8,8] = dot_general %1 %0
        %5:float32[8,8] = dot_general %4 %0
        %6:float32[8,8] = mul %5 %2
        output %3
        gradient %6""")
    plan = Plan.of(graph, [2], offloaded=[2])
    text = str(schedule(Problem.of(graph, backend=PORTABLE), plan))
    assert [line.strip() for line in text.splitlines()] == [
        "forward:", "run #0 tanh", "offload %2", "run #1 sin", "handed: %2", "backward:", "run #2 dot_general",
        "fetch %2 after %4", "run #3 dot_general", "run #4 mul"]  # fmt: skip


@pytest.mark.parametrize("function", [unrolled, looped])
def test_more_plans_with_a_link_and_never_a_slower_one(function):
    """Every plan is bounded from below, and a budget is held in no more time than without the link."""
    with_link, without = planner(function), planner(function, None)
    assert any(c.plan.offloaded for c in with_link.menu) and not any(c.plan.offloaded for c in without.menu)
    for c in with_link.menu:
        assert c.plan.bound_seconds <= c.plan.seconds
    for c in without.ranked:
        found = with_link.fastest(c.peak_bytes)
        assert found is not None and found.step_seconds <= c.step_seconds


def test_no_choice_of_what_is_saved_and_offloaded_beats_the_bound():
    """All subsets of what may be saved, each with all subsets of it in host memory."""
    mine = planner(lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])))
    values = list(mine.default().values)
    values += [op.outputs[0] for op in mine.graph.ops if op.id in mine.problem.sides.forward][:6]
    values = [v for v in dict.fromkeys(values) if mine.problem.prices[v]][:4]
    found = []
    for saved in itertools.chain.from_iterable(itertools.combinations(values, n) for n in range(len(values) + 1)):
        try:
            Plan.of(mine.problem, saved)
        except PlanError:
            continue
        subsets = itertools.chain.from_iterable(itertools.combinations(saved, n) for n in range(len(saved) + 1))
        found += [mine.priced(Plan.of(mine.problem, saved, offloaded=away)) for away in subsets]
    assert len(found) > 10
    for plan, other in itertools.product(found, found):
        if other.bytes_saved <= plan.bytes_saved:
            assert plan.bound_seconds <= other.seconds * (1 + 1e-9)


def test_a_budget_is_met_by_offloading_where_it_is_permitted():
    w, x = np.full((24, 32, 32), 0.02, np.float32), np.full((64, 32), 0.5, np.float32)
    fast = Roofline(flops_per_s=1e9, elementwise_per_s=1e8, bytes_per_s=1e10, host_bytes_per_s=1e12)
    function = aot.function(looped, argnums=(0, 1), cost=fast, offload=True)
    cut = function.trace(w, x).partition(budget=0.3)
    memory = cut.compile().memory
    assert cut.plan.strategy.endswith(", offloaded") and memory.host_bytes == cut.plan.bytes_offloaded > 0
    assert "offloaded, the device has no room for it at this budget" in str(cut.plan)
    got, want = function.value_and_grad(w, x), jax.value_and_grad(looped, argnums=(0, 1))(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
    assert not aot.function(looped, argnums=(0, 1), cost=fast).trace(w, x).partition(budget=0.3).plan.offloaded
