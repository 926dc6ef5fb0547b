"""What is recomputed comes right before the first op that reads it, and waits for the latest cotangent."""

from __future__ import annotations

from jointcut.partition.classify import classify
from jointcut.partition.graph import TOP
from jointcut.partition.plan import Plan
from jointcut.partition.schedule import Order, Step, schedule
from jointcut.partition.text import parse

CHAIN = """
    primal %0:float32[8]
    cotangent %1:float32[8]
    %2:float32[8] = sin %0
    %3:float32[8] = exp %2
    %4:float32[8] = tan %3
    backward:
    %5:float32[8] = mul %1 %4
    %6:float32[8] = mul %5 %3
    %7:float32[8] = mul %6 %2
    output %4
    gradient %7
"""


def order_of(text, saved):
    graph = parse(text)
    facts = classify(graph)
    return schedule(graph, facts, Plan.of(graph, saved, facts=facts))


def test_what_is_saved_is_not_computed_again():
    assert order_of(CHAIN, [2, 3, 4])[TOP] == Order((Step(3), Step(4), Step(5)), (), ())


def test_each_op_is_recomputed_once_before_its_first_reader():
    assert order_of(CHAIN, [])[TOP].steps == (Step(3, (0, 1, 2), 1), Step(4), Step(5))


def test_recomputation_waits_for_the_latest_cotangent_of_its_reader():
    assert order_of(CHAIN, [3, 4])[TOP].steps == (Step(3), Step(4), Step(5, (0,), 6))


def test_a_gradient_that_needs_no_cotangent_is_computed_last():
    order = order_of(CHAIN.replace("gradient %7", "gradient %7\n    gradient %3"), [2, 4])[TOP]
    assert order.steps == (Step(3), Step(4, (1,), 5), Step(5))
    early = order_of(CHAIN.replace("mul %5 %3", "mul %5 %5") + "    gradient %3\n", [2, 4])[TOP]
    assert (early.steps, early.last) == ((Step(3), Step(4), Step(5)), (1,))


def test_all_results_of_one_op_come_from_one_run():
    text = CHAIN.replace("%3:float32[8] = exp %2", "%3:float32[8] %8:float32[8] = split %2").replace(
        "mul %6 %2", "mul %6 %8"
    )
    assert [step.again for step in order_of(text, [2, 4])[TOP].steps] == [(), (1,), ()]


LOOP = """
    loop 1 x5
    primal %0:float32[3]
    cotangent %1:float32[3]
    %2:float32[3] = exp %0
    %3:float32[3] %4:float32[3]@1 = loop %0 %6 body 1 of loop 1 {
        #4 %5:float32[3] = mul %4 %2
        %6:float32[3] = sin %5
        next %6
        stacks %5
    }
    backward:
    #2 %7:float32[3] %8:float32[3]@1 = loop %1 %10 body 2 of loop 1 {
        #6 %9:float32[3] = cos %5
        %10:float32[3] = mul %8 %9
        %11:float32[3] = mul %10 %2
        next %10
        stacks %11
    }
    #3 %12:float32[3] = reduce_sum %11
    output %3
    gradient %7
    gradient %12
"""


def test_a_body_recomputes_in_its_own_step_and_asks_the_region_around_it_for_the_rest():
    orders = order_of(LOOP, [4])
    assert orders[2].steps[0] == Step(6, (4,), None)
    assert orders[2].reads == (2,)
    assert orders[TOP].steps[0] == Step(2, (0,), 1)
