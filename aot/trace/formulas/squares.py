"""Find products of a value with itself, and sums of products that are sums of squares.

A value that is computed twice is one value. So `x @ x`, `einsum("i,i->", x, x)` and `m * x * x` are made of squares. A
squared distance that is written out, `sum(x * x) + sum(y * y) - 2 * x @ y`, is a sum of squares of differences, for
vectors and for all pairs of rows of two matrices. It is found by the coefficients of its products. The coefficient of a
square must be at least half the sum of the coefficients of the same value's products with other values.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.primitives import ELEMENTWISE, SUMS
from jointcut.partition.rewrite import simplify

#: An axis of a value in a sum: the number of an axis of the result, the name of a summed axis, or None.
Axes = tuple[Any, ...]

#: A value with its axes.
Factor = tuple[Any, Axes]


#: The most equations that are followed.
_MOST = 200


@dataclass(frozen=True)
class _Term:
    """A number times one or two factors, summed over the axes that have names."""

    number: float
    factors: tuple[Factor, ...]


class Makers:
    """The equations that make the values of a jaxpr, and which values are the same."""

    def __init__(self, same: Mapping[Any, Any] | None = None) -> None:
        self._of: dict[Any, Any] = {}
        self._first: dict[Any, Any] = dict(same or {})
        self._seen: dict[Any, Sequence[Any]] = {}

    def add(self, eqn: Any) -> None:
        """Note an equation, whose operands were noted before; for a call, note the equations in it."""
        if simplify.callee(eqn) is not None:
            inputs = dict.fromkeys(jaxprs.variables(eqn.invars))
            inner, _ = jaxprs.opened(simplify.inlined(jaxprs.build(list(inputs), eqn.outvars, [eqn])))
            for one in inner.eqns:
                self.add(one)
            self._first.update((v, self.first(result)) for v, result in zip(eqn.outvars, inner.outvars, strict=True))
            self._of.update((v, self._of.get(self.first(v))) for v in eqn.outvars)
            return
        self._of.update(dict.fromkeys(eqn.outvars, eqn))
        key = None if eqn.effects else simplify.fingerprint(eqn, [self.first(v) for v in eqn.invars])
        if key is not None:
            twin = self._seen.setdefault(key, eqn.outvars)
            self._first.update(zip(eqn.outvars, twin, strict=True))

    def first(self, v: Any) -> Any:
        """Return the first value that is the same as this one."""
        return v if isinstance(v, jaxprs.Literal) else self._first.get(v, v)

    def of(self, v: Any, *names: str) -> Any:
        """Return the equation that makes a value, or None; `names` are the primitives that count, without them all."""
        eqn = None if isinstance(v, jaxprs.Literal) else self._of.get(v)
        return eqn if eqn is not None and (not names or eqn.primitive.name in names) else None

    def inner(self, pairs: Iterable[tuple[Any, Any]]) -> Makers:
        """Return the makers of a body, given pairs of a value outside, or None, and the body's input for it."""
        firsts: dict[Any, Any] = {}
        known = [(self.first(v), inner) for v, inner in pairs if v is not None and not isinstance(v, jaxprs.Literal)]
        return Makers({inner: firsts.setdefault(v, inner) for v, inner in known})

    def copy(self) -> Makers:
        """Return the same inputs, without equations."""
        return Makers(self._first)

    def odd_factors(self, eqn: Any) -> list[Any]:
        """Return the factors of a product that are left over when equal factors are paired."""
        counts: Counter[Any] = Counter()
        numbers, stack, steps = [], list(eqn.invars), 0
        while stack:
            v, steps = stack.pop(), steps + 1
            made = self.of(v, "mul") if steps < _MOST else None
            if isinstance(v, jaxprs.Literal):
                numbers.append(v)
            elif made is not None:
                stack += made.invars
            else:
                counts[self.first(v)] += 1
        return [*numbers, *(v for v, count in counts.items() if count % 2)]

    def is_with_conjugate(self, v: Any) -> bool:
        """Whether a value is made of complex numbers times their conjugates."""
        eqn = self.of(v, "mul", "dot_general")
        if eqn is None or (eqn.primitive.name == "dot_general" and not _is_paired(eqn)):
            return self._is_moved_with_conjugate(v)
        one, other = eqn.invars
        pairs = ((one, other), (other, one))
        return any((made := self.of(x, "conj")) and self.first(made.invars[0]) is self.first(y) for x, y in pairs)

    def _is_moved_with_conjugate(self, v: Any) -> bool:
        eqn = self.of(v, "reduce_sum", "reshape", "squeeze", "broadcast_in_dim", "transpose")
        return eqn is not None and self.is_with_conjugate(eqn.invars[0])

    def is_with_itself(self, eqn: Any) -> bool:
        """Whether a product of arrays sums up squares of the elements of one."""
        return _is_paired(eqn) and self.first(eqn.invars[0]) is self.first(eqn.invars[1])

    # ------------------------------------------------------------------------------------------------------- distances

    def is_sum_of_squares(self, v: Any) -> bool:
        """Whether a value is a sum of products that is zero only where it does not move.

        A product of x and y with the number c before it leaves |c| / 2 times the square of x + y or x - y, if that
        much is left of the squares of both.
        """
        left: dict[Factor, float] = defaultdict(float)
        for term in self._terms(v):
            pair = _pair(term)
            if pair is None:
                return False
            one, other, is_square = pair
            for factor in (one, other):
                left[factor] += (term.number if is_square else -abs(term.number)) / 2
        return all(number >= -1e-9 for number in left.values())

    def _terms(self, v: Any) -> Iterator[_Term]:
        """Yield the terms of a sum; the last one has no factors where there are too many."""
        names = itertools.count()
        stack: list[tuple[float, Any, Axes]] = [(1.0, v, tuple(range(v.aval.ndim)))]
        for _ in range(_MOST):
            if not stack:
                return
            number, v, axes = stack.pop()
            eqn = self.of(v)
            name, scaled, moved = _name(eqn), self._scaled(eqn), self._moved(eqn, axes)
            if name in SUMS & ELEMENTWISE and all(x.aval.ndim == len(axes) for x in eqn.invars):
                stack += zip((number, -number if name == "sub" else number), eqn.invars, (axes, axes), strict=True)
            elif scaled is not None:
                stack.append((number * scaled[0], scaled[1], axes))
            elif name == "reduce_sum":
                rest = iter(axes)
                places = range(eqn.invars[0].aval.ndim)
                inner = tuple(f"{next(names)}" if i in eqn.params["axes"] else next(rest) for i in places)
                stack.append((number, eqn.invars[0], inner))
            elif moved is not None:
                stack.append((number, *moved))
            elif _is_second_power(eqn) and (root := self.of(eqn.invars[0], "sqrt")) is not None:
                stack.append((number, root.invars[0], axes))
            else:
                numbers, factors = zip(*self._factors(v, eqn, axes, names), strict=True)
                yield _Term(number * math.prod(numbers), factors)
        yield _Term(0.0, ())

    def _factors(self, v: Any, eqn: Any, axes: Axes, names: Iterator[int]) -> list[tuple[float, Factor]]:
        """Return the factors of a product, or the value alone, each with a number."""
        name = _name(eqn)
        if name == "mul":
            return [self._bare(x, axes) for x in eqn.invars]
        if _is_second_power(eqn):
            return [self._bare(eqn.invars[0], axes)] * 2
        if name != "dot_general":
            return [self._bare(v, axes)]
        (one, other), (first, second) = eqn.params["dimension_numbers"]
        known: list[dict[int, Any]] = [dict(zip(batch, axes, strict=False)) for batch in (first, second)]
        for x, y in zip(one, other, strict=True):
            known[0][x] = known[1][y] = f"{next(names)}"
        free = iter(axes[len(first) :])
        ranks = [x.aval.ndim for x in eqn.invars]
        every = [tuple(at[i] if i in at else next(free) for i in range(n)) for at, n in zip(known, ranks, strict=True)]
        return [self._bare(x, inner) for x, inner in zip(eqn.invars, every, strict=True)]

    def _bare(self, v: Any, axes: Axes) -> tuple[float, Factor]:
        """Return a factor without the ops that move or scale its elements; axes of one element have no name."""
        number = 1.0
        while True:
            eqn = self.of(v)
            scaled, moved = self._scaled(eqn), self._moved(eqn, axes)
            if scaled is not None:
                number, v = number * scaled[0], scaled[1]
            elif moved is not None:
                v, axes = moved
            else:
                shape = v.aval.shape  # a number has no axes
                names = (a if n != 1 else None for a, n in zip(axes if shape else (), shape, strict=True))
                return number, (self.first(v), tuple(names))

    def _scaled(self, eqn: Any) -> tuple[float, Any] | None:
        """Return the number and the value whose product an equation computes; None for another equation."""
        name = _name(eqn)
        if name not in ("mul", "div", "neg"):
            return None
        if name == "neg":
            return -1.0, eqn.invars[0]
        first, second = map(self._number, eqn.invars)
        if name == "div":
            return (1.0 / second, eqn.invars[0]) if second else None
        if second is not None:
            return second, eqn.invars[0]
        return None if first is None else (first, eqn.invars[1])

    def _number(self, v: Any) -> float | None:
        while (eqn := self.of(v, "broadcast_in_dim", "convert_element_type")) is not None:
            v = eqn.invars[0]
        value = np.asarray(v.val) if isinstance(v, jaxprs.Literal) else None
        return float(value) if value is not None and value.ndim == 0 and value.dtype.kind in "iuf" else None

    def _moved(self, eqn: Any, axes: Axes) -> tuple[Any, Axes] | None:
        """Return the value that an equation moves, with its axes; None for an equation that does more."""
        name = _name(eqn)
        if name == "transpose":
            places = eqn.params["permutation"]
            return eqn.invars[0], tuple(axes[places.index(i)] for i in range(len(axes)))
        if name == "broadcast_in_dim" and not isinstance(eqn.invars[0], jaxprs.Literal):
            return eqn.invars[0], tuple(axes[i] for i in eqn.params["broadcast_dimensions"])
        if name in ("copy", "convert_element_type"):
            same = all(jnp.issubdtype(v.aval.dtype, np.floating) for v in eqn.invars)
            return (eqn.invars[0], axes) if same else None
        if name not in ("reshape", "squeeze"):
            return None
        long = [a for a, n in zip(axes, eqn.outvars[0].aval.shape, strict=True) if n != 1]
        shape = eqn.invars[0].aval.shape
        if [n for n in shape if n != 1] != [n for n in eqn.outvars[0].aval.shape if n != 1]:
            return None
        rest = iter(long)
        return eqn.invars[0], tuple(None if n == 1 else next(rest) for n in shape)


def _name(eqn: Any) -> str:
    """Return the name of the primitive of an equation; empty for none."""
    return "" if eqn is None else eqn.primitive.name


def _is_second_power(eqn: Any) -> bool:
    return _name(eqn) == "square" or (_name(eqn) == "integer_pow" and eqn.params["y"] == 2)


def _is_paired(eqn: Any) -> bool:
    """Whether a product of arrays is over elements at the same places of both."""
    summed, batch = eqn.params["dimension_numbers"]
    pairs = [(*one, *other) for one, other in zip(summed, batch, strict=True)]
    return pairs[0] == pairs[1] and len(pairs[0]) == eqn.invars[0].aval.ndim


def _pair(term: _Term) -> tuple[Factor, Factor, bool] | None:
    """Return the two factors of a product, and whether it is a square; None for anything but a product of two.

    An axis that is summed must be in both factors: then its name does not matter.
    """
    if len(term.factors) != 2:
        return None
    names = [[a for a in axes if isinstance(a, str)] for _, axes in term.factors]
    if sorted(names[0]) != sorted(names[1]) or len(set(names[0])) != len(names[0]):
        return None
    one, other = ((v, tuple("" if isinstance(a, str) else a for a in axes)) for v, axes in term.factors)
    return one, other, one == other and names[0] == names[1]
