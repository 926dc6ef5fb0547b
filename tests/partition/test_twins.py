"""Twins are the same values of the same forward, whatever the backward and whoever numbered them."""

import pytest

from jointcut import aot
from jointcut.partition import parse, show
from jointcut.partition.plans.matching import in_order, twins
from jointcut.partition.search.mincut import min_cut, save_all
from programs import CORPUS

PLAIN = """
primal %0:float32[8]
primal %1:float32[8]
cotangent %2:float32[]
%3:float32[8] = mul %0 %1
%4:float32[8] = sin %3
%5:float32[8] = sin %0
%6:float32[8] = mul %4 %5
%7:float32[] = reduce_sum %6
backward:
%8:float32[8] = broadcast_in_dim %2
%9:float32[8] = mul %8 %4
%10:float32[8] = mul %9 %1
output %7
gradient %10
"""
MORE = PLAIN.replace("gradient %10", "%11:float32[8] = mul %9 %0\noutput %7\ngradient %11\ngradient %10").replace(
    "output %7\n%11", "%11"
)
MOVED = """
primal %0:float32[8]
primal %1:float32[8]
cotangent %2:float32[]
%3:float32[8] = sin %0
%4:float32[8] = mul %0 %1
%5:float32[8] = sin %4
%6:float32[8] = mul %5 %3
%7:float32[] = reduce_sum %6
backward:
%8:float32[8] = broadcast_in_dim %2
%9:float32[8] = mul %8 %5
%10:float32[8] = mul %9 %1
output %7
gradient %10
"""


def test_a_value_is_its_own_twin(traced):
    for program in CORPUS:
        if program.name == "integers_to_differentiate":  # that one cannot be traced
            continue
        graph = traced(program.name).graph
        values = {*min_cut(graph).values, *save_all(graph).values}
        for there in (graph, parse(show(graph))):
            assert twins(values, there, graph) == {v: v for v in values}, program.name


def test_another_backward_changes_no_twin():
    assert twins([3, 4, 5, 6], parse(PLAIN), parse(MORE)) == {3: 3, 4: 4, 5: 5, 6: 6}


def test_another_order_of_the_same_ops_gives_twins_of_other_ids():
    assert twins([3, 4, 5, 6], parse(PLAIN), parse(MOVED)) == {3: 4, 4: 5, 5: 3, 6: 6}


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("%6:float32[8] = mul %4 %5", "%6:float32[8] = add %4 %5"),
        ("%6:float32[8] = mul %4 %5", "%6:float32[8] = mul %5 %4"),
        ("%5:float32[8] = sin %0", "%5:float32[8] = sin %1"),
        ("%7:float32[] = reduce_sum %6", "%7:float32[] = reduce_sum %5"),
    ],
)
def test_another_forward_has_no_twins(line, other):
    assert twins([3], parse(PLAIN), parse(PLAIN.replace(line, other))) is None


def test_what_the_forward_of_the_other_program_lacks_has_no_twin():
    only_there = PLAIN.replace("backward:", "%11:float32[8] = cos %0\nbackward:").replace("mul %9 %1", "mul %9 %11")
    assert twins([11], parse(only_there), parse(PLAIN)) is None
    assert twins([4], parse(only_there), parse(PLAIN)) == {4: 4}


def test_of_several_alike_the_first_is_the_twin_of_the_first():
    halves = PLAIN.replace("%4:float32[8] = sin %3", "%11:float32[8] = slice %3\n%12:float32[8] = slice %3\n"
                           "%4:float32[8] = add %11 %12")  # fmt: skip
    assert twins([11, 12], parse(halves), parse(halves)) == {11: 11, 12: 12}


@pytest.mark.parametrize("name", ["scan_over_layers", "nested_scans", "elman", "two_layers"])
def test_the_plan_of_one_argument_s_gradient_has_its_twins_where_all_are_differentiated(name):
    program = next(p for p in CORPUS if p.name == name)
    arguments = program.make()
    of_one = aot.function(program.function).trace(*arguments).graph
    of_all = aot.function(program.function, argnums=tuple(range(len(arguments)))).trace(*arguments).graph
    assert show(of_all) != show(of_one)
    plan = min_cut(of_one)
    found = twins(plan.values, parse(show(of_one)), of_all)
    assert found is not None
    for there, here in found.items():
        assert str(of_one.values[there]).partition(":")[2] == str(of_all.values[here]).partition(":")[2]


def test_ops_come_in_the_order_in_which_the_text_shows_them(traced):
    for name in ("nested_scans", "scan_over_layers", "two_layers"):
        graph = traced(name).graph
        lines = [line.split(" = ")[1].split()[0] for line in show(graph).splitlines() if " = " in line]
        assert sorted(in_order(graph)) == list(range(len(graph.ops)))
        assert [graph.ops[i].name for i in in_order(graph)] == lines
