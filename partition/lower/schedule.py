"""Say when each op runs: the plan as steps of both halves (`steps`), for one backend.

The forward runs in program order. The backward runs in the order of `order`, each op after the ops recomputed for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from jointcut.partition.errors import PlanError, message
from jointcut.partition.lower.among.early_updates import updated
from jointcut.partition.lower.among.hooks import hooked_early
from jointcut.partition.lower.among.moves import fetched, restored, sent, stored
from jointcut.partition.lower.among.settle import settled
from jointcut.partition.lower.among.waits import waiting
from jointcut.partition.lower.exports import handed_out
from jointcut.partition.lower.follow import changed, once
from jointcut.partition.lower.listing import Schedule
from jointcut.partition.lower.order import Order, ordered
from jointcut.partition.lower.reruns import Lengths, checked, checked_last, needed_again, segmentable, shortened
from jointcut.partition.lower.steps import (
    Branch,
    Enter,
    Fork,
    Keep,
    Parts,
    Round,
    Run,
    Segments,
    Step,
    Store,
    Wait,
    Write,
    kept_as_one,
    runs,
)
from jointcut.partition.packing.packing import HOOK
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.runs import runs_forward
from jointcut.partition.program.graph import LITERAL, OPEN, OPEN_LOOP, STEP, TOP, Graph
from jointcut.partition.program.primitives import MOVEMENT
from jointcut.partition.program.roles import Role

#: Plans of one program share most of their steps.
_run = functools.cache(Run)


def schedule(
    problem: Problem,
    plan: Plan,
    lengths: Mapping[int, Lengths] | None = None,
    kept_steps: Mapping[int, int] | None = None,
) -> Schedule:
    """Schedule a plan that closes, for the problem's backend.

    Where nothing runs again, no residual waits, and only sums of many arrays are written out.

    `lengths` gives the steps of a segment, by loop id, and `kept_steps` the number of last steps in no segment. By
    default both are the plan's own. A loop runs whole if the backward reads none of its stacks. Loops that offload in
    part run in two parts. Raises `PlanError` for a loop that cannot be divided so, or for a wrong length or number of
    steps.
    """
    if kept_steps is None:
        segments = dict(plan.segments) if lengths is None else {}
        kept_steps = {loop: steps for loop, steps in plan.kept_steps if loop in segments}
    problem = problem.at(plan.checkpoints)
    return _Halves(problem, plan).schedule(dict(plan.segments) if lengths is None else lengths, kept_steps)


@dataclass(frozen=True)
class _Divided:
    """A loop that runs in segments: the lengths of these, and its forward as it runs in a segment.

    `op` holds its forward, `starts` are the carried values that the rerun starts from. `levels` are the loops that run
    again, one for each of the lengths; the last of them makes the `values` that the backward reads. The `last` steps of
    the forward are in no segment.
    """

    op: int
    lengths: tuple[int, ...]
    last: int
    starts: tuple[int, ...]
    levels: tuple[Enter, ...]
    values: frozenset[int]

    @property
    def tails(self) -> frozenset[int]:
        """The values of the last steps that the backward reads."""
        return self.values if self.last else frozenset()


class _Halves:
    """Both halves of one plan."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.graph, self.plan = problem, problem.graph, plan
        self.outputs, self.gradients = self.graph.results(Role.OUTPUT), self.graph.results(Role.GRADIENT)
        self.rounded = _rounded(self.graph, plan)
        backend, saved, again = problem.backend, frozenset(plan.values), frozenset(plan.recomputed)
        self.written = self.sums = backend.written_sums(self.graph, problem.sides, saved) & self.graph.arrays
        if plan.runs_again:
            self.written |= backend.written_forward(self.graph, saved, again) & self.graph.arrays

    def schedule(self, lengths: Mapping[int, Lengths], kept_steps: Mapping[int, int]) -> Schedule:
        """The schedule, with loops in segments of these lengths, except for `kept_steps` last steps."""
        backward = self.backward()
        wanted = self.gradients | self.read(backward) | self.problem.asked_to_keep
        handed = [v for v in self.plan.values if v in wanted]
        divided = self.divided(lengths, kept_steps, handed)
        if divided:
            made = {v for loop in divided.values() for v in loop.values}
            handed = list(dict.fromkeys([*(v for v in handed if v not in made), *self.read_again(backward, divided)]))
            backward = changed(self.graph, backward, lambda s: _unwound(divided[s.op], s) if _is_in(s, divided) else s)
        forward = self.forward(handed, list(divided.values()))
        as_one = dict(kept_as_one(forward))
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
        handed = list(dict.fromkeys(as_one.get(v, v) for v in handed))
        forward, backward = waiting(self.problem, forward, backward, self.plan.runs_again)
        return Schedule(forward, tuple(handed), backward, self.graph)

    def parts(self, handed: Sequence[int], away: Set[int]) -> dict[int, tuple[tuple[int, ...], int]]:
        """The values handed over in two parts, and the number of last steps in the second part.

        They are listed by the ops of loops that run in two parts.
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
        """The values that are handed over in a form; values of a loop in segments are computed again in no form."""
        in_segments, forms = {loop for loop, _ in self.plan.segments}, self.plan.stored
        around = ((v, self.graph.ancestors[self.graph.values[v].loop]) for v in handed if v in forms)
        return {v: forms[v] for v, loops in around if in_segments.isdisjoint(loops)}

    def hooked(self, values: Iterable[int]) -> dict[int, str]:
        """The values that pass through a user's functions."""
        graph, hooks = self.graph, self.problem.hooks
        return {v: HOOK for v in values if hooks and v in graph.arrays and hooks.takes(graph.values[v])}

    def forward(self, handed: Sequence[int], divided: Sequence[_Divided]) -> tuple[Step, ...]:
        """The forward; it keeps the carried values where the segments of divided loops start."""
        tails = {v for loop in divided for v in loop.tails}  # they leave with the loops' carried values, see `Keep`
        leaving, starts = {*handed, *tails}, {v for loop in divided for v in loop.starts}
        loops, everything = {loop.op: loop for loop in divided}, self.run_for(leaving, starts)

        def kept(loop: _Divided, step: Enter) -> Keep:
            if not loop.last:
                return Keep(loop.lengths[0], loop.starts, step)
            bare = self.run_for(leaving.difference(loop.tails), starts).loop(loop.op)
            return Keep(loop.lengths[0], loop.starts, bare, loop.last, everything.loop(loop.op))

        others = self.pass_(everything.ops, {*self.outputs, *leaving.difference(tails)}) if tails else everything
        return changed(self.graph, others.steps(TOP), lambda s: kept(loops[s.op], s) if _is_in(s, loops) else s)

    def run_for(self, leaving: Set[int], starts: Set[int]) -> _Pass:
        """Regions of the forward with the ops that it runs for outputs and for these values; `leaving` are stacked."""
        ops = runs_forward(self.graph, self.problem.sides, sorted(leaving | starts))
        return self.pass_(ops, {*self.outputs, *leaving})

    def pass_(self, ops: frozenset[int], leaving: Set[int]) -> _Pass:
        """Regions of the forward with some of their ops."""
        return _Pass(self.graph, ops, handed_out(self.graph, ops, leaving), self.written, self.rounded)

    def backward(self) -> tuple[Step, ...]:
        """The backward, its loops whole."""
        exported = handed_out(self.graph, self.problem.sides.backward, self.gradients)
        if self.plan.recomputed or self.plan.deferred:
            orders = ordered(self.problem, self.plan)
            steps = _Turns(self.graph, orders, exported, self.plan.runs_again, self.sums).steps(TOP)
        else:  # in program order
            sides, apart = self.problem.sides, self.problem.backend.taken_apart
            steps = _Pass(self.graph, sides.backward, exported, self.sums, apart=apart).steps(TOP)
        steps = updated(self.problem, hooked_early(self.graph, steps))
        backend = self.problem.backend
        return settled(self.graph, steps, backend.several) if backend.puts_off else steps

    def read(self, steps: Iterable[Step]) -> set[int]:
        """The values that some steps read, whole or step by step."""
        graph = self.graph
        read = set[int]().union(*(graph.ops[step.op].inputs for step in runs(steps)))
        slices = (op for op in reversed(graph.ops) if op.name == STEP) if len(graph.regions) > 1 else ()
        read.update(op.inputs[0] for op in slices if op.outputs[0] in read)
        return read

    def divided(
        self, lengths: Mapping[int, Lengths], kept_steps: Mapping[int, int], read: Sequence[int]
    ) -> dict[int, _Divided]:
        """The loops to run in segments, by the op of their backward; `read` are the values that the backward reads."""
        known = segmentable(self.problem, self.plan) if lengths else {}
        asked = {loop: checked(known, loop, given) for loop, given in lengths.items()}
        lasts = {loop: checked_last({i: known[i] for i in asked}, loop, given) for loop, given in kept_steps.items()}
        divided = {}
        for loop, ks in asked.items():
            stacks = {v for v in known[loop].values if v in read}
            if stacks:
                last = lasts.get(loop, 0)
                ks = shortened(ks, known[loop].length - last)
                divided[known[loop].backward] = self.rerun(known[loop].forward, ks, last, stacks)
        return divided

    def rerun(self, op: int, lengths: tuple[int, ...], last: int, stacks: set[int]) -> _Divided:
        """A loop's forward as it runs in a segment, to make these stacks."""
        body = self.graph.bodies[op]
        run = runs_forward(self.graph, self.problem.sides, self.plan.values)
        ops, starts = needed_again(self.graph, body, stacks, run)
        bare, _ = needed_again(self.graph, body, starts, run)
        whole, carries = (
            self.pass_(frozenset({op, *(o.id for o in part)}), leaving).loop(op, again=True)
            for part, leaving in ((ops, stacks), (bare, set[int]()))
        )
        return _Divided(op, lengths, last, starts, (*[carries] * (len(lengths) - 1), whole), frozenset(stacks))

    def read_again(self, backward: Iterable[Step], divided: Mapping[int, _Divided]) -> Iterator[int]:
        """The values that segments read when they run again, except for values at hand in the backward."""
        graph, at_hand = self.graph, set(self.graph.role_inputs(Role.PRIMAL))
        for step in once(graph, backward):
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
    """Put some loops in two parts, the second taken from the `plain` steps, which move nothing to the host."""
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
    """The values around a loop that its reruns in segments read, without the starts of segments."""
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


@dataclass(frozen=True)
class _Pass:
    """Regions in program order, with the ops that run.

    `exported` are the values that each region of a loop stacks, `written` and `rounded` the values written out and
    rounded. Ops of the names `apart` run in computations of their own.
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
            if op.name in OPEN:
                yield self.loop(op.id) if op.name == OPEN_LOOP else self.fork(op.id)
                continue
            yield _run(op.id, False, op.name in self.apart)
            if touched and not touched.isdisjoint(op.outputs):
                yield from (Round(v) for v in op.outputs if v in self.rounded)
                yield from (Write(v) for v in op.outputs if v in self.written)

    def loop(self, op: int, again: bool = False) -> Enter:
        """A loop with its steps."""
        body = self.graph.bodies[op].region
        return Enter(op, tuple(self.steps(body)), tuple(self.exported[body]), again)

    def fork(self, op: int, again: bool = False) -> Fork:
        """A conditional with its branches."""
        regions = self.graph.bodies[op].regions
        return Fork(op, tuple(Branch(tuple(self.steps(r)), tuple(self.exported[r])) for r in regions), again)


@dataclass(frozen=True)
class _Turns:
    """Backward regions, in the order of `orders`.

    `exported` are the values that each region of a loop stacks, `written` the values that are written out. Without
    `waits` no value waits.
    """

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
        name = self.graph.ops[op].name
        if name not in OPEN:
            return _run(op, again, apart)
        if (rerun := order.reruns.get(op)) is not None:
            exported = handed_out(self.graph, rerun.ops | {op}, set(rerun.stacks))
            part = _Pass(self.graph, rerun.ops, exported)
            return part.loop(op, again) if name == OPEN_LOOP else part.fork(op, again)
        if name == OPEN_LOOP:
            body = self.graph.bodies[op].region
            return Enter(op, tuple(self.steps(body)), tuple(self.exported[body]), again)
        regions = self.graph.bodies[op].regions
        return Fork(op, tuple(Branch(tuple(self.steps(r)), tuple(self.exported[r])) for r in regions), again)


def _rounded(graph: Graph, plan: Plan) -> frozenset[int]:
    """Saved half-precision values: XLA may keep them wider than their type, but only in the half that makes them."""
    if not plan.recomputed:
        return frozenset()
    half = (v for v in plan.values if graph.values[v].dtype in ("bfloat16", "float16"))
    return frozenset(v for v in half if (op := graph.maker_of(v)) is not None and op.name not in MOVEMENT)
