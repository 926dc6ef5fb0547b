"""Say when each op runs: the plan as steps of both halves (`steps`), for one backend.

The forward runs in program order. The backward runs in the order of `order`, each op after what it needs recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from jointcut.partition.errors import PlanError, message
from jointcut.partition.lower.among.moves import fetched, restored, sent, stored
from jointcut.partition.lower.among.settle import settled
from jointcut.partition.lower.order import Order, ordered
from jointcut.partition.lower.reruns import Segmentable, needed_again, segmentable, shortened
from jointcut.partition.lower.steps import (
    Enter,
    Keep,
    Parts,
    Round,
    Run,
    Schedule,
    Segments,
    Step,
    Store,
    Wait,
    Write,
    runs,
)
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.runs import runs_forward
from jointcut.partition.program.graph import LITERAL, OPEN_LOOP, STEP, TOP, Graph
from jointcut.partition.program.primitives import MOVEMENT
from jointcut.partition.program.roles import Role
from jointcut.partition.stored.packing import HOOK

Lengths = int | tuple[int, ...]

#: Plans of one program share most of their steps.
_run = functools.cache(Run)


def schedule(
    problem: Problem,
    plan: Plan,
    lengths: Mapping[int, Lengths] | None = None,
    kept_steps: Mapping[int, int] | None = None,
) -> Schedule:
    """The steps of a plan that closes, for the problem's backend.

    Where nothing runs again, nothing waits, and only sums of many arrays are written out.

    `lengths` are by loop id how many steps a segment of it has, and `kept_steps` how many of its last steps are in no
    segment: the plan's own, or others. A loop of which the backward reads no stacks runs whole all the same. Loops that
    offload in part run in two parts. Raises `PlanError` for a loop that cannot be divided so, or such a length or
    number of steps.
    """
    if kept_steps is None:
        segments = dict(plan.segments) if lengths is None else {}
        kept_steps = {loop: steps for loop, steps in plan.kept_steps if loop in segments}
    return _Halves(problem, plan).schedule(dict(plan.segments) if lengths is None else lengths, kept_steps)


@dataclass(frozen=True)
class _Divided:
    """A loop that runs in segments: the steps that they have, and its forward as it runs in a segment.

    `op` holds its forward, `starts` are the carried values that the rerun starts from. `levels` are the loops that run
    again, one for each of the lengths. The `last` steps of the forward are in no segment.
    """

    op: int
    lengths: tuple[int, ...]
    last: int
    starts: tuple[int, ...]
    levels: tuple[Enter, ...]

    @property
    def tails(self) -> tuple[int, ...]:
        """The values that the backward reads of the last steps."""
        return self.levels[-1].stacks if self.last else ()


class _Halves:
    """Both halves of one plan."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.graph, self.plan = problem, problem.graph, plan
        self.outputs = {v for v in self.graph.role_outputs(Role.OUTPUT) if v is not None}
        self.gradients = {v for v in self.graph.role_outputs(Role.GRADIENT) if v is not None}
        self.rounded = _rounded(self.graph, plan)
        backend, saved, again = problem.backend, frozenset(plan.values), frozenset(plan.recomputed)
        self.written = self.sums = backend.written_sums(self.graph, problem.sides, saved) & self.graph.arrays
        if plan.runs_again:
            self.written |= backend.written_forward(self.graph, saved, again) & self.graph.arrays

    def schedule(self, lengths: Mapping[int, Lengths], kept_steps: Mapping[int, int]) -> Schedule:
        """The schedule, with loops in segments of these lengths, but for so many of their last steps."""
        backward = self.backward()
        wanted = self.gradients | self.read(backward) | self.problem.asked_to_keep
        handed = [v for v in self.plan.values if v in wanted]
        divided = self.divided(lengths, kept_steps, handed)
        if divided:
            made = {v for loop in divided.values() for v in loop.levels[-1].stacks}
            handed = list(dict.fromkeys([*(v for v in handed if v not in made), *self.read_again(backward, divided)]))
            backward = tuple(_unwound(divided[s.op], s) if _is_in(s, divided) else s for s in backward)
        forward = self.forward(handed, list(divided.values()))
        if forms := self.in_forms(handed):
            forward = stored(self.graph, self.problem.sides, forward, forms)
            backward = restored(self.problem, backward, forms)
        if self.problem.hooks:
            read = self.gradients | self.read(backward)
            inputs = self.hooked(v for v in self.graph.role_inputs(Role.PRIMAL) if v in read)
            made = self.hooked(handed)
            forward = (*(Store(v, HOOK) for v in inputs), *stored(self.graph, self.problem.sides, forward, made))
            backward, handed = restored(self.problem, backward, made | inputs), [*handed, *inputs]
        if away := frozenset(self.plan.offloaded).intersection(handed) - self.outputs:
            parts, plain = self.parts(handed, away), (forward, backward)
            forward = _in_parts(sent(self.graph, self.problem.sides, forward, away), plain[0], parts)
            backward = _in_parts(fetched(self.problem, backward, away), plain[1], parts)
        return Schedule(forward, tuple(handed), backward, self.graph)

    def parts(self, handed: Sequence[int], away: Set[int]) -> dict[int, tuple[tuple[int, ...], int]]:
        """By the ops of loops that run in two parts: the values that are handed over in two parts, and how many last
        steps are in the second.
        """
        asked, parts = self.plan.partly_offloaded, dict[int, tuple[tuple[int, ...], int]]()
        known = segmentable(self.problem, self.plan) if asked else {}
        for loop, last in asked.items():
            mine = {v for v in away if loop in self.graph.ancestors[self.graph.values[v].loop]}
            if loop not in known or self.problem.hooks or not mine.issubset(known[loop].values):
                what = f"names loop {loop}, which cannot offload what its first steps keep alone."
                cure = "Offload of it what its own backward loop alone reads, and let nothing pass through `pack`."
                raise PlanError(message("plan.kept_steps", what, cure))
            values = tuple(v for v in handed if v in known[loop].values)
            parts |= dict.fromkeys((known[loop].forward, known[loop].backward), (values, last))
        return parts

    def in_forms(self, handed: Iterable[int]) -> dict[int, str]:
        """The values that are handed over in a form; those of a loop in segments are made again as they are."""
        in_segments, forms = {loop for loop, _ in self.plan.segments}, self.plan.stored
        around = ((v, self.graph.ancestors[self.graph.values[v].loop]) for v in handed if v in forms)
        return {v: forms[v] for v, loops in around if in_segments.isdisjoint(loops)}

    def hooked(self, values: Iterable[int]) -> dict[int, str]:
        """Those of some values that pass through a user's functions."""
        graph, hooks = self.graph, self.problem.hooks
        return {v: HOOK for v in values if hooks and v in graph.arrays and hooks.takes(graph.values[v])}

    def forward(self, handed: Sequence[int], divided: Sequence[_Divided]) -> tuple[Step, ...]:
        """The forward, which keeps the carried values where the segments of divided loops start."""
        leaving = {*handed, *(v for loop in divided for v in loop.tails)}
        starts = {v for loop in divided for v in loop.starts}
        loops = {loop.op: loop for loop in divided}

        def kept(loop: _Divided, step: Enter) -> Keep:
            if not loop.last:
                return Keep(loop.lengths[0], loop.starts, step)
            bare = self.run_for(leaving.difference(loop.tails), starts).loop(loop.op)
            return Keep(loop.lengths[0], loop.starts, bare, loop.last, step)

        steps = self.run_for(leaving, starts).steps(TOP)
        return tuple(kept(loops[s.op], s) if _is_in(s, loops) else s for s in steps)

    def run_for(self, leaving: Set[int], starts: Set[int]) -> _Pass:
        """Regions of the forward with the ops that it runs for outputs and for these values; `leaving` are stacked."""
        ops = runs_forward(self.graph, self.problem.sides, sorted(leaving | starts))
        return self.pass_(ops, {*self.outputs, *leaving})

    def pass_(self, ops: frozenset[int], leaving: set[int]) -> _Pass:
        """Regions of the forward with some of their ops."""
        return _Pass(self.graph, ops, _exported(self.graph, ops, leaving), self.written, self.rounded)

    def backward(self) -> tuple[Step, ...]:
        """The backward, its loops whole."""
        exported = _exported(self.graph, self.problem.sides.backward, self.gradients)
        if not (self.plan.recomputed or self.plan.deferred):  # in program order then
            sides, apart = self.problem.sides, self.problem.backend.taken_apart
            return tuple(_Pass(self.graph, sides.backward, exported, self.sums, apart=apart).steps(TOP))
        orders = ordered(self.problem, self.plan)
        steps = tuple(_Turns(self.graph, orders, exported, self.plan.runs_again, self.sums).steps(TOP))
        return settled(self.graph, steps) if self.problem.backend.puts_off else steps

    def read(self, steps: Iterable[Step]) -> set[int]:
        """The values that some steps read, whole or step by step."""
        ops = self.graph.ops
        read = set[int]().union(*(ops[step.op].inputs for step in runs(steps)))
        slices = (op for op in reversed(ops) if op.name == STEP) if len(self.graph.regions) > 1 else ()
        read.update(op.inputs[0] for op in slices if op.outputs[0] in read)
        return read

    def divided(
        self, lengths: Mapping[int, Lengths], kept_steps: Mapping[int, int], read: Sequence[int]
    ) -> dict[int, _Divided]:
        """The loops to run in segments, by the op of their backward; `read` is what the backward reads."""
        known = segmentable(self.problem, self.plan) if lengths else {}
        asked = {loop: _checked(known, loop, given) for loop, given in lengths.items()}
        lasts = {loop: _checked_last({i: known[i] for i in asked}, loop, given) for loop, given in kept_steps.items()}
        divided = {}
        for loop, ks in asked.items():
            stacks = {v for v in known[loop].values if v in read}
            if stacks:
                last = lasts.get(loop, 0)
                ks = shortened(ks, known[loop].length - last)
                divided[known[loop].backward] = self.rerun(known[loop].forward, ks, last, stacks)
        return divided

    def rerun(self, op: int, lengths: tuple[int, ...], last: int, stacks: set[int]) -> _Divided:
        """A loop's forward as it runs in a segment, for these stacks."""
        body = self.graph.bodies[op]
        run = runs_forward(self.graph, self.problem.sides, self.plan.values)
        ops, starts = needed_again(self.graph, body, stacks, run)
        bare, _ = needed_again(self.graph, body, starts, run)
        whole, carries = (
            self.pass_(frozenset({op, *(o.id for o in part)}), leaving).loop(op, again=True)
            for part, leaving in ((ops, stacks), (bare, set[int]()))
        )
        return _Divided(op, lengths, last, starts, (*[carries] * (len(lengths) - 1), whole))

    def read_again(self, backward: Iterable[Step], divided: Mapping[int, _Divided]) -> Iterator[int]:
        """The values that segments read when they run again, but for those that are at hand in the backward."""
        graph = self.graph
        at_hand = set(graph.role_inputs(Role.PRIMAL))
        for step in backward:
            if isinstance(step, Run | Enter) and step.again:
                at_hand.update(graph.ops[step.op].outputs)
            elif _is_in(step, divided):
                for v in _read_around(graph, divided[step.op]):
                    maker = graph.maker_of(v)
                    if v not in at_hand and (maker is None or maker.name != LITERAL):
                        yield v


def _in_parts(
    steps: Iterable[Step], plain: Iterable[Step], parts: Mapping[int, tuple[tuple[int, ...], int]]
) -> tuple[Step, ...]:
    """The steps with some loops in two parts, the second as in the steps that move nothing to the host."""
    whole = {step.op: step for step in plain if _is_in(step, parts)}
    return tuple(Parts(*parts[step.op], step, whole[step.op]) if _is_in(step, parts) else step for step in steps)


def _is_in(step: Step, loops: Mapping[int, Any]) -> TypeGuard[Enter]:
    return isinstance(step, Enter) and step.op in loops


def _unwound(loop: _Divided, step: Enter) -> Segments:
    """The backward of a loop in segments."""
    *outer, length = loop.lengths
    segments = Segments(length, loop.starts, loop.levels[-1], step)
    for level, longer in reversed(list(enumerate(outer))):
        rerun = Keep(loop.lengths[level + 1], loop.starts, loop.levels[level])
        segments = Segments(longer, loop.starts, rerun, segments)
    return replace(segments, last=loop.last)


def _read_around(graph: Graph, loop: _Divided) -> dict[int, None]:
    """The values around a loop that it reads when it runs again in segments, without the starts of segments."""
    body = graph.bodies[loop.op]
    starts = dict(zip(body.carried_in, body.starts, strict=True))
    reads: dict[int, None] = {}
    read = {graph.outermost(v) for step in runs(loop.levels[-1].steps) for v in graph.ops[step.op].inputs}
    handed_on = zip(body.carried_in, body.carried, strict=True)
    read.update(graph.outermost(after) for v, after in handed_on if v in loop.starts and after is not None)
    for v in sorted(read.union(loop.levels[-1].stacks)):
        if body.loop not in graph.ancestors[graph.values[v].loop]:
            reads[v] = None
        elif v not in loop.starts and (first := starts.get(v)) is not None:
            reads[first] = None
    return reads


def _checked(known: Mapping[int, Segmentable], loop: int, given: Lengths) -> tuple[int, ...]:
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


def _checked_last(known: Mapping[int, Segmentable], loop: int, given: int) -> int:
    where = f"kept_steps[{loop}]"
    if loop not in known:
        raise PlanError(message(where, "names a loop that does not run in segments.", "Give its length, too."))
    if not 0 <= given < known[loop].length:
        cure = f"Give a number from 0 to {known[loop].length - 1}."
        raise PlanError(message(where, f"is {given}, and the loop has {known[loop].length} steps.", cure))
    return given


@dataclass(frozen=True)
class _Pass:
    """Regions in program order: the ops that run, what each region of a loop stacks, what is written and rounded.

    Ops of the names `apart` run in computations of their own.
    """

    graph: Graph
    ops: frozenset[int]
    exported: Mapping[int, list[int]]
    written: frozenset[int] = frozenset()
    rounded: frozenset[int] = frozenset()
    apart: frozenset[str] = frozenset()

    def steps(self, region: int) -> Iterator[Step]:
        """The steps of one region."""
        touched = self.rounded | self.written
        for op in (self.graph.ops[i] for i in self.graph.regions[region].ops if i in self.ops):
            if op.name == OPEN_LOOP:
                yield self.loop(op.id)
                continue
            yield _run(op.id, False, op.name in self.apart)
            if touched and not touched.isdisjoint(op.outputs):
                yield from (Round(v) for v in op.outputs if v in self.rounded)
                yield from (Write(v) for v in op.outputs if v in self.written)

    def loop(self, op: int, again: bool = False) -> Enter:
        """A loop with its steps."""
        body = self.graph.bodies[op].region
        return Enter(op, tuple(self.steps(body)), tuple(self.exported[body]), again)


@dataclass(frozen=True)
class _Turns:
    """Regions of the backward in their own order: what regions of loops stack, if anything waits, what is written."""

    graph: Graph
    orders: Mapping[int, Order]
    exported: Mapping[int, list[int]]
    waits: bool
    written: frozenset[int]

    def steps(self, region: int) -> Iterator[Step]:
        """The steps of one region."""
        order = self.orders[region]
        for turn in order.steps:
            if turn.again or turn.whole:
                if self.waits:
                    yield from (Wait(v, anchor) for v, anchor in turn.waits if v in self.graph.arrays)
                yield from (self.run(order, i, again=True) for i in turn.again)
            if self.waits and turn.written:
                yield from (Write(v) for v in turn.written if v in self.graph.arrays)
            yield self.run(order, turn.op, apart=turn.whole)
            yield from (Write(v) for v in self.graph.ops[turn.op].outputs if v in self.written)
        yield from (self.run(order, i, again=True) for i in order.last)

    def run(self, order: Order, op: int, again: bool = False, apart: bool = False) -> Step:
        """One op, or a loop with its steps."""
        if self.graph.ops[op].name != OPEN_LOOP:
            return _run(op, again, apart)
        if (rerun := order.reruns.get(op)) is not None:
            exported = _exported(self.graph, rerun.ops | {op}, set(rerun.stacks))
            return _Pass(self.graph, rerun.ops, exported).loop(op, again)
        body = self.graph.bodies[op].region
        return Enter(op, tuple(self.steps(body)), tuple(self.exported[body]), again)


def _exported(graph: Graph, run: frozenset[int], leaving: set[int]) -> dict[int, list[int]]:
    """For each region the values of its loops that someone outside it reads, so that its op must stack them."""
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
    return exported


def _reads_in(graph: Graph, i: int, v: int) -> int:
    """The region in which an op reads a value: a loop reads what makes up its own next step in its body."""
    op = graph.ops[i]
    if op.name == OPEN_LOOP and graph.bodies[i].loop in graph.ancestors[graph.values[v].loop]:
        return graph.bodies[i].region
    return op.region


def _rounded(graph: Graph, plan: Plan) -> frozenset[int]:
    """Saved half-precision values: XLA may keep them wider than they are, but only on the side that makes them."""
    if not plan.recomputed:
        return frozenset()
    half = (v for v in plan.values if graph.values[v].dtype in ("bfloat16", "float16"))
    return frozenset(v for v in half if (op := graph.maker_of(v)) is not None and op.name not in MOVEMENT)
