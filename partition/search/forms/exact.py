"""Say what stays exact where other values wait in smaller forms: masks, indices, and choices of poolings.

A number that is a little off makes a gradient that is a little off. But a comparison of such numbers, made again in the
backward, may give another mask. If a thousandth of a relu's bits differ, the gradient is off by three hundredths. So
the results of ops that choose are kept as the forward made them: masks as bits, indices as integers, and for a pooling
the element that it chose.
"""

from __future__ import annotations

from collections.abc import Iterator

from jointcut.partition.packing.forms import FORMS
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.rules import CheckpointPolicy, Constraint, judge
from jointcut.partition.program.graph import Op, Value
from jointcut.partition.program.primitives import COMPARING, JUMPING
from jointcut.partition.search.forms import bits, chosen
from jointcut.partition.search.forms.written import Rewriting

#: The reason why the result of an op that chooses is kept.
EXACT = "values that wait in a smaller form would make another choice"


def choices(problem: Problem) -> Iterator[Value]:
    """The values that ops of the forward choose by comparing floats, and that may be kept."""
    graph, plain = problem.graph, judge(problem.graph, problem.sides)
    for op in graph.ops:
        if op.name not in COMPARING | JUMPING or op.id in problem.sides.backward:
            continue
        if any("float" in graph.values[v].dtype for v in op.inputs):
            made = (graph.values[v] for v in op.outputs if not plain[v].not_saved)
            yield from (value for value in made if op.name == "sign" or "float" not in value.dtype)


def write(new: Rewriting, problem: Problem, plan: Plan) -> None:
    """Let the backward read the masks of comparisons as bits, saved or not, and the choices of poolings."""
    known = {form.value for form in problem.graph.forms}
    wanted = {v.id for v in choices(problem)} - known
    masks = (value for value in bits.candidates(problem) if value.id in wanted and _is_read_late(problem, plan, value))
    bits.write(new, problem, plan, masks, is_saved=False)
    chosen.write(new, problem, chosen.candidates(problem))


def _is_read_late(problem: Problem, plan: Plan, value: Value) -> bool:
    late = problem.sides.backward.union(plan.recomputed, plan.deferred)
    return not late.isdisjoint(problem.graph.consumers[value.id])


def kept_exact(problem: Problem, again: frozenset[int] = frozenset()) -> tuple[Constraint, ...]:
    """The constraints that keep the results of choosing ops from being chosen again.

    A mask that waits as bits is constrained as its bits. Values that must be computed `again` get no constraint; see
    `chosen_from`.
    """
    forms = problem.graph.forms
    as_bits = {form.value: form.source for form in forms if form.kind == bits.KIND}
    kept = [as_bits.get(value.id, value.id) for value in choices(problem)]
    kept += [form.source for form in forms if form.kind == chosen.KIND]
    kept += sorted(without_form(problem))
    exact = (v for v in dict.fromkeys(kept) if v not in again)
    return tuple(Constraint(v, CheckpointPolicy.MUST_SAVE, EXACT, is_asked=False) for v in exact)


def chosen_from(problem: Problem, again: frozenset[int]) -> frozenset[int]:
    """All sources of the choices that must be made `again`: they wait in no form, so that the choices stay exact."""
    graph = problem.graph
    stack, seen = [value.id for value in choices(problem) if value.id in again], set[int]()
    while stack:
        v = stack.pop()
        maker = graph.maker_of(v)
        if v not in seen:
            seen.add(v)
            stack += () if maker is None else maker.inputs
    return frozenset(seen)


def without_form(problem: Problem) -> frozenset[int]:
    """The arrays that poolings of the backward still read: they wait in no form."""
    plain = judge(problem.graph, problem.sides)
    read = (_pooled(op) for op in chosen.poolings(problem))
    return frozenset(v for v in read if not plain[v].not_saved)


def may_wait(problem: Problem, form: str) -> dict[int, int]:
    """The arrays of the forward that a form makes smaller, each with the value whose form it shares.

    A carried value has the form of its update.
    """
    graph, left_out = problem.graph, problem.sides.outputs | without_form(problem)
    found: dict[int, int] = {}
    for value in graph.values:
        is_made = value.maker is not None and not problem.sides.is_late(value.id) and value.id not in left_out
        if is_made and FORMS[form].is_smaller(value.shape, value.dtype):
            found[value.id] = value.id
    for body in graph.bodies.values():
        for carried, end, out in zip(body.carried_in, body.carried, body.carried_out, strict=True):
            for v in (carried, out):
                found.pop(v, None)
                if end in found and v not in left_out and not problem.sides.is_late(v):
                    found[v] = found[end]
    return found


def _pooled(op: Op) -> int:
    v = op.operands[1]
    assert v is not None, "a pooling of an array"
    return v
