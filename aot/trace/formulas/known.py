"""Find sums of squares, sums of exponentials, cosines, masks and numbers in a jaxpr.

A sum of squares, or of higher powers of sizes, is zero only where its slope is zero, and so is a sum of exponentials.
Elements may be moved, added, scaled by a positive number, masked, or bounded from below; the sum stays one. With a
positive number added it is zero nowhere, and nothing is to be known of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import jax.numpy as jnp
import numpy as np

from jointcut.partition.program import jaxprs
from jointcut.partition.program.primitives import MOVEMENT


class Kind(Enum):
    """What is known of a value that is not one number."""

    SQUARES = "a sum of squares of real numbers, or of higher powers of sizes, or one over something"
    EXPONENTIALS = "a sum of exponentials of real numbers"
    MASK = "zeros and ones"
    COSINES = "a cosine or a sine of real numbers, which is 1 or -1 only where its slope is 0"


#: What is known of a value: its kind, the one number that all its elements are, or nothing.
Known = Kind | float | None

#: What keeps a sum one: it moves or adds elements.
_KEEPS = MOVEMENT | {
    "abs",
    "add",
    "add_any",
    "convert_element_type",
    "copy",
    "cumsum",
    "max",
    "reduce_precision",
    "reduce_sum",
}

#: What keeps a mask one.
_KEEPS_MASKS = MOVEMENT | {"convert_element_type", "copy", "mul", "stop_gradient"}

#: What keeps a cosine one, with numbers beside it.
_KEEPS_COSINES = MOVEMENT | {"clamp", "convert_element_type", "copy", "max", "min", "neg"}

#: Functions of numbers that are followed, since JAX divides a variance by such a number.
_OF_NUMBERS: Mapping[str, Callable[..., float]] = {
    **dict.fromkeys(("convert_element_type", "broadcast_in_dim", "reshape", "copy"), float),
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": max,
}


def number_of(literal: Any) -> float | None:
    """The number that a literal is."""
    number = np.asarray(literal.val)
    return float(number) if number.ndim == 0 and number.dtype.kind in "iuf" else None


def made(eqn: Any, now: Sequence[Known], makers: Mapping[Any, Any]) -> Known:
    """What is known of the results of an equation, given that of its operands and the equations that make these."""
    name = eqn.primitive.name
    if now and all(isinstance(known, float) for known in now) and name in _OF_NUMBERS:
        return _OF_NUMBERS[name](*now)
    if not eqn.outvars or not jnp.issubdtype(eqn.outvars[0].aval.dtype, np.floating):
        return None
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == bool:
        return Kind.MASK
    if _is_power(eqn, now, makers):
        return Kind.SQUARES
    if name in ("exp", "exp2"):
        return Kind.EXPONENTIALS
    if name in ("cos", "sin"):
        return Kind.COSINES
    if name in _KEEPS_COSINES and Kind.COSINES in now:
        return Kind.COSINES if all(known is Kind.COSINES or isinstance(known, float) for known in now) else None
    if name in _KEEPS_MASKS and all(known is Kind.MASK for known in now) and now:
        return Kind.MASK
    least = float(jnp.finfo(eqn.outvars[0].aval.dtype).tiny)  # below it XLA may take a number as zero
    kinds = (kind for kind in (Kind.SQUARES, Kind.EXPONENTIALS) if kind in now and _is_sum(name, now, kind, least))
    return next(kinds, None)


def _is_power(eqn: Any, now: Sequence[Known], makers: Mapping[Any, Any]) -> bool:
    """Whether an equation makes squares, or higher powers of sizes."""
    name, operands = eqn.primitive.name, eqn.invars
    if name == "mul":
        return not isinstance(operands[0], jaxprs.Literal) and operands[0] is operands[1]
    if name == "integer_pow":
        exponent = eqn.params["y"]
        return exponent >= 2 and (exponent % 2 == 0 or _name_of(operands[0], makers) == "abs")
    if name == "pow":
        return _name_of(operands[0], makers) == "abs" and isinstance(now[1], float) and now[1] > 1
    return name == "square" or (name == "real" and _is_with_conjugate(operands[0], makers))


def _is_sum(name: str, now: Sequence[Known], kind: Kind, least: float) -> bool:
    """Whether an equation makes a sum of such sums, so that it is 0 only where these are, and may be 0.

    `least` is the least positive number that is surely not zero.
    """
    others = [known for known in now if known is not kind]
    if name == "div":
        return now[0] is kind and (kind is Kind.SQUARES or isinstance(now[1], float))
    if name == "mul":
        return all(known is Kind.MASK or (isinstance(known, float) and known > 0.0) for known in others)
    if name == "select_n":  # JAX puts NaN in the place of a variance that has no degree of freedom
        return all(known is kind or (isinstance(known, float) and not known < 0.0) for known in now[1:])
    return name in _KEEPS and all(isinstance(known, float) and 0.0 <= known < least for known in others)


def _name_of(v: Any, makers: Mapping[Any, Any]) -> str:
    """The name of the primitive that makes a value; nothing for literals and inputs."""
    return "" if isinstance(v, jaxprs.Literal) or v not in makers else makers[v].primitive.name


def _is_with_conjugate(v: Any, makers: Mapping[Any, Any]) -> bool:
    """Whether a value is a complex number times its conjugate."""
    if _name_of(v, makers) != "mul":
        return False
    one, other = makers[v].invars
    pairs = ((one, other), (other, one))
    return any(_name_of(x, makers) == "conj" and makers[x].invars[0] is y for x, y in pairs)
