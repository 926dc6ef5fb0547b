"""Say where values are copied to host memory or brought to other forms, and back: steps among the others.

A value is sent as soon as it is made. In the body of a loop each step sends its own value, so that no stack is ever
whole in the device's memory. If the forward reads a value outside the loop that makes it, the value is sent as one
stack, after the loop. On the way back, a body that reads a value step by step also fetches it step by step.

A value read outside loops is fetched `AHEAD` of its reader, so that the copy hides behind products. The fetch also
waits for the cotangent that these products wait for, so that the copy lives briefly. The compiler decides in which
order copies and ops really run.

Other forms are taken at the same places, before the copy. A value is brought back just before its first reader, and
after the cotangent that this reader needs. In a loop each step brings back its own value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from jointcut.partition.lower.steps import (
    Branch,
    Enter,
    Fetch,
    Fork,
    Keep,
    Offload,
    Restore,
    Round,
    Run,
    Segments,
    Step,
    Store,
    Wait,
    Write,
    runs,
)
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.rules import heavy
from jointcut.partition.program.graph import OPEN, OPEN_LOOP, TOP, Graph, Op
from jointcut.partition.program.roles import Role
from jointcut.partition.program.sides import Sides

#: How many heavy ops (products, convolutions, loops and the like) lie between a fetch outside loops and its reader.
AHEAD = 1


def sent(graph: Graph, sides: Sides, steps: Iterable[Step], away: Set[int]) -> tuple[Step, ...]:
    """The steps of a forward that copies the values `away` to host memory."""
    return _placed(graph, sides, steps, away, Offload)


def stored(graph: Graph, sides: Sides, steps: Iterable[Step], forms: Mapping[int, str]) -> tuple[Step, ...]:
    """The steps of a forward that brings values to other `forms`."""
    return _placed(graph, sides, steps, forms.keys(), lambda v: Store(v, forms[v]))


def _placed(
    graph: Graph, sides: Sides, steps: Iterable[Step], away: Set[int], make: Callable[[int], Step]
) -> tuple[Step, ...]:
    behind: dict[int, list[int]] = defaultdict(list)
    starting: dict[int, list[int]] = defaultdict(list)
    for v in sorted(away):
        maker = graph.maker_of(v)
        assert maker is not None, "an input of the program is not saved"
        is_carry = maker.name == OPEN_LOOP and graph.bodies[maker.id].loop == graph.values[v].loop
        home = graph.bodies[maker.id].region if is_carry else maker.region
        if home == TOP or is_read_within(graph, sides, v, home):
            (starting[home] if is_carry else behind[maker.id]).append(v)
        else:
            behind[_outermost(graph, home)].append(v)
    return tuple(_sent(graph, steps, behind, starting, make))


def is_read_within(graph: Graph, sides: Sides, v: int, home: int) -> bool:
    """Whether the forward reads a value of a loop only in the body that makes it, and in bodies inside that one."""
    inside = graph.within(home)
    readers = (graph.ops[i] for i in graph.consumers[v] if i in sides.forward)
    return v not in sides.outputs and inside.issuperset(_reading_region(graph, op, v) for op in readers)


def _reading_region(graph: Graph, op: Op, v: int) -> int:
    """The region in which an op reads a value. An op with a body reads there the values that its body hands on."""
    loops = graph.ancestors[graph.values[v].loop]
    regions = graph.bodies[op.id].regions if op.name in OPEN else ()
    return next((r for r in regions if graph.regions[r].loop in loops), op.region)


def _outermost(graph: Graph, region: int) -> int:
    """The op at the top of the program that holds a region, however deep."""
    holder = graph.holder_of(region)
    while holder.region != TOP:
        holder = graph.holder_of(holder.region)
    return holder.id


def _sent(
    graph: Graph,
    steps: Iterable[Step],
    behind: dict[int, list[int]],
    starting: dict[int, list[int]],
    make: Callable[[int], Step],
) -> Iterator[Step]:
    waiting: list[int] = []
    for step in steps:
        if not isinstance(step, Round | Write | Store):
            yield from map(make, waiting)
            waiting = []
        if isinstance(step, Enter):
            first = map(make, starting.get(graph.bodies[step.op].region, ()))
            inner = list(_sent(graph, step.steps, behind, starting, make))
            early = next((i for i, each in enumerate(inner) if not isinstance(each, Store)), len(inner))
            yield replace(step, steps=(*inner[:early], *first, *inner[early:]))
        elif isinstance(step, Fork):
            bodies = (tuple(_sent(graph, branch.steps, behind, starting, make)) for branch in step.branches)
            yield replace(step, branches=tuple(map(Branch, bodies, (branch.stacks for branch in step.branches))))
        else:
            yield step
        if isinstance(step, Run | Enter | Fork | Keep):
            waiting = behind.get(step.loop.op if isinstance(step, Keep) else step.op, [])
    yield from map(make, waiting)


def fetched(problem: Problem, steps: Iterable[Step], away: Set[int]) -> tuple[Step, ...]:
    """The steps of a backward that finds the values `away` in host memory."""
    return _Fetches(problem, away).placed(steps)


def restored(problem: Problem, steps: Iterable[Step], forms: Mapping[int, str]) -> tuple[Step, ...]:
    """The steps of a backward that finds values in other `forms`."""
    return _Restores(problem, forms.keys(), forms).placed(steps)


@dataclass(frozen=True)
class _Fetches:
    """Place fetches among the steps of one backward."""

    problem: Problem
    away: Set[int]

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    def placed(self, steps: Iterable[Step]) -> tuple[Step, ...]:
        """The steps with all fetches; fetches outside loops stand ahead of their readers."""
        row, _ = self.region(TOP, steps, self.graph.role_outputs(Role.GRADIENT))
        if not self.problem.backend.moves_inside:
            return tuple(row)
        for i, step in enumerate(row):
            if isinstance(step, Fetch) and (place := self.ahead(row, i)) is not None:
                late = self.latest(row[place])
                row.insert(place, replace(row.pop(i), cotangent=late))
        return tuple(row)

    def region(
        self, region: int, steps: Iterable[Step], ends: Iterable[int | None]
    ) -> tuple[list[Step], dict[int, None]]:
        """The steps of a region with its fetches, and the values that regions around it must fetch for it.

        `ends` are the values that the region hands on when its steps have run.
        """
        out: list[Step] = []
        met: dict[int, None] = {}
        around: dict[int, None] = {}

        def fetch(needs: Iterable[int], reader: Step | None) -> None:
            for v in needs:
                if not self.is_taken(v, region):
                    around[v] = None
                elif v not in met:
                    met[v] = None
                    out.append(self.made(v, region, reader))

        for step in steps:
            inner, needs = self.inside(step)
            fetch(needs, step)
            out.append(inner)
        fetch(self.of(v for v in ends if v is not None), None)
        return out, around

    def made(self, v: int, region: int, reader: Step | None) -> Step:
        """The step that must come before the first `reader` of a value in a region."""
        del region, reader
        return Fetch(v)

    def inside(self, step: Step) -> tuple[Step, Iterable[int]]:
        """A step with the fetches inside it, and the values `away` that it needs from its own region or around it."""
        ops = self.graph.ops
        match step:
            case Enter():
                body = self.graph.bodies[step.op]
                inner, needs = self.region(body.region, step.steps, body.carried)
                starts = self.of(v for v in body.starts if v is not None)
                return replace(step, steps=tuple(inner)), {**needs, **dict.fromkeys(starts)}
            case Fork():
                body, branches, around = self.graph.bodies[step.op], list[Branch](), dict[int, None]()
                for region, branch, ends in zip(body.regions, step.branches, body.ends, strict=True):
                    inner, needs = self.region(region, branch.steps, ends)
                    branches.append(replace(branch, steps=tuple(inner)))
                    around.update(needs)
                return replace(step, branches=tuple(branches)), around
            case Segments():
                reads = (v for run in runs([step]) for v in ops[run.op].inputs)
                return step, dict.fromkeys(map(self.graph.whole, self.of(reads)))
            case Run():
                return step, self.of(ops[step.op].inputs)
            case Wait() | Write() | Restore():
                return step, self.of([step.value])
            case _:
                return step, ()

    def of(self, values: Iterable[int]) -> list[int]:
        """Find the values or stacks that are away; a step of such a stack stays, a step of a step becomes the step."""
        found: list[int] = []
        for v in values:
            while (whole := self.graph.whole(v)) != v and whole not in self.away:
                v = whole
            found += [v] * (whole in self.away)
        return found

    def is_taken(self, v: int, region: int) -> bool:
        """Whether a region takes a value step by step; the top of the program takes each value that no loop takes."""
        graph = self.graph
        loop, around = graph.regions[region].loop, graph.values[v].loop
        while around not in graph.ancestors[loop]:
            around = graph.loops[around].parent
        return region == TOP or around == loop

    def ahead(self, row: list[Step], i: int) -> int | None:
        """The place of the `AHEAD`-th heavy step before a fetch; None if there are fewer."""
        before = (k for k in range(i - 1, -1, -1) if self.is_heavy(row[k]))
        places = [k for k, _ in zip(before, range(AHEAD), strict=False)]
        return places[-1] if len(places) == AHEAD else None

    def is_heavy(self, step: Step) -> bool:
        """Whether a step takes long enough for a copy to hide behind it."""
        if isinstance(step, Run):
            return bool(heavy(self.graph, self.graph.ops[step.op]))
        return isinstance(step, Enter | Fork | Segments)

    def latest(self, step: Step) -> int | None:
        """Among a step's reads that only the backward computes, the value made last; None if there is none."""
        if isinstance(step, Wait | Restore):
            return step.cotangent
        first = next(iter(runs([step])), None)
        reads = () if first is None else self.graph.ops[first.op].inputs
        late = [v for v in reads if self.problem.sides.is_late(v) and v in self.graph.arrays]
        at_top = [v for v in late if self.graph.values[v].loop == TOP]
        return max(at_top, default=None, key=lambda v: -1 if (m := self.graph.values[v].maker) is None else m)


@dataclass(frozen=True)
class _Restores(_Fetches):
    """Place steps that bring values back from `forms`, just before their readers."""

    forms: Mapping[int, str]

    def placed(self, steps: Iterable[Step]) -> tuple[Step, ...]:
        """The steps with all values brought back."""
        return tuple(self.region(TOP, steps, self.graph.role_outputs(Role.GRADIENT))[0])

    def made(self, v: int, region: int, reader: Step | None) -> Step:
        """The step that brings a value back; outside loops it waits for the same cotangent as the reader."""
        late = self.latest(reader) if region == TOP and reader is not None else None
        return Restore(v, self.forms[v], late)

    def of(self, values: Iterable[int]) -> list[int]:
        """Find the values that are in a form; a step of a stack becomes the stack."""
        return [whole for whole in map(self.graph.outermost, values) if whole in self.away]
