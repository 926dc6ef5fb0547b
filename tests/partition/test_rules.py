"""Each verdict has its reason: what is cheap, what is heavy, and what neither side may do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.partition.prices.rules import Verdict, heavy, judge
from jointcut.partition.program.places import RESULT, SAVED, regions_of
from jointcut.partition.program.primitives import CHECKPOINT_SCOPE
from jointcut.partition.program.sides import classify
from jointcut.partition.program.text import parse

HEAVY = {
    "%1:float32[8] = sin %0": "",
    "%1:float32[64] = broadcast_in_dim %0": "",
    "%1:float32[] = reduce_sum %0": "it reduces more than it returns",
    "%1:float32[8] = reduce_max %0": "",
    "%1:float32[8] = dot_general %0 %0": "dot_general is heavy",
    "%1:float32[8] = some_kernel %0": "some_kernel is heavy",
    "%1:float32[8] = jit %0 holds sin mul": "",
    "%1:float32[8] = jit %0 holds sin dot_general": "it holds dot_general, which is heavy",
    "%1:float32[8] = custom_jvp_call %0 holds jit exp": "",
    "%1:float32[8] = jit %0": "jit is heavy",
    "%1:float32[8] = while %0 holds sin": "while is heavy",
}


@pytest.mark.parametrize("op", HEAVY)
def test_an_op_is_heavy_unless_known_to_be_cheap(op):
    graph = parse(f"primal %0:float32[8]\n{op}\noutput %1")
    assert heavy(graph, graph.ops[0]) == HEAVY[op]


TEXT = """
    loop 1 x5
    primal %0:float32[5,3]
    cotangent %1:float32[3]
    %2:float32[3] = literal
    %3:float32[3]@1 = step %0
    %4:float32[3] %5:float32[3]@1 = loop %2 %6 body 1 of loop 1 {
        #4 %6:float32[3] = mul %5 %3
        %7:float32[3] = exp %5
        next %6
    }
    #3 %8:float32[] = reduce_sum %7
    #6 %9:float32[3] = dot_general %4
    %10:float32[3] = dot_general %9
    %11:float32[3] = io_callback %4 effects
    backward:
    %12:float32[3] = mul %1 %10
    output %8
    output %9
    output %11
    gradient %12
"""


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (0, Verdict("", "it is an input")),
        (1, Verdict()),
        (2, Verdict("it is a literal", "")),
        (3, Verdict("it is one step of a stack, and the stack can be saved", "")),
        (4, Verdict("", "a loop is not run twice")),
        (6, Verdict()),
        (7, Verdict("", "it is read outside the loop that makes it")),
        (9, Verdict("", "dot_general is heavy", is_costly=True)),
        (10, Verdict()),  # heavy, but only the backward needs it: it runs once wherever it runs
        (11, Verdict("", "io_callback has an effect, which must happen once")),
        (12, Verdict()),
    ],
)
def test_each_value_gets_the_verdict_that_its_op_deserves(value, verdict):
    graph = parse(TEXT)
    assert judge(graph, classify(graph))[value] == verdict


REGIONS = [
    "checkpointed_block",
    "checkpointed_block_saving_dots",
    "checkpointed_scan_body",
    "checkpointed_scan_body_saving_dots",
    "checkpoint_in_checkpoint",
    "checkpoint_by_name",
    "checkpoints_in_a_row",
]


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
@pytest.mark.parametrize("name", REGIONS)
def test_of_a_region_only_its_results_and_what_its_policy_allows_is_saved(name, strategy, traced):
    split = traced(name).partition(strategy).split
    graph = split.graph
    assert not any(op.name == "remat2" for op in graph.ops)
    assert any(regions_of(op.scope) for op in graph.ops)
    for saved in split.plan.saved:
        asked = regions_of(saved.scope, SAVED) | regions_of(saved.scope, RESULT)
        assert regions_of(saved.scope) <= asked or saved.value in split.problem.sides.escaping, str(saved)


@pytest.mark.parametrize("name", [name for name in REGIONS if name.startswith("checkpoints_in")])
def test_the_result_of_a_region_is_saved_rather_than_computed_again_with_all_before_it(name, traced):
    """As JAX does: else nothing at all would be saved of regions that feed each other."""
    split = traced(name).partition("min_cut").split
    (verdict,) = {split.problem.verdicts[s.value] for s in split.plan.saved if regions_of(s.scope)}
    assert verdict == Verdict("", "it is the result of a jax.checkpoint", True)


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
def test_of_a_region_that_holds_a_loop_only_what_the_backward_reads_is_saved(strategy, traced):
    """The region's own equation in the backward computes the rest again, as the user asked."""
    split = traced("checkpoint_around_scan").partition(strategy).split
    inside = [s for s in split.plan.saved if CHECKPOINT_SCOPE in s.scope]
    assert {s.value for s in inside} <= split.problem.sides.wanted
    regions = [op for op in split.graph.ops if op.name == "remat2"]
    assert regions and {s.value for s in inside} <= {v for op in regions for v in op.inputs}


def test_a_checkpointed_scan_body_hands_over_the_carry_of_each_step_alone(traced):
    plan = traced("checkpointed_scan_body").partition("min_cut").plan
    assert [(s.op, s.copies) for s in plan.saved] == [("loop", 1), ("loop", 3)]


def test_a_small_value_in_a_checkpointed_region_is_not_saved_in_place_of_its_result():
    wide = jax.checkpoint(lambda x: jnp.broadcast_to(jnp.sin(x).sum(), (8,)))
    waves = jax.checkpoint(lambda y: jnp.sin(y) * jnp.cos(y))
    cut = aot.function(lambda x: waves(wide(x)).sum()).trace(np.ones(8, np.float32)).partition("min_cut")
    assert [(s.op, s.shape) for s in cut.plan.saved] == [("copy", (8,))]


ENDS = "it ends a chain of transcendental functions"

CHAINS = {
    "two in a chain": ("%1:float32[8] = exp %0\n%2:float32[8] = neg %1\n%3:float32[8] = log1p %2", ENDS),
    "two in a call": ("%1:float32[8] = jit %0 holds exp log1p mul", ENDS),
    "one in a call": ("%1:float32[8] = jit %0 holds tanh mul", ""),
    "side by side": ("%1:float32[8] = exp %0\n%2:float32[8] = sin %0\n%3:float32[8] = mul %1 %2", ""),
    "a chain begins anew": ("%1:float32[8] = exp %0\n%2:float32[8] = sin %1\n%3:float32[8] = tanh %2", ""),
    "a product between": ("%1:float32[8] = exp %0\n%2:float32[8] = dot_general %1\n%3:float32[8] = tanh %2", ""),
    "fewer elements": (
        "%1:float32[1] = slice %0\n%2:float32[1] = exp %1\n%3:float32[8] = broadcast_in_dim %2\n%4:float32[8] = sin %3",
        "",
    ),
    "more elements": ("%1:float32[8] = exp %0\n%2:float32[1] = slice %1\n%3:float32[1] = sin %2", ENDS),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_two_transcendental_functions_for_each_element_do_not_run_twice(chain):
    text, reason = CHAINS[chain]
    last = len(text.splitlines())
    graph = parse(f"primal %0:float32[8]\n{text}\noutput %{last}")
    assert judge(graph, classify(graph))[last].not_recomputed == reason


CARRIED = """
    loop 1 x5
    primal %0:float32[3]
    cotangent %1:float32[3]
    %2:float32[3] %3:float32[3]@1 = loop %0 %4 body 1 of loop 1 {
        #3 %4:float32[3] = cos %3
        %5:float32[3] = tanh %4
        %6:float32[3] = exp %5
        next %4
    }
    %7:float32[3] = reduce_sum %6
    backward:
    %8:float32[3] = mul %1 %2
    output %7
    gradient %8
"""


def test_what_a_loop_carries_begins_a_chain():
    graph = parse(CARRIED)
    assert judge(graph, classify(graph))[5] == Verdict()


def test_what_is_read_outside_its_loop_never_runs_twice_even_if_a_budget_would_pay_for_it():
    graph = parse(CARRIED)
    verdict = judge(graph, classify(graph))[6]
    assert verdict == Verdict("", "it is read outside the loop that makes it")
    assert not verdict.is_costly


@pytest.mark.parametrize("name", ["all_gather", "psum", "ppermute"])
def test_what_talks_to_other_devices_runs_again_for_a_budget_alone(name):
    graph = parse(f"primal %0:float32[8]\n%1:float32[64] = {name} %0\n%2:float32[64] = sin %1\noutput %2")
    assert judge(graph, classify(graph))[1] == Verdict("", f"{name} talks to other devices", True)
