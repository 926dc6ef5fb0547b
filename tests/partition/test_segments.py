"""A loop in segments means, bit for bit, what it meant, and keeps as many bytes as it says."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut.partition import Plan, Roles, split
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.emit import emit
from jointcut.partition.lower.reruns import best_length, segmentable
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.verify import run_backward, run_forward, verify_structure
from jointcut.partition.plans.backend import CPU, PORTABLE
from jointcut.partition.program import jaxprs
from jointcut.partition.program.graph import TOP
from jointcut.partition.program.roles import Side
from jointcut.partition.program.sides import classify
from jointcut.partition.rewrite import simplify


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


# ------------------------------------------------------------------------------------ programs, by number of steps


def cell(steps):
    """Constants, scanned inputs, stacked outputs that the loss reads."""

    def loss(matrix, start, sequence):
        def step(h, x):
            h = jnp.tanh(h @ matrix + x)
            return h, jnp.sin(h)

        last, seen = lax.scan(step, start, jnp.exp(sequence))  # what it scans over is no argument
        return jnp.sum(last) + jnp.sum(seen**2)

    return loss, (normal(0, 3, 3), normal(1, 2, 3), normal(2, steps, 2, 3))


def dropout(steps):
    """A counter, a random key, a carry handed on unchanged, and one that nothing reads."""

    def loss(matrix, start, rate):
        def step(carry, _):
            h, count, key, rate, spare = carry
            key, own = jax.random.split(key)
            kept = jax.random.bernoulli(own, 0.7, h.shape).astype(h.dtype)
            h = jnp.sin(h @ matrix) * kept * rate + h / (1 + count.astype(h.dtype))
            return (h, count + 1, key, rate, spare * 2), count

        first = (start, jnp.int32(0), jax.random.key(7), jnp.exp(rate), start)
        (h, *_), counts = lax.scan(step, first, None, length=steps)
        return jnp.sum(h**2) * counts.sum().astype(jnp.float32)

    return loss, (0.3 * normal(3, 3, 3), normal(4, 2, 3), jnp.float32(0.3))


def reverse(steps):
    """From the end of the stacks; the carry begins as a literal and as something computed."""

    def loss(weight, sequence):
        def step(carry, x):
            h, g = carry
            h = jnp.tanh(weight * h + x * g)
            return (h, jnp.cos(g) * h), h * jnp.exp(x)

        (last, _), seen = lax.scan(step, (jnp.zeros(3), jnp.sin(weight)), sequence, reverse=True)
        return jnp.sum(last**2) + jnp.sum(seen[0] * sequence)

    return loss, (normal(5, 3), normal(6, steps, 3))


def half(steps):
    """In 16 bits."""

    def loss(matrix, sequence):
        def step(h, x):
            return jnp.tanh(h @ matrix + x) * jnp.sin(h), None

        last, _ = lax.scan(step, sequence[0], sequence)
        return jnp.sum(last.astype(jnp.float32) ** 2)

    return loss, (normal(7, 3, 3, dtype=jnp.bfloat16), normal(8, steps, 2, 3, dtype=jnp.bfloat16))


def nested(steps):
    """A loop inside the body, whose stack the body reads, too."""

    def loss(start, sequence):
        def row(h, x):
            h, inside = lax.scan(lambda g, e: (jnp.tanh(g * e + h), jnp.sin(g * h)), h, x)
            return h, inside.sum()

        last, sums = lax.scan(row, start, sequence)
        return jnp.sum(last**2) + jnp.sum(sums**2)

    return loss, (normal(9, 3), normal(10, steps, 2, 3))


def mapped(steps):
    """No carry."""

    def loss(weight, rows):
        return jnp.sum(lax.map(lambda row: jnp.exp(jnp.sin(row * weight)) * row, rows) ** 2)

    return loss, (normal(11, 3), normal(12, steps, 3))


def two_loops(steps):
    """A second loop that reads the first's stack as a constant, and is unrolled by two."""

    def loss(weight, sequence):
        last, seen = lax.scan(lambda h, x: (jnp.sin(h * x) + h, jnp.cos(h) * x), weight, sequence)

        def step(h, _):
            return jnp.tanh(h * weight + seen.sum(0)) * jnp.exp(h), None

        end, _ = lax.scan(step, last, None, length=steps + 1, unroll=2)
        return jnp.sum(end**2)

    return loss, (normal(13, 3), normal(14, steps, 3))


PROGRAMS = (cell, dropout, reverse, half, nested, mapped, two_loops)


# ------------------------------------------------------------------------------------ cut them, and run them


def cut(program, strategy):
    """The split of a function with its arguments, differentiated in all of these, and its flat inputs."""
    function, args = program

    def joint(*given):
        out, pullback = jax.vjp(function, *given[:-1])
        return out, *pullback(given[-1])

    closed = simplify.inlined(jax.make_jaxpr(joint)(*args, jnp.float32(1)))
    jaxpr, consts = jaxprs.opened(closed)
    lifted = jaxprs.build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)
    return split(lifted, Roles.simple(len(consts) + len(args), 1, 1, len(args)), strategy), [*consts, *args]


def carry_alone(graph):
    """The plan that keeps what loops carry and what is read outside them, and computes the rest again."""
    carried = [v for op in graph.ops if op.origin is Side.FORWARD and op.name == "loop" for v in op.outputs]
    sides = classify(graph)
    return Plan.of(graph, {*carried, *(v for v in sides.escaping if not sides.is_late(v))})


def in_segments(made, lengths, backend=PORTABLE):
    new = emit(made.graph, schedule(replace(made.problem, backend=backend), made.plan, lengths))
    verify_structure(made.graph, new)
    return new


def stepwise(closed, args):
    """Run a jaxpr one op at a time, also within loops, so that XLA fuses nothing: equal programs give equal bits."""
    jaxpr, _ = jaxprs.opened(closed)
    env = dict(zip(jaxpr.invars, args, strict=True))

    def read(v):
        return v.val if isinstance(v, jaxprs.Literal) else env[v]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            outs = scanned(jaxprs.scan_layout(eqn), list(map(read, eqn.invars)))
        else:
            invars = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jaxprs.Literal)))
            outs = jaxprs.evaluate(jaxprs.build(invars, eqn.outvars, [eqn]), *map(read, invars))
        env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def scanned(layout, given):
    a, b = layout.num_consts, layout.num_consts + layout.num_carry
    carry, rows, stacks = given[a:b], [pieces(x) for x in given[b:]], []
    steps = range(layout.length)
    for i in reversed(steps) if layout.reverse else steps:
        results = stepwise(layout.body, [*given[:a], *carry, *(row[i] for row in rows)])
        carry, ys = results[: len(carry)], results[len(carry) :]
        stacks.append(ys)
    stacks = stacks[::-1] if layout.reverse else stacks
    return [*carry, *map(stacked, zip(*stacks, strict=True))]


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def pieces(x):
    return list(map(jax.random.wrap_key_data, jax.random.key_data(x))) if is_key(x) else list(np.asarray(x))


def stacked(ys):
    if is_key(ys[0]):
        return jax.random.wrap_key_data(np.stack(list(map(jax.random.key_data, ys))))
    return np.stack(list(map(np.asarray, ys)))


def results(made, halves, flat, run=stepwise):
    """Outputs and gradients, from an evaluation of jaxprs."""
    ends = run(halves.forward, flat)
    count = 1
    places = {"input": flat, "output": ends[:count], "saved": ends[count:]}
    residuals = [places[r.kind][r.index] for r in halves.residuals]
    return [*ends[:count], *run(halves.backward, [*residuals, jnp.float32(1)])]


def assert_same(got, want):
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64))


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


def kept_bytes(halves):
    return sum(jaxprs.aval_bytes(v.aval) for v in jaxprs.opened(halves.forward)[0].outvars[1:])


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


def temp_bytes(function, *args):
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


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
                ends = jaxprs.evaluate(halves.forward, *flat)
                places = {"input": flat, "output": ends[:1], "saved": ends[1:]}
                residuals = [places[r.kind][r.index] for r in halves.residuals]
                return ends[0], jaxprs.evaluate(halves.backward, *residuals, jnp.float32(1))

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
