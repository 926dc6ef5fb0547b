"""Hold what a level computes as XLA's instructions, one result each.

Instructions are numbers, in an order in which each stands after what it reads. `Program` holds one list for each fact.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, lru_cache
from typing import Any, NamedTuple

from jointcut.partition.lower.memory import Level, Row, Stack
from jointcut.partition.program.graph import Op, Value
from jointcut.partition.program.jaxprs import Equation, struct
from jointcut.partition.program.primitives import ELEMENTWISE, those

COPY, DOT, CONVOLUTION, POOLING = "copy", "dot_general", "conv_general_dilated", "select_and_scatter_add"

ROUNDS = "rounds of threefry"


class Kind(Enum):
    """What XLA can do with an instruction.

    `GIVEN` lies in a buffer of somebody else. `NUMBER` is a scalar of the program. `SPREAD` repeats its operand, or a
    number. `MOVE` moves elements, `POINT` computes each element from those at its place, and `REDUCE` sums up. These
    four can be fused. `ALONE` runs by itself. `BARRIER` waits for all of its operands, and `PART` is one of the results
    of a barrier, a loop or another instruction with several.
    """

    GIVEN = auto()
    NUMBER = auto()
    SPREAD = auto()
    MOVE = auto()
    POINT = auto()
    REDUCE = auto()
    ALONE = auto()
    BARRIER = auto()
    PART = auto()


FUSIBLE = frozenset({Kind.SPREAD, Kind.MOVE, Kind.POINT, Kind.REDUCE})
SPREADING = frozenset({"broadcast_in_dim", "broadcast"})
REDUCING = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"})
MOVING = frozenset({"concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "iota", "pad", "rev", "slice"})
MOVING |= {"tile", "transpose"}

#: What XLA does not compute twice: a division, a root, or a series for each element.
DEAR = (those("dear") - {"cos", "sin"}) | {"div", "gather", "lgamma", "digamma", "rem", "rsqrt", "sqrt"}


class Type(NamedTuple):
    """The shape and the dtype of an array, and its bytes."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int

    def str_short(self) -> str:
        """The type as JAX writes it, such as `float32[8,16]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def type_in(level: Level, b: int) -> Type:
    """The type of a buffer of a level."""
    held = level.types[b]
    if isinstance(held, Stack):
        return Type((*held.lengths, *held.value.shape), held.value.dtype, level.sizes[b])
    if isinstance(held, Value):
        return Type(held.shape, held.dtype, level.sizes[b])
    return Type(tuple(getattr(held, "shape", ())), str(getattr(held, "dtype", "")), level.sizes[b])


@cache
def kind_of(name: str) -> Kind:
    """What XLA can do with a primitive."""
    if name in SPREADING:
        return Kind.SPREAD
    if name in ELEMENTWISE:
        return Kind.POINT
    if name in REDUCING:
        return Kind.REDUCE
    return Kind.MOVE if name in MOVING else Kind.ALONE


@lru_cache(1 << 14)
def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its axes of length one, which XLA adds and drops freely."""
    return tuple(d for d in shape if d != 1)


@dataclass
class Program:
    """The instructions of one level.

    For each instruction: its `kinds`, the `names` of its primitive, the instructions that it `reads`, its `types`, how
    many `elements` it has, and the `rows` that it comes from. `lies_in` says which instruction's buffer one shares. The
    number of one that stands for something is `known` by a key.

    `results` are the instructions that the level returns, `apart` those of them that lie in the memory of an input,
    `kept` those that it keeps until its end, and `handed` the pairs of a carried value as a step of a loop finds it and
    as it hands it on. `copies` may be spared. `parts` are for each loop the result, its start, and whether it is
    carried; `shown` are, for the buffers of loops, what they hold.
    `turned` says of a product's operands whether their last two axes stand the other way round than it wants.
    `late` are zeros that wait. `middle` is the barrier between the halves, and `crossing` are its operands with its
    results.
    """

    kinds: list[Kind] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    types: list[Type] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    rows: list[Row | None] = field(default_factory=list)
    lies_in: dict[int, int] = field(default_factory=dict)
    known: dict[Hashable, int] = field(default_factory=dict)
    results: set[int] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    handed: list[tuple[int, int]] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    parts: dict[int, list[tuple[int, int, bool]]] = field(default_factory=dict)
    shown: dict[int, Any] = field(default_factory=dict)
    turned: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    middle: int | None = None
    crossing: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        """The number of instructions."""
        return len(self.kinds)

    def add(self, kind: Kind, name: str, reads: Sequence[int], made: Type, row: Row | None) -> int:
        """Add an instruction; return its number."""
        self.kinds.append(kind)
        self.names.append(name)
        self.reads.append(list(reads))
        self.types.append(made)
        self.elements.append(math.prod(made.shape))
        self.rows.append(row)
        return len(self.kinds) - 1

    def number(self, text: str, made: Type, row: Row | None) -> int:
        """A number of the program, repeated over an array; the same one for the same number and shape."""
        key = "number", text, without_ones(made.shape), made.dtype
        if key not in self.known:
            self.known[key] = self.add(Kind.SPREAD if made.shape else Kind.NUMBER, "broadcast_in_dim", [], made, row)
        return self.known[key]

    def behind(self, waits: Sequence[int], dtype: str) -> int:
        """A number behind a barrier that waits for some instructions."""
        key = "behind", tuple(waits), dtype
        if key not in self.known:
            barrier = self.add(Kind.BARRIER, "barrier", waits, Type((), "", 0), None)
            self.known[key] = self.add(Kind.PART, "part", [barrier], Type((), dtype, 0), None)
        return self.known[key]

    def zeros_behind(self, waits: Sequence[int], made: Type, row: Row | None) -> int:
        """Zeros that wait for some instructions."""
        n = self.spread(self.behind(waits, made.dtype), (), made, row)
        self.late.add(n)
        return n

    def is_zeros(self, n: int) -> bool:
        """Whether an instruction repeats a number, which may stand behind a barrier."""
        return n in self.late or self.is_number(n)

    def is_number(self, n: int) -> bool:
        """Whether an instruction repeats a number of the program."""
        return self.kinds[n] is Kind.SPREAD and not self.reads[n]

    def spread(self, n: int, places: Sequence[int], made: Type, row: Row | None) -> int:
        """An array that repeats another, whose axes longer than one lie at `places` among those of the result."""
        key = "spread", n, without_ones(made.shape), tuple(places)
        if key not in self.known:
            self.known[key] = self.add(Kind.SPREAD, "broadcast_in_dim", [n], made, row)
        return self.known[key]

    def copied(self, n: int, made: Type, row: Row | None) -> int:
        """A copy of an operand that is written over, which XLA spares where nothing else reads the operand."""
        copy = self.add(Kind.ALONE, COPY, [n], made, row)
        self.copies.append(copy)
        return copy

    def buffer(self, n: int) -> int:
        """The instruction whose buffer one lies in."""
        while n in self.lies_in:
            n = self.lies_in[n]
        return n

    def params(self, n: int) -> dict[str, Any]:
        """The parameters of an instruction's equation; none where there is none."""
        row = self.rows[n]
        eqn = None if row is None else equation(row)
        return {} if eqn is None else eqn.params

    def is_flat(self, n: int) -> bool:
        """Whether an instruction is a product that XLA makes with one axis in the place of several of an operand."""
        row = self.rows[n]
        eqn = None if row is None or self.names[n] != "dot_general" else equation(row)
        if eqn is None or eqn.primitive.name != "dot_general":
            return False
        contracted, batched = eqn.params["dimension_numbers"]
        operands = zip(eqn.invars, contracted, batched, strict=True)
        return any(len(struct(v.aval).shape) - len(c) - len(b) > 1 for v, c, b in operands)


def equation(row: Row) -> Equation | None:
    """The equation of a row; None where its graph was read from text."""
    return row.source.payload if isinstance(row.source, Op) else row.source
