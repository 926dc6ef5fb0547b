"""Read from a compiled program which values it holds at each instruction.

XLA keeps with every executable the schedule of its instructions and the place of every value in its scratch
memory (the temp allocation). Both are read here from the executable itself and joined: a value lives from the
instruction that defines it to the last one that reads it, and a place that several values share counts once.

Lifetimes follow `xla/hlo/utils/hlo_live_range.cc`, so the highest point of the replay is the size of the temp
allocation up to the gaps between values.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from jointcut.aot.report.frames import Frames
from jointcut.aot.report.instructions import Index, Instruction, Program
from jointcut.aot.report.wire import Message, decode, number, packed, text

Held = dict[Index, int]  # the value at each index of a result

NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
CALLERS = {"while", "call", "conditional"}
_NOT_TEMP = (3, 5, 7, 12)  # of an allocation: thread-local, a parameter, maybe a result, a constant
PASS_THROUGH = {"bitcast", "opt-barrier", "add-dependency", "while"}


@dataclass
class Schedule:
    """All instructions in one row: when each comes, and when each computation ends."""

    order: list[int] = field(default_factory=list)
    times: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Value:
    """One value in the temp allocation: what defines it, its place, and the closed interval of times it lives."""

    maker: int
    index: Index
    offset: int
    size: int
    start: int
    end: int


@dataclass(frozen=True)
class Assignment:
    """A program as XLA scheduled it: its instructions in one row, those that do work, and the values of the temp
    allocation.
    """

    program: Program
    schedule: Schedule
    executed: list[int]
    values: list[Value]

    @classmethod
    def of(cls, compiled: Any) -> Assignment | None:
        """Read a `jax.stages.Compiled`; None where its device tells no assignment."""
        raw = getattr(compiled.memory_analysis(), "serialized_buffer_assignment_proto", None)
        if not raw:
            return None
        program = read_program(decode(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()))
        assignment, schedule = decode(raw), Schedule()
        executed = flatten(program, program.entry, schedule)
        ends = last_uses(program, schedule, Holdings(program, definitions(assignment)))
        return cls(program, schedule, executed, temp_values(assignment, schedule, ends))

    def live_bytes(self) -> list[int]:
        """Bytes in use at each instruction that the program executes, in order; a loop's body as often as it runs."""
        per_time = occupied(self.values, len(self.schedule.order))
        return [per_time[time] for time in self.executed]


def read_program(module: Message) -> Program:
    """Read an `HloModuleProto`."""
    instructions, roots = {}, {}
    for computation in map(decode, module[3]):
        home = number(computation, 5)
        roots[home] = number(computation, 6)
        for raw in map(decode, computation[2]):
            instructions[number(raw, 35)] = Instruction(
                opcode=text(raw, 2),
                name=text(metadata := decode(raw[7][0]) if 7 in raw else {}, 2),
                frame=number(metadata, 15),
                operands=tuple(packed(raw, 36)),
                called=tuple(packed(raw, 38)),
                element=number(raw, 13),
                parameter=number(raw, 9),
                trips=trips(raw),
                computation=home,
            )
    entries = [decode(entry) for entry in decode(module[7][0])[1]]
    sequences = {number(entry, 1): list(packed(decode(entry[2][0]), 1)) for entry in entries}
    return Program(instructions, sequences, roots, number(module, 6), Frames.read(module))


def trips(raw: Message) -> int:
    """How often a loop runs, where XLA knows it; else once."""
    config = raw.get(43, [b""])[0]
    if raw[2][0] != b"while" or not config.startswith(b"{"):
        return 1
    return int(json.loads(config).get("known_trip_count", {}).get("n", 1))


def flatten(program: Program, computation: int, schedule: Schedule, in_loop: bool = False) -> list[int]:
    """Put a computation and what it calls in the row; return the times at which work is done, as executed.

    A loop inside a loop is shown once: repeating it adds length and no news.
    """
    executed: list[int] = []
    for identity in program.sequences[computation]:
        instruction = program.instructions[identity]
        if instruction.opcode in CALLERS:  # of a loop, the condition comes before the body
            inside = in_loop or instruction.opcode == "while"
            blocks = [flatten(program, called, schedule, inside) for called in reversed(instruction.called)]
            executed += [time for block in blocks for time in block] * (1 if in_loop else instruction.trips)
        schedule.times[identity] = len(schedule.order)
        schedule.order.append(identity)
        if instruction.opcode not in NO_WORK and not instruction.is_called_barrier:
            executed.append(schedule.times[identity])
    schedule.ends[computation] = len(schedule.order)
    return executed


def definitions(assignment: Message) -> dict[int, Held]:
    """For each instruction, the values that it defines."""
    found: dict[int, Held] = defaultdict(dict)
    for value in map(decode, assignment[1]):
        place = decode(value[3][0])
        found[number(place, 4)][tuple(packed(place, 3))] = number(value, 1)
    return found


class Holdings:
    """Which values lie in the result of each instruction: those it defines, and those that it passes on."""

    def __init__(self, program: Program, defined: dict[int, Held]) -> None:
        self.program = program
        self.defined = defined
        self.known: dict[int, Held] = {}
        self.arguments = dict(call_arguments(program))

    def of(self, identity: int) -> Held:
        """The values in the result of one instruction."""
        if identity not in self.known:
            self.known[identity] = self.passed(identity) | self.defined.get(identity, {})
        return self.known[identity]

    def passed(self, identity: int) -> Held:
        """The values that an instruction passes on from its operands."""
        own = self.program.instructions[identity]
        if own.opcode == "tuple":
            return {(i, *at): v for i, operand in enumerate(own.operands) for at, v in self.of(operand).items()}
        if own.opcode == "get-tuple-element":
            return {at[1:]: v for at, v in self.of(own.operands[0]).items() if at[:1] == (own.element,)}
        if own.opcode == "parameter" and identity in self.arguments:
            return self.of(self.arguments[identity])
        if own.opcode in {"call", "conditional"}:
            return {at: v for called in own.called for at, v in self.of(self.program.roots[called]).items()}
        return self.of(own.operands[0]) if own.opcode in PASS_THROUGH else {}


def call_arguments(program: Program) -> Iterator[tuple[int, int]]:
    """Each parameter of a called computation with the instruction that the caller hands in."""
    for sequence in program.sequences.values():
        for caller in (program.instructions[i] for i in sequence):
            if caller.opcode not in CALLERS:
                continue
            for branch, called in enumerate(caller.called):
                for identity in program.sequences[called]:
                    inner = program.instructions[identity]
                    if inner.opcode == "parameter":
                        position = branch + 1 if caller.opcode == "conditional" else inner.parameter
                        yield identity, caller.operands[position]


def last_uses(program: Program, schedule: Schedule, holdings: Holdings) -> dict[int, int]:
    """For each value the last time that it is read.

    Values in a computation's result last until that ends, and a loop's values outlast its condition.
    """
    ends: dict[int, int] = defaultdict(int)
    for time, identity in enumerate(schedule.order):
        user = program.instructions[identity]
        if user.opcode == "tuple":
            continue
        if user.opcode in {"while", "call"}:  # from the start of these on, the values inside take over
            time = min(schedule.times[program.sequences[called][0]] for called in user.called)
        top_only = user.opcode in {"get-tuple-element", "copy"}
        for operand in user.operands:
            for at, value in holdings.of(operand).items():
                if not (top_only and at):
                    ends[value] = max(ends[value], time)
        if user.opcode == "while":
            condition = user.called[1]
            keep(ends, holdings.of(parameter_of(program, condition)), schedule.ends[condition])
    for computation, end in schedule.ends.items():
        keep(ends, holdings.of(program.roots[computation]), end)
    return ends


def parameter_of(program: Program, computation: int) -> int:
    """The one parameter of a loop's condition or body."""
    return next(i for i in program.sequences[computation] if program.instructions[i].opcode == "parameter")


def keep(ends: dict[int, int], held: Held, time: int) -> None:
    """Let these values live at least until a time."""
    for value in held.values():
        ends[value] = max(ends[value], time)


def temp_values(assignment: Message, schedule: Schedule, ends: dict[int, int]) -> list[Value]:
    """The values of the temp allocation: neither thread-local, nor parameter, nor result, nor constant."""
    places = ((number(v, 1), decode(v[3][0])) for v in map(decode, assignment[1]))
    defined = {identity: (number(place, 4), tuple(packed(place, 3))) for identity, place in places}
    values: list[Value] = []
    base = 0
    for allocation in map(decode, assignment[3]):
        if any(number(allocation, flag) for flag in _NOT_TEMP):
            continue
        for item in map(decode, allocation.get(9, [])):
            identity = number(item, 1)
            maker, index = defined[identity]
            start = schedule.times[maker]
            place = base + number(item, 2), number(item, 3)
            values.append(Value(maker, index, *place, start, max(start, ends[identity])))
        base += number(allocation, 2)
    return values


def occupied(values: list[Value], times: int) -> list[int]:
    """Bytes taken at each time, each byte once however many values share it."""
    bounds = sorted({edge for v in values for edge in (v.offset, v.offset + v.size)})
    rank = {bound: i for i, bound in enumerate(bounds)}
    intervals: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for value in values:
        for slot in range(rank[value.offset], rank[value.offset + value.size]):
            intervals[slot].add((value.start, value.end))
    change = [0] * (times + 2)
    for slot, lives in intervals.items():
        for start, end in merged(lives):
            change[start] += bounds[slot + 1] - bounds[slot]
            change[end + 1] -= bounds[slot + 1] - bounds[slot]
    return list(accumulate(change[:times]))


def merged(intervals: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Closed intervals joined where they overlap."""
    ordered = sorted(intervals)
    low, high = ordered[0]
    for start, end in ordered[1:]:
        if start > high:
            yield low, high
            low = start
        high = max(high, end)
    yield low, high
