"""Find the values of one program in another that has the same forward.

The joint program of a function depends on what is differentiated and on what traces it: `vjp` differentiates every
argument, and inside a transformation JAX may list the backward in another order. The forward stays the same, and with
it all that a plan can save. Two values are *twins* if the same ops make them from the same inputs; of several that look
alike, as slices of one array do in graph text, the first is the twin of the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator

from jointcut.partition.classify import Facts, classify
from jointcut.partition.graph import SCAN, TOP, Graph, Op
from jointcut.partition.roles import Role, Side


def twins(values: Iterable[int], there: Graph, here: Graph) -> dict[int, int] | None:
    """For values of the program `there` their twins in the program `here`.

    None where the forwards differ, or where a value has no twin.
    """
    names: dict[Hashable, int] = {}
    facts = classify(there), classify(here)
    known = [_known_as(graph, found, names) for graph, found in zip((there, here), facts, strict=True)]
    made = [Counter(k.get(v) for v in _made_forward(g, f)) for g, f, k in zip((there, here), facts, known, strict=True)]
    if made[0] != made[1]:
        return None
    places = [_alike(k) for k in known]
    found: dict[int, int] = {}
    for v in values:
        name = known[0].get(v)
        mine, others = (places[n].get(name, []) for n in (0, 1))
        if name is None or len(mine) != len(others):
            return None
        found[v] = others[mine.index(v)]
    return found


def _made_forward(graph: Graph, facts: Facts) -> Iterable[int]:
    return (v for i in facts.forward for v in graph.ops[i].outputs)


def _alike(known: dict[int, int]) -> dict[int | None, list[int]]:
    """The values that go by each name, in order."""
    found: dict[int | None, list[int]] = defaultdict(list)
    for v, name in sorted(known.items()):
        found[name].append(v)
    return found


def _known_as(graph: Graph, facts: Facts, names: dict[Hashable, int]) -> dict[int, int]:
    """For each value that exists in the forward a number for how it is made, the same in all programs of `names`."""
    known: dict[int, int] = {}

    def name(v: int, *how: Hashable) -> None:
        value = graph.values[v]
        known[v] = names.setdefault((*how, value.shape, value.dtype, value.copies), len(names))

    for role in Role:
        for n, v in enumerate(graph.role_inputs(role)):
            if not facts.is_late(v):
                name(v, "input", role.value, n)
    scans = 0
    for i in in_order(graph):
        op = graph.ops[i]
        if i in facts.backward:
            continue
        made_from: Hashable = scans if op.name == SCAN else _operands(op, known)
        scans += op.name == SCAN and op.origin is Side.FORWARD
        for n, v in enumerate(op.outputs):
            name(v, op.name, made_from, n)
    return known


def in_order(graph: Graph) -> list[int]:
    """Ids of the ops as they run, and as graph text shows them: the body of a loop follows the scan that runs it."""
    of_region: list[list[int]] = [[] for _ in graph.regions]
    for op in graph.ops:
        of_region[op.region].append(op.id)

    def walk(region: int) -> Iterator[int]:
        for i in of_region[region]:
            yield i
            if i in graph.bodies:
                yield from walk(graph.bodies[i].id)

    return list(walk(TOP))


def _operands(op: Op, known: dict[int, int]) -> Hashable:
    return tuple(None if v is None else known.get(v, -1) for v in op.operands)
