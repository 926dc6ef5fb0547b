"""A small graph whose minimum cut is asked for under rules that are given, to see it refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.rules import Verdict
from jointcut.partition.program.text import parse
from jointcut.partition.search.mincut import MinimumCut, minimum_cut
from jointcut.partition.search.network import network

CHAIN = """
    primal %0:float32[8]
    cotangent %1:float32[]
    %2:float32[8] = dot_general %0
    %3:float32[8] = sin %2
    backward:
    %4:float32[8] = mul %1 %3
    gradient %4
"""


def cut_under(verdicts: Mapping[int, Verdict]) -> MinimumCut:
    """The minimum cut of the chain, where `verdicts` forbid what the rules would not."""
    graph = parse(CHAIN)
    rules = (verdicts.get(v.id, Verdict("", "it is an input" if v.maker is None else "")) for v in graph.values)
    return minimum_cut(network(replace(Problem.of(graph), verdicts=tuple(rules))))
