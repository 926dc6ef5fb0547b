"""Choose when each value is kept and computed again, by constraint programming.

An *instance* is ops in a fixed order (see `fixed_order`). Under a budget on the peak some ops run again, and `solve`
finds the sequence of runs that takes least.

The model is that of retention intervals (Bartan, Li, Teague, Lott and Dilkina, "Moccasin: efficient tensor
rematerialization for neural networks", ICML 2023). Stage t ends with the first run of op t; before it, ops that ran
already may run again, each at most once in a stage and in their order. So the run of op i in stage t has an *event*
t(t+1)/2 + i, and an op that runs at most C times gives C intervals for each value it makes, from the event that makes
it to the last that reads it. What no event's intervals may exceed is the budget: a cumulative constraint for CP-SAT of
OR-Tools (Apache-2.0; the extra `cpsat`). Optimal therefore means: for this order, with at most C runs of an op, and
with reruns within a stage in order.

Times go to the solver as whole multiples of a billionth of their sum, rounded down, so that its bound stays one.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from benchmarks.evict import evict
from benchmarks.fixed_order import Instance as Instance
from benchmarks.fixed_order import Schedule as Schedule
from benchmarks.fixed_order import copies_of, stages_of
from jointcut.partition.errors import PlanError, message

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

_UNITS = 10**9  # what the seconds of all ops together come to in the solver


@dataclass(frozen=True)
class Outcome:
    """What the solver found within its limits.

    "optimal" and "feasible" come with a schedule; "infeasible" is proved (for so many copies), "unknown" is not.
    No schedule of the model takes less than `bound_seconds`, infinite if there is none.
    """

    status: Status
    schedule: Schedule | None
    bound_seconds: float


def solve(
    instance: Instance,
    budget_bytes: int,
    *,
    copies: int = 2,
    seconds_limit: float = 60.0,
    num_workers: int = 1,
    seed: int = 0,
) -> Outcome:
    """The sequence of runs that takes least with a peak within the budget, each op at most `copies` times.

    A greedy schedule comes first (see `evict`), and the search goes on from it. The seed is fixed, and one worker
    decides alike in every run; so do several, which take turns. Only where `seconds_limit`, on the clock, ends the
    search does the outcome depend on the machine; the greedy schedule is finished whatever the limit.

    Raises `PlanError` for fewer than one run of an op.
    """
    if copies < 1:
        raise PlanError(message("copies", f"is {copies}.", "Say how often an op may run: once, twice or more."))
    if budget_bytes < instance.floor_bytes:
        return Outcome("infeasible", None, math.inf)
    cp, start = _cp_model(), time.monotonic()
    found = evict(instance, budget_bytes, copies)
    if found and found.seconds <= instance.nominal_seconds:
        return Outcome("optimal", found, found.seconds)
    model = _Model(cp, instance, budget_bytes, copies)
    if found:
        model.hint(found)
    left = max(0.0, seconds_limit - (time.monotonic() - start))
    outcome = model.outcome(_solver(cp, left, num_workers, seed))
    if found and outcome.schedule is None:  # out of time, since the model holds what was found
        return Outcome("feasible", found, outcome.bound_seconds)
    return outcome


def _solver(cp: ModuleType, seconds_limit: float, num_workers: int, seed: int) -> Any:
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds_limit
    solver.parameters.num_workers = num_workers
    solver.parameters.interleave_search = num_workers > 1
    solver.parameters.random_seed = seed
    return solver


_STATUS: dict[str, Status] = {
    "OPTIMAL": "optimal",
    "FEASIBLE": "feasible",
    "INFEASIBLE": "infeasible",
    "UNKNOWN": "unknown",
}


def _cp_model() -> ModuleType:
    try:
        return import_module("ortools.sat.python.cp_model")
    except ModuleNotFoundError as error:
        cure = "Run `pip install 'jointcut[cpsat]'`."
        raise ModuleNotFoundError(message("solve", "needs OR-Tools, which is not installed.", cure)) from error


@dataclass(frozen=True)
class _Run:
    """One possible run of an op: its event, whether it takes place, and until which event each output is kept."""

    op: int
    start: Any
    present: Any
    ends: dict[int, Any]


class _Model:
    """The constraint model; see the top of the file. Values without bytes are left out: keeping them is free."""

    def __init__(self, cp: ModuleType, instance: Instance, budget_bytes: int, copies: int) -> None:
        self.cp = cp
        self.model = cp.CpModel()
        self.instance = instance = _joined(instance)
        self.count = len(instance.names)
        self.last = _event(self.count, self.count)  # of the end, behind a stage that only runs ops again
        self.unit_seconds = instance.nominal_seconds / _UNITS or 1.0
        stages = _latest_stages(instance)
        self.runs_of = [self.possible_runs(i, stages[i], copies) for i in range(self.count)]
        self.runs_making = {v: runs for runs in self.runs_of for v in runs[0].ends}
        self.hold(budget_bytes)
        self.read()
        again = [run for runs in self.runs_of for run in runs[1:]]
        self.model.minimize(sum(run.present * self.units(run.op) for run in again))

    def units(self, op: int) -> int:
        """What a run takes, as the solver counts it."""
        return math.floor(self.instance.seconds[op] / self.unit_seconds)

    def possible_runs(self, op: int, stage: int, copies: int) -> list[_Run]:
        """The first run of an op, and those that may follow it up to a stage."""
        made = [v for v in self.instance.makes[op] if self.instance.value_bytes[v]]
        start = _event(op, op)
        runs = [_Run(op, start, True, {v: self.model.new_int_var(start, self.last, "") for v in made})]
        stages = range(op + 1, stage + 1)
        if not stages or op in self.instance.once:
            return runs
        events = self.cp.Domain.from_values([_event(t, op) for t in stages])
        for _ in range(copies - 1):
            start, present = self.model.new_int_var_from_domain(events, ""), self.model.new_bool_var("")
            ends = {v: self.model.new_int_var(events.min(), self.last, "") for v in made}
            self.model.add(runs[-1].start < start).only_enforce_if(present)
            self.model.add_implication(present, runs[-1].present)
            runs.append(_Run(op, start, present, ends))
        return runs

    def hold(self, budget_bytes: int) -> None:
        """At no event do the intervals that hold values exceed the budget."""
        unit = math.gcd(*(self.instance.value_bytes[v] for v in self.runs_making))
        intervals, demands = [], []
        for run in (run for runs in self.runs_of for run in runs):
            for v, end in run.ends.items():
                size = self.model.new_int_var(1, self.last + 1, "")
                intervals.append(self.model.new_optional_interval_var(run.start, size, end + 1, run.present, ""))
                demands.append(self.instance.value_bytes[v] // unit)
        self.model.add_cumulative(intervals, demands, budget_bytes // max(unit, 1))

    def read(self) -> None:
        """Each run that takes place, and the end, finds its inputs in intervals that began before."""
        end = _Run(self.count, self.last, True, {})
        reads = [(run, self.instance.reads[run.op]) for runs in self.runs_of for run in runs]
        for reader, values in [*reads, (end, sorted(self.instance.kept))]:
            for v in values:
                if v in self.runs_making:
                    self.find(reader, v)

    def find(self, reader: _Run, value: int) -> None:
        """One of the intervals of a value serves a reader, if that runs."""
        serving = []
        for run in self.runs_making[value]:
            serves = self.model.new_bool_var("")
            self.model.add_implication(serves, run.present)
            self.model.add(run.start < reader.start).only_enforce_if(serves)
            self.model.add(run.ends[value] >= reader.start).only_enforce_if(serves)
            serving.append(serves)
        self.model.add_bool_or(serving).only_enforce_if(reader.present)

    def outcome(self, solver: Any) -> Outcome:
        """Search within the limits of a solver."""
        status = _STATUS[solver.status_name(solver.solve(self.model))]
        if status == "infeasible":
            return Outcome(status, None, math.inf)
        bound = self.instance.nominal_seconds + max(0.0, solver.best_objective_bound) * self.unit_seconds
        if status == "unknown":
            return Outcome(status, None, bound)
        taken = [run for runs in self.runs_of for run in runs if solver.value(run.present)]
        taken.sort(key=lambda run: solver.value(run.start))
        return Outcome(status, Schedule.of(self.instance, (run.op for run in taken)), bound)

    def hint(self, schedule: Schedule) -> None:
        """Start the search from a schedule: its reruns and intervals, then whatever else follows from them."""
        events = list(map(_event, stages_of(self.instance, schedule.runs), (*schedule.runs, self.count)))
        to_come = [list(runs) for runs in self.runs_of]
        taken = [to_come[op].pop(0) for op in schedule.runs]
        for run, event in zip(taken, events, strict=False):
            if run.present is not True:
                self.model.add_hint(run.present, True)
                self.model.add_hint(run.start, event)
        for run in (run for runs in to_come for run in runs):
            self.model.add_hint(run.present, False)
        for copy in copies_of(self.instance, schedule.runs):
            if copy.value in taken[copy.made].ends:
                self.model.add_hint(taken[copy.made].ends[copy.value], events[copy.last])
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.fix_variables_to_their_hinted_value = True
        solver.solve(self.model)
        self.model.clear_hints()
        for i in range(len(self.model.proto.variables)):
            variable = self.model.get_int_var_from_proto_index(i)
            self.model.add_hint(variable, solver.value(variable))


def _joined(instance: Instance) -> Instance:
    """Where one op makes values that the same ops read, the first of them bears the bytes of all."""
    readers: dict[int, list[int]] = {}
    for i, values in enumerate(instance.reads):
        for v in values:
            readers.setdefault(v, []).append(i)
    first: dict[tuple[int, bool, tuple[int, ...]], int] = {}
    weights = [0] * len(instance.value_bytes)
    for i, values in enumerate(instance.makes):
        for v in values:
            alike = (i, v in instance.kept, tuple(readers.get(v, ())))
            weights[first.setdefault(alike, v)] += instance.value_bytes[v]
    return replace(instance, value_bytes=tuple(weights))


def _event(stage: int, op: int) -> int:
    return stage * (stage + 1) // 2 + op


def _latest_stages(instance: Instance) -> list[int]:
    """For each op the last stage before whose end anything is still computed from it."""
    of_value: dict[int, int] = dict.fromkeys(instance.kept, len(instance.names))
    of_op = [0] * len(instance.names)
    for i in reversed(range(len(of_op))):
        of_op[i] = max((of_value.get(v, 0) for v in instance.makes[i]), default=0)
        for v in instance.reads[i]:
            of_value[v] = max(of_value.get(v, 0), i, of_op[i])
    return of_op
