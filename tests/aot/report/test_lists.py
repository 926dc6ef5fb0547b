"""The rows of a report: every saved array once, what runs twice, and what smaller budgets would give up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from jax import lax

from drawn import planned
from jointcut import aot
from jointcut.aot.report.lists import SHARES, Lists
from jointcut.aot.report.rivals import POLICIES, rivals
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.program.outline import PSEUDO, outline
from jointcut.partition.search.budget import Planner
from larger import LARGER
from programs import CORPUS, named

RATES = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
NAMES = [p.name for p in CORPUS if p.name != "integers_to_differentiate"][3::5]  # that one cannot be traced
quick = settings(deadline=None, max_examples=60, derandomize=True, database=None)


def rows_of(planner: Planner) -> Lists:
    return Lists(planner, outline(planner.graph))


def check(rows: Lists, plan) -> None:
    """The laws of the rows of a plan."""
    saved, again = rows.saved(plan), rows.again(plan)
    assert sorted(row.value for row in saved) == sorted(plan.values)
    assert [row.bytes for row in saved] == sorted((s.bytes for s in plan.saved), reverse=True)
    assert all(row.needed_by and row.type and row.op for row in saved)
    real = [i for i in plan.recomputed if rows.graph.ops[i].name not in PSEUDO]
    assert rows.twice(plan) == real
    assert sum(row.count for row in again) == len(real)
    assert sum(row.seconds for row in again) == pytest.approx(sum(rows.planner.problem.seconds[i] for i in real))
    assert sum(row.flops for row in again) == pytest.approx(sum(rows.flops(rows.graph.ops[i]) for i in real))
    assert [row.seconds for row in again] == sorted((row.seconds for row in again), reverse=True)
    assert len({(row.line, row.path) for row in again}) == len(again)


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
@pytest.mark.parametrize("name", NAMES)
def test_the_rows_of_a_program_list_its_plan(name, strategy, traced):
    with named(name).precision():
        plan, rows = traced(name).partition(strategy).plan, rows_of(traced(name).planner)
        check(rows, plan)
        assert all(row.reason for row in rows.saved(plan))
        if strategy == "save_all":
            assert [row.reason for row in rows.saved(plan)] == [
                s.reason for s in sorted(plan.saved, key=lambda s: (-s.bytes, s.value))
            ]


@quick
@given(planned())
def test_the_rows_of_a_random_plan_list_it(found):
    graph, plan = found
    check(rows_of(Planner(Problem.of(graph, RATES))), plan)


def test_the_lines_and_modules_of_rows_are_those_that_the_user_wrote():
    def loss(w, x):
        with jax.named_scope("head"):
            y = x @ w
        return jnp.sum(jnp.tanh(y))

    struct = jax.ShapeDtypeStruct((64, 64), "float32")
    cut = aot.function(loss, cost=RATES).trace(struct, struct).partition("save_all")
    for row in rows_of(cut.traced.planner).saved(cut.plan):
        assert row.line.startswith(f"{__file__}:") and "loss" in row.line
        assert ("head" in row.path) == (row.op == "dot_general")


# ------------------------------------------------------------------------------------ flops


def test_a_product_in_a_loop_counts_in_every_step_of_every_loop_around_it():
    def loss(w, x):
        def inner(c, _):
            return jnp.tanh(c @ w), None

        def outer(c, _):
            return lax.scan(inner, c, length=5)[0], None

        return jnp.sum(lax.scan(outer, x, length=3)[0])

    one = jax.ShapeDtypeStruct((8, 8), "float32")
    rows = rows_of(aot.function(loss, cost=RATES).trace(one, one).planner)
    products = [rows.flops(op) for op in rows.graph.ops if op.name == "dot_general"]
    assert products == [15 * 2 * 8**3] * 3
    assert rows.step_flops() >= sum(products)


def test_the_flops_of_a_step_are_those_of_its_ops_each_counted_once():
    def loss(w, x):
        return jnp.sum(lax.scan(lambda c, _: (c @ w, None), x, length=7)[0])

    one = jax.ShapeDtypeStruct((32, 32), "float32")
    rows = rows_of(aot.function(loss, cost=RATES).trace(one, one).planner)
    products = 3 * 7 * 2 * 32**3
    assert products <= rows.step_flops() <= 1.02 * products


# ------------------------------------------------------------------------------------ with less memory


@pytest.fixture(scope="module", params=["elman", "scan_over_layers", "unrolled_layers"])
def budgeted(request):
    """A cut of a larger program with its rows and its front."""
    program = next(p for p in LARGER if p.name == request.param)
    cut = aot.function(program.function, argnums=program.argnums, cost=RATES).trace(*program.args).partition("save_all")
    return cut, rows_of(cut.traced.planner), cut.pareto()


def test_smaller_budgets_have_smaller_peaks_and_each_plan_stands_once(budgeted):
    cut, rows, front = budgeted
    less = rows.less(cut.plan, front, front.chosen)
    known = [row for row in less if row.peak_bytes is not None]
    assert known and all(row.peak_bytes <= row.share * front.chosen.peak_bytes for row in known if row.share)
    peaks = [row.peak_bytes for row in known]
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[-1] == min(point.peak_bytes for point in front)
    assert [row.share for row in less] == sorted({row.share for row in less}, reverse=True)
    assert {row.share for row in less} <= {*SHARES, 0.0}
    assert all(row.peak_bytes is not None for row in less[:-1] if row is not less[-2])
    step = cut.traced.planner.common_seconds + front.chosen.seconds
    assert all(row.extra_share == pytest.approx(row.extra_seconds / step) for row in known)


def test_what_a_smaller_budget_frees_is_saved_here_and_not_there(budgeted):
    cut, rows, front = budgeted
    by_peak = {point.peak_bytes: point for point in front}
    for row in rows.less(cut.plan, front, front.chosen):
        if row.peak_bytes is None:
            continue
        there = by_peak[row.peak_bytes].plan
        assert {s.value for s in row.freed} == set(cut.plan.values) - set(there.values)
        assert [s.bytes for s in row.freed] == sorted((s.bytes for s in row.freed), reverse=True)
        assert row.freed_bytes == sum(s.bytes for s in row.freed)
        assert {s.value for s in row.kept} == set(there.values) - set(cut.plan.values)
        assert row.kept_bytes == sum(s.bytes for s in row.kept)
        twice = set(rows.twice(there)) - set(cut.plan.recomputed)
        assert sum(line.count for line in row.lines) == len(twice)
        assert len({line.line for line in row.lines}) == len(row.lines)
        here = front.chosen.seconds
        assert row.extra_seconds == min(p.seconds for p in front if p.peak_bytes <= row.peak_bytes) - here
        assert ("segments" in row.again) == bool(there.segments)


# ------------------------------------------------------------------------------------ policies


def test_a_policy_of_jax_saves_what_it_names_and_what_cannot_run_again(traced):
    planner = traced("transformer_block").planner
    found = dict(rivals(planner))
    assert set(found) == set(POLICIES)
    for name, plan in found.items():
        assert plan.strategy == name and plan.seconds is not None
        makers = [planner.graph.ops[planner.graph.values[v].maker] for v in plan.values]
        free = [op for op, v in zip(makers, plan.values, strict=True) if not planner.problem.verdicts[v].not_recomputed]
        assert all(POLICIES[name](op) for op in free)
    assert found["nothing_saveable"].bytes_saved <= found["dots_saveable"].bytes_saved
    assert any(op.name == "dot_general" for op in planner.graph.ops)
