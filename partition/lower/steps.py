"""The schedule: the steps of both halves, in the order in which they run.

    forward:
        run #0 exp
        loop #1 stacks %5 {
            run #2 mul
            run #3 sin
        }
    handed: %5
    backward:
        wait %0 for %1
        again #0 exp
        loop #4 stacks %11 {
            again #3 cos
            run #5 mul
        }

A number after `#` is an op of the graph, one after `%` a value. `emit` writes what stands here and decides nothing, and
`replay` counts its bytes. `written` reads the text back. For a compiler that puts gradients off, a cotangent waits for
those that are complete (`settle %9 after %7 %8`). What waits in host memory is copied there where it is made
(`offload %5`), and back ahead of its reader (`fetch %5`, or `fetch %5 after %1` once a cotangent is there), in a loop
step by step. What waits in a smaller form is brought to it behind the step that makes it (`store %5 as bfloat16`) and
back ahead of its first reader (`restore %5 from bfloat16`). A loop in segments has two blocks around it:

    keep %2 every 8 steps {
        loop #1 stacks {
            ...
        }
    }
    segments of 8 steps from %2 {
        again loop #1 stacks %5 {
            ...
        }
        loop #4 stacks %11 {
            ...
        }
    }

If its last steps are not in segments, the forward has the loop twice, the second time as those steps run it:

    keep %2 every 8 steps but the last 12 {
        loop #1 stacks {
            ...
        }
        loop #1 stacks %5 {
            ...
        }
    }
    segments of 8 steps from %2 after the last 12 {
        ...
    }

A loop that offloads what its first steps keep, and not what its last ones do, stands twice in both halves: as it runs
these and as it runs those. What follows `parts of` is not joined between them.

    parts of %5 but the last 4 {
        loop #1 stacks %5 {
            ...
            offload %5
        }
        loop #1 stacks %5 {
            ...
        }
    }
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from jointcut.partition.program.graph import Graph


@dataclass(frozen=True)
class Run:
    """Run an op, for the first time in this half or `again`; with `apart` in a computation of its own."""

    op: int
    again: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Wait:
    """Let a value wait for a cotangent, for all that reads it until the next op that does not run again has run."""

    value: int
    cotangent: int


@dataclass(frozen=True)
class Settle:
    """Let a cotangent wait for gradients that nothing but their sums reads, for all that reads it from here on."""

    cotangent: int
    values: tuple[int, ...]


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
    """Copy a value to host memory; what leaves for the backward is the copy.

    In a loop one step is copied at a time, and the stack is one of copies.
    """

    value: int


@dataclass(frozen=True)
class Fetch:
    """Copy a value back from host memory, for all that reads it from here on; one step of it in a loop.

    The copy does not start before a `cotangent` is there, if one is named.
    """

    value: int
    cotangent: int | None = None


@dataclass(frozen=True)
class Store:
    """Bring a value to another form, in which it leaves for the backward; one step of it in a loop."""

    value: int
    form: str


@dataclass(frozen=True)
class Restore:
    """Bring a value back from a form, for all that reads it from here on; one step of it in a loop.

    That does not begin before a `cotangent` is there, if one is named.
    """

    value: int
    form: str
    cotangent: int | None = None


@dataclass(frozen=True)
class Enter:
    """Run a loop, `op` holding its body; each of its steps runs `steps`, and the values `stacks` are kept of each."""

    op: int
    steps: tuple[Step, ...]
    stacks: tuple[int, ...]
    again: bool = False


@dataclass(frozen=True)
class Keep:
    """Run a loop, and keep its carried values `starts` as they are before each segment of `length` steps.

    The segments are counted from the first step of the stacks. If the length does not divide the loop's, the last
    segment is shorter. The `last` steps that the loop takes are in no segment. They run as `whole`, which keeps more
    stacks, though of these steps alone; it is None where all steps are in segments.
    """

    length: int
    starts: tuple[int, ...]
    loop: Enter
    last: int = 0
    whole: Enter | None = None

    @property
    def tails(self) -> tuple[int, ...]:
        """The values that are stacked in the last steps alone."""
        return () if self.whole is None else tuple(v for v in self.whole.stacks if v not in self.loop.stacks)


@dataclass(frozen=True)
class Segments:
    """Run a loop's backward in segments of `length` steps, in the direction in which it runs.

    In each segment the loop's forward runs again first (`rerun`), from what `Keep` kept of its carried values `starts`;
    those that are not among `starts` do not change. Then the segment's part of the backward runs (`then`). Where these
    are a `Keep` and `Segments` again, each segment is divided once more, if it is longer than their length. The `last`
    steps of the forward are in no segment: the backward reads the stacks that `Keep` has of them.
    """

    length: int
    starts: tuple[int, ...]
    rerun: Enter | Keep
    then: Enter | Segments
    last: int = 0

    @property
    def made(self) -> tuple[int, ...]:
        """The values that are stacked again in each segment, or in those of the innermost level."""
        if isinstance(self.then, Segments):
            return self.then.made
        return (self.rerun.loop if isinstance(self.rerun, Keep) else self.rerun).stacks


@dataclass(frozen=True)
class Parts:
    """Run a loop of either half in two parts, in the loop's direction: as `first` and, the `last` steps, as `rest`.

    Both halves divide the loop at the same step; `last` is counted from the end of the forward. `values` are stacked in
    two parts in the forward, and read so in the backward. Other stacks are joined.
    """

    values: tuple[int, ...]
    last: int
    first: Enter
    rest: Enter


Step = Run | Wait | Settle | Write | Round | Offload | Fetch | Store | Restore | Enter | Keep | Segments | Parts


@dataclass(frozen=True)
class Schedule:
    """The steps of both halves, and the values that the forward hands to the backward.

    Attributes:
        forward: steps of the forward.
        handed: ids of values. The program's inputs are handed over too, and what `Keep` keeps; they are not listed,
            unless they are stored in another form.
        backward: steps of the backward.
        graph: the graph that the ids are of. It names the ops when the schedule prints, and is not compared.
    """

    forward: tuple[Step, ...]
    handed: tuple[int, ...]
    backward: tuple[Step, ...]
    graph: Graph = field(compare=False, repr=False)

    def __str__(self) -> str:
        """The text above, which `written.parse` reads back."""
        forward, backward = (_lines(steps, self.graph, "    ") for steps in (self.forward, self.backward))
        handed = f"handed:{_values(self.handed)}"
        return "".join(f"{line}\n" for line in ("forward:", *forward, handed, "backward:", *backward))

    @cached_property
    def offloaded(self) -> frozenset[int]:
        """The values that leave for the backward in host memory."""
        return frozenset(step.value for step in moved(self.forward) if isinstance(step, Offload))

    @cached_property
    def steps_apart(self) -> dict[int, int]:
        """The values that are handed over in two parts, each with the steps of the first."""
        loops = ((step, self.graph.bodies[step.first.op].loop) for step in self.forward if isinstance(step, Parts))
        return {v: self.graph.loops[loop].length - step.last for step, loop in loops for v in step.values}

    @cached_property
    def stored(self) -> dict[int, tuple[str, ...]]:
        """The values that leave for the backward in other forms, with these in the order in which they are taken."""
        forms: dict[int, tuple[str, ...]] = {}
        for step in moved(self.forward):
            if isinstance(step, Store):
                forms[step.value] = (*forms.get(step.value, ()), step.form)
        return forms

    @property
    def waits(self) -> bool:
        """Whether in one program residuals must wait for the cotangents, or what is kept would not be all that is."""
        return self.runs_again or bool(self.stored)

    @property
    def runs_again(self) -> bool:
        """Whether the backward computes anything that the forward computes too."""
        early = {step.op for step in runs(self.forward)}
        return any(step.again and step.op in early for step in runs(self.backward))


def runs(steps: Iterable[Step]) -> Iterator[Run | Enter]:
    """The steps that run an op, those in loops included; of a loop in two parts, the first part's."""
    for step in steps:
        match step:
            case Run():
                yield step
            case Enter():
                yield step
                yield from runs(step.steps)
            case Keep():
                yield from runs(_loops(step))
            case Segments():
                yield from runs([step.rerun, step.then])
            case Parts():
                yield from runs([step.first])


def moved(steps: Iterable[Step]) -> Iterator[Offload | Store]:
    """The steps that change how a value leaves for the backward, those in loops included."""
    for step in steps:
        if isinstance(step, Offload | Store):
            yield step
        elif isinstance(step, Enter):
            yield from moved(step.steps)
        elif isinstance(step, Parts):
            yield from moved([step.first])


def _loops(step: Keep) -> list[Enter]:
    return [step.loop] if step.whole is None else [step.loop, step.whole]


def _values(values: Iterable[int]) -> str:
    return "".join(f" %{v}" for v in values)


def _lines(steps: Iterable[Step], graph: Graph, pad: str) -> Iterator[str]:
    for step in steps:
        match step:
            case Run():
                words = "again" if step.again else "run"
                yield f"{pad}{words}{' apart' * step.apart} #{step.op} {graph.ops[step.op].name}"
            case Wait():
                yield f"{pad}wait %{step.value} for %{step.cotangent}"
            case Settle():
                yield f"{pad}settle %{step.cotangent} after{_values(step.values)}"
            case Write():
                yield f"{pad}write %{step.value}"
            case Round():
                yield f"{pad}round %{step.value}"
            case Offload():
                yield f"{pad}offload %{step.value}"
            case Fetch():
                late = "" if step.cotangent is None else f" after %{step.cotangent}"
                yield f"{pad}fetch %{step.value}{late}"
            case Store():
                yield f"{pad}store %{step.value} as {step.form}"
            case Restore():
                late = "" if step.cotangent is None else f" after %{step.cotangent}"
                yield f"{pad}restore %{step.value} from {step.form}{late}"
            case Enter():
                head = f"{'again ' * step.again}loop #{step.op} stacks{_values(step.stacks)}"
                yield from _block(head, step.steps, graph, pad)
            case Keep():
                apart = f" but the last {step.last}" if step.last else ""
                head = f"keep{_values(step.starts)} every {step.length} steps{apart}"
                yield from _block(head, _loops(step), graph, pad)
            case Segments():
                apart = f" after the last {step.last}" if step.last else ""
                head = f"segments of {step.length} steps from{_values(step.starts)}{apart}"
                yield from _block(head, [step.rerun, step.then], graph, pad)
            case Parts():
                head = f"parts of{_values(step.values)} but the last {step.last}"
                yield from _block(head, [step.first, step.rest], graph, pad)


def _block(head: str, steps: Iterable[Step], graph: Graph, pad: str) -> Iterator[str]:
    yield f"{pad}{head} {{"
    yield from _lines(steps, graph, pad + "    ")
    yield f"{pad}}}"
