"""Under a budget the number of checkpoints follows from it, where nobody said how many there are."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition import Plan, diff
from jointcut.partition.bodies.checkpoints import steps_again
from jointcut.partition.errors import BudgetError, PlanError
from jointcut.partition.plans import planfile
from jointcut.partition.prices.cost import Roofline

X, N = jnp.linspace(0.1, 1.0, 4096), jnp.int32(60)  # a carry of 16 kB, of which 10 are kept where nobody says


ROOFLINE = Roofline(5e10, 1e10, 2e10)


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


@pytest.mark.parametrize("size", [1024, 9_400, 65_536])
def test_by_default_a_loop_takes_no_more_bytes_than_with_ten_checkpoints(size):
    x = jnp.linspace(0.1, 1.0, size)

    def with_ten(x, n):
        return (aot.fori_loop(0, n, lambda i, y: jnp.sin(y) * 1.1, x, memory=10) ** 2).sum()

    taken = [jax.jit(jax.grad(f)).lower(x, N).compile().memory_analysis().temp_size_in_bytes for f in (ours, with_ten)]
    assert taken[0] <= taken[1]


def test_expected_trips_set_the_checkpoints_of_eager_calls():
    def rows():
        _, back = jax.vjp(lambda x: aot.while_loop(lambda y: jnp.max(y) < 9, lambda y: y + 0.1 * y * y, x).sum(), X)
        return max(x.shape[0] for x in jax.tree.leaves(back) if getattr(x, "ndim", 0) == 2) - 1

    def expecting(count):
        with aot.trips(count):
            return rows()

    assert [rows(), expecting(60), rows(), expecting(5)] == [10, 60, 10, 5]


def test_a_budget_inside_a_jit_of_the_user():
    cut = aot.function(loss, budget="400 kB")
    step = jax.jit(jax.grad(lambda x: cut(x, N))).lower(X).compile()
    assert step.memory_analysis().temp_size_in_bytes < 400_000
    np.testing.assert_allclose(step(X), jax.grad(by_python)(X), rtol=2e-5, atol=1e-6)


def test_a_fraction_is_of_what_the_loop_keeps_where_nobody_says():
    traced = aot.function(loss).trace(X, N)
    cut = traced.partition(budget=0.5)
    assert cut.compile().activation_bytes <= 0.5 * traced.plain_memory.temp_bytes
    assert checkpoints(traced.partition().plan) == 10 and 2 <= checkpoints(cut.plan) <= 6
    assert checkpoints(traced.partition(budget=0.0).plan) == 1


def test_a_large_budget_gives_as_many_checkpoints_as_2_mb_hold_where_no_trips_are_known():
    traced = aot.function(loss).trace(X, N)
    assert "at most 10 checkpoints, fewer or up to 128 under a budget" in str(traced.partition().plan)
    assert checkpoints(traced.partition(budget="1GB").plan) == 128


def test_more_bytes_give_more_checkpoints_and_are_used_where_no_trips_are_known():
    traced = aot.function(loss).trace(X, N)
    numbers = []
    for budget in (250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000):
        cut = traced.partition(budget=budget)
        numbers.append(checkpoints(cut.plan))
        assert numbers[-1] == 128 or 0.85 * budget <= cut.compile().peak_bytes <= budget
    assert numbers == sorted(numbers) and numbers[0] < 10 < 100 < numbers[-1]


def test_a_large_budget_gives_more_checkpoints_to_loops_of_known_trips():
    with aot.trips(500):
        traced = aot.function(loss).trace(X, N)
    cuts = [traced.partition(budget=budget) for budget in (None, "5MB", "1GB")]
    few, some, all_ = (checkpoints(cut.plan) for cut in cuts)
    assert few == 128 < some < all_ == 500 and cuts[-1].plan.strategy.endswith(", more checkpoints")
    np.testing.assert_array_equal(*(cut.compile().value_and_grad(X, N)[1] for cut in cuts[1:]))


@pytest.mark.parametrize("budget", [200_000, 500_000, 1_000_000, 5_000_000, 20_000_000])
@pytest.mark.parametrize("size", [1024, 4096, 65_536])
def test_loops_use_what_a_budget_gives(budget, size):
    with aot.trips(2000):
        traced = aot.function(ours).trace(jnp.linspace(0.1, 1.0, size), N)
    floor = traced.partition(budget=0.0).compile().peak_bytes
    if budget < floor:
        with pytest.raises(BudgetError, match="cannot be met"):
            traced.partition(budget=budget)
        return
    cut = traced.partition(budget=budget)
    peak, most = cut.compile().peak_bytes, floor + 1999 * (4 * size + 4)
    assert min(0.85 * budget, budget - 4 * (4 * size + 4), 0.98 * most) <= peak <= budget, checkpoints(cut.plan)


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


# ------------------------------------------------------------------------------------ a choice of the plan


def plan_with(traced, *checkpoints):
    return Plan.of(traced.graph, traced.partition("save_all").plan.values, checkpoints=checkpoints)


@pytest.mark.parametrize("number", [1, 2, 5, 59, 60, 127, 128])
def test_a_plan_may_give_a_loop_any_number_of_checkpoints(number):
    traced = aot.function(loss).trace(X, N)
    cut = traced.partition(plan=plan_with(traced, (0, number)))
    assert checkpoints(cut.plan) == number and f"while_loop_backward from {number} checkpoint" in str(cut.schedule)
    assert {v.shape[0] for v in cut.schedule.graph.values if len(v.shape) == 2} == {number + 1}  # one for the sweep
    np.testing.assert_allclose(cut.compile().value_and_grad(X, N)[1], jax.grad(by_python)(X), rtol=2e-5, atol=1e-6)


def test_the_planner_prices_numbers_as_alternatives_and_a_budget_takes_the_fastest_that_fits():
    traced = aot.function(loss, cost=ROOFLINE).trace(X, N)
    planner = traced.planner
    cuts = [c for c in planner.menu if len(c.plan.values) == 6]
    numbers = {dict(c.plan.checkpoints).get(0, 10): c for c in cuts}
    assert [*numbers] == [128, 64, 32, 16, 10, 8, 4, 2, 1]  # from the fastest
    peaks = [c.peak_bytes for c in numbers.values()]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0] / 20
    again = [c.plan.seconds - cuts[0].plan.seconds for c in numbers.values()]
    step = planner.model.seconds(planner.graph, planner.graph.ops[0]) / 128
    assert again == pytest.approx([step * steps_again(128, n) for n in numbers], rel=0.1)
    room = (peaks[1] + peaks[2]) / 2
    chosen = planner.fastest(room)
    assert chosen.peak_bytes <= room and 32 < dict(chosen.plan.checkpoints)[0] < 64


def test_a_loop_of_dear_steps_keeps_its_checkpoints_longer():
    def two(x, n):
        dear = aot.fori_loop(0, n, lambda i, y: jnp.sin(jnp.sin(jnp.sin(jnp.sin(y)))) * 1.1, x)
        return (aot.fori_loop(0, n, lambda i, y: y * y * 0.5, x) * dear).sum()

    planner = aot.function(two, cost=ROOFLINE).trace(X, N).planner
    dear, cheap = (op for op, _ in sorted(planner.problem.adjustable.items()))
    kept = [dict(numbers) for numbers in planner.checkpoints.choices]
    pairs = [(each.get(dear, 128), each[cheap]) for each in kept]
    assert all(one >= other for one, other in pairs) and any(one > other for one, other in pairs)
    assert planner.checkpoints.choices[-1] == ((dear, 1), (cheap, 1))


def test_numbers_are_kept_in_the_file_of_a_plan_and_told_where_plans_differ():
    traced = aot.function(loss).trace(X, N)
    plan, whole = plan_with(traced, (0, 5)), plan_with(traced)
    text = planfile.dumps(plan, traced.graph)
    assert json.loads(text)["checkpoints"] == [{"op": 0, "number": 5}]
    assert planfile.loads(text, traced.graph) == plan != whole
    assert "checkpoints" not in json.loads(planfile.dumps(whole, traced.graph))
    assert "+ loop #0 with 5 checkpoints" in str(diff(whole, plan)).splitlines()
    assert checkpoints(traced.partition(plan=text).plan) == 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([(0, 0)], "gives 0 checkpoints to op 0, whose loop cannot keep them.\nGive it once: op 0 up to 128."),
        ([(0, 129)], "gives 129 checkpoints to op 0, whose loop cannot keep them.\nGive it once: op 0 up to 128."),
        ([(1, 4)], "gives 4 checkpoints to op 1, whose loop cannot keep them.\nGive it once: op 0 up to 128."),
        ([(0, 2), (0, 2)], "gives 2 checkpoints to op 0, whose loop cannot keep them.\nGive it once: op 0 up to 128."),
    ],
)
def test_numbers_that_a_loop_cannot_keep_are_refused(given, said):
    with pytest.raises(PlanError) as caught:
        plan_with(aot.function(loss).trace(X, N), *given)
    assert str(caught.value) == f"plan.checkpoints {said}"


def test_a_program_without_such_loops_takes_no_numbers():
    with pytest.raises(PlanError) as caught:
        plan_with(aot.function(lambda x: jnp.sin(x).sum()).trace(X), (0, 1))
    what = "plan.checkpoints gives 1 checkpoint to op 0, whose loop cannot keep them."
    assert str(caught.value) == f"{what}\nGive none: no loop here may keep another number."


def test_the_price_of_one_checkpoint_for_a_billion_trips_is_known_at_once():
    assert steps_again(10**9, 1) == 10**9 * (10**9 - 3) // 2
