"""Follow bounds that a value touches only where its slope is zero, and sums of exponentials.

A square is zero only where its slope is zero, and a cosine is 1 or -1 only there. A clipped number on its bound has a
slope of zero too: it does not move beyond the bound. Elements may be moved, added, multiplied or bounded once more: the
bounds follow by the arithmetic of intervals. A root is steep at zero, and an arc cosine at 1. Where their operand is on
such a bound the product of the slopes has a limit, or zero is in the middle of its subgradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax.numpy as jnp
import numpy as np

from jointcut.aot.trace.formulas.squares import Makers
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.primitives import BARRIER, IDENTITY, KEEPING, MOVEMENT, ROUNDING
from jointcut.partition.rewrite import simplify


class Property(Enum):
    """A property of a value beside its bounds."""

    EXPONENTIALS = "sums of exponentials of real numbers"
    MASK = "zeros and ones"


@dataclass(frozen=True)
class Facts:
    """The known facts of all elements of a value.

    Attributes:
        low: a lower bound. An element that is equal to it has the slope zero, or subgradients with zero in the middle.
        high: an upper bound, in the same way.
        kind: a further property of all elements.
    """

    low: float = -math.inf
    high: float = math.inf
    kind: Property | None = None

    @property
    def number(self) -> float | None:
        """The one number that all elements are, or None."""
        return self.low if self.low == self.high else None

    def is_zero_at_least(self, dtype: Any) -> bool:
        """Whether the least number is zero, or so small that XLA may take it as zero."""
        return 0.0 <= self.low < float(jnp.finfo(dtype).tiny)

    def scaled(self, number: float) -> Facts:
        """Return the facts of a number times the value."""
        low, high = sorted((_times(number, self.low), _times(number, self.high)))
        is_kept = self.kind is Property.EXPONENTIALS and number > 0.0
        return Facts(low, high, self.kind if is_kept or number == 1.0 else None)


#: No facts; a value that is zero at least, and only where it does not move; and NaN, which is no number.
NOTHING, SIZES, NAN = Facts(), Facts(0.0), Facts(math.inf, -math.inf)

#: The values of functions that reach their ends where they do not move.
_RANGES = {"cos": (-1.0, 1.0), "sin": (-1.0, 1.0), "tanh": (-1.0, 1.0), "erf": (-1.0, 1.0), "logistic": (0.0, 1.0)}

#: Ops that move, repeat, pick or join elements.
_MOVES = MOVEMENT | KEEPING | IDENTITY | ROUNDING | {BARRIER, "sort"}


def number_of(literal: Any) -> Facts:
    """Return the facts of a literal."""
    number = np.asarray(literal.val)
    return exactly(float(number)) if number.ndim == 0 and number.dtype.kind in "iuf" else NOTHING


def exactly(number: float) -> Facts:
    """Return the facts of a number."""
    return NAN if math.isnan(number) else Facts(number, number) if math.isfinite(number) else NOTHING


def either(cases: Sequence[Facts]) -> Facts:
    """Return the facts of a value that is one of several; NaN is left out."""
    low, high = min(one.low for one in cases), max(one.high for one in cases)
    kinds = {one.kind for one in cases if one.number is None and one is not NAN}
    is_kept = len(kinds) == 1 and (Property.EXPONENTIALS in kinds or low >= 0.0)
    return Facts(low, high, kinds.pop() if is_kept else None)


def made(eqn: Any, now: Sequence[Facts], makers: Makers, read: Callable[[Any], Facts]) -> Facts:
    """Return the facts of an equation's results, given the facts of its operands and the equations that make these."""
    name, results, operands = eqn.primitive.name, eqn.outvars, eqn.invars
    if not now or not results or not all(_is_real(v) for v in results):
        return NOTHING
    if name == "real" and makers.is_with_conjugate(operands[0]):
        return SIZES
    if name == "convert_element_type" and operands[0].aval.dtype == bool:
        return Facts(0.0, 1.0, Property.MASK)
    if name == "select_n":
        return either(now[1:])
    if name in _MOVES:
        moved = [one for one, v in zip(now, operands, strict=True) if v.aval.dtype == results[0].aval.dtype]
        return either(moved or now[:1])
    if not all(map(_is_real, operands)):
        return NOTHING
    if name in _RANGES:
        return Facts(*_RANGES[name])
    if name in ("reduce_sum", "cumsum"):
        return _summed(now[0], _count(operands[0], eqn.params.get("axes", (eqn.params.get("axis"),))), name == "cumsum")
    if name == "dot_general":
        axes = eqn.params["dimension_numbers"][0][0]
        return SIZES if makers.is_with_itself(eqn) else _summed(_product(*now), _count(operands[0], axes))
    if name == "mul":
        odd = [read(v) for v in makers.odd_factors(eqn)]
        return SIZES if len(odd) < 2 and all(one.low >= 0.0 for one in odd) else _product(*now)
    if name in ("integer_pow", "pow"):
        return _power(eqn, now, makers)
    return _ARITHMETIC[name](*now) if name in _ARITHMETIC else NOTHING


def _is_real(v: Any) -> bool:
    dtype = v.aval.dtype
    return bool(jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer))


def through(jaxpr: Any, given: Sequence[Facts]) -> list[Facts]:
    """Return the facts of a jaxpr's outputs, given the facts of its inputs."""
    known, makers = dict(zip(jaxpr.invars, given, strict=True)), Makers()

    def read(v: Any) -> Facts:
        return number_of(v) if isinstance(v, jaxprs.Literal) else known.get(v, NOTHING)

    for eqn in jaxpr.eqns:
        now, inner = [read(v) for v in eqn.invars], simplify.callee(eqn)
        ends = [made(eqn, now, makers, read)] * len(eqn.outvars) if inner is None else through(inner, now)
        known.update(zip(eqn.outvars, ends, strict=True))
        makers.add(eqn)
    return [read(v) for v in jaxpr.outvars]


# ------------------------------------------------------------------------------------------------------- arithmetic


def _times(x: float, y: float) -> float:
    return 0.0 if x == 0.0 or y == 0.0 else x * y


def _kind(one: Facts, other: Facts) -> Property | None:
    """Return the kind of a sum or a product: of exponentials with one another, with masks and with numbers."""
    kinds = [x.kind for x in (one, other) if not (x.number is not None and x.number >= 0.0)]
    is_kept = Property.EXPONENTIALS in kinds and None not in kinds
    return Property.EXPONENTIALS if is_kept else None


def _added(one: Facts, other: Facts) -> Facts:
    """Return the facts of a sum; it is at an end only where both terms are at theirs."""
    return Facts(one.low + other.low, one.high + other.high, _kind(one, other))


def _product(one: Facts, other: Facts) -> Facts:
    """Return the facts of a product; it is at an end only where both factors are, or one is zero and does not move."""
    ends = [_times(x, y) for x in (one.low, one.high) for y in (other.low, other.high)]
    masks = one.kind is other.kind is Property.MASK
    return Facts(min(ends), max(ends), Property.MASK if masks else _kind(one, other))


def _quotient(one: Facts, other: Facts) -> Facts:
    if other.number:
        return one.scaled(1.0 / other.number)
    return SIZES if one.low == 0.0 else NOTHING


def _larger(one: Facts, other: Facts) -> Facts:
    return Facts(max(one.low, other.low), max(one.high, other.high), _kind(one, other))


def _smaller(one: Facts, other: Facts) -> Facts:
    return Facts(min(one.low, other.low), min(one.high, other.high))


def _count(v: Any, axes: Sequence[int]) -> float:
    """Return the number of elements along axes; infinite if that is not known."""
    sizes = [v.aval.shape[axis] for axis in axes]
    return float(math.prod(sizes)) if all(isinstance(size, int) for size in sizes) else math.inf


def _summed(one: Facts, count: float, is_partial: bool = False) -> Facts:
    """Return the facts of a sum of `count` elements, or also of fewer."""
    few = [one.low, one.high] if is_partial else []
    ends = [*few, _times(one.low, count), _times(one.high, count)]
    low, high = min(ends[::2]), max(ends[1::2])
    if count == math.inf:
        low, high = min(low, 0.0), max(high, 0.0)
    return Facts(low, high, one.kind if one.kind is Property.EXPONENTIALS else None)


def _root(x: Facts) -> Facts:
    return Facts(x.low**0.5, x.high**0.5) if x.low >= 0.0 else NOTHING


_ARITHMETIC: Mapping[str, Callable[..., Facts]] = {
    "abs": lambda x: x if x.low >= 0.0 else Facts(-math.inf, max(-x.low, x.high)),
    "add": _added,
    "add_any": _added,
    "clamp": lambda low, x, high: _smaller(_larger(low, x), high),
    "div": _quotient,
    "exp": lambda x: Facts(0.0, kind=Property.EXPONENTIALS),
    "exp2": lambda x: Facts(0.0, kind=Property.EXPONENTIALS),
    "max": _larger,
    "min": _smaller,
    "neg": lambda x: x.scaled(-1.0),
    "sqrt": _root,
    "square": lambda x: Facts(_raised(max(x.low, 0.0), 2.0), _raised(max(-x.low, x.high), 2.0)),
    "sub": lambda x, y: _added(x, y.scaled(-1.0)),
}


def _power(eqn: Any, now: Sequence[Facts], makers: Makers) -> Facts:
    """Return the facts of a power: even ones, and those above 1 of sizes, are zero only where they do not move."""
    base, exponent = now[0], now[1].number if len(now) > 1 else float(eqn.params["y"])
    if exponent is None or exponent <= 0.0:
        return NOTHING
    is_size = base.low >= 0.0 or (exponent > 1.0 and makers.of(eqn.invars[0], "abs") is not None)
    if exponent % 2.0 != 0.0 and not is_size:
        return NOTHING
    return Facts(_raised(max(base.low, 0.0), exponent), _raised(max(-base.low, base.high), exponent))


def _raised(base: float, exponent: float) -> float:
    """Return a power that becomes infinite where it is too large."""
    return base**exponent if base == 0.0 or exponent * math.log(base) < 700.0 else math.inf
