"""A graph's text is read back as the same graph, and a malformed text is refused with its line and a cure."""

from __future__ import annotations

from dataclasses import replace
from inspect import cleandoc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jointcut.partition.errors import GraphError
from jointcut.partition.program.roles import Role, Side
from jointcut.partition.program.text import parse, show
from programs import CORPUS

SINE = """
    primal %0:float32[8] "x"
    primal %1:float32[8] "args[1]['a = b; \\\\ \\"c\\"']"
    cotangent %2:float32[]
    %3:float32[8] = mul %0 %1
    %4:float32[8] = sin %3
    %5:float32[] = reduce_sum %4
    backward:
    %6:float32[8] = cos %3
    %7:float32[8] = mul %2 %6
    %8:float32[8] = mul %7 _
    output %5
    gradient %8
    gradient _
"""

LOOP = """
    loop 1 x4
    loop 2 x3 in 1
    primal %0:float32[3] "h"
    primal %1:float32[4,3] "table"
    cotangent %2:float32[3] "cotangent 0"
    spare %9:float32[4,3]
    %3:float32[3] %4:4xfloat32[3]@1 = loop %0 %8 body 1 of loop 1 {
        #4 %6:4xfloat32[3] %7:12xfloat32[3]@2 = loop %4 %10 body 2 of loop 2 {
            #6 %10:12xfloat32[3] = sin %7
            next %10
        }
        %8:4xfloat32[3] = mul %6 %5
        next %8
        stacks %4 %6
    }
    %11:key<fry>[2]/16B = random_bits %3 effects holds add threefry2x32
    backward:
    %12:float32[3] = mul %2 %3
    %5:4xfloat32[3]@1 = step %1
    output %3
    gradient %12
"""

PRICED = """
    primal %0:float32[8] "x"
    %1:float32[8] = sin %0 takes 0.0125s
    %2:float32[] = cond %1 _ effects takes 1e-06s holds exp takes
    %3:float32[8] = rng takes 0.0s
    output %2
    output %3
"""

# Programs whose trace takes a second or refuses; all others make the round trip.
LEFT_OUT = {"integers_to_differentiate"}


@pytest.mark.parametrize("name", [program.name for program in CORPUS if program.name not in LEFT_OUT])
def test_the_text_of_every_program_is_read_back_as_its_graph(name, traced):
    graph = traced(name).graph
    assert parse(show(graph)) == graph


@pytest.mark.parametrize("text", [SINE, LOOP, PRICED], ids=["sine", "loop", "priced"])
def test_a_text_is_shown_as_it_was_written(text):
    assert show(parse(text)) == cleandoc(text)


def test_a_text_says_what_each_line_is():
    graph = parse(LOOP)
    assert graph.ops[1].effects and graph.ops[1].inner == {"add", "threefry2x32"}
    assert [op.origin for op in graph.ops[:4]] == [Side.FORWARD, Side.FORWARD, Side.BACKWARD, Side.FORWARD]
    assert (graph.regions[2].holder, graph.regions[2].parent, graph.bodies[4].carried) == (4, 1, (10,))
    assert graph.regions[0].ops == (0, 1, 2)  # a step belongs to no list
    assert graph.values[7].saved_bytes == 12 * 3 * 4
    assert graph.values[9].maker is None
    assert graph.role_outputs(Role.GRADIENT) == (12,)


def test_copies_follow_from_the_loop_and_remarks_say_nothing():
    graph = parse("loop 1 x5\n\n  // by hand\nspare %0:bfloat16[2]@1\nspare %1:float32[]")
    assert (graph.values[0].copies, graph.values[0].bytes, graph.values[1].copies) == (5, 4, 1)


def test_a_published_instance_needs_names_and_bytes_only():
    graph = parse("primal %0:?[]/4096B\n%1:tile[]/512B = matmul_v2 %0\noutput %1")
    assert graph.values[1].bytes == 512 and graph.ops[0].name == "matmul_v2"
    assert parse(show(graph)) == graph


def test_an_op_takes_the_seconds_that_its_line_says():
    graph = parse(PRICED)
    assert [op.seconds for op in graph.ops] == [0.0125, 1e-6, 0.0]
    assert graph.ops[1].effects and graph.ops[1].inner == {"exp", "takes"}
    assert parse(SINE).ops[0].seconds is None


@settings(deadline=None)
@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False))
def test_any_seconds_are_read_back_to_the_last_bit(seconds):
    graph = parse("primal %0:float32[]\n%1:float32[] = sin %0")
    priced = replace(graph, ops=(replace(graph.ops[0], seconds=seconds),))
    assert parse(show(priced)) == priced != graph


def test_a_loop_takes_seconds_too():
    text = LOOP.replace("%10 body 2", "%10 takes 2.5s body 2")
    assert show(parse(text)) == cleandoc(text)
    assert parse(text).ops[4].seconds == 2.5


def test_odd_names_are_quoted():
    graph = parse('primal %0:"Ref{float32[3]}"[3]/0B\n%1:float32[] = "a b" %0 holds "%c"')
    assert (graph.values[0].dtype, graph.ops[0].name, graph.ops[0].inner) == ("Ref{float32[3]}", "a b", {"%c"})
    assert parse(show(graph)) == graph


REFUSED = {
    "%1:float32[8] = sin %0": (
        "line 1 reads %0, which no line makes.",
        "Add the op or the input that makes %0.",
    ),
    "primal %0:float32[8]\nprimal %0:float32[4]": (
        "line 2 makes %0, which line 1 makes.",
        "Give each value a number of its own.",
    ),
    "// a remark\nprimel %0:float32[8]": (
        "line 2 reads 'primel %0:float32[8]': neither an op nor a line of a known name.",
        "An op has a `=`. Known names: 'cotangent', 'gradient', 'loop', 'next', 'output', 'primal', 'repeats', "
        "'spare', 'stacks'. Did you mean 'primal'?",
    ),
    "primal %0": ("line 1 has '%0' where a value is made.", "Write its type: %4:float32[8]."),
    "primal %0:float32[8": ("line 1 has '%0:float32[8' where a value is made.", "Write its type: %4:float32[8]."),
    "primal %0:float32[]\noutput 0": (
        "line 2 has '0' where a value is read.",
        "Write a value as %4, a literal as _.",
    ),
    "primal %0:thing[8]": (
        "line 1 has the dtype 'thing', whose size is not known.",
        "Write the bytes: %4:thing[8]/64B.",
    ),
    "primal %0:float32[]@1": ("line 1 puts %0 into loop 1.", "Write `loop 1 x6` further up."),
    "loop 2 x4": ("line 1 names loop 2, but loop 1 is next.", "Number outer loops first."),
    "%0:float32[] = ": (
        "line 1 is no op with a number of its own.",
        "Write, say, `#0 %4:float32[8] = sin %3`.",
    ),
    "%0:float32[] = iota\n#0 %1:float32[] = iota": (
        "line 2 is no op with a number of its own.",
        "Write, say, `#1 %4:float32[8] = sin %3`.",
    ),
    "%0:float32[] = iota held by": (
        "line 1 ends with 'held by'.",
        "Write nothing, `effects`, `takes 0.0125s`, `holds sin cos`, `steps x6 {`, or, of a loop and only of one, "
        "`body 1 of loop 1 {`.",
    ),
    "loop 1 x2\n= loop": (
        "line 2 ends with ''.",
        "Write nothing, `effects`, `takes 0.0125s`, `holds sin cos`, `steps x6 {`, or, of a loop and only of one, "
        "`body 1 of loop 1 {`.",
    ),
    "%0:float32[] = iota takes": (
        "line 1 ends with 'takes'.",
        "Write nothing, `effects`, `takes 0.0125s`, `holds sin cos`, `steps x6 {`, or, of a loop and only of one, "
        "`body 1 of loop 1 {`.",
    ),
    **{
        f"%0:float32[] = iota takes {figure}": (
            f"line 1 takes '{figure}'.",
            "Write what one run takes, finite and not negative: takes 0.0125s.",
        )
        for figure in ("-1s", "nans", "infs", "1e999s", "0.5", "0.5ms", "s", "1_0s", "1.s")
    },
    "loop 1 x2\n= loop body 1 of loop 3 {": (
        "line 2 opens body 1 of loop 3.",
        "Give it a new number, and write the loop further up.",
    ),
    "loop 1 x2\n= loop body 1 of loop 1 {": ("line 2 ends the text inside a body.", "Close it by a line `}`."),
    "primal %0:float32[]\nprimal %2:float32[]": (
        "line 2 ends the text, and value 1 is missing.",
        "Number each value without a gap, from 0.",
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_malformed_text_is_refused_with_its_line_and_a_cure(text):
    with pytest.raises(GraphError) as refusal:
        parse(text)
    assert str(refusal.value) == "\n".join(REFUSED[text])
