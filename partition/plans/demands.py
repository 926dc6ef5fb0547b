"""Compare a plan with the demands on single values.

A plan that breaks a MUST is refused. A plan that overrules a PREFER says so, and says the cost of following it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from jointcut.partition.errors import PlanError, message
from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.rules import CheckpointPolicy
from jointcut.partition.program.graph import TOP, Graph

#: Loops by their ids, each with a number of steps.
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Overruled:
    """A preference that a plan does not follow.

    Attributes:
        value: the id of its value in the graph.
        demand: the preference.
        reason: the key of the policy that states it.
        what: the value's type, its op and the user's line.
        bytes: the bytes that saving the value takes.
        seconds: the time of one more run of its op, by the cost model; None where ops have no prices.
        is_computed_again: whether the plan computes it again; else the plan saves it in the device's memory.
    """

    value: int
    demand: CheckpointPolicy
    reason: str
    what: str
    bytes: int
    seconds: float | None
    is_computed_again: bool


def overruled(
    problem: Problem, saved: frozenset[int], again: frozenset[int], offloaded: frozenset[int] = frozenset()
) -> tuple[Overruled, ...]:
    """The preferences that a plan does not follow.

    The plan saves the values `saved`, some of them in host memory (`offloaded`), and computes others `again`. Raises
    `PlanError` where it saves a value that must be recomputed, or saves a value on the device that must be offloaded.
    """
    on_device = saved - offloaded
    out: list[Overruled] = []
    for c in problem.constraints:
        if c.demand is CheckpointPolicy.MUST_RECOMPUTE and c.value in saved:
            cure = "Save what it is computed from, or take that key out of the policy."
            where = problem.graph.where(c.value)
            raise PlanError(message(where, f"is saved by the plan, and may not be: {c.reason}.", cure))
        if c.demand is CheckpointPolicy.MUST_OFFLOAD and c.value in on_device:
            where_to = "in Plan.of(..., offloaded=[...]), without kept_steps of its loop"
            cure = f"Name it {where_to}, or take that key out of the policy."
            where = problem.graph.where(c.value)
            raise PlanError(message(where, f"is saved on the device by the plan, and may not be: {c.reason}.", cure))
        broken = {
            CheckpointPolicy.PREFER_SAVE: again,
            CheckpointPolicy.PREFER_RECOMPUTE: saved,
            CheckpointPolicy.PREFER_OFFLOAD: again | on_device,
        }
        if c.value in broken.get(c.demand, ()):
            value, op = problem.graph.values[c.value], problem.graph.maker_of(c.value)
            trips = f"{value.copies} x " if value.copies > 1 else ""
            made = f" {op.name} {problem.graph.origin_of(op)[1]}" if op else ""
            seconds = problem.seconds[op.id] if op and problem.seconds else None
            what = f"{trips}{value.dtype}{list(value.shape)}{made}"
            size, is_again = problem.on_device[c.value], c.value in again
            out.append(Overruled(c.value, c.demand, c.reason, what, size, seconds, is_again))
    return tuple(out)


def told(rows: Iterable[Overruled]) -> Iterator[str]:
    """A line for each group of overruled preferences that read the same, with the cost of following them."""
    groups: dict[tuple[str, str], list[Overruled]] = defaultdict(list)
    for row in rows:
        groups[row.reason, row.what].append(row)
    for (reason, what), own in sorted(groups.items(), key=lambda group: -sum(row.bytes for row in group[1])):
        times = f"{len(own)} times " if len(own) > 1 else ""
        size = human_bytes(sum(row.bytes for row in own))
        if own[0].is_computed_again:
            kept = "saving" if own[0].demand is CheckpointPolicy.PREFER_SAVE else "offloading"
            cost = f"{kept} it would have kept {size} more"
        elif own[0].demand is CheckpointPolicy.PREFER_OFFLOAD:
            cost = f"it keeps {size} on the device"
        else:
            known = [row.seconds for row in own if row.seconds is not None]
            took = f"taken {1e3 * sum(known):,.3f} ms" if known else f"run {counted(len(own), 'op')} again"
            cost = f"it keeps {size}; computing it again would have {took}, with what that reads"
        yield f"overruled {reason}: {times}{what}; {cost}"


def in_bounds(problem: Problem | None, on_device: Set[int]) -> Iterator[str]:
    """A line for each part of a program with a bound on its bytes: the bound, and the bytes that it keeps."""
    if problem is None:
        return
    for bound in problem.bounds:
        yield f"{bound.reason}: {human_bytes(problem.kept_bytes(bound, on_device))} kept"


def unused(problem: Problem | None, saved: Iterable[int]) -> Iterator[str]:
    """A line for each demand whose values a plan does not save, since its backward has no use for them."""
    musts = [c for c in (problem.constraints if problem else ()) if c.demand.is_must_keep and c.is_asked]
    kept = {c.reason for c in musts if c.value in saved}
    for reason in dict.fromkeys(c.reason for c in musts if c.reason not in kept):
        yield f"{reason}: none is saved, as the backward reads none of these values and computes nothing from them"


def steps_fit(graph: Graph, segments: Pairs, kept_steps: Pairs, offloaded: Iterable[int]) -> None:
    """Raise `PlanError` where a plan's `segments` or `kept_steps` do not fit the loops of its program."""
    for n, (loop, steps) in enumerate(segments):
        where = f"plan.segments[{n}]"
        if not TOP < loop < len(graph.loops):
            cure = "Name a loop of the program: see Graph.loops."
            raise PlanError(message(where, f"names loop {loop}, which does not exist.", cure))
        _named_once(where, loop, segments[:n])
        if not 1 <= steps <= graph.loops[loop].length:
            cure = f"Loop {loop} takes {graph.loops[loop].length} steps in all."
            raise PlanError(message(where, f"has segments of {steps} steps.", cure))
    offloading = {loop for v in offloaded for loop in graph.ancestors[graph.values[v].loop]}
    for n, (loop, steps) in enumerate(kept_steps):
        where = f"plan.kept_steps[{n}]"
        if loop not in offloading.union(dict(segments)):
            cure = "Name one of plan.segments, or a loop that offloads; any other keeps what all its steps hand over."
            what = f"names loop {loop}, which neither runs in segments nor offloads anything."
            raise PlanError(message(where, what, cure))
        _named_once(where, loop, kept_steps[:n])
        if not 1 <= steps < graph.loops[loop].length:
            cure = f"Loop {loop} takes {graph.loops[loop].length} steps in all: keep at least one, and not all of them."
            raise PlanError(message(where, f"keeps {counted(steps, 'step')}.", cure))


def _named_once(where: str, loop: int, before: Iterable[tuple[int, int]]) -> None:
    if loop in dict(before):
        raise PlanError(message(where, f"names loop {loop} a second time.", "Name each loop once."))
