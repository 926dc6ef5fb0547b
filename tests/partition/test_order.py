"""What is recomputed comes right before the first op that reads it, and waits for the latest cotangent."""

from __future__ import annotations

from jointcut.partition.lower.order import Order, Turn, ordered
from jointcut.partition.plans.backend import CPU
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import TOP
from jointcut.partition.program.text import parse

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
    return ordered(Problem.of(graph, backend=CPU), Plan.of(graph, saved))


def test_what_is_saved_is_not_computed_again():
    assert order_of(CHAIN, [2, 3, 4])[TOP] == Order((Turn(3), Turn(4), Turn(5)), (), ())


def test_each_op_is_recomputed_once_before_its_first_reader():
    assert order_of(CHAIN, [])[TOP].steps == (Turn(3, (0, 1, 2), ((0, 1),)), Turn(4), Turn(5))


def test_recomputation_waits_for_the_latest_cotangent_of_its_reader():
    assert order_of(CHAIN, [3, 4])[TOP].steps == (Turn(3), Turn(4), Turn(5, (0,), ((0, 6),)))


def test_a_gradient_that_needs_no_cotangent_is_computed_last():
    order = order_of(CHAIN.replace("gradient %7", "gradient %7\n    gradient %3"), [2, 4])[TOP]
    assert order.steps == (Turn(3), Turn(4, (1,), ((2, 5),)), Turn(5))
    early = order_of(CHAIN.replace("mul %5 %3", "mul %5 %5") + "    gradient %3\n", [2, 4])[TOP]
    assert (early.steps, early.last) == ((Turn(3), Turn(4), Turn(5)), (1,))


def test_all_results_of_one_op_come_from_one_run():
    text = CHAIN.replace("%3:float32[8] = exp %2", "%3:float32[8] %8:float32[8] = split %2").replace(
        "mul %6 %2", "mul %6 %8"
    )
    assert [step.again for step in order_of(text, [2, 4])[TOP].steps] == [(), (1,), ()]


# %2 is read twice, with three matrix products between; it is light to compute from %0.
FAR = """
    primal %0:float32[8,8]
    cotangent %1:float32[8,8]
    %2:float32[8,8] = NAME %0
    %3:float32[8,8] = sin %2
    backward:
    %4:float32[8,8] = mul %1 %2
    %5:float32[8,8] = dot_general %4 %0
    %6:float32[8,8] = dot_general %5 %0
    %7:float32[8,8] = MIDDLE %6 %0
    %8:float32[8,8] = mul %7 %2
    %9:float32[8,8] = mul %8 %2
    output %3
    gradient %9
"""


def steps_of(name, middle):
    steps = order_of(FAR.replace("NAME", name).replace("MIDDLE", middle), [])[TOP].steps
    return [(step.again, step.waits[0][1]) for step in steps if step.again]


def test_a_light_value_is_recomputed_once_more_where_its_next_reader_is_far():
    assert steps_of("neg", "dot_general") == [((0,), 1), ((0,), 7)]


def test_a_value_whose_next_reader_is_near_or_that_is_gathered_stays():
    assert steps_of("neg", "mul") == [((0,), 1)]
    assert steps_of("gather", "dot_general") == [((0,), 1)]


def test_a_light_value_is_recomputed_three_times_at_most():
    more = "".join(
        f"""%{n}:float32[8,8] = dot_general %{n - 1} %0
        %{n + 1}:float32[8,8] = dot_general %{n} %0
        %{n + 2}:float32[8,8] = dot_general %{n + 1} %0
        %{n + 3}:float32[8,8] = mul %{n + 2} %2
        """
        for n in (10, 14, 18)
    )
    text = FAR.replace("NAME", "neg").replace("MIDDLE", "dot_general")
    text = text.replace("    output %3", more + "    output %3").replace("gradient %9", "gradient %21")
    steps = order_of(text, [])[TOP].steps
    assert sum(step.again == (0,) for step in steps) == 3


def test_what_was_recomputed_long_ago_waits_again_where_something_is_made_of_it():
    text = """
        primal %0:float32[8,8]
        cotangent %1:float32[8,8]
        %2:float32[8,8] = gather %0
        %3:float32[8,8] = neg %2
        %4:float32[8,8] = sin %3
        backward:
        %5:float32[8,8] = mul %1 %2
        %6:float32[8,8] = dot_general %5 %0
        %7:float32[8,8] = dot_general %6 %0
        MORE
        %9:float32[8,8] = mul %8 %3
        output %4
        gradient %9
    """
    near = order_of(text.replace("MORE", "%8:float32[8,8] = neg %7"), [])[TOP].steps[-1]
    far = order_of(text.replace("MORE", "%8:float32[8,8] = dot_general %7 %0"), [])[TOP].steps[-1]
    assert (near.again, near.waits) == ((1,), ())
    assert (far.again, far.waits) == ((1,), ((2, 8),))


def test_recomputation_waits_for_what_a_broadcast_repeats():
    text = CHAIN.replace("cotangent %1:float32[8]", "cotangent %1:float32[]").replace(
        "%5:float32[8] = mul %1 %4",
        """%8:float32[1] = broadcast_in_dim %1
        %9:float32[8] = broadcast_in_dim %8
        %5:float32[8] = mul %9 %4""",
    )
    steps = order_of(text, [3])[TOP].steps
    assert [(s.again, s.waits) for s in steps if s.again] == [((2,), ((3, 1),)), ((0,), ((0, 6),))]


def test_recomputation_waits_for_a_stack_and_not_for_what_each_step_repeats_in_it():
    text = """
        loop 1 x5
        primal %0:float32[5,3]
        cotangent %1:float32[]
        %2:float32[5,3] = exp %0
        backward:
        #1 %3:float32[] %4:float32[]@1 = loop %1 %5 body 1 of loop 1 {
            #2 %5:float32[] = neg %4
            #3 %6:float32[3] = broadcast_in_dim %5
            next %5
            stacks %6
        }
        #4 %7:float32[5,3] = mul %6 %2
        output %2
        gradient %7
    """
    assert order_of(text, [])[TOP].steps[-1] == Turn(4, (0,), ((0, 6),))


PRODUCTS = """
    primal %0:float32[8,8]
    cotangent %1:float32[8,8]
    %2:float32[8,8] = dot_general %0 %0
    %3:float32[8,8] = tanh %2
    %4:float32[8,8] = dot_general %3 %0
    backward:
    %5:float32[8,8] = mul %1 %3
    %6:float32[64] = reshape %5
    %7:float32[8,8] = transpose %3
    %8:float32[8,8] = dot_general %3 %5
    %9:float32[8,8] = conv_general_dilated %2 %6
    %10:float32[8,8] = dot_general %7 %8
    output %4
    gradient %9
    gradient %10
"""


def test_products_find_the_ends_of_elementwise_chains_written_out():
    steps = order_of(PRODUCTS, [2])[TOP].steps
    assert {s.op: s.written for s in steps if s.written} == {6: (3, 5), 7: (6,)}
    assert {s.op: s.written for s in order_of(PRODUCTS, [2, 3])[TOP].steps if s.written} == {6: (5,), 7: (6,)}


def test_the_forward_writes_out_what_the_backward_recomputes_for_a_product():
    graph = parse(PRODUCTS)
    assert CPU.written_forward(graph, {2}, Plan.of(graph, [2]).recomputed) == {3}
    assert CPU.written_forward(graph, {2, 3}, Plan.of(graph, [2, 3]).recomputed) == set()


POOLED = """
    primal %0:float32[8]
    cotangent %1:float32[4]
    %2:float32[8] = dot_general %0
    %3:float32[4] = reduce_window_max %2
    backward:
    %4:float32[8] = select_and_scatter_add %1 %2
    output %3
    gradient %4
"""


def test_what_the_compiler_takes_apart_waits_as_a_whole():
    assert order_of(POOLED, [2])[TOP].steps == (Turn(2, (), ((2, 1),), whole=True),)


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
    assert orders[2].steps[0] == Turn(6, (4,))
    assert orders[2].reads == (2,)
    assert orders[TOP].steps[0] == Turn(2, (0,), ((0, 1),))


def test_what_waited_just_now_waits_for_the_same_cotangent():
    text = """
        primal %0:float32[8,8]
        cotangent %1:float32[8,8]
        %2:float32[8,8] = sin %0
        %3:float32[8,8] = cos %0
        backward:
        %4:float32[8,8] = mul %1 %2
        MORE
        %9:float32[8,8] = mul %8 %3
        output %2
        gradient %9
    """
    light = "\n".join(f"%{n}:float32[8,8] = neg %{n - 1}" for n in (5, 6, 7, 8))
    heavy = "\n".join(f"%{n}:float32[8,8] = dot_general %{n - 1} %1" for n in (5, 6, 7, 8))
    near, far = (order_of(text.replace("MORE", more), [])[TOP].steps[-1] for more in (light, heavy))
    assert (near.again, near.waits) == ((1,), ((0, 1),))
    assert (far.again, far.waits) == ((1,), ((0, 8),))


def test_a_light_chain_from_inputs_waits_for_nothing_where_the_compiler_fuses_it():
    text = """
        primal %0:float32[8,8]
        cotangent %1:float32[8,8]
        primal %2:float32[8,8]
        %3:float32[8,8] = sin %0
        backward:
        %4:float32[8,8] = mul %1 %0
        %5:float32[8,8] = MAKER %2
        %6:float32[8,8] = add %4 %5
        %7:float32[8,8] = mul %6 READ
        output %3
        gradient %7
    """
    orders = [
        order_of(text.replace("MAKER", maker).replace("READ", read), [])[TOP].steps[1]
        for maker, read in (("neg", "%0"), ("cos", "%0"), ("neg", "%5"))
    ]
    assert [(turn.again, turn.waits) for turn in orders] == [((2,), ()), ((2,), ((2, 4),)), ((2,), ((2, 4),))]
