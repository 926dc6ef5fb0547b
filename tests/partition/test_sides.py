"""Each op has its side: what an output needs, what a cotangent needs, and what may choose."""

from __future__ import annotations

import pytest

from jointcut.partition.errors import GraphError
from jointcut.partition.program.sides import classify
from jointcut.partition.program.text import parse

FREE = """
    primal %0:float32[8]
    cotangent %1:float32[]
    %2:float32[8] = sin %0
    %3:float32[] = reduce_sum %2
    %4:float32[8] = cos %0
    backward:
    %5:float32[8] = neg %4
    %6:float32[8] = mul %1 %5
    output %3
    gradient %6
    gradient %4
"""


def test_what_needs_neither_output_nor_cotangent_may_choose():
    sides = classify(parse(FREE))
    assert (sides.forward, sides.backward) == ({0, 1}, {4})
    assert sides.late == {1, 6}


def test_the_backward_wants_what_it_reads_and_the_gradients_made_early():
    sides = classify(parse(FREE))
    assert sides.wanted == {4, 5}
    assert sides.outputs == {3}


def test_effects_stay_on_the_side_where_they_were_traced():
    sides = classify(
        parse(
            """
            primal %0:float32[]
            cotangent %1:float32[]
            = debug_print %0 effects
            backward:
            = debug_print %0 effects
            %2:float32[] = mul %0 %1
            output %0
            gradient %2
            """
        )
    )
    assert (sides.forward, sides.backward) == ({0}, {1, 2})


def test_a_result_for_the_user_that_needs_a_cotangent_is_refused():
    with pytest.raises(GraphError) as refusal:
        classify(parse("primal %0:float32[]\ncotangent %1:float32[]\n%2:float32[] = mul %0 %1\noutput %2"))
    assert str(refusal.value) == (
        "%2:float32[] (mul) is an output of the forward but needs a cotangent.\n"
        "Give that result the role GRADIENT, or take the cotangent out of it."
    )


LOOP = """
    loop 1 x5
    primal %0:float32[3]
    cotangent %1:float32[3]
    %2:float32[3] %3:float32[3]@1 = loop %0 %4 body 1 of loop 1 {
        #4 %4:float32[3] = sin %3
        %9:float32[3] = exp %3
        %10:float32[3] = tan %3
        next %4
    }
    %5:float32[] = reduce_sum %9
    backward:
    %6:float32[5,3] = neg %10
    %7:float32[3] %8:float32[3]@1 = loop %1 %12 body 2 of loop 1 {
        #7 %11:float32[3] = cos %3
        %12:float32[3] = mul %8 %11
        next %12
    }
    output %2
    output %5
    gradient %7
    gradient %6
"""


def test_a_backward_scan_and_its_whole_body_run_in_the_backward():
    sides = classify(parse(LOOP))
    assert {3, 7, 8} <= sides.backward
    assert {0, 1, 4, 5} <= sides.forward
    assert not {2, 6} & (sides.backward | sides.forward)


def test_what_is_read_outside_its_loop_escapes_it():
    assert classify(parse(LOOP)).escaping == {9, 10}
