"""List the values of loops and branches that each region hands out to readers outside it."""

from __future__ import annotations

from collections.abc import Set

from jointcut.partition.program.bodies import Body
from jointcut.partition.program.graph import LITERAL, ONCE, OPEN, OPEN_LOOP, STEP, TOP, Graph


def handed_out(graph: Graph, run: frozenset[int], leaving: Set[int]) -> dict[int, list[int]]:
    """List for each region the values of its loops that something outside reads; its op must stack them."""
    exported: dict[int, list[int]] = {r.id: [] for r in graph.regions}
    if len(graph.regions) == 1:
        return exported
    for value in graph.values:
        if value.loop == TOP or value.maker is None:
            continue
        op = graph.ops[value.maker]
        if op.id not in run or op.name in (STEP, LITERAL):
            continue
        steps = op.name == OPEN_LOOP and value.loop == graph.bodies[op.id].loop
        home: int | None = graph.bodies[op.id].region if steps else op.region
        readers = {_reads_in(graph, i, value.id) for i in graph.consumers[value.id] if i in run}
        while home is not None and home != TOP:
            if value.id in leaving or any(home not in graph.around[r] for r in readers):
                exported[home].append(value.id)
            home = graph.regions[home].parent
    for body in reversed([*graph.bodies.values()]) if any(loop.rivals for loop in graph.loops) else ():
        if graph.ops[body.op].name in ONCE:
            _hand_over_as_one(graph, body, exported)
    return exported


def _hand_over_as_one(graph: Graph, body: Body, exported: dict[int, list[int]]) -> None:
    """Let the first value that the branches keep stand for all of them around the conditional."""
    _, *others = [v for r in body.regions for v in exported[r]] or [-1]
    home: int | None = graph.ops[body.op].region
    while others and home is not None:
        exported[home] = [v for v in exported[home] if v not in others]
        home = graph.regions[home].parent


def _reads_in(graph: Graph, i: int, v: int) -> int:
    """The region in which an op reads a value. An op with a body reads there the values that its body hands on."""
    op, loops = graph.ops[i], graph.ancestors[graph.values[v].loop]
    if op.name in OPEN:
        return next((r for r in graph.bodies[i].regions if graph.regions[r].loop in loops), op.region)
    return op.region
