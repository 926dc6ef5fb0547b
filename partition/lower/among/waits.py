"""Let stacks, random numbers and gathers wait, and zeros lie apart, for compilers that hold them too long.

XLA:CPU runs an op as soon as its operands are ready. Stacks begin as zeros, and random numbers need only a key. So it
would make the stacks of all loops of the backward, and the random numbers of all layers, at the start. It would also
gather there all saved arrays that lie on several devices and must be whole for a product. These steps prevent this:

- A loop of the backward makes its stacks after the values that it reads and that the backward computes
  (`stacks after %7`).
- A region under `jax.checkpoint`, which runs again as a whole, begins after all values that it reads (`hold %1 %7`).
- A key waits for an operand of the last matrix product or convolution before it (`wait %3 for %7`). That operand is in
  memory anyway.
- A saved array that is gathered waits for the cotangent that its first reader waits for (`settle`), and stays so for
  all readers.

XLA:GPU uses one array for all zeros of one shape. Where a scatter fills such an array, other readers of zeros of that
shape read other zeros (`zeros apart float32[8,8]`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from jointcut.partition.bodies.kinds import inside
from jointcut.partition.bodies.stacks import is_held
from jointcut.partition.lower.follow import is_ahead, results_of, runs_once, steps_of, with_steps
from jointcut.partition.lower.steps import (
    Delay,
    Enter,
    Fetch,
    Fork,
    Hold,
    Parts,
    Restore,
    Round,
    Run,
    Segments,
    Settle,
    Step,
    Update,
    Wait,
    Write,
    Zeros,
    runs,
)
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.graph import LITERAL, TOP, Graph, Op
from jointcut.partition.program.primitives import DRAWN, MOVEMENT, PACKING, REGION, RENAMING, REORDERING, VIEWS
from jointcut.partition.program.roles import Role
from jointcut.partition.rewrite.fills import FILLING

_MOVES = MOVEMENT | RENAMING | {"convert_element_type"}

#: Steps that run programs whose regions the graph holds.
Opened = Enter | Fork | Segments | Parts

Steps = tuple[Step, ...]


def waiting(problem: Problem, forward: Steps, backward: Steps, runs_again: bool) -> tuple[Steps, Steps]:
    """Add the waiting steps that the backend needs to both halves; gathers wait only if something runs again."""
    graph, backend = problem.graph, problem.backend
    if backend.runs_early:
        backward = tuple(_Gathers(problem).placed(backward)) if graph.moves and runs_again else backward
        forward, backward = _drawn_late(graph, forward), _stacked_late(graph, _drawn_late(graph, backward))
    zeros = _zeros_apart(graph, (*forward, *backward)) if backend.shares_zeros else ()
    return (*zeros, *forward), (*zeros, *backward)


def _zeros_apart(graph: Graph, steps: Iterable[Step]) -> tuple[Zeros, ...]:
    """The types of the zeros that the halves fill."""
    ops = (graph.ops[step.op] for step in steps if isinstance(step, Run))
    values = (graph.values[v] for op in ops if op.name in FILLING for v in op.outputs)
    return tuple(dict.fromkeys(Zeros(value.shape, value.dtype) for value in values))


def _drawn_late(graph: Graph, steps: Steps) -> Steps:
    """Let the keys of random numbers wait in the steps of a half."""
    if not any(graph.ops[step.op].name == DRAWN for step in runs(steps)):
        return steps
    return tuple(_Draws(graph).placed(steps))


def _stacked_late(graph: Graph, steps: Steps) -> Steps:
    """Let the stacks of a backward's loops wait, except for stacks that it returns: the caller has memory for these."""
    if not any(_has_loop(graph, step) for step in steps):
        return steps
    return tuple(_Stacks(graph, frozenset(graph.role_outputs(Role.GRADIENT))).placed(steps))


def _has_loop(graph: Graph, step: Step) -> bool:
    is_closed = isinstance(step, Run) and graph.ops[step.op].name in (SCAN, REGION)
    return is_closed or isinstance(step, Opened)


# ------------------------------------------------------------------------------------------------------ random numbers


@dataclass
class _Draws:
    """One half while it is followed, with the operand that keys wait for.

    This is an operand of the last product before a step: the first one that an op of the half computes and that is in
    memory as it was computed. A weight does not qualify, nor does an array in another order or dtype. `computed` maps
    each value to the value that is in memory.
    """

    graph: Graph
    last: int | None = None
    computed: dict[int, int] = field(default_factory=dict)

    def placed(self, steps: Iterable[Step]) -> Iterator[Step]:
        for step in steps:
            if isinstance(step, Run):
                op = self.graph.ops[step.op]
                key = op.operands[0] if op.name == DRAWN else None
                if key is not None and self.last is not None:
                    yield Wait(key, self.last)
                self.follow(op)
            elif isinstance(step, Opened):
                if runs_once(step, self.graph):
                    step = with_steps(step, _Draws(self.graph).placed(step.branches[0].steps))
                self.computed.update((v, v) for v in _made(self.graph, step))
            elif isinstance(step, Wait | Write) and step.value in self.computed:
                self.computed[step.value] = step.value
            yield step

    def follow(self, op: Op) -> None:
        """Go past an op."""
        reads = [v for v in op.inputs if v in self.computed]
        if op.name in PACKING and reads:
            self.last = self.computed[reads[0]]
        if op.name in RENAMING:
            pairs = zip(op.operands, op.outputs, strict=False)
            self.computed.update((made, self.computed[v]) for v, made in pairs if v in self.computed)
        elif op.name not in _MOVES and op.inputs:
            self.computed.update((v, v) for v in op.outputs)


# ------------------------------------------------------------------------------------------------------------- gathers


@dataclass
class _Gathers:
    """One backward while it is followed.

    Attributes:
        problem: the problem whose values it reads.
        met: the values that it has made, or that wait.
        anchor: the cotangent for which the ops that run again before the next op wait.
    """

    problem: Problem
    met: set[int] = field(default_factory=set)
    anchor: int | None = None

    def placed(self, steps: Iterable[Step]) -> Iterator[Step]:
        for step in steps:
            self.anchor = step.cotangent if isinstance(step, Wait) else self.anchor
            first = list(self.gathered(step)) if isinstance(step, Wait | Run) else []
            if (anchor := self.latest(step)) is not None:
                self.met.update(first)
                yield from (Settle(v, (anchor,)) for v in first)
            if anchor is None or not first or not isinstance(step, Wait):  # else it waits already
                yield step
            if isinstance(step, Run):
                self.met.update(self.problem.graph.ops[step.op].outputs)
            self.anchor = self.anchor if is_ahead(step) else None

    def gathered(self, step: Wait | Run) -> Iterator[int]:
        """The saved arrays outside loops that a step is the first to read, and that are gathered."""
        graph = self.problem.graph
        reads = (step.value,) if isinstance(step, Wait) else graph.ops[step.op].inputs
        for v in dict.fromkeys(reads):
            if v in self.met or v not in graph.arrays or graph.values[v].loop != TOP:
                continue
            maker = graph.maker_of(v)
            while maker is not None and maker.name in VIEWS:
                maker = graph.maker_of(maker.inputs[0])
            if maker is not None and any(move.kind == "all-gather" for move in graph.moves_of.get(maker.id, ())):
                yield v

    def latest(self, step: Step) -> int | None:
        """The cotangent that a step waits for, or else the last one that it reads; None if there is none."""
        if self.anchor is not None or not isinstance(step, Run) or step.again:
            return self.anchor
        graph, is_late = self.problem.graph, self.problem.sides.is_late
        late = (v for v in graph.ops[step.op].inputs if is_late(v) and v in graph.arrays)
        return max(late, default=None, key=lambda v: -1 if (maker := graph.values[v].maker) is None else maker)


# -------------------------------------------------------------------------------------------------------------- stacks


class _Is(IntEnum):
    """The origin of a value that a step reads: made of nothing, handed over, computed, or only put into another order.

    A loop that waits for an array in another order has XLA hold two copies of it: one for the barrier, one for the
    loop.
    """

    NOTHING = 0
    GIVEN = 1
    REORDERED = 2
    COMPUTED = 3


@dataclass
class _Stacks:
    """One backward while it is followed.

    Attributes:
        graph: the graph of its ops.
        ends: the values that it returns.
        known: the origin of each value that it makes; all other values are given.
        before: the origins of values that wait, to be put back.
    """

    graph: Graph
    ends: frozenset[int | None]
    known: dict[int, _Is] = field(default_factory=dict)
    before: dict[int, _Is] = field(default_factory=dict)

    def placed(self, steps: Iterable[Step]) -> Iterator[Step]:
        for step in steps:
            if runs_once(step, self.graph):
                step = self.within(step)
            match step:
                case Run() | Enter() | Fork() | Segments() | Parts():
                    reads = _read(self.graph, step)
                    yield from self.waits(step, reads)
                    self.make(step, reads)
                case Wait():
                    self.before.setdefault(step.value, self.of(step.value))
                    self.known[step.value] = _Is.COMPUTED
                case Write() | Round() | Fetch() | Restore() if self.of(step.value) is not _Is.NOTHING:
                    self.known[step.value] = _Is.COMPUTED
                case Settle():
                    self.known[step.cotangent] = _Is.COMPUTED
                case Update():
                    self.known.update(dict.fromkeys(step.waiting, _Is.COMPUTED))
                case _:
                    pass
            yield step
            if self.before and not is_ahead(step):
                self.known.update(self.before)
                self.before.clear()

    def within(self, step: Fork) -> Fork:
        """An op whose program runs once, with the waiting steps in it."""
        pairs = zip(self.graph.ops[step.op].outputs, self.graph.bodies[step.op].ends[0], strict=True)
        ends = frozenset(end for v, end in pairs if v in self.ends)
        return with_steps(step, _Stacks(self.graph, ends).placed(step.branches[0].steps))

    def of(self, v: int) -> _Is:
        return self.known.get(v, _Is.GIVEN)

    def make(self, step: Run | Opened, reads: Iterable[int]) -> None:
        """Note the values that a step makes."""
        is_moved = isinstance(step, Run) and self.graph.ops[step.op].name in REORDERING
        is_made = any(self.of(v) is not _Is.NOTHING for v in reads)
        now = _Is.NOTHING if not is_made else _Is.REORDERED if is_moved else _Is.COMPUTED
        self.known.update(dict.fromkeys(_made(self.graph, step), now))

    def waits(self, step: Run | Opened, reads: list[int]) -> Iterator[Step]:
        """The steps that stand before a loop, or a region that runs again as a whole."""
        graph, arrays = self.graph, self.graph.arrays
        if isinstance(step, Run) and (op := graph.ops[step.op]).name == REGION:
            values = tuple(v for v in reads if v in arrays)
            if values and is_held(op.payload):
                yield Hold(values)
            if values and SCAN in op.inner:
                yield Delay(values)
        elif _has_loop(graph, step):
            late = [v for v in reads if v in arrays and self.of(v) >= _Is.REORDERED]
            late = [v for v in late if self.of(v) is _Is.COMPUTED] or late
            stacks = _stacks(graph, step)
            left = tuple(v for v in stacks if v in self.ends and isinstance(step, Run | Enter))  # parts are joined
            if late and len(left) < len(stacks):
                yield Delay(tuple(late), left)


def _stacks(graph: Graph, step: Step) -> list[int]:
    """The stacks made by a step that can wait: arrays of several steps, made without effects."""
    if any(graph.ops[run.op].effects for run in _runs(step)):
        return []
    match step:
        case Run():
            op = graph.ops[step.op]
            nested = None if op.payload is None else inside(op.payload)
            runs_on = nested is not None and nested.trips is not None and nested.trips > 1
            made = op.outputs[len(nested.carries) :] if nested is not None and runs_on else ()
        case Enter():
            body = graph.bodies[step.op]
            made = (*step.stacks, *body.own) if steps_of(graph, step) > 1 else ()
        case Segments():
            last = _last(step)
            rest = (steps_of(graph, last) - step.last) % step.length
            made = (*(step.made if rest else ()), *last.stacks, *graph.bodies[last.op].own)
        case Parts():
            made = (*step.first.stacks, *graph.bodies[step.first.op].own)
        case _:
            made = ()
    return [v for v in made if v in graph.arrays]


def _last(step: Segments) -> Enter:
    return _last(step.then) if isinstance(step.then, Segments) else step.then


def _read(graph: Graph, step: Run | Opened) -> list[int]:
    """The values that a step reads at the top, whole or step by step, in order of their ids; no literals."""
    if isinstance(step, Run):
        read = dict.fromkeys(graph.ops[step.op].inputs)
    else:
        ran = list(_runs(step))
        made = {v for run in ran for v in graph.ops[run.op].outputs}
        read = {v for run in ran for v in graph.ops[run.op].inputs}
        read = dict.fromkeys(sorted({_around(graph, v, made) for v in read} - made))
    makers = ((v, graph.maker_of(v)) for v in read)
    return [v for v, maker in makers if maker is None or maker.name != LITERAL]


def _runs(step: Step) -> Iterator[Run | Enter | Fork]:
    """The ops that a step runs; for a loop in two parts, the ops of both."""
    return runs([step.first, step.rest] if isinstance(step, Parts) else [step])


def _around(graph: Graph, v: int, made: set[int]) -> int:
    """The value itself if it is made inside, or else the stack that it is a step of."""
    while v not in made and (stack := graph.whole(v)) != v:
        v = stack
    return v


def _made(graph: Graph, step: Run | Opened) -> tuple[int, ...]:
    """The values that are available at the top once a step has run."""
    match step:
        case Run():
            return graph.ops[step.op].outputs
        case Fork():
            return (*graph.ops[step.op].outputs, *step.stacks)
        case Enter():
            return results_of(graph, step)
        case Segments():
            return results_of(graph, _last(step))
        case Parts():
            return results_of(graph, step.first)
