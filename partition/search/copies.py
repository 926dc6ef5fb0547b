"""Choose values that wait in host memory: the time of their copies, and the share that hides behind computing.

The link to the host carries one copy after another, each way on its own (as PCIe does). A value is sent when it is
made; the forward is over when the last copy is. On the way back each copy starts where the schedule says `fetch`, and
its reader waits for it. A loop copies while it runs, and ends when both are done. So copies cost nothing as long as
there is enough to compute meanwhile: bandwidth is a resource, not a price. Bytes that went to the host are off the
device between the halves.

Stacks of loops are few and large, so a whole stack seldom fits into the remaining bandwidth. A loop may therefore send
only the values of its first steps: its backward reads these last. The copies of each such step then have less to hide
behind than if fewer values were sent in all steps. The clock counts this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from jointcut.partition.lower.follow import steps_of
from jointcut.partition.lower.listing import Schedule
from jointcut.partition.lower.reruns import segmentable
from jointcut.partition.lower.steps import Enter, Fetch, Fork, Keep, Offload, Parts, Run, Segments, Step, runs
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import CostModel, op_seconds
from jointcut.partition.program.graph import OPEN
from jointcut.partition.program.primitives import FUSED

#: A value is worth a copy of its own if it has at least this share of the bytes of the largest value.
_WORTH = 1 / 256

#: More bytes than any plan saves.
_ALL = 2**62

#: For how many sets of a loop's values a plan tries how many steps' copies hide.
_IN_PARTS = 3

#: The parts into which the bytes are divided for a lower bound.
_PARTS = 128


@dataclass(frozen=True)
class Copies:
    """The copies of one step: the seconds that the link is busy one way, and the seconds that the step waits."""

    busy_seconds: float
    waiting_seconds: float

    @property
    def hidden(self) -> float:
        """The share of the copies, in both directions, that nothing waits for."""
        return 1.0 - self.waiting_seconds / (2 * self.busy_seconds) if self.busy_seconds else 1.0


def copies(problem: Problem, schedule: Schedule, model: CostModel, host_bytes_per_s: float) -> Copies:
    """Follow the copies of a schedule through both halves, at the link's rate `host_bytes_per_s`."""
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

    `shares` gives the copied part of each value that is copied in part.
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
            case Enter() | Fork() | Keep() | Segments():
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

    def seconds(self, step: Run | Enter | Fork) -> float:
        return seconds_of(self.problem, self.model, step.op)


def seconds_of(problem: Problem, model: CostModel, op: int) -> float:
    """The seconds of an op over all trips of its loops; 0 for an op that the compiler fuses."""
    graph = problem.graph
    if graph.ops[op].name in FUSED or graph.ops[op].name in OPEN:
        return 0.0
    loop = graph.loop_of(graph.ops[op])
    return op_seconds(graph, graph.ops[op], model) * graph.trips[loop] / graph.rivals[loop]


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
    """The saved values of a plan that may go to the host; values made first, and so needed last, are in front."""
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
    """Yield the plan with more of its values in host memory: as many as cost no time, half of the rest more, and all.

    `waiting` gives the seconds for which a plan waits for its copies; `hidden_bytes` are the bytes that the link moves
    in the shorter half. Sets of values that fit into these bytes are tried too, in two orders, because stacks of loops
    are few and large.
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
    """Yield the plan with more values of a loop in host memory, for as many first steps as cost no time.

    `waiting` and `hidden_bytes` are as in `sending`. A user's demand on a value applies to all its steps. So no value
    of a loop is sent in part if one of the loop's values must be sent, or if a part of the program has a budget. Each
    part has two steps at least: XLA unrolls a loop of one step, which may change the last bits.
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
    """The plan with values of a loop in host memory, for the first `steps` steps."""
    return _with(problem, plan, away, ((loop, problem.graph.loops[loop].length - steps),))


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that `fits`; if a number fits, all smaller ones do, and 0 always does."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def _fitting(values: Iterable[int], sizes: Mapping[int, int], most_bytes: float) -> list[int]:
    """The values that fit into `most_bytes`, taken in order; a value that does not fit is skipped."""
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
    strategy = f"{plan.strategy}, offloaded{' in part' * bool(kept_steps)}"
    parts = {"dropped": plan.dropped, "checkpoints": plan.checkpoints, "offloaded": offloaded, "kept_steps": kept_steps}
    return Plan.of(problem, plan.values, strategy=strategy, reasons=reasons, **parts)


def bound_seconds(
    again: Callable[[int], float], on_device: int, most_bytes: int, halves_seconds: tuple[float, float], rate: float
) -> float:
    """A lower bound on the seconds of recomputing and waiting, for any plan that keeps `on_device` bytes on the device.

    `again` is a lower bound on the seconds of recomputing for a number of saved bytes, at most `most_bytes`.
    `halves_seconds` are the seconds of forward and backward without recomputing.

    A plan that sends O bytes waits in the forward for O / rate, minus the time of the forward. In the backward it is
    the same, but recomputing makes the backward longer. All O are covered, in parts: in each part either term takes its
    lower end, and the last part covers all larger O too.
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
