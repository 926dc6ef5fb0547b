"""Find the arrays that a compiled program holds by the order of its instructions.

XLA's compilers for GPUs and TPUs tell how many bytes of temporaries a program takes, and not where each value lies. But
the program names its instructions in the order in which they run, with their types. From this follow the values, and
the first and the last instruction that needs each. In one place lie: an array before and after an update, what a loop
carries, and what an elementwise loop or a sort makes of an operand that nothing reads later. Other values that XLA lays
over each other, padding, and gaps are not known, so the most bytes at one instruction are not quite XLA's temporaries.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jointcut.aot.report.instructions import Index, Instruction, Instructions
from jointcut.aot.report.liveness import (
    NO_WORK,
    PASS_THROUGH,
    Held,
    HeldValue,
    Holdings,
    Liveness,
    RunOrder,
    flatten,
    last_uses,
    read_instructions,
)
from jointcut.aot.report.wire import Message, decode, number, packed, text

_BITS = {  # of an element, by the number that XLA has for its type
    **dict.fromkeys((1, 2, 6, 19, 20, 23, 24, 25, 28, 29, 33), 8),
    **dict.fromkeys((3, 7, 10, 16), 16),
    **dict.fromkeys((4, 8, 11), 32),
    **dict.fromkeys((5, 9, 12, 15), 64),
    18: 128,
    **dict.fromkeys((21, 22, 32), 4),
    **dict.fromkeys((26, 27), 2),
    **dict.fromkeys((30, 31), 1),
}
_TUPLE = 13  # the number of the type
_SCHEDULE = 7  # the field of a module
_PASSING = NO_WORK | PASS_THROUGH | {"call", "conditional"}
_IN_PLACE = {"dynamic-update-slice", "scatter"}  # write their result over their first operand
#: Where the result of an operation in two halves lies in the result of the first half.
_HALVES: dict[str, Index] = {
    "all-gather-done": (1,),
    "async-done": (1,),
    "collective-permute-done": (1,),
    "copy-done": (0,),
    "all-reduce-done": (),
}


_Source = tuple[int, Index]  # an instruction, and the place in its result
_Passes = dict[int, dict[Index, _Source]]  # of an instruction, the source that each part of its result lies in


@dataclass(frozen=True)
class _Made:
    """The values that instructions make: those of each instruction, the source of each value, and its bytes.

    `loops` are the fusions that are a loop over elements, and sorts: XLA writes these over an operand.
    """

    by_instruction: dict[int, Held]
    sources: list[_Source]
    sizes: list[int]
    loops: set[int]


class _Passing(Holdings):
    """The values in the result of each instruction, where updates in place make no value."""

    def __init__(self, instructions: Instructions, defined: dict[int, Held], passes: _Passes) -> None:
        super().__init__(instructions, defined)
        self.passes = passes

    def passed(self, identity: int) -> Held:
        """Return the values that an instruction passes on, or updates in place."""
        if identity not in self.passes:
            return super().passed(identity)
        found: Held = {}
        for index, (operand, part) in self.passes[identity].items():
            inner = self.of(operand).items()
            found |= {(*index, *i[len(part) :]): v for i, v in inner if i[: len(part)] == part}
        return found


def scheduled(compiled: Any) -> Liveness | None:
    """Return the values that a `jax.stages.Compiled` holds, by its schedule; None where it has none."""
    module = decode(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    if _SCHEDULE not in module:
        return None
    instructions, order = read_instructions(module), RunOrder()
    executed = flatten(instructions, instructions.entry, order)
    passes = dict(_passes(instructions, order))
    made = _made(instructions, module, order, passes)
    holdings = _Passing(instructions, made.by_instruction, passes)
    ends = last_uses(instructions, order, holdings)
    place_of, elsewhere = _places(instructions, order, holdings, made)
    _written_over(instructions, holdings, made, ends, order, place_of, elsewhere)
    offsets, values, end = dict[int, int](), list[HeldValue](), 0
    for value, (maker, index) in enumerate(made.sources):
        if (place := place_of[value]) in elsewhere:
            continue
        if place not in offsets:
            offsets[place], end = end, end + made.sizes[value]
        start = order.times[maker]
        values.append(HeldValue(maker, index, offsets[place], made.sizes[value], start, max(start, ends[value])))
    return Liveness(instructions, order, executed, values)


def _passes(instructions: Instructions, order: RunOrder) -> Iterator[tuple[int, dict[Index, _Source]]]:
    """Yield the instructions whose results lie in an operand."""
    for identity in order.times:
        instruction = instructions.by_id[identity]
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in _HALVES:
            yield identity, {(): (operands[0], _HALVES[opcode])}
        elif opcode in _IN_PLACE:
            yield identity, {(): (operands[0], ())}
        elif opcode == "fusion" and (updated := dict(_updated(instructions, instruction))):
            yield identity, updated


def _updated(instructions: Instructions, fusion: Instruction) -> Iterator[tuple[Index, _Source]]:
    """Yield the results of a fusion that are operands of it with an update."""

    def unwrapped(identity: int) -> Instruction:
        while (inner := instructions.by_id[identity]).opcode == "bitcast":
            identity = inner.operands[0]
        return inner

    root = instructions.roots[fusion.called[0]]
    is_tuple = instructions.by_id[root].opcode == "tuple"
    for place, end in enumerate(instructions.by_id[root].operands if is_tuple else (root,)):
        if (update := unwrapped(end)).opcode in _IN_PLACE:
            start = unwrapped(update.operands[0])
            if start.opcode == "parameter":
                yield (place,) if is_tuple else (), (fusion.operands[start.parameter], ())


def _made(instructions: Instructions, module: Message, order: RunOrder, passes: _Passes) -> _Made:
    """Return the values that the instructions of a module make."""
    made = _Made(defaultdict(dict), [], [], set())
    for raw in (decode(each) for computation in module[3] for each in decode(computation)[2]):
        identity = number(raw, 35)
        instruction, over = instructions.by_id[identity], passes.get(identity, {})
        if identity not in order.times or instruction.opcode in _PASSING or instruction.is_called_barrier:
            continue
        if text(raw, 11) == "kLoop" or instruction.opcode == "sort":
            made.loops.add(identity)
        for index, size in _arrays(decode(raw[3][0]), ()):
            if not any(index[: len(part)] == part for part in over):
                made.by_instruction[identity][index] = len(made.sources)
                made.sources.append((identity, index))
                made.sizes.append(size)
    return made


def _arrays(shape: Message, index: Index) -> Iterator[tuple[Index, int]]:
    """Yield the arrays of a type in the memory of the device, and the bytes of each."""
    if number(shape, 2) == _TUPLE:
        for i, inner in enumerate(shape.get(4, [])):
            yield from _arrays(decode(inner), (*index, i))
        return
    size = math.prod(packed(shape, 3)) * _BITS.get(number(shape, 2), 0) // 8
    is_elsewhere = 5 in shape and number(decode(shape[5][0]), 8) != 0  # in the host's memory, or on the chip
    if size and not is_elsewhere:
        yield index, size


def _places(instructions: Instructions, order: RunOrder, holdings: Holdings, made: _Made) -> tuple[list[int], set[int]]:
    """Return the place of each value, and the places that are of results or arguments.

    What a loop carries has one place from step to step, and what branches return has one.
    """
    place = list(range(len(made.sources)))
    elsewhere = set(holdings.of(instructions.roots[instructions.entry]).values())
    for identity in order.times:
        instruction = instructions.by_id[identity]
        if instruction.opcode not in ("while", "conditional"):
            continue
        ends = [holdings.of(instructions.roots[called]) for called in instruction.called]
        first, *others = (holdings.of(instruction.operands[0]), ends[0]) if instruction.opcode == "while" else ends
        for index, value in (item for other in others for item in other.items()):
            if index not in first:
                elsewhere.add(value)  # over an argument
            elif made.sizes[first[index]] == made.sizes[value]:
                old, new = place[value], place[first[index]]
                place = [new if each == old else each for each in place]
    return place, {place[value] for value in elsewhere}


def _written_over(
    instructions: Instructions,
    holdings: Holdings,
    made: _Made,
    ends: dict[int, int],
    order: RunOrder,
    place: list[int],
    elsewhere: set[int],
) -> None:
    """Lay what a loop over elements makes over an operand of as many bytes that it is the last to read."""
    for identity in sorted(made.loops, key=order.times.__getitem__):
        operands = (holdings.of(operand).get(()) for operand in instructions.by_id[identity].operands)
        free = [v for v in operands if v is not None and ends[v] == order.times[identity] and place[v] not in elsewhere]
        for value in made.by_instruction[identity].values():
            over = next((v for v in free if made.sizes[v] == made.sizes[value]), None)
            if over is not None and place[value] == value and value not in elsewhere:
                free.remove(over)
                place[value] = place[over]
