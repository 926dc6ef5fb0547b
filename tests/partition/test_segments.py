"""A loop in segments means, bit for bit, what it meant, and keeps as many bytes as it says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut.partition.errors import PlanError
from jointcut.partition.lower.reruns import best_length, segmentable
from jointcut.partition.lower.verify import run_backward, run_forward
from jointcut.partition.plans.backend import CPU
from jointcut.partition.program.graph import TOP
from jointcut.partition.program.jax import jaxprs, runtime
from segmented import (
    PROGRAMS,
    assert_same,
    carry_alone,
    cell,
    cut,
    dropout,
    in_segments,
    kept_bytes,
    mapped,
    nested,
    normal,
    results,
    reverse,
    temp_bytes,
    two_loops,
)

# ------------------------------------------------------------------------------------ what they mean


@pytest.mark.parametrize("steps", [1, 2, 5, 13])
def test_every_segment_length_gives_the_same_bits(steps):
    made, flat = cut(cell(steps), "save_all")
    want = results(made, made.halves, flat)
    for k in range(1, steps + 1) if steps < 7 else (1, 6, 12):
        assert_same(results(made, in_segments(made, {1: k}), flat), want)


@pytest.mark.parametrize("strategy", ["min_cut", "save_all", carry_alone])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_loop_gives_the_same_bits_in_segments(program, strategy):
    made, flat = cut(program(5), strategy)
    loops = segmentable(made.problem, made.plan)
    assert bool(loops) == (program is not mapped or strategy != carry_alone)
    want = results(made, made.halves, flat)
    for k in (2, (4, 3)):
        assert_same(results(made, in_segments(made, dict.fromkeys(loops, k)), flat), want)


@pytest.mark.parametrize("program", [cell, two_loops])
def test_halves_for_xla_cpu_can_be_segmented_too(program):
    made, flat = cut(program(5), carry_alone)
    held = made.on(CPU).halves
    loops = segmentable(made.problem, made.plan)
    new = in_segments(made, dict.fromkeys(loops, 3), CPU)
    assert_same(results(made, new, flat), results(made, held, flat))


def test_compiled_as_one_they_agree_but_for_rounding():
    made, flat = cut(cell(7), "save_all")

    def step(halves):
        def run(flat):
            outputs, residuals = run_forward(halves, made.graph, flat)
            return [*outputs, *run_backward(halves, residuals, [jnp.float32(1)])]

        return jax.jit(run)(flat)

    for got, want in zip(step(in_segments(made, {1: (5, 2)})), step(made.halves), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------ what they keep


@pytest.mark.parametrize("program", [cell, dropout, reverse, nested, mapped])
def test_the_bytes_are_those_that_the_record_states(program):
    """For each segment its carry instead of the residuals of all steps; besides only what the loop reads."""
    made, _ = cut(program(6), "save_all")
    (record,) = segmentable(made.problem, made.plan).values()
    assert record.length == 6 and record.residual_bytes > 0
    before = {r.value for r in made.halves.residuals}
    for k in (1, 2, 3, 6):
        halves = in_segments(made, {1: k})
        new = [r for r in halves.residuals if r.kind == "saved" and r.value not in {*before, *record.carries}]
        read = sum(made.graph.values[r.value].saved_bytes for r in new)
        stacks = 6 * record.residual_bytes
        assert kept_bytes(halves) == kept_bytes(made.halves) - stacks + 6 // k * record.carry_bytes + read


def test_what_a_carry_hands_on_and_what_nothing_reads_is_not_kept_for_each_segment():
    made, _ = cut(dropout(6), "save_all")
    (record,) = segmentable(made.problem, made.plan).values()
    assert sorted(made.graph.values[v].dtype for v in record.carries) == ["float32", "int32", "key<fry>"]


@pytest.mark.parametrize("program", [cell, dropout, reverse, nested])
@pytest.mark.parametrize("k", [2, 3, (3, 2)])
def test_each_residual_is_of_the_value_that_it_names(program, k):
    """A stack of it, or one."""
    made, _ = cut(program(7), "save_all")
    halves = in_segments(made, {1: k})
    inner, _ = jaxprs.opened(halves.backward)
    for residual, var in zip(halves.residuals, inner.invars, strict=False):
        value = made.graph.values[residual.value]
        assert var.aval.dtype == value.payload.dtype
        assert var.aval.shape[len(var.aval.shape) - len(value.shape) :] == value.shape


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_ops_that_run_again_are_the_forward_bodys_own(program):
    made, _ = cut(program(4), "save_all")
    for record in segmentable(made.problem, made.plan).values():
        body = made.graph.bodies[record.forward]
        inside = {body.region} | {r.id for r in made.graph.regions if r.parent == body.region}
        assert record.rerun_ops
        assert {made.graph.ops[i].region for i in record.rerun_ops} <= inside


def test_the_memory_of_a_long_loop_grows_as_the_root_of_its_length():
    def small(steps):
        def loss(matrix, start):
            return jnp.sum(lax.scan(lambda h, _: (jnp.tanh(h @ matrix), None), start, None, length=steps)[0])

        return loss, (normal(15, 16, 16), normal(16, 4, 16))

    found = {}
    for steps in (100, 10_000):
        made, flat = cut(small(steps), carry_alone)
        (record,) = segmentable(made.problem, made.plan).values()
        k = best_length(steps, record.carry_bytes, record.residual_bytes)
        for halves in (made.halves, in_segments(made, {1: k})):

            def step(*flat, halves=halves):
                ends = runtime.evaluate(halves.forward, *flat)
                places = {"input": flat, "output": ends[:1], "saved": ends[1:]}
                residuals = [places[r.kind][r.index] for r in halves.residuals]
                return ends[0], runtime.evaluate(halves.backward, *residuals, jnp.float32(1))

            found[steps, halves is made.halves] = temp_bytes(step, *flat)
    assert found[10_000, True] > 50 * found[100, True]
    assert found[10_000, False] < 12 * found[100, False]
    assert found[10_000, False] < found[10_000, True] / 20


# ------------------------------------------------------------------------------------ which length, which loops


def test_the_best_length_holds_about_the_fewest_bytes():
    draws = np.random.default_rng(0)
    for _ in range(300):
        length, carry, residual = (int(draws.integers(1, 400)) for _ in range(3))
        held = {k: -(-length // k) * carry + k * residual for k in range(1, length + 1)}
        chosen = best_length(length, carry, residual)
        even = min(held[k] for k in held if length % k == 0)
        if length % chosen == 0:
            assert held[chosen] == even <= 1.1 * min(held.values())
        else:
            assert held[chosen] == min(held.values()) < even / 1.1


def with_effect(steps):
    def step(h, x):
        jax.debug.callback(lambda h: None, h)
        return jnp.sin(h * x) * jnp.exp(h), None

    return lambda h, xs: jnp.sum(lax.scan(step, h, xs)[0]), (normal(17, 3), normal(18, steps, 3))


def feeding(steps):
    def loss(matrix, sequence):
        _, first = lax.scan(lambda h, x: (jnp.tanh(h @ matrix + x), jnp.sin(h)), jnp.zeros(3), sequence)
        last, _ = lax.scan(lambda h, x: (jnp.tanh(h + x @ matrix), None), jnp.zeros(3), first, reverse=True)
        return jnp.sum(last**2)

    return loss, (normal(19, 3, 3), normal(20, steps, 3))


def all_read_elsewhere(steps):
    def loss(start, sequence):
        _, seen = lax.scan(lambda h, x: (h * x, h), start, sequence)
        return jnp.sum(seen**2)

    return loss, (normal(21, 3), normal(22, steps, 3))


@pytest.mark.parametrize("program", [with_effect, feeding, all_read_elsewhere])
def test_loops_with_effects_of_several_scans_or_with_stacks_read_elsewhere_stay_whole(program):
    made, _ = cut(program(4), "save_all")
    assert len(made.graph.loops) > 1
    assert segmentable(made.problem, made.plan) == {}


def test_only_loops_at_the_top_run_in_segments():
    made, _ = cut(nested(4), "save_all")
    found = segmentable(made.problem, made.plan)
    assert len(made.graph.loops) == 3
    assert [made.graph.loops[loop].parent for loop in found] == [TOP]


@pytest.mark.parametrize("given", [0, 8, -1, (), (3, 3), (2, 4), (8, 2), (3, 0)])
def test_a_length_that_does_not_fit_is_refused(given):
    made, _ = cut(cell(7), "save_all")
    with pytest.raises(PlanError) as caught:
        in_segments(made, {1: given})
    assert str(caught.value) == (
        f"lengths[1] is {given}, and the loop has 7 steps.\n"
        "Give a length from 1 to 7, or several in a tuple, each shorter than the one before."
    )


def test_a_loop_that_cannot_run_in_segments_is_refused():
    made, _ = cut(with_effect(4), "save_all")
    with pytest.raises(PlanError) as caught:
        in_segments(made, {1: 2})
    assert str(caught.value) == "lengths[1] names a loop that cannot run in segments.\nThose that can: []."
