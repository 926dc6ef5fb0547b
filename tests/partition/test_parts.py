"""A loop that offloads what its first steps keep, and keeps the rest on the device, means what it meant."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition import Plan, Planner, Problem, Roofline, diff
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.emit import emit
from jointcut.partition.lower.memory.replay import Replayer
from jointcut.partition.lower.reruns import segmentable
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.verify import verify_structure
from jointcut.partition.plans import planfile
from jointcut.partition.plans.backend import PORTABLE
from jointcut.partition.prices.rules import CheckpointPolicy, Constraint
from segmented import PROGRAMS, assert_same, cell, cut, results, reverse


def in_part(problem, plan, last):
    """The plan with all that the loops' own backward reads in host memory, but for so many last steps."""
    loops = segmentable(problem, plan)
    away = [v for record in loops.values() for v in record.values]
    return Plan.of(problem, plan.values, offloaded=away, kept_steps=[(loop, last) for loop in loops])


@pytest.mark.parametrize(
    ("program", "strategy"), [(program, ("save_all", "min_cut")[n % 2]) for n, program in enumerate(PROGRAMS)]
)
def test_a_loop_in_two_parts_gives_the_same_bits_and_its_plan_is_read_back(program, strategy):
    made, flat = cut(program(4), strategy)
    want = results(made, made.halves, flat)
    for last in (1, 3):
        plan = in_part(made.problem, made.plan, last)
        steps = schedule(made.problem, plan)
        halves = emit(made.graph, steps)
        verify_structure(made.graph, halves)
        assert ("parts of" in str(steps)) == bool(plan.offloaded)
        assert_same(results(made, halves, flat), want)
        assert (halves.host_bytes, halves.residual_bytes) == (plan.bytes_offloaded, plan.bytes_saved)
        assert Replayer(made.graph, PORTABLE).rows(steps).host_bytes == plan.bytes_offloaded
        assert planfile.loads(planfile.dumps(plan, made.graph), made.graph) == plan


def test_both_directions_send_what_the_forward_makes_first():
    """The backward reads it last, whichever way it goes."""
    for program, first in ((cell, 0), (reverse, 1)):
        made, _ = cut(program(4), "save_all")
        text = str(emit(made.graph, schedule(made.problem, in_part(made.problem, made.plan, 1))).forward)
        places = [line.split("add ")[1].split(":")[0] for line in text.splitlines() if "u32[3] = add" in line]
        assert places == [str(first)]


# ------------------------------------------------------------------------------------ on this machine

W = np.linspace(-0.5, 0.5, 6 * 16 * 16, dtype=np.float32).reshape(6, 16, 16)
X = np.linspace(-1, 1, 64 * 16, dtype=np.float32).reshape(64, 16)
STEP = 64 * 16 * 4  # bytes of an activation


def loss(w, x):
    return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w) + jnp.sin(h), None), x, w)[0] ** 2)


def offloading(last):
    """A strategy: what is saved of the loop waits in host memory, but for so many last steps."""

    def strategy(graph):
        problem = Problem.of(graph)
        plan = Plan.of(problem, PLAIN.plan.values)
        return plan if last is None else in_part(problem, plan, last)

    return strategy


TRACED = aot.function(loss, argnums=(0, 1)).trace(W, X)
PLAIN = TRACED.partition("min_cut")


def test_the_part_lies_in_host_memory_and_the_device_has_so_much_less_by_xlas_account():
    plain = PLAIN.compile(2)
    want = plain.value_and_grad(W, X)
    (loop,) = segmentable(PLAIN.split.problem, PLAIN.plan).values()
    stacks = len(loop.values)
    for last in (2, 5):
        made = TRACED.partition(offloading(last))
        run, size = made.compile(2), (6 - last) * STEP * stacks
        _, residuals = run.forward(W, X)
        there = [x for x in residuals if isinstance(x, jax.Array) and x.sharding.memory_kind == "pinned_host"]
        assert [x.shape for x in there] == [(6 - last, 64, 16)] * stacks
        jax.tree.map(np.testing.assert_array_equal, run.value_and_grad(W, X), want)
        jax.tree.map(np.testing.assert_array_equal, made.compile(1).value_and_grad(W, X), want)
        memory, before = run.memory, plain.memory
        assert memory.host_bytes == made.plan.bytes_offloaded == size == TRACED.planner.rows(made.plan).host_bytes
        assert before.forward.output_bytes - memory.forward.output_bytes == pytest.approx(size, rel=0.02)
        assert before.backward.argument_bytes - memory.backward.argument_bytes == pytest.approx(size, rel=0.02)


def test_plan_file_and_diff_tell_the_steps_and_an_artefact_runs(tmp_path):
    made, whole = (TRACED.partition(offloading(last)).plan for last in (2, None))
    assert "steps 0..4 of 6 offloaded, " in str(made)
    assert "loop 1 keeps on the device what its last 2 steps would offload" in made.summary()[1]
    other = TRACED.partition(offloading(1)).plan
    assert not diff(made, other).is_empty and other.key != made.key and made.bytes_saved > other.bytes_saved
    assert whole.bytes_saved == made.bytes_saved + made.bytes_offloaded
    function = aot.function(loss, argnums=(0, 1), strategy=offloading(2))
    loaded = aot.load(function.export(tmp_path / "artefact", W, X))
    got, want = loaded.value_and_grad(W, X), jax.value_and_grad(loss, (0, 1))(W, X)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), got, want)
    text = planfile.dumps(made, TRACED.graph)
    assert '"on_device": [\n    {"kept": 2, "loop": 1}' in text
    with pytest.raises(PlanError) as caught:
        planfile.loads(text.replace('"host_steps": 4', '"host_steps": 3'), TRACED.graph)
    assert str(caught.value).startswith("plan.saved[1].host_steps is 3, but 4 in %")


# ------------------------------------------------------------------------------------ plans


def deep(w, x):
    """A loop that keeps more than the link moves meanwhile, and no stack that is another one moved."""

    def step(h, w):
        return jnp.sin(jnp.tanh(jnp.tanh(h @ w) @ w) @ w), None

    return jnp.sum(lax.scan(step, x, w)[0])


def test_a_stack_that_does_not_fit_into_the_bandwidth_is_sent_in_part():
    rates = Roofline(flops_per_s=1e9, elementwise_per_s=1e12, bytes_per_s=1e12, host_bytes_per_s=1.5e7)
    w, x = np.full((20, 32, 32), 0.1, np.float32), np.full((16, 32), 0.5, np.float32)
    problem = Problem.of(aot.function(deep, argnums=(0, 1)).trace(w, x).graph, rates, backend=PORTABLE)
    alone, both = Planner(problem), Planner(problem, host_bytes_per_s=rates.host_bytes_per_s)
    plan = next(c.plan for c in both.menu if c.plan.partly_offloaded and c.plan.strategy.endswith(" in part"))
    ((loop, kept),) = plan.kept_steps
    assert 0 < kept < 20 and both.waiting_seconds(plan) <= both.waiting_seconds(alone.default()) + 1e-12
    more = Plan.of(problem, plan.values, offloaded=plan.offloaded, kept_steps=[(loop, kept - 1)])
    assert both.waiting_seconds(more) > 0
    assert plan.bytes_offloaded == both.rows(plan).host_bytes
    for share in (0.8, 0.6, 0.4):
        fewest = share * alone.ranked[0].peak_bytes
        found, other = both.fastest(fewest), alone.fastest(fewest)
        assert found is not None and (other is None or found.step_seconds <= other.step_seconds)


def test_a_budget_is_met_by_sending_a_part_and_plan_and_report_tell_it():
    rates = Roofline(flops_per_s=1e9, elementwise_per_s=1e12, bytes_per_s=1e12, host_bytes_per_s=3e7)
    w, x = np.full((24, 32, 32), 0.02, np.float32), np.full((64, 32), 0.5, np.float32)
    cut = aot.function(deep, argnums=(0, 1), cost=rates, offload=True).trace(w, x).partition(budget=0.4)
    ((_, kept),) = cut.plan.kept_steps
    run, told = cut.compile(), f"steps 0..{24 - kept} of 24 offloaded, "
    assert told in str(cut.plan) and told in str(cut.explain(measure=False).to_dict())
    assert run.memory.host_bytes == cut.plan.bytes_offloaded > 0
    got, want = run.value_and_grad(w, x), jax.value_and_grad(deep, argnums=(0, 1))(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


# ------------------------------------------------------------------------------------ what is refused


def test_a_loop_that_sends_what_others_read_cannot_be_in_two_parts():
    def sums(w, x):
        h, sums = lax.scan(lambda h, w: (jnp.tanh(h @ w), jnp.sum(h)), x, w)
        return jnp.sum(h) + jnp.sum(sums**2)

    made, _ = cut((sums, (W, X)), "min_cut")
    away = [v for v in made.plan.values if made.graph.values[v].loop]
    with pytest.raises(PlanError) as caught:
        schedule(made.problem, Plan.of(made.problem, made.plan.values, offloaded=away, kept_steps=[(1, 2)]))
    assert str(caught.value) == (
        "plan.kept_steps names loop 1, which cannot offload what its first steps keep alone.\n"
        "Offload of it what its own backward loop alone reads, and let nothing pass through `pack`."
    )


def test_what_must_be_offloaded_must_be_so_of_all_steps():
    v = next(iter(segmentable(PLAIN.split.problem, PLAIN.plan).values())).values[0]
    problem = Problem.of(TRACED.graph, constraints=[Constraint(v, CheckpointPolicy.MUST_OFFLOAD, "so I say")])
    with pytest.raises(PlanError) as caught:
        in_part(problem, PLAIN.plan, 2)
    assert str(caught.value) == (
        f"{TRACED.graph.where(v)} is saved on the device by the plan, and may not be: so I say.\n"
        "Name it in Plan.of(..., offloaded=[...]), without kept_steps of its loop, or take that key out of the policy."
    )
