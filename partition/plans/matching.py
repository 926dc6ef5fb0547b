"""Find the values of one program in another that has the same forward.

A function can have several joint programs: `vjp` differentiates every argument, and inside a transformation JAX may
list the backward in another order. The forward stays the same, and so do the values that a plan can save. Two values
are *twins* if the same ops make them from the same inputs. Several values may look alike, as slices of one array do in
graph text. Then the first is the twin of the first, the second of the second, and so on. A plan is `moved` to a program
by the twins of its values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from jointcut.partition.bodies.checkpoints import adjustable_loops
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.graph import OPEN, TOP, Graph, Op
from jointcut.partition.program.roles import Role, Side
from jointcut.partition.program.sides import Sides, classify


def moved(plan: Plan, there: Graph, here: Graph) -> Plan | None:
    """The plan of the program `there` in the program `here`; None where the forwards differ.

    Unless both are one program, only `seconds` is kept of its figures. Raises `PlanError` where it does not close here.
    """
    is_same = there.bare == here.bare
    twin_of = (
        {v: v for v in (*plan.values, *plan.dropped)} if is_same else twins((*plan.values, *plan.dropped), there, here)
    )
    if twin_of is None:
        return None
    names = ("bound_bytes", "bound_seconds", "peak_bytes", "bytes_spared") if is_same else ()
    loops = dict(zip(_loops(there), _loops(here), strict=True))
    keeping = dict(zip(adjustable_loops(there), adjustable_loops(here), strict=False))
    return Plan.of(
        here,
        [twin_of[v] for v in plan.values],
        strategy=plan.strategy,
        reasons={twin_of[s.value]: s.reason for s in plan.saved},
        seconds=plan.seconds,
        segments=[(loops[i], steps) for i, steps in plan.segments],
        kept_steps=[(loops[i], steps) for i, steps in plan.kept_steps],
        dropped=[twin_of[v] for v in plan.dropped],
        offloaded=[twin_of[v] for v in plan.offloaded],
        stored={twin_of[v]: form for v, form in plan.stored.items()},
        checkpoints=[(keeping[i], number) for i, number in plan.checkpoints if i in keeping],
        **{name: getattr(plan, name) for name in names},
    )


def _loops(graph: Graph) -> list[int]:
    """The loops of a program's forward, in order."""
    bodies = [graph.bodies[i] for i in in_order(graph) if i in graph.bodies]
    return [graph.regions[r].loop for body in bodies if graph.ops[body.op].origin is Side.FORWARD for r in body.regions]


def twins(values: Iterable[int], there: Graph, here: Graph) -> dict[int, int] | None:
    """Map values of the program `there` to their twins in the program `here`.

    Returns None where the forwards differ, or where a value has no twin.
    """
    names: dict[Hashable, int] = {}
    theirs, ours = _Known.of(there, names), _Known.of(here, names)
    if theirs.forward() != ours.forward():
        return None
    twin_of: dict[int, int] = {}
    for v in values:
        alike, others = theirs.alike(v), ours.places.get(theirs.named.get(v, -1), [])
        if not alike or len(alike) != len(others):
            return None
        twin_of[v] = others[alike.index(v)]
    return twin_of


def in_order(graph: Graph) -> list[int]:
    """Ids of the ops as they run, and as graph text shows them: the body of a loop follows the scan that runs it."""
    of_region: list[list[int]] = [[] for _ in graph.regions]
    for op in graph.ops:
        of_region[op.region].append(op.id)

    def walk(region: int) -> Iterator[int]:
        for i in of_region[region]:
            yield i
            if i in graph.bodies:
                for inner in graph.bodies[i].regions:
                    yield from walk(inner)

    return list(walk(TOP))


@dataclass(frozen=True)
class _Known:
    """A program in which a number tells how a forward value is made.

    `named` has the number of each value, `places` the values of each number, in order.
    """

    graph: Graph
    sides: Sides
    named: dict[int, int]
    places: dict[int, list[int]]

    @classmethod
    def of(cls, graph: Graph, names: dict[Hashable, int]) -> _Known:
        """Number the values of a graph; programs that share `names` share the numbers."""
        sides = classify(graph)
        named = _named(graph, sides, names)
        places: dict[int, list[int]] = defaultdict(list)
        for v, name in sorted(named.items()):
            places[name].append(v)
        return cls(graph, sides, named, dict(places))

    def alike(self, v: int) -> list[int]:
        """The values that are made in the same way as this one, itself included; none for a value of the backward."""
        return self.places[self.named[v]] if v in self.named else []

    def forward(self) -> tuple[Hashable, ...]:
        """A key that programs with the same forward share: the values made, carried by loops, taken and returned."""
        graph = self.graph
        made = Counter(self.named.get(v) for i in self.sides.forward for v in graph.ops[i].outputs)
        bodies = [graph.bodies[i] for i in in_order(graph) if i in graph.bodies and i in self.sides.forward]
        carried = tuple(tuple(map(self.names_of, (body.carried, *body.ends))) for body in bodies)
        ends = self.names_of(graph.role_inputs(Role.PRIMAL)), self.names_of(graph.role_outputs(Role.OUTPUT))
        return frozenset(made.items()), carried, *ends

    def names_of(self, values: Iterable[int | None]) -> tuple[int | None, ...]:
        """The numbers of values; None for a literal, and for a value that has no number."""
        return tuple(None if v is None else self.named.get(v) for v in values)


def _named(graph: Graph, sides: Sides, names: dict[Hashable, int]) -> dict[int, int]:
    named: dict[int, int] = {}

    def name(v: int, *how: Hashable) -> None:
        value = graph.values[v]
        named[v] = names.setdefault((*how, value.shape, value.dtype, value.copies), len(names))

    for n, v in enumerate(graph.role_inputs(Role.PRIMAL)):
        name(v, "input", n)
    scans = 0
    for i in in_order(graph):
        op = graph.ops[i]
        if i in sides.backward:
            continue
        made_from = _made_from(graph, op, named)
        if op.name in OPEN:
            made_from, scans = (scans, *made_from), scans + (op.origin is Side.FORWARD)
        for n, v in enumerate(op.outputs):
            name(v, op.name, op.effects, op.inner, made_from, n)
    return named


def _made_from(graph: Graph, op: Op, named: dict[int, int]) -> tuple[Hashable, ...]:
    """The numbers of an op's operands.

    For a loop only operands from around it count: the values that it hands to its next step have no numbers yet.
    """
    operands: Iterable[int | None] = op.operands
    if op.name in OPEN:
        around = graph.ancestors[graph.loop_of(op)]
        operands = [v for v in op.operands if v is not None and graph.values[v].loop in around]
    return tuple(None if v is None else named.get(v, -1) for v in operands)
