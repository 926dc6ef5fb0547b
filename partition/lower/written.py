"""Read a schedule back from the text that it prints (see `steps`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from jointcut.partition.errors import PlanError, message
from jointcut.partition.lower.steps import (
    Enter,
    Fetch,
    Keep,
    Offload,
    Parts,
    Restore,
    Round,
    Run,
    Schedule,
    Segments,
    Settle,
    Step,
    Store,
    Wait,
    Write,
)
from jointcut.partition.program.graph import LITERAL, OPEN_LOOP, STEP, TOP, Graph
from jointcut.partition.program.roles import Role


def parse(text: str, graph: Graph) -> Schedule:
    """The schedule that a text describes.

    Raises `PlanError`, with the number of the line, where the text is malformed or does not fit the graph.
    """
    return _Reader(graph).read(text)


_LINES = (
    (re.compile(r"(run|again)( apart)? #(\d+) (\S+)"), "run"),
    (re.compile(r"wait %(\d+) for %(\d+)"), "wait"),
    (re.compile(r"settle %(\d+) after((?: %\d+)+)"), "settle"),
    (re.compile(r"(write|round|offload) %(\d+)"), "touch"),
    (re.compile(r"fetch %(\d+)(?: after %(\d+))?"), "fetch"),
    (re.compile(r"store %(\d+) as (\w+)"), "store"),
    (re.compile(r"restore %(\d+) from (\w+)(?: after %(\d+))?"), "restore"),
    (re.compile(r"(again )?loop #(\d+) stacks((?: %\d+)*) \{"), "enter"),
    (re.compile(r"keep((?: %\d+)*) every ([1-9]\d*) steps(?: but the last ([1-9]\d*))? \{"), "keep"),
    (re.compile(r"segments of ([1-9]\d*) steps from((?: %\d+)*)(?: after the last ([1-9]\d*))? \{"), "segments"),
    (re.compile(r"parts of((?: %\d+)*) but the last ([1-9]\d*) \{"), "parts"),
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
    """Read a schedule line by line; `open` are the blocks around the next step, outermost first.

    `lasts` are by loop how many of its last steps the forward has in no segment.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.number, self.half = graph, 0, ""
        self.halves: dict[str, list[Step]] = {}
        self.lines: dict[str, list[_Line]] = {"forward": [], "backward": []}
        self.handed: tuple[int, ...] | None = None
        self.open: list[_Block] = []
        self.lasts: dict[int, int] = {}

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

    def settle(self, cotangent: str, values: str) -> None:
        step = Settle(self.value(cotangent), self.values(values))
        self.note((step.cotangent, *step.values))
        self.steps().append(step)

    def touch(self, how: str, value: str) -> None:
        self.note((self.value(value),))
        self.steps().append({"write": Write, "round": Round, "offload": Offload}[how](self.value(value)))

    def fetch(self, value: str, cotangent: str | None) -> None:
        step = Fetch(self.value(value), None if cotangent is None else self.value(cotangent))
        self.note((step.value, *([] if step.cotangent is None else [step.cotangent])))
        self.steps().append(step)

    def store(self, value: str, form: str) -> None:
        step = Store(self.value(value), form)
        self.note((step.value,))
        self.steps().append(step)

    def restore(self, value: str, form: str, cotangent: str | None) -> None:
        step = Restore(self.value(value), form, None if cotangent is None else self.value(cotangent))
        self.note((step.value, *([] if step.cotangent is None else [step.cotangent])))
        self.steps().append(step)

    def enter(self, again: str | None, op: str, stacks: str) -> None:
        holder, values = self.op(op, OPEN_LOOP), self.values(stacks)
        body = self.graph.bodies[holder]
        self.note((), self.graph.ops[holder].outputs)

        def close(steps: tuple[Step, ...]) -> Step:
            self.note(values)
            return Enter(holder, steps, values, bool(again))

        self.open.append(_Block(close, body.region))

    def keep(self, starts: str, length: str, last: str | None) -> None:
        values, apart = self.values(starts), int(last or 0)

        def close(steps: tuple[Step, ...]) -> Step:
            self.lines["backward"].insert(0, _Line(self.number, (), values))
            match steps:
                case (Enter() as loop,) if not apart:
                    return self.noted(Keep(int(length), values, loop))
                case (Enter() as loop, Enter() as whole) if apart and loop.op == whole.op:
                    return self.noted(Keep(int(length), values, loop, apart, whole))
            what = "which does not hold one loop twice." if apart else "which does not hold one loop."
            more = "once as segments run it, once as its last steps do" if apart else "and nothing else"
            return self.fail(f"closes `keep`, {what}", f"Write a `loop` into it, {more}.")

        self.open.append(_Block(close, self.region))

    def noted(self, kept: Keep) -> Keep:
        """Note how many steps are in no segment; refuse more than the loop has, and any in the backward."""
        loop = self.graph.loops[self.graph.bodies[kept.loop.op].loop]
        if kept.last and kept.last >= loop.length:
            what = f"closes a `keep` of all but the last {kept.last} steps, and the loop has {loop.length}."
            self.fail(what, f"Leave out at most {loop.length - 1} steps.")
        if self.half == "forward":
            self.lasts[loop.id] = kept.last
        elif kept.last:
            self.fail("closes a `keep` in the backward, which leaves out steps.", "Leave them out in the forward.")
        return kept

    def segments(self, length: str, starts: str, last: str | None) -> None:
        values, apart = self.values(starts), int(last or 0)

        def close(steps: tuple[Step, ...]) -> Step:
            match steps:
                case (Enter() as rerun, Enter() as then) | (Keep() as rerun, Segments() as then):
                    op = rerun.op if isinstance(rerun, Enter) else rerun.loop.op
                    there = 0 if self.open else self.lasts.get(self.graph.bodies[op].loop, 0)
                    if apart != there:
                        what = (
                            f"closes `segments` after the last {apart} steps, and here the last {there} are left out."
                        )
                        self.fail(what, "Leave out as many as `keep` does, and none in segments of segments.")
                    return Segments(int(length), values, rerun, then, apart)
            cure = "Write two loops into it, or a `keep` and `segments`."
            return self.fail("closes `segments`, which do not hold a loop and its backward.", cure)

        self.open.append(_Block(close, self.region))

    def parts(self, values: str, last: str) -> None:
        apart, rest = self.values(values), int(last)

        def close(steps: tuple[Step, ...]) -> Step:
            match steps:
                case (Enter() as first, Enter() as second) if first.op == second.op:
                    length = self.graph.loops[self.graph.bodies[first.op].loop].length
                    if rest < length:
                        return Parts(apart, rest, first, second)
                    what = f"closes `parts` of all but the last {rest} steps, and the loop has {length}."
                    self.fail(what, f"Leave out at most {length - 1} steps.")
            cure = "Write the loop into it as its first steps run it, and as its last ones do."
            return self.fail("closes `parts`, which do not hold one loop twice.", cure)

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
