"""List the saved arrays, the ops that run again, and the cost of other budgets.

The rows come from a cut's graph and plan, with prices by its planner. Rows of other budgets hold predictions, or the
figures of compiled plans.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jointcut.aot.planning.budgets.pareto import Pareto, ParetoPoint
from jointcut.aot.report.tried import SHARES, Met
from jointcut.partition.drawing.picture import JSON, file_and_line, type_of
from jointcut.partition.figures import human_bytes
from jointcut.partition.plans.loops_told import in_segments
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.saved import DEVICE, Saved
from jointcut.partition.prices.flops import flops
from jointcut.partition.program.bodies import Nested
from jointcut.partition.program.graph import BRANCHES, OPEN_LOOP, STEP, Graph, Op
from jointcut.partition.program.outline import PSEUDO, Outline
from jointcut.partition.program.sides import first_met
from jointcut.partition.search.budget import Planner

_MOST_NAMES = 3  # names of ops on a line


@dataclass(frozen=True)
class SavedRow:
    """One saved array: its `bytes` (all copies of a loop), its type, and the op, module and user's line that made it.

    `needed_by` names the ops of the backward that read it. `reason` says why it is not recomputed. `value` is its id in
    the graph, and `memory` the memory that holds it, "device" or "pinned_host". `part` is the part of it that one of
    several devices has, such as "1/8"; empty on one device.
    """

    value: int
    bytes: int
    type: str
    op: str
    path: str
    line: str
    needed_by: str
    reason: str
    memory: str = DEVICE
    part: str = ""


@dataclass(frozen=True)
class AgainRow:
    """The ops of one line of the user's code that run again: their number, names, flops and seconds."""

    path: str
    line: str
    count: int
    ops: str
    flops: float
    seconds: float


def by_line(rows: Iterable[AgainRow]) -> list[list[AgainRow]]:
    """Return the rows in groups that differ by module alone, in the given order."""
    groups: dict[AgainRow, list[AgainRow]] = defaultdict(list)
    for row in rows:
        groups[replace(row, path="")].append(row)
    return list(groups.values())


@dataclass(frozen=True)
class LessRow:
    """A plan within a `share` of this one's peak, or the smallest plan (a share of 0).

    `budget` is the text to type for it; it was tried, and `peak_bytes` is the peak of the compiled step. Without a
    budget nothing was compiled: the peak is predicted, or None if no plan was found. `extra_seconds` is the additional
    time of the plan, `extra_share` this time over the predicted time of a step. `freed` lists the arrays that the plan
    no longer saves, `kept` the arrays that it saves instead, both largest first; `freed_bytes` and `kept_bytes` are
    their sums. `again` names the further ops that run again, and `lines` lists them by the user's line, longest time
    first. `segments` are the loops that run in segments, as in `Plan.loops_in_segments`.
    """

    share: float
    peak_bytes: int | None
    budget: str = ""
    extra_seconds: float = 0.0
    extra_share: float = 0.0
    freed_bytes: int = 0
    kept_bytes: int = 0
    freed: tuple[SavedRow, ...] = ()
    kept: tuple[SavedRow, ...] = ()
    again: str = ""
    lines: tuple[AgainRow, ...] = ()
    segments: tuple[tuple[int, int, int], ...] = ()


class Lists:
    """The rows of a report, for plans of one program."""

    def __init__(self, planner: Planner, outline: Outline) -> None:
        """Take a planner, which prices the ops, and an outline, which gives the module and line of each op."""
        self.planner, self.outline = planner, outline
        self.graph: Graph = planner.graph

    def saved(self, plan: Plan) -> tuple[SavedRow, ...]:
        """Return the saved arrays of a plan, largest first."""
        late = {*plan.recomputed, *plan.deferred, *self.planner.problem.sides.backward}
        rows = (self._saved(s, plan, late) for s in plan.saved)
        return tuple(sorted(rows, key=lambda row: (-row.bytes, row.value)))

    def _saved(self, s: Saved, plan: Plan, late: set[int]) -> SavedRow:
        maker = self.graph.values[s.value].maker
        assert maker is not None, "a plan saves no argument"
        type_ = type_of(s.dtype, s.shape, s.copies)
        path, line = self.path(maker), self.outline.lines[maker]
        is_final = plan.strategy == "save_all" or self.planner.problem.verdicts[s.value].not_recomputed
        reason = s.reason if is_final else self._instead(s, plan) or s.reason
        reason = replace(s, reason=reason).why
        part = _part(self.graph.values[s.value].parts, self.graph)
        read = self._needed_by(s.value, late)
        return SavedRow(s.value, s.bytes, type_, s.op, path, line, read, reason, s.memory, part)

    def _instead(self, s: Saved, plan: Plan) -> str:
        """Return a reason that names the values to save instead of a value; empty if there are none."""
        graph, verdicts, saved = self.graph, self.planner.problem.verdicts, {*plan.values} - {s.value}

        def stops(v: int, op: Op) -> bool:
            return v in saved or (bool(verdicts[v].not_recomputed) and op.name not in PSEUDO)

        values = [v for v in first_met(graph, [s.value], stops) if v not in saved]
        if not values:
            return ""
        largest = max(values, key=lambda v: (self.planner.problem.prices[v], -v))
        size = human_bytes(sum(self.planner.problem.prices[v] for v in values))
        maker = graph.maker_of(largest)
        assert maker is not None, "first_met finds what an op computes"
        rest = f" and {len(values) - 1} more" if len(values) > 1 else ""
        name = {OPEN_LOOP: "the loop", BRANCHES: "the conditional"}.get(maker.name, maker.name)
        why = verdicts[largest].not_recomputed.removeprefix(f"{maker.name} is ")
        source = f"{name} at {file_and_line(self.outline.lines[maker.id])}{rest}"
        source = f"the heavy {source}" if why == "heavy" else f"{source} ({why})"
        return f"to compute it again, {size} would be kept in its place: {source}"

    def path(self, op: int) -> str:
        """Return the module path of an op."""
        scope = self.outline.scope_of.get(op, 0)
        return self.outline.path(scope) if scope else ""

    def _needed_by(self, value: int, late: set[int]) -> str:
        """Return the names of the ops of the backward that read a value, the most frequent first."""
        readers = [op for op in self._readers(value) if op.id in late]
        counts = Counter(op.name for op in readers)
        names = [name if n == 1 else f"{n} {name}" for name, n in counts.most_common(_MOST_NAMES)]
        more = len(counts) - len(names)
        return ", ".join([*names, *([f"{more} more"] if more else [])]) or "the caller"

    def _readers(self, value: int) -> Iterator[Op]:
        for i in self.graph.consumers[value]:
            op = self.graph.ops[i]
            if op.name == STEP:
                yield from self._readers(op.outputs[0])
            else:
                yield op

    def again(self, plan: Plan) -> tuple[AgainRow, ...]:
        """Return the ops that run twice, by the user's line and module, longest time first."""
        return self._by_line(self.twice(plan), self.path)

    def _by_line(self, ids: Iterable[int], path_of: Callable[[int], str]) -> tuple[AgainRow, ...]:
        """Group ops that run again by the user's line and by `path_of`, longest time first."""
        groups: dict[tuple[str, str], list[Op]] = defaultdict(list)
        for i in ids:
            groups[self.outline.lines[i], path_of(i)].append(self.graph.ops[i])
        rows = [
            AgainRow(path, line, len(ops), _names(ops), sum(map(self.flops, ops)), sum(map(self.seconds, ops)))
            for (line, path), ops in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.seconds, -row.flops, row.line)))

    def twice(self, plan: Plan) -> list[int]:
        """Return the ops that run in the forward and again in the backward, without the ops of loops in segments.

        An op that runs a third time is listed twice.
        """
        return [i for i in plan.reruns(self.graph) if self.graph.ops[i].name not in PSEUDO]

    def seconds(self, op: Op) -> float:
        """Return the predicted seconds of one more run of an op, over all steps of its loops."""
        return self.planner.problem.seconds[op.id]

    def flops(self, op: Op) -> float:
        """Return the flops of an op on one device, over all steps of its loops."""
        once = 0.0 if op.payload is None or op.name in PSEUDO else flops(op.payload) or 0.0
        loop = self.graph.loop_of(op)
        return once * self.graph.trips[loop] / self.graph.rivals[loop] / self.graph.parts_of(op)

    def step_flops(self) -> float:
        """Return the flops of a step in which no op runs twice."""
        loops = self.graph.bodies  # the ops of their bodies are counted one by one
        return sum(self.flops(op) for op in self.graph.ops if op.id not in loops)

    def tried(self, plan: Plan, met: Iterable[Met], here: ParetoPoint) -> tuple[LessRow, ...]:
        """Return the differences between this plan and the plans for the budgets that were met."""
        return tuple(self._tried(plan, budget, here) for budget in met)

    def _tried(self, plan: Plan, met: Met, here: ParetoPoint) -> LessRow:
        other = self.planner.priced(met.plan)
        place = ParetoPoint(met.peak_bytes, self.planner.step_seconds(other), other)
        return replace(self._less(plan, met.share, place, here), budget=met.budget)

    def less(self, plan: Plan, front: Pareto, here: ParetoPoint) -> tuple[LessRow, ...]:
        """Return the differences between this plan and the predicted plans for `SHARES` and for the least peak.

        The first share that no plan holds gets a row without a peak; smaller shares get no row.
        """
        rows: list[LessRow] = []
        for share in SHARES:
            fitting = [p for p in front if p.peak_bytes <= share * here.peak_bytes]
            if not fitting:
                rows.append(LessRow(share, None))
                break
            row = self._less(plan, share, min(fitting, key=lambda p: p.seconds), here)
            if rows and rows[-1].peak_bytes == row.peak_bytes:
                rows.pop()  # the same plan also holds the smaller share
            rows.append(row)
        least = min(front, key=lambda p: p.peak_bytes, default=here)
        if least.peak_bytes < here.peak_bytes and all(row.peak_bytes != least.peak_bytes for row in rows):
            rows.append(self._less(plan, 0.0, least, here))
        return tuple(rows)

    def _less(self, plan: Plan, share: float, other: ParetoPoint, here: ParetoPoint) -> LessRow:
        before, after = set(plan.values), set(other.plan.values)
        freed = tuple(row for row in self.saved(plan) if row.value not in after)
        kept = tuple(row for row in self.saved(other.plan) if row.value not in before)
        again = sorted({*self.twice(other.plan)} - {*plan.recomputed})
        extra = other.seconds - here.seconds
        step = self.planner.common_seconds + here.seconds
        names = [_names([self.graph.ops[i] for i in again])] if again else []
        return LessRow(
            share,
            other.peak_bytes,
            extra_seconds=extra,
            extra_share=extra / step if step else 0.0,
            freed_bytes=sum(row.bytes for row in freed),
            kept_bytes=sum(row.bytes for row in kept),
            freed=freed,
            kept=kept,
            again="; ".join([*names, *in_segments(other.plan.loops_in_segments)]),
            lines=self._by_line(again, lambda _: ""),
            segments=other.plan.loops_in_segments,
        )


def _part(parts: int, graph: Graph) -> str:
    """Return the part of an array that one of several devices has; empty on one device."""
    return "" if graph.devices == 1 else f"1/{parts}" if parts > 1 else "whole"


def _names(ops: Sequence[Op]) -> str:
    """Return the names of all ops with their counts, most frequent first."""
    return ", ".join(name if n == 1 else f"{n} {name}" for name, n in Counter(op.name for op in ops).most_common())


# ------------------------------------------------------------------------------------------------------- loops


def loop_told(loop: Nested) -> JSON:
    """Return a loop whose steps are cut on their own, as plain JSON; bytes and ops are for one step."""
    return {
        "name": loop.name,
        "trips": loop.trips,
        "checkpoints": loop.checkpoints,
        "checkpoint_bytes": loop.checkpoint_bytes,
        "saved_bytes": loop.plan.bytes_saved,
        "recomputed": len(loop.plan.recomputed),
    }


def segments_told(loops: Iterable[tuple[int, int, int]]) -> list[JSON]:
    """Return loops that run in segments, as plain JSON."""
    return [{"loop": loop, "steps": steps, "kept_steps": kept} for loop, steps, kept in loops]
