"""Choose the forms that pay, for the minimum cut of a program.

The program is cut as it is. Where a cheaper form of a value that is kept then exists, the graph is written again with
it. A form whose price is known beforehand is taken where it is smaller; of the others the cut of the new graph decides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Graph
from jointcut.partition.search.forms import before, bits, exact, indices, results
from jointcut.partition.search.forms.written import Rewriting
from jointcut.partition.search.mincut import min_cut


def formed(graph: Graph, exact_masks: bool = False) -> Graph:
    """The graph with the cheaper forms of values that lower its minimum cut; the same graph where there is none.

    Its halves return the same bits. With `exact_masks` the backward reads masks of comparisons as bits, and its
    poolings read which element was chosen. Raises the errors of `min_cut`.
    """
    if any(v.payload is None for v in graph.values):
        return graph
    cheaper = _cheaper(graph)
    if not exact_masks:
        return cheaper
    problem, new = Problem.of(cheaper), Rewriting(cheaper)
    exact.write(new, problem, min_cut(problem))
    return new.finished() if new.forms else cheaper


def _cheaper(graph: Graph) -> Graph:
    """The graph with the forms that pay."""
    problem = Problem.of(graph)
    if not any(next(kind.candidates(problem), None) for kind in (results, bits, indices, before)):
        return graph
    plan = min_cut(problem)
    with_results = _written(graph, problem, plan, results)
    if with_results is not graph:
        again = Problem.of(with_results)
        cut = min_cut(again)
        if less := max(plan.bytes_saved - cut.bytes_saved, 0):
            first, *others = with_results.forms
            graph = replace(with_results, forms=(replace(first, bytes_less=less), *others))
            problem, plan = again, cut
    return _written(graph, problem, plan, bits, indices, before)


def _written(graph: Graph, problem: Problem, plan: Plan, *kinds: Any) -> Graph:
    """The graph with the forms of some kinds that a plan of it makes worth having."""
    new = Rewriting(graph)
    for kind in kinds:
        kind.write(new, problem, plan, kind.candidates(problem))
    return new.finished() if new.forms else graph
