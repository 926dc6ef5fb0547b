"""Mark the ops that must run forward, the ops that must run backward, and the ops that may do either.

*Backward* ops need a cotangent, have an effect and were traced in the backward, or belong to a backward scan. *Forward*
ops are needed by an output of the user, or have an effect and were traced in the forward. The other ops (`1/sqrt(x)`
used by a gradient only) may run on either side. The words follow `classify_nodes` of PyTorch's partitioner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jointcut.partition.errors import GraphError, message
from jointcut.partition.program.graph import LITERAL, OPEN, STEP, TOP, Graph, Op
from jointcut.partition.program.roles import Role, Side


@dataclass(frozen=True)
class Sides:
    """Op ids by side, and the values that matter where the sides meet.

    Attributes:
        wanted: forward values that an op of the backward reads, or that are gradients themselves.
        escaping: values read outside the loop that makes them, where only their whole stack serves.
        outputs: values handed to the user.
        late: values that exist only in the backward.
    """

    backward: frozenset[int]
    forward: frozenset[int]
    wanted: frozenset[int]
    escaping: frozenset[int]
    outputs: frozenset[int]
    late: frozenset[int]

    def is_late(self, value_id: int) -> bool:
        """Whether a value exists in the backward only."""
        return value_id in self.late


def classify(graph: Graph) -> Sides:
    """Return the sides of a graph.

    Raises `GraphError` where an output of the user needs a cotangent, since no cut can serve it.
    """
    backward, late = _backward(graph)
    forward = _forward(graph)
    if mixed := sorted(forward & backward):
        where = graph.where(graph.ops[mixed[0]].outputs[0])
        cure = "Give that result the role GRADIENT, or take the cotangent out of it."
        raise GraphError(message(where, "is an output of the forward but needs a cotangent.", cure))
    reads = {v for op_id in backward for v in _read_by(graph, graph.ops[op_id])}
    wanted = graph.results(Role.GRADIENT).union(reads) - late
    return Sides(backward, forward, wanted, _escaping(graph), graph.results(Role.OUTPUT), late)


def _read_by(graph: Graph, op: Op) -> Iterable[int]:
    """The values that an op of the backward reads; for a scan only values around it, as its ops read the others."""
    if op.name not in OPEN:
        return op.inputs
    return [v for v in op.inputs if graph.values[v].loop in graph.ancestors[graph.loop_of(op)]]


def _backward(graph: Graph) -> tuple[frozenset[int], frozenset[int]]:
    """Ops that must run in the backward, and the values that exist only there: the closure over users."""
    ops: set[int] = set()
    late = set(graph.role_inputs(Role.COTANGENT))
    pinned = [
        op
        for op in graph.ops
        if op.origin is Side.BACKWARD
        and (op.effects or graph.regions[op.region].origin is Side.BACKWARD or op.name in OPEN)
        and op.name not in (STEP, LITERAL)
    ]
    stack = [*late]
    for op in pinned:
        ops.add(op.id)
        stack.extend(op.outputs)
    late.update(stack)
    while stack:
        for user in graph.consumers[stack.pop()]:
            if user not in ops:
                ops.add(user)
                new = [v for v in graph.ops[user].outputs if v not in late]
                late.update(new)
                stack.extend(new)
    return frozenset(ops), frozenset(late)


def _forward(graph: Graph) -> frozenset[int]:
    """Ops that the user's outputs and the forward's effects need: the closure over makers."""
    starts = [op.id for v in graph.results(Role.OUTPUT) if (op := graph.maker_of(v)) is not None]
    starts += [op.id for op in graph.ops if op.effects and op.origin is Side.FORWARD]
    return frozenset(reached(starts, graph.behind))


def _escaping(graph: Graph) -> frozenset[int]:
    """Values of a loop that are read outside it, as a stack."""
    out = {v for v, _ in graph.outputs if v is not None and graph.values[v].loop != TOP}
    for op in graph.ops:
        # The next-step values of a scan lie in its own body; all other values must lie in a loop around the op.
        home = graph.ancestors[graph.loop_of(op)]
        for v in op.inputs:
            loop = graph.values[v].loop
            if loop not in home and not (op.name in OPEN and loop in graph.loops_in(op.id)):
                out.add(v)
    return frozenset(out)


def reached(starts: Iterable[int], further: Callable[[int], Iterable[int]]) -> dict[int, None]:
    """The numbers reached from `starts`, in order; `further` gives those to go on to from each, and is asked once."""
    seen: dict[int, None] = {}
    stack = list(starts)
    while stack:
        if (v := stack.pop()) not in seen:
            seen[v] = None
            stack += further(v)
    return seen


def first_met(graph: Graph, starts: Iterable[int], stops: Callable[[int, Op], bool]) -> list[int]:
    """The first values going back from `starts` for which `stops` is true of the value and its op."""
    found: list[int] = []

    def further(v: int) -> Iterable[int]:
        op = graph.maker_of(v)
        if op is None or not stops(v, op):
            return () if op is None else op.inputs
        found.append(v)
        return ()

    reached(starts, further)
    return found
