"""What a search is given: a program, and what is known of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jointcut.partition import Plan, parse
from jointcut.partition.errors import PlanError
from jointcut.partition.plans.backend import CPU
from jointcut.partition.plans.problem import Problem, as_problem
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.prices.rules import CheckpointPolicy, Constraint, judge
from jointcut.partition.program.sides import classify
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.mincut import min_cut, save_all
from jointcut.partition.search.network import network

RATES = Roofline(1e9, 1e9, 1e9)
PROGRAM = """
    primal %0:float32[8]
    cotangent %1:float32[8]
    %2:float32[8] = dot_general %0
    %3:float32[8] = neg %2
    output %3
    backward:
    %4:float32[8] = mul %1 %3
    gradient %4
"""


def test_a_problem_holds_what_is_known_of_a_graph():
    graph = parse(PROGRAM)
    problem = Problem.of(graph, backend=CPU)
    assert (problem.graph, problem.backend) == (graph, CPU)
    assert problem.sides == classify(graph)
    assert problem.prices == (0, 0, 32, 0, 32)
    assert list(problem.verdicts) == judge(graph, problem.sides)


def test_a_problem_is_made_once():
    problem = Problem.of(parse(PROGRAM), RATES)
    assert as_problem(problem) is problem
    assert as_problem(problem.graph, CPU) == Problem.of(problem.graph, backend=CPU)


def test_without_a_cost_model_no_op_has_a_price():
    problem = Problem.of(parse(PROGRAM))
    assert (problem.seconds, problem.model) == ((), None)


def test_an_op_that_is_fused_takes_no_time_and_one_of_the_backward_none_again():
    product, negation, late = Problem.of(parse(PROGRAM)).timed(RATES).seconds
    assert product > 0
    assert (negation, late) == (0.0, 0.0)


def test_prices_in_seconds_take_the_place_of_rules_of_cost():
    problem = Problem.of(parse(PROGRAM))
    assert network(problem).seconds.sum() == 0.0
    assert network(problem.timed(RATES)).seconds.sum() == problem.timed(RATES).seconds[0]


def test_demands_are_part_of_the_verdicts_and_bind_every_search():
    demand = Constraint(2, CheckpointPolicy.MUST_SAVE, "so told")
    problem = Problem.of(parse(PROGRAM), constraints=[demand])
    assert problem.constraints == (demand,)
    assert problem.verdicts[2].not_recomputed == "so told"
    assert min_cut(Problem.of(parse(PROGRAM))).values == (3,)


def test_a_plan_is_made_of_a_problem_as_of_its_graph():
    problem = Problem.of(parse(PROGRAM))
    assert Plan.of(problem, [2]) == Plan.of(problem.graph, [2])
    for strategy in (min_cut, save_all):
        assert strategy(problem) == strategy(problem.graph)


def test_a_minimum_cut_goes_by_bytes_whatever_ops_take():
    problem = Problem.of(parse(PROGRAM))
    assert min_cut(problem.timed(RATES)) == min_cut(problem)


def test_a_planner_refuses_a_problem_without_prices():
    with pytest.raises(PlanError) as caught:
        Planner(Problem.of(parse(PROGRAM)))
    assert str(caught.value) == ("The problem has no prices in seconds.\nGive a model: problem.timed(model).")


def test_another_backend_leaves_the_rest_of_a_problem_as_it_is():
    problem = Problem.of(parse(PROGRAM))
    assert replace(problem, backend=CPU).verdicts is problem.verdicts
