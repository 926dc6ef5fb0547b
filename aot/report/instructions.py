"""Hold the instructions of a compiled program, and say which op of the user's each stands for.

XLA moves what it was given: it fuses, copies, adds arrays of its own and writes into the stacks of loops. An
instruction that bears no line of the user's is followed back to what it is computed from, or else forth to what reads
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jointcut.aot.report.frames import Frames

Index = tuple[int, ...]  # where in a tuple-shaped result

_BARRIERS = ("/optimization_barrier", "/jit(optimization_barrier)")  # as they are, and as calls (`jaxprs`)
_NEAR = 64  # instructions without a line that are followed from one


@dataclass(frozen=True)
class Instruction:
    """One instruction, as far as lifetimes need it; `name` and `frame` say what it was lowered from."""

    opcode: str
    name: str
    frame: int
    operands: tuple[int, ...]
    called: tuple[int, ...]
    element: int
    parameter: int
    trips: int
    computation: int

    @property
    def is_placed(self) -> bool:
        """Whether it is the user's, and bears the line that it was lowered from."""
        return self.is_users and self.frame != 0

    @property
    def is_users(self) -> bool:
        """Whether it was lowered from an op of the user's: it is no argument, not XLA's own, and no barrier of ours."""
        return bool(self.name) and self.opcode != "parameter" and not self.name.endswith(_BARRIERS)

    @property
    def is_called_barrier(self) -> bool:
        """Whether it is a call that does nothing: its results are its operands."""
        return self.opcode == "call" and self.name.endswith(_BARRIERS)


@dataclass
class Program:
    """The instructions of a program, and the order in which each computation runs them."""

    instructions: dict[int, Instruction]
    sequences: dict[int, list[int]]
    roots: dict[int, int]
    entry: int
    frames: Frames

    def writer(self, identity: int, index: Index = (), depth: int = 12) -> Instruction:
        """The instruction that computes what stands in a result, as far as it has a name: of a loop, in its body."""
        own = self.instructions[identity]
        inner = self._inner(own, index) if depth else None
        found = own if inner is None else self.writer(*inner, depth - 1)
        return found if found.name else own

    @cached_property
    def bodies(self) -> dict[int, int]:
        """The body of the loop whose condition a computation is."""
        return {loop.called[1]: loop.called[0] for loop in self.instructions.values() if loop.opcode == "while"}

    def named(self, own: Instruction) -> Instruction:
        """An instruction of the user's program; of another one what it works on, if that is one."""
        seen: set[tuple[int, Index]] = set()
        steps = () if own.is_placed else ((operand, (), seen) for operand in own.operands)
        return next(filter(None, (self._origin(*step) for step in steps)), own)

    def reader(self, identity: int) -> Instruction | None:
        """The first instruction of a known line near a result that reads it, or what others make of it; else None."""
        row, seen = [identity], {identity}
        for at in row:
            for reader in self._readers.get(at, ()):
                if self.instructions[reader].is_placed:
                    return self.instructions[reader]
                if reader not in seen and len(seen) < _NEAR:
                    seen.add(reader)
                    row.append(reader)
        return None

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """For each result the instructions that read it."""
        found: dict[int, list[int]] = {}
        for identity, own in self.instructions.items():
            for operand in (*own.operands, *(self.roots[name] for name in own.called)):
                found.setdefault(operand, []).append(identity)
        return found

    def _origin(self, identity: int, index: Index, seen: set[tuple[int, Index]]) -> Instruction | None:
        """What of the user's program stands in a result, or in one of those near it that it is computed from."""
        at = self.instructions[identity]
        if at.is_placed:
            return self.writer(identity, index)
        if (identity, index) in seen or len(seen) >= _NEAR:
            return None
        seen.add((identity, index))
        if at.opcode == "get-tuple-element":
            index = (at.element, *index)
        elif (at.opcode == "tuple" or at.is_called_barrier) and index:
            return self._origin(at.operands[index[0]], index[1:], seen)
        elif at.opcode != "opt-barrier":
            index = ()
        return next(filter(None, (self._origin(operand, index, seen) for operand in at.operands)), None)

    def filled(self) -> dict[int, Instruction]:
        """For each array that is handed to a loop to be written, the instruction of the loop's body that writes it."""
        found: dict[int, Instruction] = {}
        for identity, loop in self.instructions.items():
            given = self.instructions[loop.operands[0]] if loop.opcode == "while" else loop
            for place, at in enumerate(given.operands if given.opcode == "tuple" and given is not loop else ()):
                author = self.writer(identity, (place,))
                while author is not loop and self._is_blank(at):
                    found[at] = author
                    at = (self.instructions[at].operands or (at,))[0]
        return found

    def _is_blank(self, identity: int) -> bool:
        """Whether an instruction only makes room: a copy, or one number everywhere."""
        own = self.instructions[identity]
        own = self.instructions[self.roots[own.called[0]]] if own.opcode == "fusion" else own
        return own.opcode in ("broadcast", "copy", "bitcast") and bool(own.operands)

    def _inner(self, own: Instruction, index: Index) -> tuple[int, Index] | None:
        """What an instruction passes on, or its body computes; None where it computes something itself."""
        if own.opcode in ("while", "conditional"):
            return self.roots[own.called[0]], index  # a loop's condition comes behind its body
        if own.opcode == "fusion":
            return self._updated(own)
        if own.opcode == "parameter" and index:  # of a loop's body or condition: what the step before has written
            return self.roots[self.bodies.get(own.computation, own.computation)], index
        if own.is_called_barrier or (own.opcode == "tuple" and index):
            return own.operands[index[0] if index else 0], index[1:]
        if own.opcode == "get-tuple-element":
            return own.operands[0], (own.element, *index)
        if own.opcode == "dynamic-update-slice":
            return own.operands[1], ()
        if own.opcode in ("bitcast", "copy", "reshape") and own.operands:
            return own.operands[0], index
        return None

    def _updated(self, fusion: Instruction) -> tuple[int, Index] | None:
        """What a fusion writes into an array that it updates; None where it updates none."""
        at = self.instructions[self.roots[fusion.called[0]]]
        if at.opcode != "dynamic-update-slice":
            return None
        update = at.operands[1]
        while self.instructions[update].opcode in ("bitcast", "broadcast", "copy", "reshape"):
            update = self.instructions[update].operands[0]
        found = self.instructions[update]
        return (fusion.operands[found.parameter] if found.opcode == "parameter" else update), ()
