"""Order the backward so that a recomputed value lives briefly.

Each op of the backward is a `Step`; ops that the plan recomputes come right before the first step that reads them.
XLA is free to start them earlier, at the beginning of the backward, where they would all be alive together. So a step
names an *anchor*, the latest cotangent that it reads, and `emit` lets the recomputation wait for it. Coarser anchors
(only cotangents that a matrix product writes out) keep more fusion but hold twice the memory: on 6 unrolled
transformer blocks 94 MB of temporaries, against 53 MB with these and 112 MB for the plain step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jointcut.partition.classify import Facts
from jointcut.partition.graph import LITERAL, SCAN, STEP, TOP, Graph, Op
from jointcut.partition.plan import Plan
from jointcut.partition.roles import Role

#: Ops that XLA takes apart, so that what they do to a residual alone could start before the cotangent is there: the
#: gradient of a maximum pooling first looks where the maxima are, in eight arrays of the residual's size on CPU.
TAKEN_APART = frozenset({"select_and_scatter_add"})


@dataclass(frozen=True)
class Step:
    """One op of the backward, the ops recomputed just before it, and the cotangent that they wait for.

    With `whole` the op itself waits too.
    """

    op: int
    again: tuple[int, ...] = ()
    anchor: int | None = None
    whole: bool = False


@dataclass(frozen=True)
class Order:
    """The steps of one region of the backward, what its results need recomputed last, and what it reads from
    the regions around it.
    """

    steps: tuple[Step, ...]
    last: tuple[int, ...]
    reads: tuple[int, ...]


def schedule(graph: Graph, facts: Facts, plan: Plan) -> dict[int, Order]:
    """The order of every region that runs in the backward, by region id."""
    scheduler = _Scheduler(graph, facts, frozenset(plan.values))
    results = [v for v in graph.role_outputs(Role.GRADIENT) if v is not None]
    scheduler.region(TOP, results)
    return scheduler.orders


class _Scheduler:
    """Walk the regions of the backward, outermost first, and place what must be recomputed."""

    def __init__(self, graph: Graph, facts: Facts, saved: frozenset[int]) -> None:
        self.graph, self.facts, self.saved = graph, facts, saved
        self.orders: dict[int, Order] = {}
        self.backward = {r.id: [i for i in r.ops if i in facts.backward] for r in graph.regions}

    def region(self, region_id: int, results: Iterable[int]) -> Order:
        """Order one region; its loops are ordered on the way, since what they read must be computed before."""
        region = self.graph.regions[region_id]
        have: set[int] = set()
        reads: dict[int, None] = {}
        steps = []
        for i in self.backward[region_id]:
            op = self.graph.ops[i]
            demands = self.demands(op)
            again = self.missing(demands, region.loop, have, reads)
            anchor = max((v for v in demands if self.facts.is_late(v)), default=None, key=self.made_by)
            whole = op.name in TAKEN_APART
            steps.append(Step(i, again, anchor if again or whole else None, whole))
            have.update(op.outputs)
        last = self.missing(results, region.loop, have, reads)
        order = Order(tuple(steps), last, tuple(reads))
        self.orders[region_id] = order
        return order

    def demands(self, op: Op) -> tuple[int, ...]:
        """What an op reads at its own level; for a scan also what its body reads from there."""
        if op.name != SCAN:
            return op.inputs
        body = self.graph.bodies[op.id]
        home = self.graph.ancestors[self.graph.loop_of(op)]
        carried = [v for v in body.carried if isinstance(v, int)]
        inner = self.region(body.id, [*carried, *body.stacks])
        own = [v for v in op.inputs if self.graph.values[v].loop in home]
        return tuple(dict.fromkeys([*own, *inner.reads]))

    def missing(self, demands: Iterable[int], loop: int, have: set[int], reads: dict[int, None]) -> tuple[int, ...]:
        """Ops to run again before `demands` are at hand, in program order; `have` and `reads` are extended."""
        ops: set[int] = set()
        stack = [v for v in demands if v not in have]
        while stack:
            v = stack.pop()
            if v in have:
                continue
            have.add(v)
            value = self.graph.values[v]
            maker = None if value.maker is None else self.graph.ops[value.maker]
            if value.loop != loop:
                if loop in self.graph.ancestors[value.loop]:
                    continue  # lives in a loop inside this one: its stack is at hand
                reads[v] = None
            elif maker is not None and maker.name == STEP:
                reads[maker.inputs[0]] = None
            elif maker is None or v in self.saved or self.facts.is_late(v) or maker.name in (SCAN, LITERAL):
                continue
            else:
                ops.add(maker.id)
                have.update(maker.outputs)
                stack.extend(u for u in maker.inputs if u not in have)
        return tuple(sorted(ops))

    def made_by(self, v: int) -> int:
        """The op that makes a value, as a place in program order; inputs come first."""
        maker = self.graph.values[v].maker
        return -1 if maker is None else maker
