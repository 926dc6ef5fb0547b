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
`replay` counts its bytes. A loop in segments has two blocks around it:

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
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from jointcut.partition.errors import PlanError, message
from jointcut.partition.program.graph import LITERAL, OPEN_LOOP, STEP, TOP, Graph
from jointcut.partition.program.roles import Role


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
class Write:
    """Have a value in memory before it is read, so that the compiler does not compute it within its readers."""

    value: int


@dataclass(frozen=True)
class Round:
    """Bring a value to the precision of its type, which the compiler may exceed."""

    value: int


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
    segment is shorter.
    """

    length: int
    starts: tuple[int, ...]
    loop: Enter


@dataclass(frozen=True)
class Segments:
    """Run a loop's backward in segments of `length` steps, in the direction in which it runs.

    In each segment the loop's forward runs again first (`rerun`), from what `Keep` kept of its carried values `starts`;
    those that are not among `starts` do not change. Then the segment's part of the backward runs (`then`). Where these
    are a `Keep` and `Segments` again, each segment is divided once more, if it is longer than their length.
    """

    length: int
    starts: tuple[int, ...]
    rerun: Enter | Keep
    then: Enter | Segments


Step = Run | Wait | Write | Round | Enter | Keep | Segments


@dataclass(frozen=True)
class Schedule:
    """The steps of both halves, and the values that the forward hands to the backward.

    Attributes:
        forward: steps of the forward.
        handed: ids of values. The program's inputs are handed over too, and what `Keep` keeps; they are not listed.
        backward: steps of the backward.
        graph: the graph that the ids are of. It names the ops when the schedule prints, and is not compared.
    """

    forward: tuple[Step, ...]
    handed: tuple[int, ...]
    backward: tuple[Step, ...]
    graph: Graph = field(compare=False, repr=False)

    def __str__(self) -> str:
        """The text above, which `parse` reads back."""
        forward, backward = (_lines(steps, self.graph, "    ") for steps in (self.forward, self.backward))
        handed = f"handed:{_values(self.handed)}"
        return "".join(f"{line}\n" for line in ("forward:", *forward, handed, "backward:", *backward))

    @property
    def runs_again(self) -> bool:
        """Whether the backward computes anything that the forward computes too."""
        early = {step.op for step in runs(self.forward)}
        return any(step.again and step.op in early for step in runs(self.backward))


def runs(steps: Iterable[Step]) -> Iterator[Run | Enter]:
    """The steps that run an op, those in loops included."""
    for step in steps:
        match step:
            case Run():
                yield step
            case Enter():
                yield step
                yield from runs(step.steps)
            case Keep():
                yield from runs([step.loop])
            case Segments():
                yield from runs([step.rerun, step.then])


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
            case Write():
                yield f"{pad}write %{step.value}"
            case Round():
                yield f"{pad}round %{step.value}"
            case Enter():
                head = f"{'again ' * step.again}loop #{step.op} stacks{_values(step.stacks)}"
                yield from _block(head, step.steps, graph, pad)
            case Keep():
                yield from _block(f"keep{_values(step.starts)} every {step.length} steps", [step.loop], graph, pad)
            case Segments():
                head = f"segments of {step.length} steps from{_values(step.starts)}"
                yield from _block(head, [step.rerun, step.then], graph, pad)


def _block(head: str, steps: Iterable[Step], graph: Graph, pad: str) -> Iterator[str]:
    yield f"{pad}{head} {{"
    yield from _lines(steps, graph, pad + "    ")
    yield f"{pad}}}"


def parse(text: str, graph: Graph) -> Schedule:
    """The schedule that a text describes.

    Raises `PlanError`, with the number of the line, where the text is malformed or does not fit the graph.
    """
    return _Reader(graph).read(text)


_LINES = (
    (re.compile(r"(run|again)( apart)? #(\d+) (\S+)"), "run"),
    (re.compile(r"wait %(\d+) for %(\d+)"), "wait"),
    (re.compile(r"(write|round) %(\d+)"), "touch"),
    (re.compile(r"(again )?loop #(\d+) stacks((?: %\d+)*) \{"), "enter"),
    (re.compile(r"keep((?: %\d+)*) every ([1-9]\d*) steps \{"), "keep"),
    (re.compile(r"segments of ([1-9]\d*) steps from((?: %\d+)*) \{"), "segments"),
    (re.compile(r"\}"), "close"),
)
_HANDED = re.compile(r"handed:((?: %\d+)*)")


@dataclass
class _Block:
    """A block that is being read: how to make a step of the steps inside it, and the region that these are of."""

    close: Callable[[tuple[Step, ...]], Step]
    region: int
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class _Line:
    """The values that a line reads, and those that stand for something from there on."""

    number: int
    reads: tuple[int, ...]
    makes: tuple[int, ...] = ()


class _Reader:
    """Read a schedule line by line; `open` are the blocks around the next step, outermost first."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.number, self.half = graph, 0, ""
        self.halves: dict[str, list[Step]] = {}
        self.lines: dict[str, list[_Line]] = {"forward": [], "backward": []}
        self.handed: tuple[int, ...] | None = None
        self.open: list[_Block] = []

    def read(self, text: str) -> Schedule:
        for number, line in enumerate(text.splitlines(), 1):
            self.number = number
            if line.strip():
                self.line(line.strip())
        if self.open:
            self.fail("is the last, and a block is still open.", "Close it with }.")
        if set(self.halves) != {"forward", "backward"} or self.handed is None:
            cure = "Write `forward:` with its steps, `handed:` with values, then `backward:` with its steps."
            self.fail("is the last, and a part is missing.", cure)
        self.compare()
        return Schedule(tuple(self.halves["forward"]), self.handed, tuple(self.halves["backward"]), self.graph)

    def line(self, line: str) -> None:
        if line in ("forward:", "backward:"):
            self.begin(line[:-1])
        elif (handed := _HANDED.fullmatch(line)) is not None:
            self.begin("handed")
            self.handed = self.values(handed[1])
            self.lines["forward"].append(_Line(self.number, self.handed))
            self.lines["backward"].insert(0, _Line(self.number, (), self.handed))
        elif not self.half:
            self.fail(f"is `{line}`, before any half began.", "Begin with `forward:`.")
        else:
            self.step(line)

    def begin(self, part: str) -> None:
        if self.open:
            self.fail(f"is `{part}:`, and a block is still open.", "Close it with }.")
        if part in self.halves or (part == "handed" and self.handed is not None):
            self.fail(f"is `{part}:` for the second time.", "Write all of it in one place.")
        self.half = "" if part == "handed" else part
        if self.half:
            self.halves[part] = []

    def step(self, line: str) -> None:
        for pattern, kind in _LINES:
            if (match := pattern.fullmatch(line)) is not None:
                getattr(self, kind)(*match.groups())
                return
        self.fail(f"is no step: `{line}`.", "Write steps as a schedule prints them.")

    def run(self, how: str, apart: str | None, op: str, name: str) -> None:
        number = self.op(op, name)
        self.note(self.graph.ops[number].inputs, self.graph.ops[number].outputs)
        self.steps().append(Run(number, how == "again", bool(apart)))

    def wait(self, value: str, cotangent: str) -> None:
        step = Wait(self.value(value), self.value(cotangent))
        self.note((step.value, step.cotangent))
        self.steps().append(step)

    def touch(self, how: str, value: str) -> None:
        self.note((self.value(value),))
        self.steps().append((Write if how == "write" else Round)(self.value(value)))

    def enter(self, again: str | None, op: str, stacks: str) -> None:
        holder, values = self.op(op, OPEN_LOOP), self.values(stacks)
        body = self.graph.bodies[holder]
        self.note((), self.graph.ops[holder].outputs)

        def close(steps: tuple[Step, ...]) -> Step:
            self.note(values)
            return Enter(holder, steps, values, bool(again))

        self.open.append(_Block(close, body.region))

    def keep(self, starts: str, length: str) -> None:
        values = self.values(starts)

        def close(steps: tuple[Step, ...]) -> Step:
            if len(steps) != 1 or not isinstance(loop := steps[0], Enter):
                self.fail("closes `keep`, which does not hold one loop.", "Write a `loop` into it, and nothing else.")
            self.lines["backward"].insert(0, _Line(self.number, (), values))
            return Keep(int(length), values, loop)

        self.open.append(_Block(close, self.region))

    def segments(self, length: str, starts: str) -> None:
        values = self.values(starts)

        def close(steps: tuple[Step, ...]) -> Step:
            match steps:
                case (Enter() as rerun, Enter() as then) | (Keep() as rerun, Segments() as then):
                    return Segments(int(length), values, rerun, then)
            cure = "Write two loops into it, or a `keep` and `segments`."
            return self.fail("closes `segments`, which do not hold a loop and its backward.", cure)

        self.open.append(_Block(close, self.region))

    def close(self) -> None:
        if not self.open:
            self.fail("is `}`, and no block is open.", "Leave it out.")
        block = self.open.pop()
        self.steps().append(block.close(tuple(block.steps)))

    def steps(self) -> list[Step]:
        return self.open[-1].steps if self.open else self.halves[self.half]

    def op(self, number: str, name: str) -> int:
        op = int(number)
        if op >= len(self.graph.ops):
            self.fail(f"names op #{op}, and the graph has {len(self.graph.ops)}.", _OTHER)
        if (there := self.graph.ops[op].name) != name:
            self.fail(f"calls op #{op} {name}, and in the graph it is {there}.", _OTHER)
        if self.graph.loop_of(self.graph.ops[op]) != self.graph.regions[self.region].loop:
            self.fail(f"runs op #{op} {name}, which is of another loop.", "Write it where the graph has it.")
        return op

    def values(self, text: str) -> tuple[int, ...]:
        return tuple(self.value(v[1:]) for v in text.split())

    def value(self, number: str) -> int:
        if int(number) >= len(self.graph.values):
            self.fail(f"names value %{number}, and the graph has {len(self.graph.values)}.", _OTHER)
        return int(number)

    @property
    def region(self) -> int:
        """The region whose ops may run next."""
        return self.open[-1].region if self.open else TOP

    def note(self, reads: tuple[int, ...], makes: tuple[int, ...] = ()) -> None:
        """Remember what this line reads and makes."""
        self.lines[self.half].append(_Line(self.number, reads, makes))

    def compare(self) -> None:
        """Refuse a line that reads what nothing before it in its half computes, and a half without its results."""
        graph = self.graph
        for half, role in (("forward", Role.OUTPUT), ("backward", Role.GRADIENT)):
            results = tuple(v for v in graph.role_outputs(role) if v is not None)
            known = set[int]()
            late = set(graph.role_inputs(Role.COTANGENT)) if half == "forward" else set[int]()
            for line in (*self.lines[half], _Line(self.number, results)):
                for v in line.reads:
                    while (maker := graph.maker_of(v)) is not None and maker.name == STEP:
                        v = maker.inputs[0]
                    if v in late or (maker is not None and maker.name != LITERAL and v not in known):
                        self.number = line.number
                        what = f"needs {graph.where(v)}, which nothing in the {half} before it computes."
                        self.fail(what, "Run what computes it first, or hand it over.")
                known.update(line.makes)

    def fail(self, what: str, cure: str) -> NoReturn:
        raise PlanError(message(f"line {self.number}", what, cure))


_OTHER = "Give the graph for which the schedule was made."
