"""Define the steps of a schedule: ops that run, and values that wait, move or are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Run an op, for the first time in this half or `again`; with `apart` in a computation of its own."""

    op: int
    again: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Wait:
    """Let a value wait for a cotangent, for all its readers until the next op that does not run again has run."""

    value: int
    cotangent: int


@dataclass(frozen=True)
class Hold:
    """Let values wait for each other, for all their readers until the next op that does not run again has run."""

    values: tuple[int, ...]


@dataclass(frozen=True)
class Delay:
    """Let the next step make the stacks of its loops once `values` are there; stacks that are `left` out do not wait.

    In a region under `jax.checkpoint` the stacks of its loops wait for the values that the region reads.
    """

    values: tuple[int, ...]
    left: tuple[int, ...] = ()


@dataclass(frozen=True)
class Zeros:
    """Give loops over elements of a type other zeros than the zeros that are filled, in all of this half."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Settle:
    """Let a cotangent wait for values; later readers see the waiting cotangent.

    The values are gradients that nothing but their sums reads, or numbers that a second sweep needs.
    """

    cotangent: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class Update:
    """Say that a parameter is updated by the values `made`: values `waiting` wait for them, for all later readers.

    If the backward runs twice, the first sweep makes numbers for the second in this way.
    """

    parameter: int
    made: tuple[int, ...]
    waiting: tuple[int, ...]


@dataclass(frozen=True)
class Write:
    """Have a value in memory before it is read, so that the compiler does not compute it within its readers."""

    value: int


@dataclass(frozen=True)
class Round:
    """Bring a value to the precision of its type, which the compiler may exceed."""

    value: int


@dataclass(frozen=True)
class Offload:
    """Copy a value to host memory; the copy leaves for the backward.

    In a loop one step is copied at a time, and the stack is a stack of copies.
    """

    value: int


@dataclass(frozen=True)
class Fetch:
    """Copy a value back from host memory, for all later readers; in a loop, one step of it.

    The copy does not start before a `cotangent` is there, if one is named.
    """

    value: int
    cotangent: int | None = None


@dataclass(frozen=True)
class Store:
    """Bring a value to another form, in which it leaves for the backward; in a loop, one step of it."""

    value: int
    form: str


@dataclass(frozen=True)
class Restore:
    """Bring a value back from a form, for all later readers; in a loop, one step of it.

    This does not begin before a `cotangent` is there, if one is named.
    """

    value: int
    form: str
    cotangent: int | None = None


@dataclass(frozen=True)
class Enter:
    """Run the loop whose body `op` holds: each step runs `steps`, and the values `stacks` are kept at each step."""

    op: int
    steps: tuple[Step, ...]
    stacks: tuple[int, ...]
    again: bool = False


@dataclass(frozen=True)
class Branch:
    """One of the programs that an op runs at most once: its steps, and the values that it keeps."""

    steps: tuple[Step, ...]
    stacks: tuple[int, ...]


@dataclass(frozen=True)
class Fork:
    """Run an op whose regions run at most once, such as a conditional; `branches` are its regions, in order.

    The values that the branches keep are handed over together, under the name of one of them.
    """

    op: int
    branches: tuple[Branch, ...]
    again: bool = False

    @property
    def stacks(self) -> tuple[int, ...]:
        """The value that stands for all kept values, if the branches keep any."""
        return tuple(v for branch in self.branches for v in branch.stacks)[:1]


@dataclass(frozen=True)
class Keep:
    """Run a loop, and keep its carried values `starts` before each segment of `length` steps.

    The segments are counted from the first step of the stacks. If the length does not divide the loop's, the last
    segment is shorter. The `last` steps that the loop takes are in no segment. They run as `whole`, which keeps more
    stacks, though only for these steps. `whole` is None where all steps are in segments.
    """

    length: int
    starts: tuple[int, ...]
    loop: Enter
    last: int = 0
    whole: Enter | None = None

    @property
    def tails(self) -> tuple[int, ...]:
        """The values that are stacked only in the last steps."""
        return () if self.whole is None else tuple(v for v in self.whole.stacks if v not in self.loop.stacks)


@dataclass(frozen=True)
class Segments:
    """Run a loop's backward in segments of `length` steps, in the direction in which it runs.

    In each segment the loop's forward runs again first (`rerun`). It starts from the carried values `starts` that
    `Keep` kept; other carried values do not change. Then the segment's part of the backward runs (`then`). If `rerun`
    and `then` are a `Keep` and `Segments` again, a segment longer than their length is divided once more. The `last`
    steps of the forward are in no segment: the backward reads the stacks that `Keep` has of them.
    """

    length: int
    starts: tuple[int, ...]
    rerun: Enter | Keep
    then: Enter | Segments
    last: int = 0

    @property
    def made(self) -> tuple[int, ...]:
        """The values that are stacked again in each segment of the innermost level."""
        if isinstance(self.then, Segments):
            return self.then.made
        return (self.rerun.loop if isinstance(self.rerun, Keep) else self.rerun).stacks


@dataclass(frozen=True)
class Parts:
    """Run a loop of either half in two parts, in the loop's direction: as `first`, then the `last` steps as `rest`.

    Both halves divide the loop at the same step; `last` is counted from the end of the forward. `values` are stacked in
    two parts in the forward, and the backward reads both parts. Other stacks are joined.
    """

    values: tuple[int, ...]
    last: int
    first: Enter
    rest: Enter


Waiting = Wait | Hold | Delay | Settle | Update
Step = (
    Run | Waiting | Zeros | Write | Round | Offload | Fetch | Store | Restore | Enter | Fork | Keep | Segments | Parts
)


def runs(steps: Iterable[Step]) -> Iterator[Run | Enter | Fork]:
    """The steps that run an op, including steps in loops; for a loop in two parts, the steps of the first part."""
    for step in steps:
        match step:
            case Run():
                yield step
            case Enter():
                yield step
                yield from runs(step.steps)
            case Fork():
                yield step
                for branch in step.branches:
                    yield from runs(branch.steps)
            case Keep():
                yield from runs(loops_of(step))
            case Segments():
                yield from runs([step.rerun, step.then])
            case Parts():
                yield from runs([step.first])


def kept_as_one(steps: Iterable[Step]) -> Iterator[tuple[int, int]]:
    """Values that branches keep, each with the value that stands for it outside all conditionals."""
    for step in steps:
        match step:
            case Fork():
                own = [v for branch in step.branches for v in branch.stacks]
                inner = {a: b for branch in step.branches for a, b in kept_as_one(branch.steps)}
                yield from ((v, own[0]) for v in (*own, *(v for v, b in inner.items() if b in own)))
            case Enter():
                yield from kept_as_one(step.steps)
            case Keep():
                yield from kept_as_one(loops_of(step))
            case Parts():
                yield from kept_as_one([step.first])
            case _:
                pass


def moved(steps: Iterable[Step]) -> Iterator[Offload | Store]:
    """The steps that change how a value leaves for the backward, including steps in loops."""
    for step in steps:
        if isinstance(step, Offload | Store):
            yield step
        elif isinstance(step, Enter):
            yield from moved(step.steps)
        elif isinstance(step, Fork):
            for branch in step.branches:
                yield from moved(branch.steps)
        elif isinstance(step, Parts):
            yield from moved([step.first])


def loops_of(step: Keep) -> list[Enter]:
    """The loops of a `Keep`."""
    return [step.loop] if step.whole is None else [step.loop, step.whole]
