"""Choose the forms that pay, for the minimum cut of a program.

The program is cut without forms first. If a kept value has a cheaper form, the graph is written again with it. A form
whose price is known beforehand is taken where it is smaller. For other forms the cut of the new graph decides.

Packing and unpacking take time, and spare the time to write and read the bytes that they spare. Bits and small integers
are taken where they are not slower by the rates of a `model`. Without a model they are taken wherever they are smaller:
they are never slower by the rates of this package for a CPU (`search/best`), nor by the data sheet of a GPU.

Measured with XLA:CPU on two cores, by turns with plain values: XLA fuses packing into the op that makes a mask and
unpacking into its readers. For 65 thousand to 8 million elements, bits changed the time of forward and backward
together by between 0.03 ns more and 0.35 ns less per element. Using int16 for int32 was faster every time. In whole
steps the median of the ratio of the times is between 0.95 and 1.02, for dropout alone, an MLP with dropout and the GPT
of the suite.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import CostModel, Roofline
from jointcut.partition.program.graph import Graph
from jointcut.partition.search.forms import before, bits, exact, indices, results
from jointcut.partition.search.forms.written import Rewriting
from jointcut.partition.search.mincut import min_cut


def formed(graph: Graph, exact_masks: bool = False, model: CostModel | None = None) -> Graph:
    """The graph with the cheaper forms of values that lower its minimum cut; the same graph where there is none.

    Its halves return the same bits. With a `Roofline` as `model`, bits and small integers that are slower than the
    plain values are left out; other models do not price packing. With `exact_masks` the backward reads masks of
    comparisons as bits, and its poolings read the place of the chosen element. Raises the errors of `min_cut`.
    """
    if any(v.payload is None for v in graph.values):
        return graph
    cheaper = _cheaper(graph, model if isinstance(model, Roofline) else None)
    if not exact_masks:
        return cheaper
    problem, new = Problem.of(cheaper), Rewriting(cheaper)
    exact.write(new, problem, min_cut(problem))
    return new.finished() if new.forms else cheaper


def _cheaper(graph: Graph, rates: Roofline | None) -> Graph:
    """The graph with the forms that pay, by the rates if there are any."""
    problem = Problem.of(graph)
    if not any(next(kind.candidates(problem), None) for kind in (results, bits, indices, before)):
        return graph
    plan = min_cut(problem)
    if rates is not None:
        rates = rates.within(plan.bytes_saved * graph.devices)
    with_results = _written(graph, problem, plan, rates, results)
    if with_results is not graph:
        again = Problem.of(with_results)
        cut = min_cut(again)
        if less := max(plan.bytes_saved - cut.bytes_saved, 0):
            first, *others = with_results.forms
            graph = replace(with_results, forms=(replace(first, bytes_less=less), *others))
            problem, plan = again, cut
    return _written(graph, problem, plan, rates, bits, indices, before)


def not_slower(rates: Roofline, additions: float, bytes_less: int) -> bool:
    """Whether these additions of vectors take no longer than writing and reading `bytes_less` bytes."""
    return additions / rates.elementwise_per_s <= rates.saving_seconds(bytes_less)


def _written(graph: Graph, problem: Problem, plan: Plan, rates: Roofline | None, *kinds: Any) -> Graph:
    """The graph with the forms of some kinds that are worthwhile under a plan of it."""
    new = Rewriting(graph)
    for kind in kinds:
        places = kind.candidates(problem)
        if rates is not None and kind in (bits, indices):
            places = (place for place in places if not_slower(rates, *kind.work(place)))
        kind.write(new, problem, plan, places)
    return new.finished() if new.forms else graph
