"""Choose the forms that pay, for the minimum cut of a program.

The program is cut as it is. Where a cheaper form of a value that is kept then exists, the graph is written again with
it. A form whose price is known beforehand is taken where it is smaller; of the others the cut of the new graph decides.
"""

from __future__ import annotations

from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Graph
from jointcut.partition.search.forms import before, bits, results
from jointcut.partition.search.forms.written import Rewriting
from jointcut.partition.search.mincut import min_cut


def formed(graph: Graph) -> Graph:
    """The graph with the cheaper forms of values that lower its minimum cut; the same graph where there is none.

    Its halves return the same bits. Raises the errors of `min_cut`.
    """
    if any(v.payload is None for v in graph.values):
        return graph
    problem = Problem.of(graph)
    masks, carried = list(results.candidates(problem)), list(before.candidates(problem))
    if not (masks or carried or next(bits.candidates(problem), None)):
        return graph
    plan = min_cut(problem)
    new = Rewriting(graph)
    results.write(new, problem, plan, masks)
    if new.forms:
        graph_with = new.finished()
        cut = min_cut(again := Problem.of(graph_with))
        if cut.bytes_saved < plan.bytes_saved:
            graph, problem, plan = graph_with, again, cut
    new = Rewriting(graph)
    bits.write(new, problem, plan)
    before.write(new, problem, plan, list(before.candidates(problem)) if carried else [])
    return new.finished() if new.forms else graph
