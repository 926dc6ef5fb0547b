"""Say along which axis each value of a graph keeps rows apart, and which ops mix rows.

Forward and backward are followed in turn (`program/axes`). The forward begins at the inputs with rows. The backward
begins at all values of the forward that have rows or in which rows have met, and at the cotangents, which have rows
where their outputs do. Any row of the backward may read sums of the forward: when it runs, these are known.

So a value is told by all that it was computed from. A tiling (`grow`) is told by single ops: it goes on behind an op
that mixes rows, in another loop. Where this file finds no such op in the forward, a tiling takes all its ops in one
loop, but for those that it cannot write for fewer rows: loops over the rows, effects, and `jax.custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jointcut.partition.program.axes import MET, TOTAL, Joined, Place, Rows, is_sum
from jointcut.partition.program.graph import TOP, Graph
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.places import line_of
from jointcut.partition.program.roles import Role, Roles, Side


@dataclass(frozen=True)
class Mixing:
    """An op that mixes rows.

    Attributes:
        op: its primitive.
        source: the line of the user's code that made it, `file:line (function)`; empty if unknown.
        side: the half in which it was traced.
        reads_total: whether it mixes rows with a number that was computed from all of them, such as their mean.
    """

    op: str
    source: str
    side: Side
    reads_total: bool


def apart(
    closed: Any, roles: Roles, given: Mapping[int, int], carries: Sequence[bool]
) -> tuple[Rows, tuple[Mixing, ...]]:
    """Follow rows through a joint program, and find the ops that mix them, in order.

    `given` has the axis of the rows by the number of each input that has rows, and `carries` says which outputs have
    a cotangent among the inputs.
    """
    jaxpr, _ = jaxprs.opened(closed)
    boundary = len(jaxpr.eqns) if roles.forward_ops is None else roles.forward_ops
    early = Rows()
    early.put(jaxpr.invars, [given.get(n) for n in range(len(jaxpr.invars))])
    early.follow(jaxpr.eqns[:boundary])
    sums = (v for v, p in early.places.items() if isinstance(p, Joined) and p != MET)
    late = Rows({**early.places, **dict.fromkeys(sums, TOTAL)}, shares=True)
    cotangents = [v for v, role in zip(jaxpr.invars, roles.inputs, strict=True) if role is Role.COTANGENT]
    carrying = [v for v, on in zip(jaxpr.outvars, carries, strict=False) if on]
    late.put(cotangents, [_of_cotangent(early.place(v), v) for v in carrying])
    late.follow(jaxpr.eqns[boundary:])
    rows = Rows({**late.places, **early.places}, inside={**early.inside, **late.inside})
    mixing = (
        Mixing(eqn.primitive.name, line_of(eqn), side, any(isinstance(p, Joined) for p in places))
        for half, side in ((early, Side.FORWARD), (late, Side.BACKWARD))
        for eqn, places in half.ends
    )
    return rows, tuple(mixing)


def _of_cotangent(place: Place, output: Any) -> Place:
    """The place in the cotangent of an output. One number has no rows, even where rows meet in it."""
    return place if isinstance(place, int) or (place == MET and output.aval.shape) else None


def in_graph(rows: Rows, graph: Graph) -> dict[int, Place]:
    """Return the places of rows in the values of the graph that was read from a program, by value.

    Axes are counted in one copy. Where the steps of a loop are the rows, the values in its steps have no place.
    """
    found, known = dict[int, Place](), {TOP: rows}
    for region in graph.regions:
        if region.holder is not None and region.parent in known:
            inside = known[region.parent].inside.get(id(graph.ops[region.holder].payload), ())
            known |= dict(zip(graph.bodies[region.holder].regions, inside, strict=False))
        for variable, v in region.names.items() if region.id in known else ():
            if isinstance(v, int) and graph.values[v].loop == region.loop:
                found.setdefault(v, known[region.id].place(variable))
    return {v: place for v, place in found.items() if place is not None}


def told(place: Place) -> str:
    """The place of the rows in words."""
    if isinstance(place, int):
        return f"rows along axis {place}"
    words = {None: "no rows", TOTAL: "computed from sums over rows"}
    return "sum over rows" if is_sum(place) else words.get(place, "rows meet")


def labelled(graph: Graph, places: Mapping[int, Place]) -> Graph:
    """Return a graph in which each value is labelled with the place of its rows, behind the user's name for it."""
    labels = {v: ", ".join(filter(None, (graph.values[v].label, told(p)))) for v, p in places.items()}
    return replace(graph, values=tuple(replace(v, label=labels.get(v.id, v.label)) for v in graph.values))
