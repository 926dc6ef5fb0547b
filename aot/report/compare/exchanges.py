"""Read from a compiled program what its devices exchange, and for which lines of the user's.

XLA inserts collectives where it lays values over a mesh, and names each by the op that it is for. Where it knows no way
from one sharding to another, it gathers an array whole on each device, which then keeps a part: its log calls this an
involuntary full rematerialization.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.aot.report.instructions import Index, Instruction, Instructions
from jointcut.aot.report.liveness import read_instructions
from jointcut.aot.report.wire import decode
from jointcut.partition.program.places import place
from jointcut.partition.program.primitives import PICKING

_KINDS = (
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute"),
    *("ragged-all-to-all", "reduce-scatter"),
)
#: What hands a gathered array on, and ops of users that take a part of an array.
_HANDING = ("all-gather-done", "bitcast", "convert", "copy", "reshape", "transpose")
_TAKING = PICKING | {"all_gather"}
#: In the name of an op that carries a cotangent; an op of a forward that a backward runs again is under `jvp(jvp(`.
_CARRIES = re.compile(r"transpose\(jvp\((?!jvp\()")


@dataclass(frozen=True)
class Exchange:
    """The arrays that devices exchange in one way for an op of one line.

    Attributes:
        kind: the collective, as XLA names it, such as `"all-gather"`.
        op: the primitive that needs or makes the arrays.
        line: the user's line, as `file:line (function)`.
        is_backward: whether the op is one of a backward, and does not run in a forward again.
        count: how many arrays, each as often as its loop runs, where XLA knows that.
        bytes: their bytes on each device.
    """

    kind: str
    op: str
    line: str
    is_backward: bool
    count: int
    bytes: int


@dataclass(frozen=True)
class Gathered:
    """An array that is gathered whole on each device, which then keeps a part: its type, bytes, op and line."""

    type: str
    bytes: int
    op: str
    line: str


@dataclass(frozen=True)
class Exchanges:
    """What the devices of a step exchange.

    Attributes:
        totals: for each kind of collective, how many run, and the bytes that they make on each device. Arrays that XLA
            exchanges together are one.
        rows: the exchanges by kind, op and line, those of most bytes first.
        whole: the arrays that are gathered whole although each device keeps a part, largest first.
    """

    totals: dict[str, tuple[int, int]]
    rows: tuple[Exchange, ...]
    whole: tuple[Gathered, ...] = ()

    @property
    def bytes(self) -> int:
        """The bytes of all together."""
        return sum(size for _, size in self.totals.values())


def exchanges(programs: Sequence[Any]) -> Exchanges:
    """Return what devices exchange in some `jax.stages.Compiled`, which are the programs of one step."""
    found = _Found()
    for program in programs:
        for module in program.runtime_executable().hlo_modules():
            _Walk(read_instructions(decode(module.as_serialized_hlo_module_proto())), found).run()
    rows = (Exchange(*key, count, found.sizes[key]) for key, count in found.counts.items())
    return Exchanges(
        {kind: (found.runs[kind], found.bytes[kind]) for kind in sorted(found.runs)},
        tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.line, row.op))),
        tuple(sorted(found.whole, key=lambda each: (-each.bytes, each.line))),
    )


@dataclass
class _Found:
    """What was found so far: numbers and bytes by kind, and by kind, op, line and side."""

    runs: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    counts: Counter[tuple[str, str, str, bool]] = field(default_factory=Counter)
    sizes: Counter[tuple[str, str, str, bool]] = field(default_factory=Counter)
    whole: list[Gathered] = field(default_factory=list)


class _Walk:
    """A walk through the instructions of one program, as often as they run."""

    def __init__(self, instructions: Instructions, found: _Found) -> None:
        self.instructions, self.found = instructions, found
        self.within: dict[int, list[tuple[int, Instruction]]] = defaultdict(list)
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.elements: dict[tuple[int, int], Instruction] = {}
        for identity, each in instructions.by_id.items():
            self.within[each.computation].append((identity, each))
            for operand in each.operands:
                self.readers[operand].append(identity)
            if each.opcode == "get-tuple-element":
                self.elements[each.operands[0], each.element] = each
        self.fused = set[int]()

    def run(self) -> None:
        """Add what the program exchanges to what was found."""
        self._enter(self.instructions.entry, 1, False)

    def _enter(self, computation: int, times: int, is_fused: bool) -> None:
        """Walk through a computation. On a TPU one collective stands in all fusions beside which it runs."""
        for identity, each in self.within[computation]:
            if each.opcode.removesuffix("-start") in _KINDS:
                if not (is_fused and each.channel in self.fused):
                    self._add(identity, each, times)
                self.fused.update([each.channel] if is_fused and each.channel else [])
            elif not each.opcode.endswith(("-done", "-update")):  # these name what was started
                for called in each.called:
                    self._enter(called, times * each.trips, each.opcode == "fusion")

    def _add(self, identity: int, each: Instruction, times: int) -> None:
        kind, made = each.opcode.removesuffix("-start"), _made(each)
        self.found.runs[kind] += times
        for index in made:
            element = self.elements.get((identity, index[0])) if index and each.opcode == kind else None
            owner = element if element is not None and element.is_placed else self.instructions.named(each)
            key = kind, *self._origin(owner), bool(_CARRIES.search(owner.name))
            size = times * each.nbytes(index)
            self.found.counts[key] += times
            self.found.sizes[key] += size
            self.found.bytes[kind] += size
        if kind == "all-gather" and _op(each) not in _TAKING and self._is_taken_apart(identity):
            self.found.whole += [
                Gathered(each.type(index), each.nbytes(index), *self._origin(self._reader(identity) or each))
                for index in made
            ]

    def _origin(self, owner: Instruction) -> tuple[str, str]:
        """The primitive and the user's line of an instruction."""
        return _op(owner), place("", self.instructions.frames.of(owner.frame)).line

    # ------------------------------------------------------------------------------- arrays that are taken apart

    def _is_taken_apart(self, identity: int) -> bool:
        """Whether all that reads an array takes a part of it, and no op of the user's asks for that."""
        readers = self.readers[identity]
        return bool(readers) and all(self._takes_a_part(reader, identity) for reader in readers)

    def _takes_a_part(self, reader: int, identity: int) -> bool:
        each = self.instructions.by_id[reader]
        if each.opcode == "dynamic-slice":
            return each.operands[0] == identity and _op(each) not in _TAKING
        if each.opcode == "fusion":
            places = {n for n, operand in enumerate(each.operands) if operand == identity}
            inside = [i for i, p in self.within[each.called[0]] if p.opcode == "parameter" and p.parameter in places]
            return all(map(self._is_taken_apart, inside))
        return each.opcode in _HANDING and self._is_taken_apart(reader)

    def _reader(self, identity: int) -> Instruction | None:
        """The instruction of the user's that reads an array first, or that the array was gathered for."""
        each = self.instructions.by_id[identity]
        return each if each.is_placed else self.instructions.reader(identity)


def _made(each: Instruction) -> list[Index]:
    """The arrays that a collective makes; where it is only started, its operands stand in front of them."""
    parts = each.arrays
    if not each.opcode.endswith("-start"):
        return parts
    parts = [part for part in parts if each.type(part) != "uint32[]"]  # flags
    return parts[len(parts) // 2 :] if len(parts) > 1 else parts


def _op(each: Instruction) -> str:
    """The primitive that an instruction was lowered from, or its own name; of several that were joined, the last."""
    return each.name.rpartition("/")[2].rstrip(")") or each.opcode
