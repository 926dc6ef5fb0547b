"""Prove where the counters of a loop begin, how they change, and how many trips they allow.

A counter is a whole number of the carry to which every step adds the same number. Whole numbers wrap around at the ends
of their type: after 127 an `int8` is -128. So a number is no counter if its sums may leave their type, on the way from
one step to the next or on the way to an index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jointcut.aot.loops.parts import Parts
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Literal
from jointcut.partition.program.primitives import SAME_NUMBERS
from jointcut.partition.rewrite import simplify

#: No loop that runs backwards makes more trips: they are counted in 32 bits.
FOREVER = 2**30

_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


@dataclass(frozen=True)
class Counter:
    """A whole number of the carry, which never wraps around.

    Attributes:
        part: its place in the carry.
        change: the number that a step adds to it.
        least: no step begins with a smaller value.
        most: no step begins with a larger one.
    """

    part: int
    change: int
    least: int
    most: int


@dataclass(frozen=True)
class Counters:
    """The counters of a loop, and the most trips it makes, None where that is not known.

    `is_exact` says that it makes exactly that number. `body` and `inputs` are its body while it is read, and the
    variables of constants and carry.
    """

    each: Sequence[Counter]
    trips: int | None
    is_exact: bool
    body: Reader
    inputs: Sequence[Any]

    @classmethod
    def of(cls, parts: Parts, known: Mapping[int, int]) -> Counters:
        """Read a loop; `known` are the known values of inputs, by their places among constants and carry."""
        loop = _Loop(parts, known)
        bounds = [n for p in loop.parts if (n := loop.trips(p)) is not None]
        trips = min(bounds, default=None)
        found = (loop.counter(p, FOREVER if trips is None else trips) for p in loop.parts)
        is_exact = trips is not None and loop.cond.is_one_test
        return cls([counter for counter in found if counter is not None], trips, is_exact, loop.body, loop.inputs)

    def places(self, atom: Atom) -> Iterator[tuple[Counter, int]]:
        """Yield the counters that a number in the body follows, and the difference of the number from each."""
        count = len(self.inputs) - len(self.body.outputs)
        for counter in self.each:
            offset = self.body.offset(atom, self.inputs[count + counter.part], counter.least, counter.most)
            if offset is not None:
                yield counter, offset


class Reader:
    """A jaxpr whose whole numbers are followed; `numbers` are the inputs whose value is known."""

    def __init__(self, closed: Any, numbers: Mapping[int, int]) -> None:
        """Take the jaxpr, and the values by the places of the inputs."""
        jaxpr, self.consts = jaxprs.opened(simplify.inlined(closed))
        self.inputs, self.outputs = jaxpr.invars, jaxpr.outvars
        self._makers: dict[Any, Equation] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._numbers = {self.inputs[i]: n for i, n in numbers.items()}

    def maker(self, atom: Atom) -> Equation | None:
        """Return the equation that makes a value, None for inputs and literals."""
        return None if isinstance(atom, Literal) else self._makers.get(atom)

    def number(self, atom: Atom) -> int | None:
        """Return the value of a known number, None for any other."""
        eqn = self.maker(atom)
        if eqn is not None:
            found = self.number(eqn.invars[0]) if eqn.primitive.name in SAME_NUMBERS else None
        else:
            found = number_in(atom) if isinstance(atom, Literal) else self._numbers.get(atom)
        return found if found is None or _fits(atom, found, found) else None

    def offset(self, atom: Atom, counter: Any, least: int, most: int) -> int | None:
        """Return the difference of a number from the counter, if the same for each value from `least` to `most`."""
        if atom is counter:
            return 0
        eqn, found = self.maker(atom), None
        if eqn is None:
            return None
        name, operands = eqn.primitive.name, list(eqn.invars)
        if name in ("add", "sub"):
            if name == "add" and self.number(operands[0]) is not None:
                operands.reverse()
            found, number = self.offset(operands[0], counter, least, most), self.number(operands[1])
            found = None if found is None or number is None else found + (number if name == "add" else -number)
        elif name == "select_n":
            which = self._choice(operands[0], counter, least, most)
            found = None if which is None else self.offset(operands[1 + which], counter, least, most)
        elif name in SAME_NUMBERS:
            found = self.offset(operands[0], counter, least, most)
        return found if found is None or _fits(atom, least + found, most + found) else None

    def _choice(self, predicate: Atom, counter: Any, least: int, most: int) -> int | None:
        """Return the operand of a `select_n`, if the same for each value: a negative index counts from the end."""
        eqn = self.maker(predicate)
        if eqn is None or eqn.primitive.name != "lt":
            return None
        offset, number = self.offset(eqn.invars[0], counter, least, most), self.number(eqn.invars[1])
        if offset is None or number is None:
            return None
        return 0 if least + offset >= number else 1 if most + offset < number else None

    @property
    def is_one_test(self) -> bool:
        """Whether the first output is one comparison."""
        eqn = self.maker(self.outputs[0])
        while eqn is not None and eqn.primitive.name in SAME_NUMBERS:
            eqn = self.maker(eqn.invars[0])
        return eqn is not None and eqn.primitive.name in _SWAPPED

    def limits(self, counter: Any) -> Iterator[tuple[str, int]]:
        """Yield comparisons of an input with known numbers; the first output is true only if all of them hold."""
        ends = _ends(counter)
        work = [self.outputs[0]] if ends is not None else []
        while work:
            eqn = self.maker(work.pop())
            if eqn is None or ends is None:
                continue
            name = eqn.primitive.name
            if name == "and" or (name in SAME_NUMBERS and _dtype(eqn.invars[0]) == np.bool_):
                work += eqn.invars
            elif name in _SWAPPED:
                one, other = eqn.invars
                if self.number(one) is not None:
                    name, one, other = _SWAPPED[name], other, one
                offset, number = self.offset(one, counter, *ends), self.number(other)
                if offset is not None and number is not None:
                    yield name, number - offset


class _Loop:
    """A loop, while its counters are searched among the whole numbers of its carry, the places `parts`."""

    def __init__(self, parts: Parts, known: Mapping[int, int]) -> None:
        self.count, self.known = parts.num_consts, known
        body = jaxprs.opened(parts.quiet)[0]
        same = (i for i in range(self.count, len(parts.avals)) if body.outvars[i - self.count] is body.invars[i])
        fixed = {*range(self.count), *same}
        numbers = {i: n for i, n in known.items() if i in fixed}
        self.body, self.cond = Reader(parts.quiet, numbers), Reader(parts.cond, numbers)
        self.inputs = self.body.inputs
        carry = enumerate(parts.carry)
        self.parts = [p for p, aval in carry if aval.shape == () and _ends(self.inputs[self.count + p]) is not None]

    def trips(self, part: int) -> int | None:
        """Return the number of trips that the predicate allows by this counter, None where it does not say."""
        first, change = self.first(part), self.change(part)
        if first is None or not change:
            return None
        bottom, top = self.bounds(part)
        left = top - first if change > 0 else first - bottom + 1
        if math.isinf(left):
            return None
        trips = max(0, -int(-left // abs(change)))
        return trips if self.counter(part, trips) is not None else None

    def counter(self, part: int, trips: int) -> Counter | None:
        """Return the counter of a loop that makes at most `trips` trips; None if it is none, or may wrap around."""
        first, change = self.first(part), self.change(part)
        if not change:
            return None
        if first is not None:
            least, most = sorted((first, first + (max(trips, 1) - 1) * change))
            if self.keeps(part, change, least, most):
                return Counter(part, change, least, most)
        (bottom, top), (_, highest) = self.bounds(part), _ends(self.inputs[self.count + part]) or (0, 0)
        if change > 0 or math.isinf(bottom):
            return None
        least, most = int(bottom), int(min(top - 1, highest))
        return Counter(part, change, least, most) if self.keeps(part, change, least, most) else None

    def keeps(self, part: int, change: int, least: int, most: int) -> bool:
        """Whether each step that begins with a value from `least` to `most` makes this change."""
        inner = self.inputs[self.count + part]
        return least <= most and self.body.offset(self.body.outputs[part], inner, least, most) == change

    def first(self, part: int) -> int | None:
        """Return the first value, None where it is not known."""
        found = self.known.get(self.count + part)
        return found if found is not None and _fits(self.inputs[self.count + part], found, found) else None

    def change(self, part: int) -> int | None:
        """Return the number that the first step adds, or a step from the least value that the predicate allows."""
        first = self.first(part)
        start = self.bounds(part)[0] if first is None else first
        if math.isinf(start):
            return None
        return self.body.offset(self.body.outputs[part], self.inputs[self.count + part], int(start), int(start))

    def bounds(self, part: int) -> tuple[float, float]:
        """Return the least value that the predicate allows, and the least one above that it refuses; or infinities."""
        limits = list(self.cond.limits(self.cond.inputs[self.count + part]))
        bottom = max((n + (name == "gt") for name, n in limits if name in ("gt", "ge")), default=-math.inf)
        top = min((n + (name == "le") for name, n in limits if name in ("lt", "le")), default=math.inf)
        return bottom, top


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)


def _ends(atom: Any) -> tuple[int, int] | None:
    """Return the least and the largest number of an atom's type, None if that is not a type of whole numbers."""
    dtype = _dtype(atom)
    if dtype is None or not isinstance(dtype, np.dtype) or not np.issubdtype(dtype, np.integer):
        return None
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _fits(atom: Any, least: int, most: int) -> bool:
    ends = _ends(atom)
    return ends is not None and ends[0] <= least and most <= ends[1]


def number_in(literal: Any) -> int | None:
    """Return the number of an integer literal, None for anything else."""
    if not isinstance(literal, Literal) or not np.issubdtype(np.asarray(literal.val).dtype, np.integer):
        return None
    return int(literal.val)


def known_numbers(values: Sequence[Any]) -> dict[int, int]:
    """Return the integers among some values that are no tracers, by their places."""
    plain = ((i, x) for i, x in enumerate(values) if not runtime.is_tracer(x) and abstract.is_plain(jax.typeof(x)))
    return {i: int(x) for i, x in plain if np.shape(x) == () and np.issubdtype(jax.typeof(x).dtype, np.integer)}
