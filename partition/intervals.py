"""Choose when each value is kept and computed again, by constraint programming.

The ops of an *instance* come in a fixed order, each with what one run takes and the bytes of what it makes. Under a
budget on the peak some ops run again, and `solve` finds the sequence of runs that takes least. The peak rule: while an
op runs, its outputs count, and so does each value that it or a later run still reads.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from jointcut.partition.errors import GraphError, PlanError, message
from jointcut.partition.graph import LITERAL, TOP, Graph, Op

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Pricing = Callable[[Graph, Op], float]

_UNITS = 10**9  # what the seconds of all ops together come to in the solver


@dataclass(frozen=True)
class Instance:
    """Ops in a fixed order, with what they take, make and read.

    Op i takes `seconds[i]`, reads the values `reads[i]` and makes the values `makes[i]`; value v has `value_bytes[v]`.
    A value that no op makes is held by the caller and counts nothing. `kept` values must be there in the end, ops in
    `once` never run again.
    """

    names: tuple[str, ...]
    seconds: tuple[float, ...]
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    value_bytes: tuple[int, ...]
    kept: frozenset[int] = frozenset()
    once: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """See that each value has one maker, and is read after it."""
        made: set[int] = set()
        late = {v for vs in self.makes for v in vs}
        for i, (name, read, make) in enumerate(zip(self.names, self.reads, self.makes, strict=True)):
            where = f"op {i} ({name})"
            if early := [v for v in read if v in late and v not in made]:
                raise GraphError(
                    message(where, f"reads %{early[0]} before it is made.", "Put ops behind their inputs.")
                )
            if again := [v for v in make if v in made]:
                raise GraphError(
                    message(
                        where, f"makes %{again[0]}, which an op before makes.", "Give each value a number of its own."
                    )
                )
            if not 0 <= self.seconds[i] < math.inf:
                cure = "Give seconds that are finite and not negative."
                raise GraphError(message(where, f"takes {self.seconds[i]} seconds.", cure))
            made.update(make)

    @classmethod
    def of(cls, graph: Graph, model: Pricing | None = None) -> Instance:
        """The instance of a graph without loops; ops whose text says no seconds are priced by `model`.

        The outputs of the program are kept, ops with effects run once.
        """
        if len(graph.regions) > 1 or any(value.loop != TOP for value in graph.values):
            raise GraphError(message("the graph", "has a loop.", "Pass a graph of ops in one list."))
        made = {value.id for value in graph.values if value.maker is not None}
        return cls(
            names=tuple(op.name for op in graph.ops),
            seconds=tuple(_seconds(graph, op, model) for op in graph.ops),
            reads=tuple(tuple(v for v in op.inputs if v in made) for op in graph.ops),
            makes=tuple(op.outputs for op in graph.ops),
            value_bytes=tuple(value.bytes if value.id in made else 0 for value in graph.values),
            kept=frozenset(v for v, _ in graph.outputs if v in made),
            once=frozenset(op.id for op in graph.ops if op.effects),
        )

    def peak_bytes(self, runs: Sequence[int]) -> int:
        """The peak of a sequence of op ids, each value freed after its last read."""
        return Schedule.of(self, runs).peak_bytes

    @property
    def nominal_bytes(self) -> int:
        """The peak when each op runs once."""
        return self.peak_bytes(range(len(self.names)))

    @property
    def nominal_seconds(self) -> float:
        """What one run of each op takes."""
        return math.fsum(self.seconds)

    @property
    def floor_bytes(self) -> int:
        """What the most demanding op needs for its inputs and outputs, and the end for what is kept."""
        needs = [{*r, *m} for r, m in zip(self.reads, self.makes, strict=True)] + [set(self.kept)]
        return max(sum(self.value_bytes[v] for v in vs) for vs in needs)


def _seconds(graph: Graph, op: Op, model: Pricing | None) -> float:
    if op.seconds is not None:
        return op.seconds
    if op.name == LITERAL:
        return 0.0
    if model is None:
        cure = "Write `takes 0.0125s` behind it, or pass a model that prices ops."
        raise GraphError(message(f"op {op.id} ({op.name})", "has no seconds.", cure))
    return model(graph, op)


@dataclass(frozen=True)
class Schedule:
    """Op ids in the order in which they run, some more than once, and the values freed behind each run.

    A run reads what the latest run of an input's maker made, and a copy is freed behind its last reader, at once if
    it has none.
    """

    runs: tuple[int, ...]
    frees: tuple[tuple[int, ...], ...]
    seconds: float
    peak_bytes: int

    @classmethod
    def of(cls, instance: Instance, runs: Iterable[int]) -> Schedule:
        """Replay a sequence of op ids.

        Raises `PlanError` where an input has not been made yet, or a kept value never is.
        """
        order = tuple(runs)
        maker = {v: i for i, vs in enumerate(instance.makes) for v in vs}
        latest: dict[int, int] = {}
        last_read: dict[tuple[int, int], int] = {}
        for place, i in enumerate(order):
            for v in instance.reads[i]:
                if v in maker and v not in latest:
                    what = f"runs {instance.names[i]}, which reads %{v}, before %{v} is made."
                    raise PlanError(message(f"runs[{place}]", what, f"Run op {maker[v]} further up."))
                last_read[v, latest.get(v, -1)] = place
            for v in instance.makes[i]:
                latest[v] = place
                last_read[v, place] = place
        if missing := sorted(instance.kept & maker.keys() - latest.keys()):
            raise PlanError(message("runs", f"never make %{missing[0]}.", f"Run op {maker[missing[0]]}."))
        held = {(v, latest[v]) for v in instance.kept if v in latest}
        frees: list[list[int]] = [[] for _ in order]
        for (v, made), place in last_read.items():
            if made >= 0 and (v, made) not in held:
                frees[place].append(v)
        seconds = math.fsum(instance.seconds[i] for i in order)
        return cls(order, tuple(tuple(sorted(vs)) for vs in frees), seconds, _peak(instance, order, frees))


def _peak(instance: Instance, runs: Sequence[int], frees: Sequence[Sequence[int]]) -> int:
    alive = peak = 0
    for i, freed in zip(runs, frees, strict=True):
        alive += sum(instance.value_bytes[v] for v in instance.makes[i])
        peak = max(peak, alive)
        alive -= sum(instance.value_bytes[v] for v in freed)
    return peak


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
    num_workers: int = 8,
    seed: int = 0,
) -> Outcome:
    """The sequence of runs that takes least with a peak within the budget, each op at most `copies` times.

    One worker is quickest to prove what it can prove. What it leaves open after half of the limit goes to
    `num_workers` that take turns, which find better schedules of large instances; 1 leaves it all to the one. Both
    have a fixed seed and decide alike in every run; the outcome depends on the machine only where the limit, in
    seconds on the clock, ends the search.
    """
    cp = _cp_model()
    if budget_bytes < instance.floor_bytes:
        return Outcome("infeasible", None, math.inf)
    model = _Model(cp, instance, budget_bytes, copies)
    start = time.monotonic()
    alone = _solver(cp, seconds_limit, 1, seed)
    if num_workers > 1:
        alone.parameters.max_deterministic_time = seconds_limit / 2  # its unit is about a second, on any machine
    outcome = model.outcome(alone)
    left = seconds_limit - (time.monotonic() - start)
    if outcome.status in ("optimal", "infeasible") or num_workers == 1 or left <= 0:
        return outcome
    if outcome.schedule:
        model.hint(alone)
    return _better(outcome, model.outcome(_solver(cp, left, num_workers, seed)))


def _solver(cp: ModuleType, seconds_limit: float, num_workers: int, seed: int) -> Any:
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds_limit
    solver.parameters.num_workers = num_workers
    solver.parameters.interleave_search = num_workers > 1
    solver.parameters.random_seed = seed
    return solver


def _better(first: Outcome, second: Outcome) -> Outcome:
    """What two searches of one model found together."""
    if second.status in ("optimal", "infeasible"):
        return second
    schedules = [o.schedule for o in (first, second) if o.schedule]
    best = min(schedules, key=lambda schedule: schedule.seconds, default=None)
    return Outcome("feasible" if best else "unknown", best, max(first.bound_seconds, second.bound_seconds))


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
        self.instance = instance
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
        schedule = Schedule.of(self.instance, (run.op for run in taken))
        return Outcome(status, schedule, min(bound, schedule.seconds))

    def hint(self, solver: Any) -> None:
        """Start the next search where one ended."""
        for i in range(len(self.model.proto.variables)):
            variable = self.model.get_int_var_from_proto_index(i)
            self.model.add_hint(variable, solver.value(variable))


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
