"""Values that a plan drops are computed again for readers that stand far apart, and mean what they meant."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.fuzz import closed
from jointcut import aot
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.emit import emit
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.steps import Run
from jointcut.partition.plans import planfile
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.plandiff import diff
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.program.graph import OPEN, OPEN_LOOP
from jointcut.partition.program.text import parse as graph_of
from oracle import assert_same, cotangents, plain_vjp
from programs import EVERY_PROGRAM, OF_EACH_KIND, named
from segmented import assert_same as assert_same_bits
from segmented import results

ROOFLINE = Roofline(1e11, 1e10, 1e10)


def all_dropped(graph):
    """The plan that saves no more than it must, and drops all that it may."""
    plan = closed(graph, set())
    again = (graph.ops[i] for i in (*plan.recomputed, *plan.deferred))
    return Plan.of(graph, plan.values, dropped=[v for op in again if op.name not in OPEN for v in op.outputs])


@pytest.mark.parametrize("name", sorted(OF_EACH_KIND)[:: 1 if EVERY_PROGRAM else 2])
def test_every_program_pulls_back_as_jax_with_all_dropped(name):
    program = named(name)
    with program.precision():
        bound = partial(program.function, **program.kwargs)
        function = aot.function(bound, has_aux=program.has_aux, strategy=all_dropped)
        out, pullback, *aux = function.vjp(*program.args)
        want_out, want_aux, want, _ = plain_vjp(program)
        assert_same((out, aux), (want_out, want_aux), program)
        assert_same(pullback(cotangents(out, 1)), want, program)


# ------------------------------------------------------------------------------------ a chain of layers


def stack(layers, width=32):
    """A loss of layers of two products each, and its arguments."""

    def loss(weights, x):
        for up, down in weights:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.sum(x**2)

    draws = np.random.default_rng(0)
    weights = [tuple(jnp.float32(draws.standard_normal((width, width)) / 8) for _ in "ab") for _ in range(layers)]
    return loss, (weights, jnp.float32(draws.standard_normal((64, width))))


def cut(layers):
    loss, args = stack(layers)
    traced = aot.function(loss, cost=ROOFLINE).trace(*args)
    return traced, args


def divided(traced):
    """The division of a chain that drops the most."""
    return max(traced.planner.divided(), key=lambda plan: len(plan.dropped))


def runs_of(steps):
    """How often each op runs again in a schedule's backward."""
    return Counter(step.op for step in steps.backward if isinstance(step, Run) and step.again)


def test_a_division_may_run_a_layer_three_times_and_gives_the_same_bits():
    traced, args = cut(12)
    plan = divided(traced)
    assert plan.dropped
    steps = schedule(traced.problem, plan)
    runs = runs_of(steps)
    products = [op.id for op in traced.graph.ops if op.name == "dot_general" and op.id in plan.recomputed]
    assert max(runs[i] for i in products) == 2  # after the forward's own
    kept = schedule(traced.problem, replace(plan, dropped=()))
    assert max(runs_of(kept)[i] for i in products) == 1
    flat = jax.tree.leaves(args)
    made = traced.partition().split
    got, want = (results(made, emit(traced.graph, s), flat) for s in (steps, kept))
    assert_same_bits(got, want)


def test_dropping_makes_the_smallest_peak_of_a_deep_chain_smaller_by_xla():
    traced, _ = cut(24)
    by_dropping = {True: [], False: []}
    for candidate in traced.planner.menu:
        by_dropping[bool(candidate.plan.dropped)].append(candidate)
    least = [min(of_kind, key=lambda c: c.predicted_bytes).plan for of_kind in by_dropping.values()]
    dropping, keeping = (traced.partition(plan=plan).compile().activation_bytes for plan in least)
    assert dropping < 0.9 * keeping


def test_the_seconds_of_a_dropped_value_count_twice():
    traced, _ = cut(12)
    plan = divided(traced)
    seconds = traced.planner.problem.seconds
    twice = {traced.graph.values[v].maker for v in plan.dropped}
    kept = traced.planner.priced(replace(plan, dropped=()))
    assert plan.seconds == pytest.approx(kept.seconds + sum(seconds[i] for i in twice))
    assert Counter(plan.reruns(traced.graph)) == Counter([*plan.recomputed, *twice])


# ------------------------------------------------------------------------------------ as a record

GRAPH = graph_of("""
    primal %0:float32[8]
    cotangent %1:float32[8]
    %2:float32[8] = sin %0
    %3:float32[8] = exp %2
    backward:
    %4:float32[8] = mul %1 %3
    %5:float32[8] = mul %4 %2
    output %3
    gradient %5
""")


def test_a_plan_with_dropped_values_is_written_and_read_back():
    plan = Plan.of(GRAPH, [3], dropped=[2])
    text = planfile.dumps(plan, GRAPH)
    assert planfile.loads(text, GRAPH) == plan
    assert '"dropped"' not in planfile.dumps(Plan.of(GRAPH, [3]), GRAPH)
    assert "1 value dropped between their readers" in str(plan)
    assert plan.key != Plan.of(GRAPH, [3]).key


def test_a_plan_file_with_dropped_values_serves_a_program_with_the_same_forward():
    plan = Plan.of(GRAPH, [3], dropped=[2])
    other = graph_of("""
        primal %0:float32[8]
        cotangent %1:float32[8]
        %2:float32[8] = sin %0
        %3:float32[8] = exp %2
        backward:
        %4:float32[8] = mul %1 %2
        %5:float32[8] = mul %4 %3
        output %3
        gradient %5
    """)
    assert planfile.loads(planfile.dumps(plan, GRAPH), other).dropped == (2,)


def test_two_plans_that_drop_other_values_differ():
    one, other = Plan.of(GRAPH, [3], dropped=[2]), Plan.of(GRAPH, [3])
    shown = diff(other, one)
    assert not shown.is_empty
    assert str(shown) == "by hand -> by hand: +0 bytes saved, +0 -0 ops recomputed, +1 -0 values dropped"


@pytest.mark.parametrize("v", [3, 4, 0, 99])
def test_only_what_is_computed_again_can_be_dropped(v):
    with pytest.raises(PlanError) as caught:
        Plan.of(GRAPH, [3], dropped=[v])
    assert str(caught.value) == (
        f"plan.dropped[%{v}] is not computed again in the backward.\n"
        "Drop results of ops in plan.recomputed: there is nothing else to compute again."
    )


def test_a_loops_results_cannot_be_dropped():
    program = named("nested_scans")
    graph = aot.function(program.function, argnums=program.argnums).trace(*program.args).graph
    plan = closed(graph, set())
    loop = next(graph.ops[i] for i in plan.recomputed if graph.ops[i].name == OPEN_LOOP)
    with pytest.raises(PlanError) as caught:
        Plan.of(graph, plan.values, dropped=loop.outputs[:1])
    assert str(caught.value) == (
        f"plan.dropped[%{loop.outputs[0]}] is made by a loop, which runs again only once.\nDrop other values."
    )
