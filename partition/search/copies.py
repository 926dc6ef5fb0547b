"""Choose what waits in host memory: how long the copies take, and how much of that hides behind computing.

The link to the host carries one copy after another, each way on its own (as PCIe does). A value is sent when it is
made; the forward is over when the last copy is. On the way back each copy starts where the schedule says `fetch`, and
its reader waits for it. A loop copies while it runs, and ends when both are done. So copies cost nothing as long as
there is enough to compute meanwhile: bandwidth is a resource, not a price. Bytes that went to the host are off the
device between the halves.

Stacks of loops are few and large, so what still fits into the bandwidth is seldom one of them. So a loop may send what
its first steps keep alone: these are the ones that its backward reads last. Each step's copies then have less to hide
behind than if fewer values were sent of all steps, which the clock counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from jointcut.partition.lower.follow import steps_of
from jointcut.partition.lower.reruns import segmentable
from jointcut.partition.lower.steps import Enter, Fetch, Keep, Offload, Parts, Run, Schedule, Segments, Step, runs
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import CostModel, op_seconds
from jointcut.partition.program.graph import OPEN_LOOP
from jointcut.partition.program.primitives import FUSED

#: A value is worth a copy of its own if it has at least this share of the bytes of the largest one.
_WORTH = 1 / 256

#: More bytes than any plan saves.
_ALL = 2**62

#: For how many sets of values of a loop a plan tries how many steps' copies hide.
_IN_PARTS = 3

#: The parts into which the bytes are divided for a lower bound.
_PARTS = 128


@dataclass(frozen=True)
class Copies:
    """The copies of one step: the seconds that the link is busy one way, and those for which the step waits."""

    busy_seconds: float
    waiting_seconds: float

    @property
    def hidden(self) -> float:
        """The share of the copies, there and back, for which nothing waits."""
        return 1.0 - self.waiting_seconds / (2 * self.busy_seconds) if self.busy_seconds else 1.0


def copies(problem: Problem, schedule: Schedule, model: CostModel, host_bytes_per_s: float) -> Copies:
    """Follow the copies of a schedule through both halves, for a link that moves so many bytes in a second."""
    parts = [step for step in schedule.forward if isinstance(step, Parts)]
    shares = {v: 1 - step.last / steps_of(problem.graph, step.first) for step in parts for v in step.values}
    clock = _Clock(problem, model, host_bytes_per_s, shares)
    for step in schedule.forward:
        clock.run(step)
    waiting = max(0.0, clock.link - clock.now)
    busy = sum(map(clock.copy_seconds, schedule.offloaded))
    back = _Clock(problem, model, host_bytes_per_s, shares)
    for step in schedule.backward:
        back.run(step)
    return Copies(busy, waiting + back.waited)


class _Clock:
    """The time in one half: `now` of the device, `link` when the link is free; `ready` are fetched values.

    `shares` are of the values that are copied in part the parts that are.
    """

    def __init__(
        self, problem: Problem, model: CostModel, host_bytes_per_s: float, shares: Mapping[int, float]
    ) -> None:
        self.shares = shares
        self.problem, self.graph, self.model, self.rate = problem, problem.graph, model, host_bytes_per_s
        self.now = self.link = self.waited = 0.0
        self.ready: dict[int, float] = {}

    def copy_seconds(self, v: int) -> float:
        whole = self.graph.outermost(v)
        return self.shares.get(whole, 1.0) * self.graph.values[whole].saved_bytes / self.rate

    def run(self, step: Step) -> None:
        """Let one step outside loops run."""
        match step:
            case Offload() | Fetch():
                self.link = max(self.link, self.now) + self.copy_seconds(step.value)
                if isinstance(step, Fetch):
                    self.ready[step.value] = self.link
            case Run():
                self.wait(max((self.ready.get(v, 0.0) for v in self.graph.ops[step.op].inputs), default=0.0))
                self.now += self.seconds(step)
            case Enter() | Keep() | Segments():
                self.wait(max((self.ready.get(v, 0.0) for v in _read(self.problem, step)), default=0.0))
                self.loop(step)
            case Parts():
                self.wait(max((self.ready.get(v, 0.0) for v in _read(self.problem, step.first)), default=0.0))
                share = step.last / steps_of(self.graph, step.first)
                is_forward = any(isinstance(inner, Offload) for inner in _moves([step.first]))
                parts = (step.first, 1.0 - share), (step.rest, share)
                for part, of_all in parts if is_forward else reversed(parts):
                    self.loop(part, of_all)
            case _:
                pass

    def loop(self, step: Step, share: float = 1.0) -> None:
        """Let a loop run, or a share of its steps, with their copies."""
        moved = list(_moved([step]))
        end = self.now + share * sum(map(self.seconds, runs([step])))
        if moved:
            self.link = max(self.link, self.now) + sum(map(self.copy_seconds, moved))
            if not any(isinstance(inner, Offload) for inner in _moves([step])):  # fetched: each step waits for its own
                self.now = end
                self.wait(self.link)
                return
        self.now = end

    def wait(self, until: float) -> None:
        self.waited += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def seconds(self, step: Run | Enter) -> float:
        return seconds_of(self.problem, self.model, step.op)


def seconds_of(problem: Problem, model: CostModel, op: int) -> float:
    """The seconds of an op over all trips of its loops; none for one that the compiler fuses."""
    graph = problem.graph
    if graph.ops[op].name in FUSED or graph.ops[op].name == OPEN_LOOP:
        return 0.0
    return op_seconds(graph, graph.ops[op], model) * graph.trips[graph.loop_of(graph.ops[op])]


def _read(problem: Problem, step: Step) -> Iterator[int]:
    return (v for run in runs([step]) for v in problem.graph.ops[run.op].inputs)


def _moves(steps: Iterable[Step]) -> Iterator[Offload | Fetch]:
    for step in steps:
        if isinstance(step, Offload | Fetch):
            yield step
        elif isinstance(step, Enter):
            yield from _moves(step.steps)


def _moved(steps: Iterable[Step]) -> Iterator[int]:
    return (step.value for step in _moves(steps))


# ------------------------------------------------------------------------------------------------- what to send


def worth_sending(problem: Problem, plan: Plan) -> list[int]:
    """The saved values of a plan that may go to the host, those that are made first, and needed last, in front."""
    graph, kept = problem.graph, problem.must_keep
    in_segments = {loop for loop, _ in plan.segments}
    least = _WORTH * max((s.bytes for s in plan.saved), default=0)
    row = [
        s
        for s in plan.saved
        if s.bytes > least
        and s.value not in kept
        and in_segments.isdisjoint(graph.ancestors[graph.values[s.value].loop])
        and not problem.not_offloaded(s.value)
    ]
    return [s.value for s in sorted(row, key=lambda s: (graph.values[s.value].maker or 0, s.value))]


def sending(problem: Problem, plan: Plan, waiting: Callable[[Plan], float], hidden_bytes: float) -> Iterator[Plan]:
    """The same plan with more of its values in host memory: as many as cost no time, a half more, and all.

    `waiting` says for how many seconds a plan waits for its copies; `hidden_bytes` are those that the link moves in the
    shorter half. What fits into these is tried, too, in two orders: stacks of loops are few and large.
    """
    row = worth_sending(problem, plan)
    if not row:
        return
    before = waiting(plan)
    free = _largest(len(row), lambda count: waiting(_with(problem, plan, row[:count])) <= before)
    chosen = [row[:count] for count in (free, (free + len(row)) // 2, len(row))]
    sizes = {s.value: s.bytes for s in plan.saved}
    left = hidden_bytes - plan.bytes_offloaded
    orders = row, sorted(row, key=lambda v: -sizes[v])
    chosen += [_fitting(order, sizes, left) for order in orders]
    for away in dict.fromkeys(map(tuple, map(sorted, chosen))):
        if away:
            yield _with(problem, plan, away)


def in_parts(problem: Problem, plan: Plan, waiting: Callable[[Plan], float], hidden_bytes: float) -> Iterator[Plan]:
    """The same plan with more of its values in host memory, of as many first steps of a loop as cost no time.

    `waiting` and `hidden_bytes` are as in `sending`. What a user demands of single values is about all their steps:
    nothing of a loop is sent in part where something of it must be sent, or where a part of the program has a budget.
    Each part has two steps at least: XLA unrolls a loop of one step, which may change the last bits.
    """
    row = worth_sending(problem, plan)
    if not row or problem.hooks or problem.bounds:
        return
    graph, sizes = problem.graph, {s.value: s.bytes for s in plan.saved}
    before, left = waiting(plan), hidden_bytes - plan.bytes_offloaded
    sent = {loop for v in plan.offloaded for loop in graph.ancestors[graph.values[v].loop]}
    for loop, record in segmentable(problem, plan).items():
        mine, length = [v for v in row if v in record.values and loop not in sent], record.length
        fitting = ((mine[:n], int(left * length / sum(sizes[v] for v in mine[:n]))) for n in range(1, len(mine) + 1))
        for away, most in islice(((away, most) for away, most in fitting if 0 < most < length), _IN_PARTS):
            part = partial(_of_steps, problem, plan, away, loop)
            free = _largest(min(most, length - 2), lambda steps, part=part: waiting(part(steps)) <= before)
            if free > 1:
                yield part(free)


def _of_steps(problem: Problem, plan: Plan, away: Sequence[int], loop: int, steps: int) -> Plan:
    """The plan with values of a loop in host memory, of so many first steps."""
    return _with(problem, plan, away, ((loop, problem.graph.loops[loop].length - steps),))


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that `fits`, as all smaller ones do; 0 always does."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def _fitting(values: Iterable[int], sizes: Mapping[int, int], most_bytes: float) -> list[int]:
    """Of some values, in their order, each that still fits into so many bytes."""
    chosen = list[int]()
    for v in values:
        if sizes[v] <= most_bytes:
            most_bytes -= sizes[v]
            chosen.append(v)
    return chosen


def _with(problem: Problem, plan: Plan, away: Sequence[int], kept_steps: Sequence[tuple[int, int]] = ()) -> Plan:
    offloaded = {*plan.offloaded, *away}
    reasons = {s.value: s.reason for s in plan.saved}
    reasons |= dict.fromkeys(set(away) - set(plan.offloaded), "the device has no room for it at this budget")
    strategy, dropped = f"{plan.strategy}, offloaded{' in part' * bool(kept_steps)}", plan.dropped
    parts = {"dropped": dropped, "offloaded": offloaded, "kept_steps": kept_steps}
    return Plan.of(problem, plan.values, strategy=strategy, reasons=reasons, **parts)


def bound_seconds(
    again: Callable[[int], float], on_device: int, most_bytes: int, halves_seconds: tuple[float, float], rate: float
) -> float:
    """A lower bound on the seconds of recomputing and waiting of any plan that keeps so many bytes on the device.

    `again` bounds the seconds of recomputing from below for a number of saved bytes, of which there are at most
    `most_bytes`; `halves_seconds` are those of forward and backward without recomputing. Who sends O bytes waits in the
    forward for what of O / rate is longer than it, and the same in the backward, which recomputing makes longer. All O
    are looked at, in parts: each part is bounded by the best at either end, the last one for all larger O too.
    """
    forward, backward = halves_seconds
    room = max(0, most_bytes - on_device)
    least = math.inf
    for part in range(_PARTS):
        low, high = room * part // _PARTS, room * (part + 1) // _PARTS
        computing = again(on_device + high if part + 1 < _PARTS else _ALL)
        sent = low / rate
        least = min(least, max(computing, sent - backward) + max(0.0, sent - forward))
    return least
