"""Compute the mask of a derivative from the function's result in place of its input.

The derivative of `y = max(x, 0)` asks whether `x > 0`, which holds just where `y > 0`. If y is kept anyway, for the
matrix product that reads it, neither x nor a mask need be kept. The same holds for `min`, `clamp`, and chains of them,
which are calls in JAX (`relu`, `relu6`). It holds for numbers, for infinities, and for NaN, where each comparison is
false. It does not hold for `jnp.maximum(x, 0)`, whose derivative in JAX is half at a tie: where y is 0, x may be less
or equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Form, Graph, Op
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.primitives import CALLS, ORDERS
from jointcut.partition.search.forms.written import Rewriting

KIND = "a mask from the result"


class Comparison(NamedTuple):
    """A comparison of a value with a number, and the results that can be compared instead."""

    mask: Op
    results: tuple[int, ...]


def candidates(problem: Problem) -> Iterator[Comparison]:
    """The comparisons of the backward alone that can be made on a result."""
    graph, sides = problem.graph, problem.sides
    for op in graph.ops:
        if op.name not in ORDERS or op.id in sides.forward or op.operands[0] is None:
            continue
        number = _number(op.payload.invars[1])
        if number is not None and (results := tuple(_results(graph, op, number))):
            yield Comparison(op, results)


def _results(graph: Graph, op: Op, number: float) -> Iterator[int]:
    source = op.operands[0]
    assert source is not None, "the first operand is a value"
    for i in graph.consumers[source]:
        reader = graph.ops[i]
        if reader.region != op.region or reader.id > op.id or len(reader.inputs) != 1 or len(reader.outputs) != 1:
            continue
        bounds = _bounds(reader.payload)
        if bounds is not None and _agree(op.name, number, *bounds):
            yield reader.outputs[0]


def _agree(name: str, number: float, low: float, high: float) -> bool:
    """Whether a comparison of x gives the same as a comparison of min(max(x, low), high), for every x."""
    return low <= number < high if name in ("gt", "le") else low < number <= high


def _bounds(equation: Any) -> tuple[float, float] | None:
    """The bounds to which an equation clips its only operand that is no number; None for any other equation."""
    name = equation.primitive.name
    if name in ("max", "min"):
        one, other = equation.invars
        number = _number(other if isinstance(other, jaxprs.Literal) else one)
        if number is None or (isinstance(one, jaxprs.Literal) and isinstance(other, jaxprs.Literal)):
            return None
        return (number, math.inf) if name == "max" else (-math.inf, number)
    if name == "clamp":
        low, high = _number(equation.invars[0]), _number(equation.invars[2])
        return None if low is None or high is None or low > high else (low, high)
    return _bounds_of_call(equation) if name in CALLS else None


def _bounds_of_call(equation: Any) -> tuple[float, float] | None:
    """The bounds of a call that holds a chain of such equations, from its input to its result."""
    inner = next(iter(jaxprs.inner_jaxprs(equation)), None)
    if inner is None or len(inner.invars) != 1 or len(inner.outvars) != 1 or inner.constvars:
        return None
    low, high, now = -math.inf, math.inf, inner.invars[0]
    for step in inner.eqns:
        bounds = _bounds(step)
        if bounds is None or not any(v is now for v in step.invars) or len(step.outvars) != 1:
            return None
        # A chain of clips is one clip: of an interval that is clipped itself.
        low, high = (min(max(end, bounds[0]), bounds[1]) for end in (low, high))
        now = step.outvars[0]
    return (low, high) if inner.outvars[0] is now else None


def _number(atom: Any) -> float | None:
    """The number that a literal has in all elements; None for other atoms, and for NaN."""
    if not isinstance(atom, jaxprs.Literal):
        return None
    value = np.asarray(atom.val)
    if value.ndim or (value.dtype.kind not in "fiub" and value.dtype.name != "bfloat16"):
        return None
    number = float(value)
    return None if math.isnan(number) else number


def write(new: Rewriting, problem: Problem, plan: Plan, places: Iterable[Comparison]) -> None:
    """Let comparisons read results that are at hand anyway; the next cut decides whether that pays."""
    at_hand = problem.sides.outputs.union(plan.values)
    for mask, results in places:
        source, result = mask.operands[0], next((y for y in results if y in at_hand), None)
        if source is not None and result is not None and problem.graph.values[source].maker is not None:
            new.instead([mask], source, result)
            new.forms.append(Form(KIND, mask.outputs[0], result, 0))
