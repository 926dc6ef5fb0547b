"""Say which loops can run in segments, and at which cost.

A loop of L steps hands L copies of each residual to the backward. In segments of k steps (`segments`) it hands over
L/k carries instead, and the residuals of k steps at a time are computed again from them. This is the sqrt(L) scheme of
Chen et al., "Training deep nets with sublinear memory cost" (2016). Here it is only decided, on the graph; nothing is
rewritten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jointcut.partition.bodies.kinds import KINDS
from jointcut.partition.errors import PlanError, message
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.runs import runs_forward
from jointcut.partition.program.bodies import Body, DividingKind
from jointcut.partition.program.graph import LITERAL, STEP, Graph, Loop, Op
from jointcut.partition.program.jax import meshes
from jointcut.partition.program.primitives import COLLECTIVES
from jointcut.partition.program.roles import Side

#: How much more equal segments may cost than the best segments with a tail. A tail copies stacked results.
_EVEN = 1.1

#: The steps of a segment; for several levels of segments, the steps of each level, the longest first.
Lengths = int | tuple[int, ...]


@dataclass(frozen=True)
class Segmentable:
    """A loop that can run in segments.

    Attributes:
        loop: the loop's id.
        length: its steps.
        forward, backward: the ops that hold the two bodies.
        values: the residuals that need not be stacked.
        carries: the carried values to keep for each segment.
        carry_bytes: the size of the carries.
        residual_bytes: the size of the residuals of one step.
        rerun_ops: the ops of the forward's body that run once more.
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
    """A segment length k near `steps`, such that `length` steps make at least two segments.

    XLA unrolls a loop over one segment, and may then run the forward again too early. A divisor of `length` is
    preferred, if it differs from `steps` by at most a third.
    """
    steps = min(steps, -(-length // 2))
    even = (k for k in range(-(-2 * steps // 3), 4 * steps // 3 + 1) if length % k == 0 and k < max(length, 2))
    return min(even, key=lambda k: abs(k - steps), default=steps)


def segmentable(problem: Problem, plan: Plan) -> dict[int, Segmentable]:
    """The loops that can run in segments under a plan, by loop id.

    Such a loop runs once, at the top of the program or in a `jax.shard_map` there. It has one forward and one backward
    body of a kind that divides, and hands over stacks that nothing else reads. It has no effects, and no ops that talk
    to other devices.
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
    if loop.parent not in graph.once or loop.rivals or len(held) != 2 or set(sides) != set(Side):
        return None
    if not all(map(_divides, held)):
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
    """Whether an array's type says how it lies on a mesh: pieces of its stack may not fit that layout."""
    return meshes.is_explicit(getattr(graph.values[v].payload, "sharding", None))


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
    """The ops of a forward body that compute some of its values, and the carried values that they start from.

    `run` are the ops that the forward runs. A loop inside the body runs again as a whole. A carried value that each
    step hands on unchanged is a constant of the loop.
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
    """The unit of a body that an op belongs to: the op alone, or the body's loop around it with all its ops."""
    while op.region != body.region:
        op = graph.holder_of(op.region)
    if op.id not in graph.bodies:
        return [op.id]
    inside = graph.within(*graph.bodies[op.id].regions)
    return [op.id, *(o.id for o in graph.ops if o.region in inside)]


def shortened(lengths: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """The lengths cut down to `steps`: the first at most as long, and the later ones shorter."""
    first = min(lengths[0], steps)
    return first, *(k for k in lengths[1:] if k < first)


def checked(known: Mapping[int, Segmentable], loop: int, given: Lengths) -> tuple[int, ...]:
    """The lengths of a loop's segments, as asked. Raises `PlanError` if the loop cannot be divided so."""
    where = f"lengths[{loop}]"
    if loop not in known:
        cure = f"Those that can: {sorted(known)}."
        raise PlanError(message(where, "names a loop that cannot run in segments.", cure))
    lengths = given if isinstance(given, tuple) else (given,)
    bounds = (known[loop].length + 1, *lengths)
    if not lengths or any(not 1 <= k < most for k, most in zip(lengths, bounds, strict=False)):
        cure = f"Give a length from 1 to {known[loop].length}, or several in a tuple, each shorter than the one before."
        raise PlanError(message(where, f"is {given}, and the loop has {known[loop].length} steps.", cure))
    return lengths


def checked_last(known: Mapping[int, Segmentable], loop: int, given: int) -> int:
    """The number of last steps of a loop outside segments, as asked. Raises `PlanError` if the loop has fewer steps."""
    where = f"kept_steps[{loop}]"
    if loop not in known:
        raise PlanError(message(where, "names a loop that does not run in segments.", "Give its length, too."))
    if not 0 <= given < known[loop].length:
        cure = f"Give a number from 0 to {known[loop].length - 1}."
        raise PlanError(message(where, f"is {given}, and the loop has {known[loop].length} steps.", cure))
    return given
