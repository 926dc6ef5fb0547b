"""A loop partly in segments, its last steps kept whole, means what it meant and lies between the two in bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition import Planner
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.emit import emit
from jointcut.partition.lower.memory.lifetimes import lifetimes
from jointcut.partition.lower.memory.replay import Replayer, handed_bytes
from jointcut.partition.lower.reruns import segmentable, similar_length
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.verify import run_backward, run_forward
from jointcut.partition.plans.backend import CPU
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.search import mincut
from programs import EVERY_PROGRAM
from segmented import (
    PROGRAMS,
    assert_same,
    carry_alone,
    cell,
    cut,
    dropout,
    in_segments,
    kept_bytes,
    nested,
    normal,
    results,
    reverse,
    temp_bytes,
    two_loops,
)

# ------------------------------------------------------------------------------------ what they mean


@pytest.mark.parametrize("program", [cell, reverse])
def test_every_number_of_kept_steps_gives_the_same_bits(program):
    made, flat = cut(program(6), "save_all")
    want = results(made, made.halves, flat)
    pairs = product((1, 2, 5), (1, 2, 4)) if EVERY_PROGRAM else [(1, 4), (2, 1), (2, 2), (5, 2)]
    for kept, k in pairs:
        assert_same(results(made, in_segments(made, {1: k}, kept_steps={1: kept}), flat), want)


@pytest.mark.parametrize(
    ("program", "strategy"),
    [
        *((program, "save_all") for program in PROGRAMS),
        *((program, other) for program in (nested, two_loops) for other in ("min_cut", carry_alone)),
    ],
)
def test_every_loop_gives_the_same_bits_and_hands_over_the_bytes_that_are_counted(program, strategy):
    made, flat = cut(program(7), strategy)
    loops = segmentable(made.problem, made.plan)
    want = results(made, made.halves, flat)
    for k, kept in ((1, 1), (2, 3), (2, 6), ((3, 2), 2)) if strategy == "save_all" else ((3, 3), ((4, 3), 4)):
        steps = schedule(made.problem, made.plan, dict.fromkeys(loops, k), dict.fromkeys(loops, kept))
        halves = emit(made.graph, steps)
        assert_same(results(made, halves, flat), want)
        assert kept_bytes(halves) == halves.residual_bytes == handed_bytes(made.graph, steps)


@pytest.mark.parametrize("kept_steps", [{1: 2}, {2: 2}, {1: 1, 2: 4}])
def test_one_of_two_loops_may_keep_steps_and_the_other_not(kept_steps):
    made, flat = cut(two_loops(5), "save_all")
    new = in_segments(made, {1: 2, 2: 2}, kept_steps=kept_steps)
    assert_same(results(made, new, flat), results(made, made.halves, flat))


@pytest.mark.parametrize("program", [cell, two_loops, nested])
def test_halves_for_xla_cpu_can_keep_steps_too(program):
    made, flat = cut(program(5), carry_alone)
    loops = segmentable(made.problem, made.plan)
    new = in_segments(made, dict.fromkeys(loops, 2), CPU, dict.fromkeys(loops, 2))
    assert_same(results(made, new, flat), results(made, made.on(CPU).halves, flat))


@pytest.mark.parametrize("program", [cell, dropout, reverse, nested])
@pytest.mark.parametrize("k", [2, 3, (3, 2)])
def test_each_residual_is_a_stack_of_the_value_that_it_names_or_one(program, k):
    made, _ = cut(program(7), "save_all")
    halves = in_segments(made, {1: k}, kept_steps={1: 3})
    inner, _ = jaxprs.opened(halves.backward)
    for residual, var in zip(halves.residuals, inner.invars, strict=False):
        value = made.graph.values[residual.value]
        assert var.aval.dtype == value.payload.dtype
        assert var.aval.shape[len(var.aval.shape) - len(value.shape) :] == value.shape


@pytest.mark.parametrize("reverse_forward", [False, True])
@pytest.mark.parametrize("reverse_backward", [False, True])
def test_a_backward_in_the_direction_of_its_forward_reads_the_kept_steps_last(reverse_forward, reverse_backward):
    @jax.custom_vjp
    def scaled(weight, rows):
        return forward(weight, rows)[0]

    def forward(weight, rows):
        def step(c, row):
            return c * 0.9 + row.sum(), (jnp.sin(row * weight) * c, jnp.exp(jnp.cos(row * weight) * c))

        _, (out, kept) = lax.scan(step, jnp.float32(1), rows, reverse=reverse_forward)
        return out, (weight, rows, kept)

    def backward(saved, ct):
        weight, rows, kept = saved

        def step(g, x):
            row, e, c = x
            return jnp.tanh(g + c * e * row), c * e * weight + g

        return lax.scan(step, jnp.zeros_like(weight), (rows, kept, ct), reverse=reverse_backward)

    scaled.defvjp(forward, backward)
    program = (lambda weight, rows: jnp.sum(scaled(weight, rows) ** 2)), (normal(1, 3), normal(2, 7, 3))
    made, flat = cut(program, "save_all")
    assert list(segmentable(made.problem, made.plan)) == [1]
    for k, kept in ((2, 3), ((3, 2), 2)):
        got = results(made, in_segments(made, {1: k}, kept_steps={1: kept}), flat)
        assert_same(got, results(made, made.halves, flat))


def partly(length, kept):
    """A strategy: the default plan, each of its loops that can in segments, and their last steps kept."""

    def strategy(graph):
        plan = mincut.STRATEGIES["min_cut"](graph)
        loops = segmentable(Problem.of(graph), plan)
        pairs = (dict.fromkeys(loops, steps) for steps in (length, kept))
        segments, kept_steps = (tuple(by_loop.items()) for by_loop in pairs)
        return replace(plan, segments=segments, kept_steps=kept_steps)

    return strategy


def test_one_program_and_two_and_an_exported_pair_agree_with_jax(tmp_path):
    loss, args = two_loops(7)
    function = aot.function(loss, argnums=tuple(range(len(args))), strategy=partly(2, 3))
    want = jax.value_and_grad(loss, tuple(range(len(args))))(*args)
    assert function.trace(*args).partition().plan.kept_steps
    value, pullback = function.vjp(*args)
    function.export(tmp_path / "artefact", *args)
    loaded = aot.load(tmp_path / "artefact")
    for got in (function.value_and_grad(*args), (value, pullback(jnp.ones_like(value))), loaded.value_and_grad(*args)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), got, want)


def test_an_exported_pair_tells_the_bytes_of_the_kept_steps_alone(tmp_path):
    loss, args = cell(7)
    function = aot.function(loss, argnums=(0, 1, 2), strategy=partly(2, 3))
    function.export(tmp_path / "artefact", *args)
    residuals = aot.load(tmp_path / "artefact").contract.residuals
    assert [r.bytes for r in residuals] == [int(np.prod(r.shape)) * 4 for r in residuals]
    assert {r.shape[0] for r in residuals if len(r.shape) == 3 and r.kind == "saved"} >= {2, 3}


# ------------------------------------------------------------------------------------ what they take


def long(steps):
    """A long loop that stacks much more than it carries, and an output."""

    def loss(matrix, start, sequence):
        def step(h, x):
            inner = jnp.tanh(jnp.sin(h @ matrix) @ matrix.T + x)
            return jnp.tanh(inner @ matrix), inner.sum(1)

        last, sums = lax.scan(step, start, sequence)
        return jnp.sum(last) + jnp.sum(sums**2)

    return loss, (normal(0, 32, 32) / 6, normal(1, 16, 32), normal(2, steps, 16, 32))


def whole_step(made, halves):
    def run(*flat):
        outputs, residuals = run_forward(halves, made.graph, flat)
        return [*outputs, *run_backward(halves, residuals, [jnp.float32(1)])]

    return run


def test_xlas_temporaries_lie_on_the_line_between_segments_and_a_whole_loop():
    """Within a tenth of the difference."""
    made, flat = cut(long(80), "save_all")
    least, most = (temp_bytes(whole_step(made, h), *flat) for h in (in_segments(made, {1: 8}), made.halves))
    assert most > 3 * least
    for kept in (16, 40, 72):
        found = temp_bytes(whole_step(made, in_segments(made, {1: 4}, kept_steps={1: kept})), *flat)
        assert found == pytest.approx(least + kept / 80 * (most - least), abs=(most - least) / 10), kept


@pytest.mark.parametrize("program", [long, cell, dropout, reverse, nested])
def test_the_predicted_peak_falls_by_no_more_than_the_carries_when_more_steps_are_kept(program):
    made, _ = cut(program(24), "save_all")
    (record,) = segmentable(made.problem, made.plan).values()
    replayer = Replayer(made.graph)
    peaks = [replayer.rows(schedule(made.problem, made.plan, {1: 2}, {1: w})).peak_bytes for w in range(1, 23, 2)]
    assert peaks[-1] > peaks[0]
    assert all(later >= earlier - record.carry_bytes for earlier, later in pairwise(peaks))


def test_the_lifetimes_of_a_loop_partly_in_segments_add_up_to_its_peak():
    made, _ = cut(long(24), "save_all")
    rows = Replayer(made.graph).rows(schedule(made.problem, made.plan, {1: 5}, {1: 7}))
    assert max(lifetimes(rows, made.graph).totals) == rows.peak_bytes


# ------------------------------------------------------------------------------------ plans


ROOFLINE = Roofline(1e9, 1e9, 1e-6)


@pytest.fixture(scope="module")
def planner():
    loss, args = long(80)
    return Planner(Problem.of(aot.function(loss, argnums=(0, 1, 2)).trace(*args).graph, ROOFLINE))


def test_a_planner_keeps_a_share_of_the_steps_and_prices_the_rest(planner):
    whole = planner.default()
    (segmented,) = planner.in_segments(whole)
    rerun = segmented.seconds - whole.seconds
    for share, kept in ((0.001, 1), (0.25, 20), (0.5, 40), (0.75, 60), (0.999, 79)):
        plan = planner.partly(segmented, share)
        assert plan.kept_steps == ((1, kept),)
        assert plan.seconds == pytest.approx(whole.seconds + (1 - kept / 80) * rerun)
        assert plan.bytes_saved == planner.candidate(plan).plan.bytes_saved
        assert segmented.bytes_saved < plan.bytes_saved <= whole.bytes_saved
        assert planner.partly(planner.partly(segmented, 0.3), share).bytes_saved == plan.bytes_saved


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5])
def test_a_share_of_none_or_all_steps_is_refused(share, planner):
    (segmented,) = planner.in_segments(planner.default())
    with pytest.raises(PlanError) as caught:
        planner.partly(segmented, share)
    assert str(caught.value) == (
        f"share is {share}, not between 0 and 1.\n"
        "Give a number between them: 0 would be the plan itself, and 1 one without segments."
    )


def test_a_similar_length_leaves_two_segments_where_it_can_and_divides_where_that_is_near():
    assert [similar_length(n, 4) for n in (1, 2, 3, 5, 7, 20, 61)] == [1, 1, 2, 3, 4, 4, 4]
    assert [similar_length(n, 8) for n in (20, 40, 60, 61)] == [10, 8, 6, 8]


@pytest.mark.parametrize("kept", [-1, 7, 8])
def test_a_number_of_steps_that_the_loop_does_not_have_is_refused(kept):
    made, _ = cut(cell(7), "save_all")
    with pytest.raises(PlanError) as caught:
        in_segments(made, {1: 2}, kept_steps={1: kept})
    assert str(caught.value) == f"kept_steps[1] is {kept}, and the loop has 7 steps.\nGive a number from 0 to 6."


def test_a_loop_that_keeps_steps_without_segments_is_refused():
    made, _ = cut(two_loops(4), "save_all")
    with pytest.raises(PlanError) as caught:
        in_segments(made, {1: 2}, kept_steps={2: 1})
    assert str(caught.value) == "kept_steps[2] names a loop that does not run in segments.\nGive its length, too."
