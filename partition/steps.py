"""The schedule: the steps of both halves, in the order in which they run.

    forward:
        run #0 exp
        loop #1 stacks %5 {
            run #2 mul
            run #3 sin
        }
    backward:
        wait %0 for %1
        again #0 exp
        loop #4 stacks %11 {
            again #3 cos
            run #5 mul
        }

A number after `#` is an op of the graph, one after `%` a value. `emit` writes what stands here and decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from jointcut.partition.errors import PlanError, message
from jointcut.partition.graph import SCAN, Graph


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
    """Run a loop, `op` being its scan; each of its steps runs `steps`, and the values `stacks` are kept of each."""

    op: int
    steps: tuple[Step, ...]
    stacks: tuple[int, ...]
    again: bool = False


Step = Run | Wait | Write | Round | Enter


@dataclass(frozen=True)
class Schedule:
    """The steps of both halves."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


def show(schedule: Schedule, graph: Graph) -> str:
    """A schedule as text, one line a step; the names of ops are the graph's."""
    halves = (("forward:", schedule.forward), ("backward:", schedule.backward))
    return "".join(f"{line}\n" for title, steps in halves for line in (title, *_lines(steps, graph, "    ")))


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
                stacks = "".join(f" %{v}" for v in step.stacks)
                yield f"{pad}{'again ' * step.again}loop #{step.op} stacks{stacks} {{"
                yield from _lines(step.steps, graph, pad + "    ")
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
)


class _Reader:
    """Read a schedule line by line; `open` are the loops around the next step, outermost first."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.number, self.half = graph, 0, ""
        self.halves: dict[str, list[Step]] = {}
        self.open: list[tuple[Enter, list[Step]]] = []

    def read(self, text: str) -> Schedule:
        for number, line in enumerate(text.splitlines(), 1):
            self.number = number
            if line.strip():
                self.line(line.strip())
        if self.open:
            self.fail("is the last, and a loop is still open.", "Close it with }.")
        if set(self.halves) != {"forward", "backward"}:
            self.fail("is the last, and a half is missing.", "Write `forward:` with its steps, then `backward:`.")
        return Schedule(tuple(self.halves["forward"]), tuple(self.halves["backward"]))

    def line(self, line: str) -> None:
        if line in ("forward:", "backward:"):
            self.begin(line[:-1])
        elif not self.half:
            self.fail(f"is `{line}`, before any half began.", "Begin with `forward:`.")
        elif line == "}" and self.open:
            loop, steps = self.open.pop()
            self.steps().append(Enter(loop.op, tuple(steps), loop.stacks, loop.again))
        else:
            self.step(line)

    def begin(self, half: str) -> None:
        if self.open:
            self.fail(f"is `{half}:`, and a loop is still open.", "Close it with }.")
        if half in self.halves:
            self.fail(f"is `{half}:` for the second time.", "Write all steps of a half in one place.")
        self.half = half
        self.halves[half] = []

    def step(self, line: str) -> None:
        for pattern, kind in _LINES:
            if (found := pattern.fullmatch(line)) is not None:
                getattr(self, kind)(*found.groups())
                return
        self.fail(f"is no step: `{line}`.", "Write steps as jointcut.partition.steps.show does.")

    def run(self, how: str, apart: str | None, op: str, name: str) -> None:
        self.steps().append(Run(self.op(op, name), how == "again", bool(apart)))

    def wait(self, value: str, cotangent: str) -> None:
        self.steps().append(Wait(self.value(value), self.value(cotangent)))

    def touch(self, how: str, value: str) -> None:
        self.steps().append((Write if how == "write" else Round)(self.value(value)))

    def enter(self, again: str | None, op: str, stacks: str) -> None:
        values = tuple(self.value(v[1:]) for v in stacks.split())
        self.open.append((Enter(self.op(op, SCAN), (), values, bool(again)), []))

    def steps(self) -> list[Step]:
        return self.open[-1][1] if self.open else self.halves[self.half]

    def op(self, number: str, name: str) -> int:
        op = int(number)
        if op >= len(self.graph.ops):
            self.fail(f"names op #{op}, and the graph has {len(self.graph.ops)}.", _OTHER)
        if (there := self.graph.ops[op].name) != name:
            self.fail(f"calls op #{op} {name}, and in the graph it is {there}.", _OTHER)
        return op

    def value(self, number: str) -> int:
        if int(number) >= len(self.graph.values):
            self.fail(f"names value %{number}, and the graph has {len(self.graph.values)}.", _OTHER)
        return int(number)

    def fail(self, what: str, cure: str) -> NoReturn:
        raise PlanError(message(f"line {self.number}", what, cure))


_OTHER = "Give the graph for which the schedule was made."
