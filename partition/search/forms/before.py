"""Read the carried values of a step from the stack of the step before, where both stacks are kept anyway.

A recurrent layer returns its states, `h[1], ..., h[n]`, for the layer above, and its backward reads the state before
each step, `h[0], ..., h[n-1]`. JAX keeps both stacks. The second is the first, moved by one step.

This is for loops inside loops. An outermost loop can run in segments, which need no such stack. With the moved stack,
the smallest step of two LSTM layers grew from 14.5 to 21.5 MB, though the default plan kept 0.87 of the bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jax import lax

from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.bodies import SCAN, Body
from jointcut.partition.program.graph import Form
from jointcut.partition.program.roles import Side
from jointcut.partition.search.forms.readers import is_usual, readers
from jointcut.partition.search.forms.written import Rewriting

KIND = "a carried value from the step before"


class CarriedValue(NamedTuple):
    """A carried value of a loop: as a step finds it, as the step hands it on, and the operand that it starts from."""

    body: Body
    found: int
    handed: int
    start: Any


def candidates(problem: Problem) -> Iterator[CarriedValue]:
    """The carried values of inner loops that the backward reads, and that are made in each step."""
    graph = problem.graph
    for body in graph.bodies.values():
        is_inner = graph.loops[body.loop].parent not in graph.once
        if not is_inner or body.kind != SCAN or body.inside is None or graph.ops[body.op].origin is not Side.FORWARD:
            continue
        for found, handed, start, carry in zip(
            body.carried_in, body.carried, body.starts, body.inside.carries, strict=True
        ):
            if handed is None or found not in problem.sides.wanted or not is_usual(graph.values[found]):
                continue
            maker = graph.maker_of(handed)
            if maker is not None and maker.region == body.region and graph.values[handed].loop == body.loop:
                yield CarriedValue(body, found, handed, carry.start if start is None else start)


def write(new: Rewriting, problem: Problem, plan: Plan, places: Iterable[CarriedValue]) -> None:
    """Let the backward read the stack of the step before, where a plan keeps both stacks."""
    graph = problem.graph
    saved = set(plan.values)
    for body, found, handed, start in places:
        if found not in saved or handed not in saved | problem.sides.outputs:
            continue
        regions = readers(problem, plan, graph.values[found])
        started = graph.values[start].saved_bytes if isinstance(start, int) else 0  # may have to be kept instead
        less = graph.values[found].saved_bytes - started
        if regions is None or len(regions) != 1 or less <= 0:
            continue
        ((region, ops),) = regions.items()
        holder = graph.holder_of(region)
        if graph.regions[holder.region].loop != graph.loops[body.loop].parent:
            continue
        reverse = bool(graph.ops[body.op].payload.params["reverse"])
        stack = new.before(holder, _moved(reverse), [handed, start])
        step = new.step(holder, stack, body.loop, graph.values[found].payload)
        new.instead(ops, found, step)
        new.forms.append(Form(KIND, found, handed, less))


@functools.cache
def _moved(reverse: bool) -> Callable[[Any, Any], Any]:
    def step_before(stack: Any, start: Any) -> Any:
        first = lax.expand_dims(start, [0])
        if reverse:
            return lax.concatenate([lax.slice_in_dim(stack, 1, None), first], 0)
        return lax.concatenate([first, lax.slice_in_dim(stack, 0, -1)], 0)

    return step_before
