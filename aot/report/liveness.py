"""Read from a compiled program the values that are alive at each instruction.

Every XLA executable holds the order of its instructions and the offset of each value in its temporary memory (the temp
allocation). A value lives from the instruction that defines it to its last reader.

Lifetimes follow `xla/hlo/utils/hlo_live_range.cc`, so the peak of live bytes is the size of the temp allocation, except
for gaps between values.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jointcut.aot.report.frames import Frames
from jointcut.aot.report.instructions import Index, Instruction, Instructions
from jointcut.aot.report.wire import Message, decode, number, packed, text

Held = dict[Index, int]  # the value at each index of a result

NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
CALLERS = {"while", "call", "conditional"}
_NOT_TEMP = (3, 5, 7, 12)  # flags of an allocation: thread-local, a parameter, maybe a result, a constant
PASS_THROUGH = {"bitcast", "opt-barrier", "add-dependency", "while"}


@dataclass
class RunOrder:
    """All instructions in the order they run, the time of each (its position), and the end of each computation."""

    instructions: list[int] = field(default_factory=list)
    times: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldValue:
    """One value in the temp allocation: the instruction that defines it, its place, and its first and last time."""

    maker: int
    index: Index
    offset: int
    size: int
    start: int
    end: int


@dataclass(frozen=True)
class Liveness:
    """The instructions of a program, their order, the times at which work is done, and the temporary values."""

    instructions: Instructions
    order: RunOrder
    executed: list[int]
    values: list[HeldValue]

    @property
    def times(self) -> list[int]:
        """The times at which work is done, each once."""
        return sorted(set(self.executed))

    @classmethod
    def of(cls, compiled: Any) -> Liveness | None:
        """Read a `jax.stages.Compiled`; None where its device gives no buffer assignment."""
        raw = getattr(compiled.memory_analysis(), "serialized_buffer_assignment_proto", None)
        if not raw:
            return None
        module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
        instructions = read_instructions(decode(module))
        assignment, order = decode(raw), RunOrder()
        executed = flatten(instructions, instructions.entry, order)
        ends = last_uses(instructions, order, Holdings(instructions, definitions(assignment)))
        return cls(instructions, order, executed, temp_values(assignment, order, ends))


def read_instructions(module: Message) -> Instructions:
    """Read an `HloModuleProto`."""
    by_id, roots = {}, {}
    for computation in map(decode, module[3]):
        computation_id = number(computation, 5)
        roots[computation_id] = number(computation, 6)
        for raw in map(decode, computation[2]):
            by_id[number(raw, 35)] = Instruction(
                opcode=text(raw, 2),
                name=text(metadata := decode(raw[7][0]) if 7 in raw else {}, 2),
                frame=number(metadata, 15),
                operands=tuple(packed(raw, 36)),
                called=tuple(packed(raw, 38)),
                element=number(raw, 13),
                parameter=number(raw, 9),
                trips=trips(raw),
                computation=computation_id,
                shape=raw.get(3, [b""])[0],
                channel=number(raw, 26),
            )
    entries = [decode(entry) for entry in decode(module[7][0])[1]]
    sequences = {number(entry, 1): list(packed(decode(entry[2][0]), 1)) for entry in entries}
    return Instructions(by_id, sequences, roots, number(module, 6), Frames.read(module))


def trips(raw: Message) -> int:
    """Return the number of steps of a loop if XLA knows it; else 1."""
    config = raw.get(43, [b""])[0]
    if raw[2][0] != b"while" or not config.startswith(b"{"):
        return 1
    return int(json.loads(config).get("known_trip_count", {}).get("n", 1))


def flatten(instructions: Instructions, computation: int, order: RunOrder, in_loop: bool = False) -> list[int]:
    """Add a computation and its called computations to the order; return the times of work, as executed.

    The body of a loop inside a loop is listed once, since repeating it would add nothing new.
    """
    executed: list[int] = []
    for identity in instructions.sequences[computation]:
        instruction = instructions.by_id[identity]
        if instruction.opcode in CALLERS:  # reversed, since a loop runs its condition before its body
            inside = in_loop or instruction.opcode == "while"
            blocks = [flatten(instructions, called, order, inside) for called in reversed(instruction.called)]
            executed += [time for block in blocks for time in block] * (1 if in_loop else instruction.trips)
        order.times[identity] = len(order.instructions)
        order.instructions.append(identity)
        if instruction.opcode not in NO_WORK and not instruction.is_called_barrier:
            executed.append(order.times[identity])
    order.ends[computation] = len(order.instructions)
    return executed


def definitions(assignment: Message) -> dict[int, Held]:
    """Return the values that each instruction defines."""
    defined: dict[int, Held] = defaultdict(dict)
    for value in map(decode, assignment[1]):
        place = decode(value[3][0])
        defined[number(place, 4)][tuple(packed(place, 3))] = number(value, 1)
    return defined


class Holdings:
    """The values in the result of each instruction: the values that it defines or passes on."""

    def __init__(self, instructions: Instructions, defined: dict[int, Held]) -> None:
        self.instructions = instructions
        self.defined = defined
        self.known: dict[int, Held] = {}
        self.arguments = dict(call_arguments(instructions))

    def of(self, identity: int) -> Held:
        """Return the values in the result of one instruction."""
        if identity not in self.known:
            self.known[identity] = self.passed(identity) | self.defined.get(identity, {})
        return self.known[identity]

    def passed(self, identity: int) -> Held:
        """Return the values that an instruction passes on from its operands."""
        instruction = self.instructions.by_id[identity]
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "tuple":
            return {(i, *index): v for i, operand in enumerate(operands) for index, v in self.of(operand).items()}
        if opcode == "get-tuple-element":
            return {i[1:]: v for i, v in self.of(operands[0]).items() if i[:1] == (instruction.element,)}
        if opcode == "parameter" and identity in self.arguments:
            return self.of(self.arguments[identity])
        if opcode in {"call", "conditional"}:
            roots = (self.instructions.roots[called] for called in instruction.called)
            return {index: v for root in roots for index, v in self.of(root).items()}
        return self.of(operands[0]) if opcode in PASS_THROUGH else {}


def call_arguments(instructions: Instructions) -> Iterator[tuple[int, int]]:
    """Yield each parameter of a called computation with the caller's operand for it."""
    for sequence in instructions.sequences.values():
        for caller in (instructions.by_id[i] for i in sequence):
            if caller.opcode not in CALLERS:
                continue
            for branch, called in enumerate(caller.called):
                for identity in instructions.sequences[called]:
                    inner = instructions.by_id[identity]
                    if inner.opcode == "parameter":
                        position = branch + 1 if caller.opcode == "conditional" else inner.parameter
                        yield identity, caller.operands[position]


def last_uses(instructions: Instructions, order: RunOrder, holdings: Holdings) -> dict[int, int]:
    """Return the last time at which each value is read.

    Values in a computation's result live until it ends, and a loop's values until its condition ends.
    """
    ends: dict[int, int] = defaultdict(int)
    for time, identity in enumerate(order.instructions):
        user = instructions.by_id[identity]
        if user.opcode == "tuple":
            continue
        if user.opcode in {"while", "call"}:  # once these start, the values inside them replace the operands
            time = min(order.times[instructions.sequences[called][0]] for called in user.called)
        top_only = user.opcode in {"get-tuple-element", "copy"}
        for operand in user.operands:
            for index, value in holdings.of(operand).items():
                if not (top_only and index):
                    ends[value] = max(ends[value], time)
        if user.opcode == "while":
            condition = user.called[1]
            keep(ends, holdings.of(parameter_of(instructions, condition)), order.ends[condition])
    for computation, end in order.ends.items():
        keep(ends, holdings.of(instructions.roots[computation]), end)
    return ends


def parameter_of(instructions: Instructions, computation: int) -> int:
    """Return the only parameter of a loop's condition or body."""
    return next(i for i in instructions.sequences[computation] if instructions.by_id[i].opcode == "parameter")


def keep(ends: dict[int, int], held: Held, time: int) -> None:
    """Let values live at least until a time."""
    for value in held.values():
        ends[value] = max(ends[value], time)


def temp_values(assignment: Message, order: RunOrder, ends: dict[int, int]) -> list[HeldValue]:
    """Return the values in the temp allocations, which have no flag of `_NOT_TEMP`."""
    places = ((number(v, 1), decode(v[3][0])) for v in map(decode, assignment[1]))
    defined = {identity: (number(place, 4), tuple(packed(place, 3))) for identity, place in places}
    values: list[HeldValue] = []
    base = 0
    for allocation in map(decode, assignment[3]):
        if any(number(allocation, flag) for flag in _NOT_TEMP):
            continue
        for item in map(decode, allocation.get(9, [])):
            identity = number(item, 1)
            maker, index = defined[identity]
            start = order.times[maker]
            offset, size = base + number(item, 2), number(item, 3)
            values.append(HeldValue(maker, index, offset, size, start, max(start, ends[identity])))
        base += number(allocation, 2)
    return values
