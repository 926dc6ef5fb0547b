"""Find the values of one program in another that has the same forward.

The joint program of a function depends on what is differentiated and on what traces it: `vjp` differentiates every
argument, and inside a transformation JAX may list the backward in another order. The forward stays the same, and with
it all that a plan can save. Two values are *twins* if the same ops make them from the same inputs; of several that look
alike, as slices of one array do in graph text, the first is the twin of the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from jointcut.partition.classify import Facts, classify
from jointcut.partition.graph import SCAN, TOP, Graph, Op
from jointcut.partition.roles import Role, Side


def twins(values: Iterable[int], there: Graph, here: Graph) -> dict[int, int] | None:
    """For values of the program `there` their twins in the program `here`.

    None where the forwards differ, or where a value has no twin.
    """
    names: dict[Hashable, int] = {}
    theirs, ours = _Known.of(there, names), _Known.of(here, names)
    if theirs.forward() != ours.forward():
        return None
    found: dict[int, int] = {}
    for v in values:
        alike, others = theirs.alike(v), ours.places.get(theirs.named.get(v, -1), [])
        if not alike or len(alike) != len(others):
            return None
        found[v] = others[alike.index(v)]
    return found


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


@dataclass(frozen=True)
class _Known:
    """A program with a number for how each value of its forward is made; the values by that number, in order."""

    graph: Graph
    facts: Facts
    named: dict[int, int]
    places: dict[int, list[int]]

    @classmethod
    def of(cls, graph: Graph, names: dict[Hashable, int]) -> _Known:
        """Number the values, as programs before did that used the same `names`."""
        facts = classify(graph)
        named = _named(graph, facts, names)
        places: dict[int, list[int]] = defaultdict(list)
        for v, name in sorted(named.items()):
            places[name].append(v)
        return cls(graph, facts, named, dict(places))

    def alike(self, v: int) -> list[int]:
        """The values that are made as this one is, itself among them; none for a value of the backward."""
        return self.places[self.named[v]] if v in self.named else []

    def forward(self) -> tuple[Hashable, ...]:
        """What must be the same: inputs, what the forward makes, what its loops carry, and its outputs."""
        graph = self.graph
        made = Counter(self.named.get(v) for i in self.facts.forward for v in graph.ops[i].outputs)
        bodies = [graph.bodies[i] for i in in_order(graph) if i in graph.bodies and i in self.facts.forward]
        carried = tuple(self.names_of(body.carried) for body in bodies)
        ends = self.names_of(graph.role_inputs(Role.PRIMAL)), self.names_of(graph.role_outputs(Role.OUTPUT))
        return frozenset(made.items()), carried, *ends

    def names_of(self, values: Iterable[int | None]) -> tuple[int | None, ...]:
        """Their numbers; None for literals."""
        return tuple(None if v is None else self.named.get(v) for v in values)


def _named(graph: Graph, facts: Facts, names: dict[Hashable, int]) -> dict[int, int]:
    named: dict[int, int] = {}

    def name(v: int, *how: Hashable) -> None:
        value = graph.values[v]
        named[v] = names.setdefault((*how, value.shape, value.dtype, value.copies), len(names))

    for n, v in enumerate(graph.role_inputs(Role.PRIMAL)):
        name(v, "input", n)
    scans = 0
    for i in in_order(graph):
        op = graph.ops[i]
        if i in facts.backward:
            continue
        made_from = _made_from(graph, op, named)
        if op.name == SCAN:
            made_from, scans = (scans, *made_from), scans + (op.origin is Side.FORWARD)
        for n, v in enumerate(op.outputs):
            name(v, op.name, op.effects, op.inner, made_from, n)
    return named


def _made_from(graph: Graph, op: Op, named: dict[int, int]) -> tuple[Hashable, ...]:
    """The operands; of a loop those from around it, since what it hands to its next step is not named yet."""
    operands: Iterable[int | None] = op.operands
    if op.name == SCAN:
        around = graph.ancestors[graph.loop_of(op)]
        operands = [v for v in op.operands if v is not None and graph.values[v].loop in around]
    return tuple(None if v is None else named.get(v, -1) for v in operands)
