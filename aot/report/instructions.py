"""Hold the instructions of a compiled program, and find the user's op for each.

XLA fuses and copies ops, adds arrays of its own and writes into the stacks of loops. From an instruction without a
source line, the search goes back to the instructions of its operands, or else forward to its readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from jointcut.aot.report.frames import Frames
from jointcut.aot.report.wire import decode, number, packed
from jointcut.partition.drawing.picture import type_of

Index = tuple[int, ...]  # position in a tuple-shaped result

#: The numbers of element types in `xla/xla_data.proto`, with their names in NumPy and their bits.
_ELEMENTS = {
    1: ("bool", 8), 2: ("int8", 8), 3: ("int16", 16), 4: ("int32", 32), 5: ("int64", 64),
    6: ("uint8", 8), 7: ("uint16", 16), 8: ("uint32", 32), 9: ("uint64", 64),
    10: ("float16", 16), 11: ("float32", 32), 12: ("float64", 64), 16: ("bfloat16", 16),
    15: ("complex64", 64), 18: ("complex128", 128), 19: ("float8_e5m2", 8), 20: ("float8_e4m3fn", 8),
    21: ("int4", 4), 22: ("uint4", 4),
}  # fmt: skip

_BARRIERS = ("/optimization_barrier", "/jit(optimization_barrier)")  # inlined, and as calls (`jaxprs`)
_NEAR = 64  # the most instructions without a line that one search visits


@dataclass(frozen=True)
class Instruction:
    """The parts of an instruction that lifetimes need.

    `name` and `frame` are the name stack and the stack frame that it was lowered from. `operands` are ids of
    instructions, `called` ids of computations. `element` is the index of a tuple's element, `trips` the number of steps
    of a loop. `shape` is the type of its result, as XLA writes it. `channel` is the number of a collective, else 0.
    """

    opcode: str
    name: str
    frame: int
    operands: tuple[int, ...]
    called: tuple[int, ...]
    element: int
    parameter: int
    trips: int
    computation: int
    shape: bytes = b""
    channel: int = 0

    def type(self, index: Index = ()) -> str:
        """Return the type of a part of its result, as `float32[8,128]`; empty where it is not known."""
        element, dims = self._array(index)
        return type_of(_ELEMENTS[element][0], dims) if element in _ELEMENTS else ""

    def nbytes(self, index: Index = ()) -> int:
        """Return the bytes of a part of its result, if that is one array of a known type; else 0."""
        element, dims = self._array(index)
        return math.prod(dims) * _ELEMENTS[element][1] // 8 if element in _ELEMENTS else 0

    @property
    def arrays(self) -> list[Index]:
        """The positions of the arrays of its result."""
        return list(_arrays(self.shape))

    def _array(self, index: Index) -> tuple[int, tuple[int, ...]]:
        """Return element type and dimensions of a part of the result; no type for a tuple or a missing part."""
        shape = decode(self.shape)
        for place in index:
            parts = shape.get(4, [])
            shape = decode(parts[place]) if place < len(parts) else {}
        return number(shape, 2), tuple(packed(shape, 3))

    @property
    def is_placed(self) -> bool:
        """Whether it was lowered from a known line of the user's code."""
        return self.is_users and self.frame != 0

    @property
    def is_users(self) -> bool:
        """Whether it was lowered from an op of the user, not an argument, added by XLA, or a barrier of jointcut."""
        return bool(self.name) and self.opcode != "parameter" and not self.name.endswith(_BARRIERS)

    @property
    def is_called_barrier(self) -> bool:
        """Whether it is a call that does nothing: its results are its operands."""
        return self.opcode == "call" and self.name.endswith(_BARRIERS)


def _arrays(shape: bytes) -> Iterator[Index]:
    """Yield the positions of the arrays in a type."""
    if parts := decode(shape).get(4, []):
        yield from ((place, *rest) for place, part in enumerate(parts) for rest in _arrays(part))
    else:
        yield ()


@dataclass
class Instructions:
    """The instructions of a program by their ids, and the order in which each computation runs them."""

    by_id: dict[int, Instruction]
    sequences: dict[int, list[int]]
    roots: dict[int, int]
    entry: int
    frames: Frames

    def writer(self, identity: int, index: Index = (), depth: int = 12) -> Instruction:
        """Return the named instruction that computes a result; for a loop's result, it is in the loop's body."""
        outer = self.by_id[identity]
        source = self._source(outer, index) if depth else None
        inner = outer if source is None else self.writer(*source, depth - 1)
        return inner if inner.name else outer

    @cached_property
    def bodies(self) -> dict[int, int]:
        """The body of each loop, by its condition."""
        return {loop.called[1]: loop.called[0] for loop in self.by_id.values() if loop.opcode == "while"}

    def named(self, instruction: Instruction) -> Instruction:
        """Return the instruction if its line is known; else the first known origin of its operands, or itself."""
        seen: set[tuple[int, Index]] = set()
        operands = () if instruction.is_placed else instruction.operands
        return next(filter(None, (self._origin(operand, (), seen) for operand in operands)), instruction)

    def reader(self, identity: int) -> Instruction | None:
        """Return the nearest instruction with a known line that reads a result, directly or not; None without one."""
        queue, seen = [identity], {identity}
        for result in queue:
            for reader in self._readers.get(result, ()):
                if self.by_id[reader].is_placed:
                    return self.by_id[reader]
                if reader not in seen and len(seen) < _NEAR:
                    seen.add(reader)
                    queue.append(reader)
        return None

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """The instructions that read each result."""
        readers: dict[int, list[int]] = {}
        for identity, instruction in self.by_id.items():
            for operand in (*instruction.operands, *(self.roots[name] for name in instruction.called)):
                readers.setdefault(operand, []).append(identity)
        return readers

    def _origin(self, identity: int, index: Index, seen: set[tuple[int, Index]]) -> Instruction | None:
        """Return the nearest instruction with a known line that a result comes from, or None."""
        instruction = self.by_id[identity]
        if instruction.is_placed:
            return self.writer(identity, index)
        if (identity, index) in seen or len(seen) >= _NEAR:
            return None
        seen.add((identity, index))
        if instruction.opcode == "get-tuple-element":
            index = (instruction.element, *index)
        elif (instruction.opcode == "tuple" or instruction.is_called_barrier) and index:
            return self._origin(instruction.operands[index[0]], index[1:], seen)
        elif instruction.opcode != "opt-barrier":
            index = ()
        return next(filter(None, (self._origin(operand, index, seen) for operand in instruction.operands)), None)

    def filled(self) -> dict[int, Instruction]:
        """Map each array that a loop fills to the instruction of the loop's body that writes it."""
        writers: dict[int, Instruction] = {}
        for identity, loop in self.by_id.items():
            carry = self.by_id[loop.operands[0]] if loop.opcode == "while" else None
            for place, array in enumerate(carry.operands if carry and carry.opcode == "tuple" else ()):
                writer = self.writer(identity, (place,))
                while writer is not loop and array is not None and self._is_blank(array):
                    writers[array] = writer
                    array = next(iter(self.by_id[array].operands), None)
        return writers

    def _is_blank(self, identity: int) -> bool:
        """Whether an instruction only allocates an array: a copy, or one number everywhere."""
        instruction = self.by_id[identity]
        root = self.by_id[self.roots[instruction.called[0]]] if instruction.opcode == "fusion" else instruction
        return root.opcode in ("broadcast", "copy", "bitcast") and bool(root.operands)

    def _source(self, instruction: Instruction, index: Index) -> tuple[int, Index] | None:
        """Return the result that an instruction passes on, or that its body computes; None if it computes its own."""
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in ("while", "conditional"):
            return self.roots[instruction.called[0]], index  # a loop calls its body, then its condition
        if opcode == "fusion":
            return self._updated(instruction)
        if opcode == "parameter" and index:  # of a loop's body or condition: the result of the previous step
            return self.roots[self.bodies.get(instruction.computation, instruction.computation)], index
        if instruction.is_called_barrier or (opcode == "tuple" and index):
            return operands[index[0] if index else 0], index[1:]
        if opcode == "get-tuple-element":
            return operands[0], (instruction.element, *index)
        if opcode == "dynamic-update-slice":
            return operands[1], ()
        if opcode in ("bitcast", "copy", "reshape") and operands:
            return operands[0], index
        return None

    def _updated(self, fusion: Instruction) -> tuple[int, Index] | None:
        """Return the result that a fusion writes into an array; None if it updates no array."""
        root = self.by_id[self.roots[fusion.called[0]]]
        if root.opcode != "dynamic-update-slice":
            return None
        update = root.operands[1]
        while self.by_id[update].opcode in ("bitcast", "broadcast", "copy", "reshape"):
            update = self.by_id[update].operands[0]
        written = self.by_id[update]
        return (fusion.operands[written.parameter] if written.opcode == "parameter" else update), ()
