"""Say which loops can run in segments, and what that takes.

A loop of L steps hands L copies of each residual to the backward. In segments of k steps (`segments`) it hands over
L/k carries instead, and k residuals at a time are made again from them: the sqrt(L) scheme of Chen et al., "Training
deep nets with sublinear memory cost" (2016). Here this is decided on the graph; nothing is rewritten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jointcut.partition.nesting.kinds import KINDS
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.runs import runs_forward
from jointcut.partition.program import jaxprs
from jointcut.partition.program.bodies import Body, DividingKind
from jointcut.partition.program.graph import LITERAL, STEP, TOP, Graph, Loop, Op
from jointcut.partition.program.primitives import COLLECTIVES
from jointcut.partition.program.roles import Side

#: By how much segments of one length may cost more than the best segments with a tail: a tail copies stacked results.
_EVEN = 1.1


@dataclass(frozen=True)
class Segmentable:
    """A loop that can run in segments, and what that takes.

    `values` are the residuals that need not be stacked, `residual_bytes` their size in one step; `carries` are the
    carried values to keep for each segment, `carry_bytes` their size; `rerun_ops` are the ops of the forward's body
    that run once more. `forward` and `backward` are the ops that hold the two bodies.
    """

    loop: int
    length: int
    forward: int
    backward: int
    values: tuple[int, ...]
    carries: tuple[int, ...]
    carry_bytes: int
    residual_bytes: int
    rerun_ops: tuple[int, ...]


def best_length(length: int, carry_bytes: int, residual_bytes: int) -> int:
    """The segment length k that holds the fewest bytes, `ceil(length / k) * carry_bytes + k * residual_bytes`.

    A divisor of `length`, which needs no tail, is preferred where it costs at most a tenth more.
    """
    root = math.isqrt(length) + 1
    candidates = {*range(1, root + 1), *(-(-length // q) for q in range(1, root + 1))}

    def bytes_held(k: int) -> tuple[int, int]:
        return -(-length // k) * carry_bytes + k * residual_bytes, k

    best = min(map(bytes_held, (k for k in candidates if k <= length)))
    even = min(map(bytes_held, (k for k in candidates if length % k == 0)))
    return even[1] if even[0] <= _EVEN * best[0] else best[1]


def similar_length(length: int, steps: int) -> int:
    """A segment length k near `steps` for `length` steps, of which there are two segments at least.

    XLA unrolls a loop over one segment, and may then run the forward again too early. A divisor of `length` is
    preferred, if it differs from `steps` by at most a third.
    """
    steps = min(steps, -(-length // 2))
    even = (k for k in range(-(-2 * steps // 3), 4 * steps // 3 + 1) if length % k == 0 and k < max(length, 2))
    return min(even, key=lambda k: abs(k - steps), default=steps)


def segmentable(problem: Problem, plan: Plan) -> dict[int, Segmentable]:
    """The loops that can run in segments under a plan, by loop id.

    Loops at the top of the program, of one forward and one backward body of a kind that divides, that hand over stacks
    which nothing else reads, without effects and without ops that talk to other devices.
    """
    known, key = problem.segmentable, (plan.values, plan.recomputed, plan.deferred)
    if key not in known:
        found = (_considered(problem, plan, loop) for loop in problem.graph.loops[1:])
        known[key] = {record.loop: record for record in found if record is not None}
    return known[key]


def _considered(problem: Problem, plan: Plan, loop: Loop) -> Segmentable | None:
    graph = problem.graph
    held = [body for body in graph.bodies.values() if body.loop == loop.id]
    sides = {graph.ops[body.op].origin: body for body in held}
    if loop.parent != TOP or len(held) != 2 or set(sides) != set(Side) or not all(map(_divides, held)):
        return None
    body = sides[Side.FORWARD]
    inside = graph.within(body.region)
    values = _stacked_for_loop(problem, plan, graph.within(*(r for body in held for r in body.regions)))
    ops = [op for op in graph.ops if op.region in inside]
    if not values or any(op.effects for op in ops) or any(_is_laid_out(graph, v) for op in ops for v in op.outputs):
        return None
    again, carries = needed_again(graph, body, values, runs_forward(graph, problem.sides, plan.values))
    barred = {v for bound in problem.bounds for v in bound.values if problem.verdicts[v].not_saved}
    if barred.intersection(carries) or any(({op.name} | op.inner) & COLLECTIVES for op in again):
        return None
    return Segmentable(
        loop.id,
        loop.length,
        body.op,
        sides[Side.BACKWARD].op,
        values,
        carries,
        sum(graph.values[v].bytes for v in carries),
        sum(graph.values[v].saved_bytes for v in values) // loop.length,
        tuple(op.id for op in again),
    )


def _divides(body: Body) -> bool:
    """Whether a body runs in steps that can be divided into segments."""
    return isinstance(KINDS.get(body.kind), DividingKind) and bool(body.trips)


def _is_laid_out(graph: Graph, v: int) -> bool:
    """Whether an array's type says how it lies on a mesh: cutting its stack to pieces may not fit that."""
    return jaxprs.is_explicit(getattr(graph.values[v].payload, "sharding", None))


def _stacked_for_loop(problem: Problem, plan: Plan, inside: frozenset[int]) -> tuple[int, ...]:
    """Saved values of a loop that the loop's backward reads, and nothing outside the loop."""
    graph = problem.graph
    loops = {graph.regions[r].loop for r in inside}
    late = {*problem.sides.backward, *plan.recomputed, *plan.deferred}
    ends = {v for v, _ in graph.outputs}
    scans = {graph.regions[r].holder for r in inside}

    def is_local(v: int) -> bool:
        readers = graph.consumers[v]
        near = all(graph.ops[i].region in inside or i in scans for i in readers)
        return graph.values[v].loop in loops and v not in ends and near and any(i in late for i in readers)

    return tuple(filter(is_local, plan.values))


def needed_again(
    graph: Graph, body: Body, values: Iterable[int], run: frozenset[int]
) -> tuple[list[Op], tuple[int, ...]]:
    """The ops of a forward body that some of its values are computed by, and the carried values that they start from.

    `run` are the ops that the forward runs. A loop inside the body runs again as a whole. What a carry hands on
    unchanged is a constant of the loop.
    """
    following = dict(zip(body.carried_in, body.carried, strict=True))
    inside = graph.within(body.region)
    ops: set[int] = set()
    seen: set[int] = set()
    stack: list[int | None] = list(values)
    while stack:
        v = stack.pop()
        if v is None or v in seen:
            continue
        seen.add(v)
        maker = graph.values[v].maker
        if v in following:
            stack.append(following[v])
        elif maker is not None and graph.ops[maker].region in inside and maker not in ops:
            unit = _unit(graph, body, graph.ops[maker])
            ops.update(i for i in unit if i in run or graph.ops[i].name == STEP)
            stack += [v for i in unit if i in ops for v in graph.ops[i].inputs]
    again = [graph.ops[i] for i in sorted(ops) if graph.ops[i].name not in (STEP, LITERAL)]
    return again, tuple(v for v, after in following.items() if v in seen and after != v)


def _unit(graph: Graph, body: Body, op: Op) -> list[int]:
    """An op of a body, or with all that it holds the loop of the body that an op lies in."""
    while op.region != body.region:
        op = graph.holder_of(op.region)
    if op.id not in graph.bodies:
        return [op.id]
    inside = graph.within(graph.bodies[op.id].region)
    return [op.id, *(o.id for o in graph.ops if o.region in inside)]


def shortened(lengths: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """The lengths for so many steps: the first at most as long, and those after it shorter."""
    first = min(lengths[0], steps)
    return first, *(k for k in lengths[1:] if k < first)
