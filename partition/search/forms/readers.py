"""Say who reads a value in the backward, and whether something else may be read there in its place."""

from __future__ import annotations

from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import LITERAL, OPEN, STEP, Op, Value
from jointcut.partition.program.jax import abstract, meshes


def readers(problem: Problem, plan: Plan, value: Value) -> dict[int, list[Op]] | None:
    """The ops of the backward that read a value, by region.

    None where a reader cannot read another value in its place. Such a reader is an op that belongs to the forward too,
    a loop, an output, or an op outside the loop in whose steps the value lives.
    """
    graph, sides = problem.graph, problem.sides
    found: dict[int, list[Op]] = {}
    again = {*plan.recomputed, *plan.deferred}
    for i in graph.consumers[value.id]:
        op = graph.ops[i]
        if i in again or (i in sides.backward and is_fixed(op)):
            return None
        if i in sides.backward:
            if graph.loop_of(op) != value.loop:
                return None
            found.setdefault(op.region, []).append(op)
    is_result = any(v == value.id and v not in sides.outputs for v, _ in graph.outputs)
    return None if is_result or not found else found


def is_fixed(op: Op) -> bool:
    """Whether an op's operands may not be replaced: a loop hands them to its steps, and an op may have an effect."""
    return op.name in (*OPEN, STEP, LITERAL) or op.effects


def is_usual(value: Value) -> bool:
    """Whether a value has a known size and its type names no explicit axis, so that code of ours may run on it."""
    aval = value.payload
    if aval is None or not abstract.is_plain(aval) or not all(isinstance(size, int) for size in value.shape):
        return False
    return not meshes.is_explicit(getattr(aval, "sharding", None))
