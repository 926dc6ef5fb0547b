"""A plan follows from what is saved, and one that does not close is refused with the value's name."""

from __future__ import annotations

import pytest

from jointcut.partition.errors import PlanError
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.text import parse

CHAIN = """
    primal %0:float32[8] "args[0]"
    cotangent %1:float32[]
    %2:float32[8] = dot_general %0
    %3:float32[8] = sin %2
    %4:float32[] = reduce_sum %3
    backward:
    %5:float32[8] = cos %2
    %6:float32[8] = mul %5 %3
    %7:float32[8] = mul %1 %6
    output %4
    gradient %7
"""


def test_what_is_recomputed_follows_from_what_is_saved():
    plan = Plan.of(parse(CHAIN), [2])
    assert (plan.values, plan.recomputed, plan.deferred, plan.strategy) == ((2,), (1,), (3, 4), "by hand")
    assert (plan.bytes_saved, plan.saved[0].op, plan.saved[0].shape) == (32, "dot_general", (8,))


def test_values_are_saved_once_in_program_order_and_inputs_not_at_all():
    assert Plan.of(parse(CHAIN), [3, 2, 3, 0]).values == (2, 3)


def test_outputs_cost_nothing():
    graph = parse(CHAIN.replace("output %4", "output %3"))
    assert Plan.of(graph, [2, 3]).bytes_saved == 32


def test_a_plan_by_hand_may_recompute_what_is_heavy():
    """That a product is worth saving is advice; only what must not happen twice is a rule."""
    assert Plan.of(parse(CHAIN), []).recomputed == (0, 1)


def test_each_copy_of_a_looped_value_counts():
    loop = """
        loop 1 x5
        primal %0:float32[3]
        cotangent %1:float32[3]
        %2:float32[3] %3:float32[3]@1 = loop %0 %4 body 1 of loop 1 {
            #2 %4:float32[3] = sin %3
            next %4
        }
        backward:
        #1 %5:float32[3] %6:float32[3]@1 = loop %1 %8 body 2 of loop 1 {
            #3 %7:float32[3] = cos %3
            %8:float32[3] = mul %6 %7
            next %8
        }
        output %2
        gradient %5
    """
    plan = Plan.of(parse(loop), [3])
    assert (plan.saved[0].copies, plan.saved[0].bytes) == (5, 60)


EFFECT = """
    primal %0:float32[8]
    cotangent %1:float32[]
    %2:float32[8] = io_callback %0 effects
    %3:float32[8] = sin %2
    backward:
    %4:float32[8] = mul %1 %3
    output %0
    gradient %4
"""
STEP = """
    loop 1 x5
    primal %0:float32[5,3]
    cotangent %1:float32[3]
    %2:float32[3]@1 = step %0
    %3:float32[3] %4:float32[3]@1 = loop %5 body 1 of loop 1 {
        #2 %5:float32[3] = mul %4 %2
        next %5
    }
    backward:
    #3 %6:float32[3] %7:float32[3]@1 = loop %1 %8 body 2 of loop 1 {
        #4 %8:float32[3] = mul %7 %2
        next %8
    }
    output %3
    gradient %6
"""

REFUSED = {
    "an effect twice": (
        EFFECT,
        [],
        "%2:float32[8] (io_callback) is neither saved nor can it be recomputed.\n"
        "Save it, or save what the backward computes from it. "
        "It is not recomputed because io_callback has an effect, which must happen once.",
    ),
    "a loop twice": (
        STEP.replace("mul %7 %2", "mul %7 %4"),
        [],
        "%4:5xfloat32[3] (loop) is neither saved nor can it be recomputed.\n"
        "Save it, or save what the backward computes from it. It is not recomputed because a loop is not run twice.",
    ),
    "a cotangent": (
        CHAIN,
        [7],
        "plan.saved[%7] does not exist in the forward.\n"
        "Save values of the forward only: see Graph.values and Value.maker.",
    ),
    "one step": (
        STEP,
        [2],
        "plan.saved[%2:5xfloat32[3] (step)] is one step of a stack.\nSave the stack that it is taken from.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_does_not_close_is_refused_with_the_value(case):
    text, saved, expected = REFUSED[case]
    with pytest.raises(PlanError) as refusal:
        Plan.of(parse(text), saved)
    assert str(refusal.value) == expected


def test_saving_what_comes_after_an_effect_closes_the_plan():
    assert Plan.of(parse(EFFECT), [3]).recomputed == ()


def test_a_plan_prints_its_total_and_its_values_largest_first():
    text = """
primal %0:float32[8] "args[0]"
cotangent %1:float32[] "cotangent 0"
%2:float32[8] = sort %0
%3:float32[] = dot_general %2 %2
backward:
%4:float32[8] = mul %1 %2
output %3
gradient %4
"""
    plan = Plan.of(parse(text), [2], reasons={2: "sort is heavy"})
    assert str(plan) == (
        "by hand: 1 value, 32 bytes saved; 0 ops recomputed\n            32  float32[8] sort : sort is heavy"
    )
