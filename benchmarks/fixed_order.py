"""Hold ops in a fixed order, with what they take and make, and replay sequences of them.

This is what schedule-aware rematerialisation starts from. The peak rule: while an op runs, its outputs count, and so
does each value that it or a later run still reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from jointcut.partition.errors import GraphError, PlanError, message
from jointcut.partition.program.graph import LITERAL, TOP, Graph, Op

Pricing = Callable[[Graph, Op], float]


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
        """See that each value has one maker and is read after it, and that seconds and bytes are amounts."""
        counts = [len(field) for field in (self.names, self.seconds, self.reads, self.makes)]
        if len(set(counts)) > 1:
            what = "has {} names, {} seconds, {} reads and {} makes.".format(*counts)
            raise GraphError(message("the instance", what, "Give one of each for an op."))
        for v, size in enumerate(self.value_bytes):
            if size < 0:
                raise GraphError(message(f"%{v}", f"has {size} bytes.", "Give bytes that are not negative."))
        made: set[int] = set()
        late = {v for vs in self.makes for v in vs}
        for i in range(len(self.names)):
            self._check_op(i, late, made)
            made.update(self.makes[i])

    def _check_op(self, i: int, late: set[int], made: set[int]) -> None:
        """Look at one op; of the values that ops make, `late`, those before it have `made` some."""
        where, known = f"op {i} ({self.names[i]})", range(len(self.value_bytes))
        if strange := [v for v in (*self.reads[i], *self.makes[i]) if v not in known]:
            what = f"names %{strange[0]}, of {len(known)} values in all."
            raise GraphError(message(where, what, "Give bytes for each value."))
        if early := [v for v in self.reads[i] if v in late and v not in made]:
            raise GraphError(message(where, f"reads %{early[0]} before it is made.", "Put ops behind their inputs."))
        if again := [v for v in self.makes[i] if v in made]:
            cure = "Give each value a number of its own."
            raise GraphError(message(where, f"makes %{again[0]}, which an op before makes.", cure))
        if not 0 <= self.seconds[i] < math.inf:
            cure = "Give seconds that are finite and not negative."
            raise GraphError(message(where, f"takes {self.seconds[i]} seconds.", cure))

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
        made = {v for vs in self.makes for v in vs}
        needs = [{*r, *m} for r, m in zip(self.reads, self.makes, strict=True)] + [set(self.kept)]
        return max(sum(self.value_bytes[v] for v in vs & made) for vs in needs)


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

        Raises `PlanError` where an op does not exist, an input has not been made yet, or a kept value never is.
        """
        order = tuple(runs)
        count = len(instance.names)
        if strange := [place for place, i in enumerate(order) if not 0 <= i < count]:
            where, what = f"runs[{strange[0]}]", f"names op {order[strange[0]]}, of {count} in all."
            raise PlanError(message(where, what, "Name the ops of the instance by their places in it."))
        frees: list[list[int]] = [[] for _ in order]
        for copy in copies_of(instance, order):
            if copy.last < len(order):
                frees[copy.last].append(copy.value)
        seconds = math.fsum(instance.seconds[i] for i in order)
        freed = tuple(tuple(sorted(vs)) for vs in frees)
        return cls(order, freed, seconds, max(held_bytes(instance, order), default=0))


@dataclass(frozen=True, slots=True)
class Copy:
    """A value from the run that makes it to the last that reads it, as places in a sequence of runs.

    Without a reader it ends where it is made; kept for the caller, behind the last run.
    """

    value: int
    made: int
    last: int


def copies_of(instance: Instance, runs: Sequence[int]) -> list[Copy]:
    """Every copy that a sequence of runs makes.

    Raises `PlanError` where an input has not been made yet, or a kept value never is.
    """
    maker = {v: i for i, vs in enumerate(instance.makes) for v in vs}
    latest: dict[int, int] = {}
    last: dict[tuple[int, int], int] = {}
    for place, i in enumerate(runs):
        for v in instance.reads[i]:
            if v in latest:
                last[v, latest[v]] = place
            elif v in maker:
                what = f"runs {instance.names[i]}, which reads %{v}, before %{v} is made."
                raise PlanError(message(f"runs[{place}]", what, f"Run op {maker[v]} further up."))
        for v in instance.makes[i]:
            latest[v] = last[v, place] = place
    if missing := sorted(instance.kept & maker.keys() - latest.keys()):
        raise PlanError(message("runs", f"never make %{missing[0]}.", f"Run op {maker[missing[0]]}."))
    last |= {(v, latest[v]): len(runs) for v in instance.kept if v in latest}
    return [Copy(v, made, place) for (v, made), place in last.items()]


def held_bytes(instance: Instance, runs: Sequence[int]) -> list[int]:
    """For each place in a sequence of runs the bytes that count while that run runs."""
    change = [0] * (len(runs) + 2)
    for copy in copies_of(instance, runs):
        change[copy.made] += instance.value_bytes[copy.value]
        change[copy.last + 1] -= instance.value_bytes[copy.value]
    return list(accumulate(change[: len(runs)]))


def stages_of(instance: Instance, runs: Sequence[int]) -> list[int]:
    """For each place, and for the end, the op whose first run comes next: itself, where an op runs first."""
    out: list[int] = []
    first = 0
    for op in runs:
        out.append(first)
        first += op == first
    return [*out, len(instance.names)]
