"""Read the carried values of a step from the stack of the step before, where both stacks are kept anyway.

A recurrent layer returns its states, `h[1], ..., h[n]`, for the layer above, and its backward reads the state before
each step, `h[0], ..., h[n-1]`. JAX keeps both stacks, also where only the backward reads the states. The second is the
first, moved by one step.

In a loop inside a loop the moved stack is made before the backward's loop. In an outermost loop each step of the
backward takes the row before its own, so that there is never a second stack. But an outermost loop can run in segments,
which need neither stack: with these forms the smallest step of two LSTM layers grew from 14.5 to 21.5 MB. So they are
for default plans (`outermost`), and a search for a budget goes without them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.bodies import SCAN, Body
from jointcut.partition.program.graph import Form, Graph
from jointcut.partition.program.roles import Side
from jointcut.partition.search.forms.readers import is_usual, readers
from jointcut.partition.search.forms.written import Rewriting
from jointcut.partition.search.mincut import min_cut

KIND, OUTERMOST = "a carried value from the step before", "a carried value from the row before"


class CarriedValue(NamedTuple):
    """A carried value of a loop: as a step finds it, as the step hands it on, and the operand that it starts from."""

    body: Body
    found: int
    handed: int
    start: Any


def outermost(graph: Graph) -> Graph:
    """The graph in which the backward's outermost loops take rows of the steps before; the same graph without such."""
    if any(v.payload is None for v in graph.values):
        return graph
    problem, new = Problem.of(graph), Rewriting(graph)
    if places := [*candidates(problem, False)]:
        write(new, problem, min_cut(problem), places)
    return new.finished() if new.forms else graph


def candidates(problem: Problem, are_inner: bool = True) -> Iterator[CarriedValue]:
    """The carried values of inner or of outermost loops that the backward reads, and that are made in each step."""
    graph = problem.graph
    for body in graph.bodies.values():
        is_inner = graph.loops[body.loop].parent not in graph.once
        if is_inner is not are_inner or body.kind != SCAN or body.inside is None:
            continue
        if graph.ops[body.op].origin is not Side.FORWARD:
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
        params, aval = graph.ops[body.op].payload.params, graph.values[found].payload
        is_inner, reverse = graph.loops[body.loop].parent not in graph.once, bool(params["reverse"])
        if is_inner:
            stack = new.before(holder, _moved(reverse), [handed, start])
            step = new.step(holder, stack, body.loop, aval)
        else:
            stack, numbers = new.seen_before(holder, _whole, handed), new.before(holder, _numbers(params["length"]), [])
            number = new.step(holder, numbers, body.loop, jax.typeof(np.int32(0)))
            step = new.before(min(ops, key=lambda op: op.id), _row_before(reverse), [stack, start, number])
        new.instead(ops, found, step)
        new.forms.append(Form(KIND if is_inner else OUTERMOST, found, handed, less))


def _whole(stack: Any) -> Any:
    """A view of a stack as one array."""
    return lax.reshape(stack, (1, *stack.shape))


@functools.cache
def _numbers(length: int) -> Callable[[], Any]:
    return lambda: lax.iota(np.int32, length)


@functools.cache
def _row_before(reverse: bool) -> Callable[[Any, Any, Any], Any]:
    def row_before(stack: Any, start: Any, i: Any) -> Any:
        last = stack.shape[1] - 1
        place, is_first = (jnp.minimum(i + 1, last), i == last) if reverse else (jnp.maximum(i - 1, 0), i == 0)
        return lax.select(is_first, start, lax.dynamic_index_in_dim(stack, place, 1, keepdims=False)[0])

    return row_before


@functools.cache
def _moved(reverse: bool) -> Callable[[Any, Any], Any]:
    def step_before(stack: Any, start: Any) -> Any:
        first = lax.expand_dims(start, [0])
        if reverse:
            return lax.concatenate([lax.slice_in_dim(stack, 1, None), first], 0)
        return lax.concatenate([first, lax.slice_in_dim(stack, 0, -1)], 0)

    return step_before
