"""Order the backward so that a recomputed value lives briefly.

Each op of the backward is a `Turn`; ops that the plan recomputes come right before the first step that reads them.
XLA may start them earlier, at the beginning of the backward, where they would all be alive together. So a step names an
*anchor*, the latest cotangent that it reads, and `emit` lets the recomputation wait for it. Coarser anchors (only
cotangents that a matrix product writes out) keep more fusion but hold twice the memory. On 6 unrolled transformer
blocks they take 94 MB of temporaries, against 53 MB with the anchors here and 112 MB for the plain step.

A step far from the last reader of a recomputed value computes a light value anew. Otherwise a residual network of plain
additions would keep its whole stream from the first reader on (81 MB against 53 MB on the suite's ResNet).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jointcut.partition.lower.roots import Whole, waiting_roots
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.rules import heavy, light, rerunnable
from jointcut.partition.program.graph import LITERAL, OPEN, OPEN_LOOP, STEP, TOP, Graph, Op
from jointcut.partition.program.jax.abstract import is_reference
from jointcut.partition.program.primitives import CALLS, CHEAP, DEAR, ELEMENTWISE, FUSED, REDUCTIONS, REPEATING
from jointcut.partition.program.roles import Role, Side
from jointcut.partition.program.sides import reached

#: How many heavy ops (products, convolutions and the like) may pass while a recomputed value is *near*: the two with
#: which the gradient passes a layer. A far value is recomputed once more if it is light, or else waits anew.
NEAR = 2

#: Ops that the gradient passes within a layer.
_NOT_HEAVY = CHEAP | REDUCTIONS

#: How often the backward runs a light op, and how often another op whose results are dropped.
MOST_RUNS, MOST_DROPPED_RUNS = 3, 2


class Turn(NamedTuple):
    """One op of the backward, the ops recomputed just before it, and the values that these wait for.

    Each pair of `waits` is a value that these ops start from, and the cotangent that it waits for. With `whole` the op
    itself waits too, and is called in a computation of its own. The op should find the values `written` in memory.
    """

    op: int
    again: tuple[int, ...] = ()
    waits: tuple[tuple[int, int], ...] = ()
    whole: bool = False
    written: tuple[int, ...] = ()


#: Plans of one program share most of their turns.
_alone = functools.cache(Turn)


@dataclass(frozen=True)
class Rerun:
    """The forward scan of an inner loop, run again at each step of the loop around it.

    It has the ops of the body that the rerun needs, with the ops of loops inside, the values that it stacks, and the
    values that it reads from around.
    """

    ops: frozenset[int]
    stacks: tuple[int, ...]
    reads: tuple[int, ...]


@dataclass
class Progress:
    """The progress of the walk through one region.

    `have` are the values at hand, `reads` the values taken from regions around it, and `passed` the number of heavy ops
    so far. `made_at` is `passed` when each value was last recomputed. `waited` is `passed` when each value last waited,
    and the cotangent that it waited for. `runs` tells how often each op was recomputed. `dropped` are values that are
    not kept for far readers, and `whole` those that devices gather (`Whole`).
    """

    loop: int
    have: set[int] = field(default_factory=set)
    reads: dict[int, None] = field(default_factory=dict)
    passed: int = 0
    made_at: dict[int, int] = field(default_factory=dict)
    waited: dict[int, tuple[int, int]] = field(default_factory=dict)
    runs: Counter[int] = field(default_factory=Counter)
    stacked: dict[int, dict[int, None]] = field(default_factory=dict)  # by the op id of a scan that runs again
    dropped: frozenset[int] = frozenset()
    whole: Collection[int] = ()

    @property
    def near(self) -> int:
        """How many heavy ops of the backward may pass until a value is far from where it was recomputed."""
        return NEAR - bool(self.dropped)

    def has(self, values: Iterable[int]) -> bool:
        """Whether values are at hand, and none of them was recomputed."""
        return self.have.issuperset(values) and (not self.made_at or self.made_at.keys().isdisjoint(values))

    def is_far(self, v: int) -> bool:
        """Whether a value was recomputed long ago."""
        return self.passed - self.made_at.get(v, self.passed) > self.near

    def wait(self, v: int, anchor: int) -> int:
        """Let a value wait for a cotangent; return the cotangent that it waits for.

        If the value waited just now, this is the cotangent that it waited for then. The values recomputed then are
        still alive. For another cotangent the compiler would write that one out, in the midst of an elementwise chain.
        """
        if v not in self.waited or (self.passed - self.waited[v][0] > self.near and v not in self.whole):
            self.waited[v] = self.passed, anchor
        return self.waited[v][1]

    def is_dropped(self, graph: Graph, v: int) -> bool:
        """Whether a value was recomputed long ago and is recomputed once more rather than kept."""
        return v in self.made_at and self.is_far(v) and self.may_run_again(graph, v)

    def may_run_again(self, graph: Graph, v: int) -> bool:
        """Whether a recomputed value may be recomputed once more: if it is dropped, or light.

        A value computed from dropped values is not light, unless it is dropped too.
        """
        op, is_dropped = graph.maker_of(v), v in self.dropped
        if op is None or v in self.whole or not (is_dropped or self.dropped.isdisjoint(op.inputs)):
            return False
        is_light = light(graph, op)
        return (is_light or is_dropped) and self.runs[op.id] < (MOST_RUNS if is_light else MOST_DROPPED_RUNS)

    def note(self, op: Op) -> None:
        """Note that an op of the backward runs."""
        self.passed += op.name not in _NOT_HEAVY

    def note_again(self, op: Op) -> None:
        """Note that an op is recomputed."""
        self.runs[op.id] += 1
        for v in op.outputs:
            self.made_at[v] = self.passed

    def is_near(self, v: int) -> bool:
        """Whether a value was recomputed just now."""
        return v in self.made_at and not self.is_far(v)


@dataclass(frozen=True)
class Order:
    """The steps of one region of the backward.

    It also has the ops to recompute last, for the region's results; the values read from the regions around it; and the
    loops that it runs again, by the op id of their scans.
    """

    steps: tuple[Turn, ...]
    last: tuple[int, ...]
    reads: tuple[int, ...]
    reruns: Mapping[int, Rerun] = field(default_factory=dict)


def ordered(problem: Problem, plan: Plan) -> dict[int, Order]:
    """The order of every region that runs in the backward, by region id."""
    scheduler = _Scheduler(problem, frozenset(plan.values), (*plan.recomputed, *plan.deferred), plan.dropped)
    scheduler.region(TOP, [v for v in problem.graph.role_outputs(Role.GRADIENT) if v is not None])
    return scheduler.orders


class _Scheduler:
    """Walk the regions of the backward, outermost first, and place the recomputed ops."""

    def __init__(
        self, problem: Problem, saved: frozenset[int], again: Iterable[int], dropped: Iterable[int] = ()
    ) -> None:
        self.dropped = frozenset(dropped)
        self.graph, self.sides, self.backend, self.saved = problem.graph, problem.sides, problem.backend, saved
        graph = problem.graph
        self.special = {*OPEN, *self.backend.taken_apart, *self.backend.read_written}
        self.rerunnable = rerunnable(graph)
        self.reruns = self.rerunnable.intersection(again)
        self.whole = Whole.of(graph)
        self.there = saved.union(self.whole.values)  # in memory in any case
        self.stackable = self.stacked_by_reruns(again)
        self.orders: dict[int, Order] = {}
        self.given = frozenset(v for v, _ in graph.inputs)
        self.at_hand = frozenset(v for v in (*saved, *self.given) if graph.values[v].loop == TOP)
        self.backward = {r.id: [i for i in r.ops if i in problem.sides.backward] for r in graph.regions}

    def region(self, region_id: int, results: Iterable[int]) -> Order:
        """Order one region; its loops are ordered on the way, since the values they read must be computed first."""
        progress = Progress(self.graph.regions[region_id].loop, dropped=self.dropped, whole=self.whole.values)
        if region_id == TOP:
            progress.have.update(self.at_hand)
        steps = [self.step(self.graph.ops[i], progress) for i in self.backward[region_id]]
        last = self.missing(results, progress)
        reruns = {scan: self.rerun(self.graph.ops[scan], stacks) for scan, stacks in progress.stacked.items()}
        self.orders[region_id] = Order(tuple(steps), last, tuple(progress.reads), reruns)
        return self.orders[region_id]

    def step(self, op: Op, progress: Progress) -> Turn:
        """One op with the ops to recompute before it; `progress` is extended."""
        if op.name not in self.special and op.id not in self.whole.operands and progress.has(op.inputs):
            progress.have.update(op.outputs)
            progress.note(op)
            return _alone(op.id)
        demands = self.demands(op)
        again = self.missing(demands, progress)
        whole = op.name in self.backend.taken_apart
        written = self.written(op, progress) if op.name in self.backend.read_written else ()
        waits = self.waits(op, demands, again, whole, progress)
        for i in again:
            progress.note_again(self.graph.ops[i])
        progress.have.update(op.outputs)
        progress.note(op)
        return Turn(op.id, again, waits, whole, written)

    def waits(
        self, op: Op, demands: Iterable[int], again: Iterable[int], whole: bool, progress: Progress
    ) -> tuple[tuple[int, int], ...]:
        """The values that the ops recomputed before an op start from, each with the cotangent that it waits for."""
        waiting = [self.graph.ops[i] for i in again] + [op] * whole
        made = {v for o in waiting for v in o.outputs} | {v for scan in progress.stacked.values() for v in scan}
        reads = dict.fromkeys(v for o in waiting for v in self.inputs(o) if v not in made and not self.sides.is_late(v))
        roots = tuple(v for v in reads if not progress.is_near(v))
        if not whole and self.is_fused(op, again, roots):
            return ()
        gathered = self.whole.kept(self.graph, (*again, op.id), self.saved)
        late = (self.repeated(v, op.region) for v in demands if (roots or gathered) and self.sides.is_late(v))
        if (anchor := max((v for v in late if not self.is_constant(v)), default=None, key=self.made_by)) is None:
            return ()
        if self.backend.several:
            near, ops = {v for v in reads if progress.is_near(v)}, [(o, self.inputs(o)) for o in waiting]
            roots = dict.fromkeys([*waiting_roots(self.graph, ops, dict.fromkeys(roots), near), *gathered])
        return tuple((v, progress.wait(v, anchor)) for v in roots)

    def is_fused(self, op: Op, again: Iterable[int], roots: Collection[int]) -> bool:
        """Whether XLA fuses the ops recomputed before an elementwise op of the backward into it.

        It does so for numbers, and for light chains that start from inputs. A wait would copy an input that an update
        overwrites.
        """
        graph = self.graph
        ops = [graph.ops[i] for i in again]

        def is_inside(o: Op) -> bool:
            is_number = all(not graph.values[v].shape for v in o.outputs)
            is_read_once = o.name in FUSED and all(len(graph.consumers[v]) == 1 for v in o.outputs)
            return o.origin is Side.BACKWARD and o.name in ELEMENTWISE and (is_number or is_read_once)

        return op.name in ELEMENTWISE and self.given.issuperset(roots) and all(map(is_inside, ops))

    def stacked_by_reruns(self, again: Iterable[int]) -> dict[int, list[int]]:
        """The values that each loop that may run again would stack, by the id of the loop's op."""
        stacks: dict[int, list[int]] = {scan: [] for scan in self.rerunnable}
        for op in (self.graph.ops[i] for i in again):
            scan = self.graph.regions[op.region].holder
            if scan in stacks:
                stacks[scan] += [v for v in op.outputs if v in self.sides.escaping or self.is_stacked_again(op)]
        return stacks

    def inputs(self, op: Op) -> tuple[int, ...]:
        """The values that an op reads at its own level when it runs again; for a loop, all that its steps read."""
        return self.rerun(op, self.stackable[op.id]).reads if op.id in self.rerunnable else op.inputs

    def rerun(self, scan: Op, stacks: Iterable[int]) -> Rerun:
        """The rerun of a forward loop: all ops that its carry is computed from.

        A value that another scan of the same loop makes at a step is read from the stack of that scan.
        """
        graph, home = self.graph, self.graph.ancestors[self.graph.loop_of(scan)]
        inside = graph.within(*graph.bodies[scan.id].regions)
        ops: set[int] = set()
        reads: dict[int, None] = {}

        def further(v: int) -> tuple[int, ...]:
            maker = graph.maker_of(v)
            if graph.values[v].loop in home:
                reads[v] = None
            elif maker is not None and maker.name == STEP:
                return maker.inputs
            elif maker is None or v in self.saved or maker.id == scan.id:
                return ()
            elif maker.region not in inside:
                reads[v] = None
            else:
                ops.add(maker.id)
                return maker.inputs
            return ()

        reached([*scan.inputs, *stacks], further)
        return Rerun(frozenset(ops), tuple(stacks), tuple(sorted(reads)))

    def written(self, op: Op, progress: Progress) -> tuple[int, ...]:
        """The operands of an op that end elementwise chains of the backward in the same region."""
        here = (v for v in dict.fromkeys(op.inputs) if self.graph.values[v].loop == progress.loop)
        return tuple(v for v in here if v not in self.there and self.backend.ends_chain(self.graph, v))

    def demands(self, op: Op) -> tuple[int, ...]:
        """The values that an op reads at its own level; for a loop, also those that its body reads from there."""
        if op.name not in OPEN:
            return op.inputs
        body = self.graph.bodies[op.id]
        home = self.graph.ancestors[self.graph.loop_of(op)]
        own = [v for v in op.inputs if self.graph.values[v].loop in home]
        if op.name == OPEN_LOOP:
            bodies = [self.region(body.region, [*(v for v in body.carried if v is not None), *body.stacks])]
        else:
            ends = ([v for v in end if v is not None] for end in body.ends)
            bodies = [self.region(region, results) for region, results in zip(body.regions, ends, strict=True)]
        return tuple(dict.fromkeys([*own, *(v for inner in bodies for v in inner.reads)]))

    def missing(self, demands: Iterable[int], progress: Progress) -> tuple[int, ...]:
        """Ops to run again before `demands` are at hand, in program order; `progress` is extended."""
        graph, have, made_at = self.graph, progress.have, progress.made_at
        stack = [v for v in demands if v not in have or (v in made_at and progress.is_dropped(graph, v))]
        if not stack:
            return ()
        ops: set[int] = set()
        fresh: set[int] = set()
        while stack:
            v = stack.pop()
            if v in fresh or (v in have and not (v in made_at and progress.is_dropped(graph, v))):
                continue
            fresh.add(v)
            have.add(v)
            value, maker = graph.values[v], graph.maker_of(v)
            if value.loop != progress.loop:
                if progress.loop not in graph.ancestors[value.loop]:
                    progress.reads[v] = None
                elif (scan := self.scan_to_rerun(v)) is not None:  # else its stack is at hand
                    stack.extend(self.again(scan, ops, fresh, progress))
                    progress.stacked[scan.id][v] = None
            elif maker is not None and maker.name == STEP:
                progress.reads[maker.inputs[0]] = None
            elif maker is None or v in self.saved or self.sides.is_late(v) or maker.name == LITERAL:
                continue
            elif self.is_stacked_again(maker):
                progress.reads[v] = None
            elif maker.name not in OPEN:
                stack.extend(self.again(maker, ops, fresh, progress))
            elif maker.name == OPEN_LOOP and graph.bodies[maker.id].loop == value.loop:
                progress.reads.update({v: None} if maker.id in self.rerunnable else {})
            elif maker.id in self.rerunnable:
                stack.extend(self.again(maker, ops, fresh, progress))
        return tuple(sorted(ops))

    def again(self, op: Op, ops: set[int], fresh: set[int], progress: Progress) -> tuple[int, ...]:
        """Run an op again; return the values that it reads. A loop runs once, whichever of its values are read."""
        here = {v for v in op.outputs if self.graph.values[v].loop == progress.loop}
        fresh.update(here)
        progress.have.update(here)
        if op.name in OPEN and op.id in progress.stacked:
            return ()
        if op.name in OPEN:
            progress.stacked[op.id] = {}
        ops.add(op.id)
        return self.inputs(op)

    def scan_to_rerun(self, v: int) -> Op | None:
        """The scan that must run again for a value of an inner loop; None if the value's stack is kept."""
        graph, maker = self.graph, self.graph.values[v].maker
        if maker is None or v in self.saved or self.sides.is_late(v):
            return None
        op = graph.ops[maker]
        scan = op if op.name == OPEN_LOOP and graph.bodies[op.id].loop == graph.values[v].loop else self.around(op)
        return scan if scan is not None and scan.id in self.rerunnable else None

    def is_stacked_again(self, op: Op) -> bool:
        """Whether an op's result is stacked when its loop runs again, rather than computed a third time: if it is dear.

        Its stacks last for one step of the loop around it, and are small.
        """
        scan = self.around(op) if self.reruns else None
        if scan is None or scan.id not in self.reruns:
            return False
        return bool(heavy(self.graph, op)) or op.name in DEAR or (op.name in CALLS and bool(op.inner & DEAR))

    def around(self, op: Op) -> Op | None:
        """The scan in whose body an op stands."""
        return None if (scan := self.graph.regions[op.region].holder) is None else self.graph.ops[scan]

    def repeated(self, v: int, region: int) -> int:
        """The value that a cotangent repeats, or the cotangent itself: a barrier would write all repetitions out.

        A reference becomes the value that it was made with, since no barrier takes a reference. A value from another
        region is taken unchanged: only the stacks of a loop's body are at hand here, not their operands.
        """
        graph, maker = self.graph, self.graph.maker_of(v)
        while maker is not None and maker.region == region and maker.inputs:
            if maker.name not in REPEATING and not is_reference(graph.values[v].payload):
                break
            v, maker = maker.inputs[0], graph.maker_of(maker.inputs[0])
        return v

    def is_constant(self, v: int) -> bool:
        """Whether a value is made of nothing, such as zeros in the body of a backward loop: nothing can wait for it."""
        return (maker := self.graph.maker_of(v)) is not None and not maker.inputs

    def made_by(self, v: int) -> int:
        """The op that makes a value, as a place in program order; inputs come first."""
        return -1 if (maker := self.graph.values[v].maker) is None else maker
