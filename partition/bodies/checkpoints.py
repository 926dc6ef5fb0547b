"""Give the loops of a graph other numbers of checkpoints.

A loop whose trips only a run can tell is two closed ops, or more: one leaves checkpoints, and the others run the loop
back from them. The arrays between them have a row for each checkpoint, and nothing else reads these. So a graph with
another number of checkpoints has the same ops and values; only the sizes of these arrays differ, and the equations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from jointcut.partition.errors import PlanError, message
from jointcut.partition.figures import counted
from jointcut.partition.program.bodies import CHECKPOINTED, Nested
from jointcut.partition.program.graph import TOP, Graph, Op, Value
from jointcut.partition.program.jax import abstract, own_primitives

#: Loops by the ids of the ops that leave their checkpoints, each with a number of checkpoints.
Numbers = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Adjustable:
    """A loop whose number of checkpoints may be chosen.

    Attributes:
        number: the number that the graph has.
        most: the largest number that a plan may choose.
        back: ids of the ops that run the loop back.
        rows: ids of the values that have a row for each checkpoint.
    """

    number: int
    most: int
    back: tuple[int, ...]
    rows: tuple[int, ...]


def adjustable_loops(graph: Graph) -> dict[int, Adjustable]:
    """The loops whose number of checkpoints may be chosen, by the ids of the ops that leave these."""
    backs: dict[int | None, list[int]] = defaultdict(list)
    for i, loop in graph.nested.items():
        makers = {graph.values[v].maker for v in _rows(graph, i)}
        if loop.is_adjustable:
            backs[makers.pop() if len(makers) == 1 else None].append(i)
    found: dict[int, Adjustable] = {}
    for op, back in backs.items():
        rows = sorted({v for i in back for v in _rows(graph, i)})
        if op is not None and graph.ops[op].name == CHECKPOINTED and _are_own(graph, rows, back):
            loop = graph.nested[back[0]]
            found[op] = Adjustable(loop.checkpoints, max(loop.most, loop.checkpoints), tuple(back), tuple(rows))
    return dict(sorted(found.items()))


def _rows(graph: Graph, back: int) -> list[int]:
    operands = graph.ops[back].operands
    return [v for i in graph.nested[back].rows if (v := operands[i]) is not None]


def _are_own(graph: Graph, rows: Iterable[int], back: list[int]) -> bool:
    """Whether only these ops read the values, which no branch keeps in a space that it shares."""
    results = {v for v, _ in graph.outputs}
    return all(
        v not in results and set(graph.consumers[v]) <= set(back) and graph.branch_of(v, TOP) is None for v in rows
    )


def with_checkpoints(graph: Graph, known: dict[int, Adjustable], numbers: Numbers) -> Graph:
    """The same program in which some of the `known` loops keep other numbers of checkpoints.

    Raises `PlanError` for a loop that is not known or named twice, and for a number that is not from 1 up to its most.
    """
    values, nested = with_rows(graph, known, numbers)
    ops, names = list(graph.ops), dict[int, dict[Any, Any]]()
    for op, number in numbers:
        for i in (op, *known[op].back):
            region = graph.regions[ops[i].region]
            ops[i] = _rewritten(ops[i], number, names.setdefault(region.id, dict(region.names)))
    regions = tuple(replace(r, names=names.get(r.id, r.names)) for r in graph.regions)
    return replace(graph, values=tuple(values), ops=tuple(ops), regions=regions, nested=nested)


def with_rows(graph: Graph, known: dict[int, Adjustable], numbers: Numbers) -> tuple[list[Value], dict[int, Nested]]:
    """The values and the nested steps of `with_checkpoints`, without equations: these take longer."""
    values, nested, left = list(graph.values), dict(graph.nested), dict(known)
    for op, number in numbers:
        if (kept := left.pop(op, None)) is None or not 1 <= number <= kept.most:
            what = f"gives {counted(number, 'checkpoint')} to op {op}, whose loop cannot keep them."
            raise PlanError(message("plan.checkpoints", what, _choices(known)))
        for v in kept.rows:
            values[v] = _resized(values[v], number - kept.number)
        nested |= {i: replace(nested[i], checkpoints=number, rows=()) for i in kept.back}
    return values, nested


def _choices(known: dict[int, Adjustable]) -> str:
    told = " or ".join(f"{op} up to {kept.most}" for op, kept in known.items())
    return f"Give it once: op {told}." if told else "Give none: no loop here may keep another number."


def _resized(value: Value, more: int) -> Value:
    """A value with more rows, or fewer."""
    before, *sizes = value.shape
    payload = None if value.payload is None else abstract.resized(value.payload, before + more)
    return replace(value, shape=(before + more, *sizes), bytes=value.bytes // before * (before + more), payload=payload)


def _rewritten(op: Op, number: int, names: dict[Any, Any]) -> Op:
    """An op of the loop with this number; variables of other types get `names`."""
    if op.payload is None:
        return op
    eqn = own_primitives.with_checkpoints(op.payload, number)
    pairs = zip((*op.payload.invars, *op.payload.outvars), (*eqn.invars, *eqn.outvars), strict=True)
    names.update((new, names[old]) for old, new in pairs if new is not old)
    return replace(op, payload=eqn)


def steps_again(trips: int, slots: int) -> int:
    """The fewest steps that run again to pull back `trips` steps from `slots` checkpoints.

    They are those of the algorithm in `aot/loops/sweep`.

    >>> steps_again(10, 10), steps_again(10, 3)
    (0, 7)
    """
    if trips <= slots:
        return 0
    again = trips - 1 if slots == 1 else next(r for r in range(1, trips + 1) if math.comb(slots + r, r) >= trips)
    return max(again * trips - math.comb(slots + again, again - 1) - trips, trips - slots)
