"""Follow numbers that a program computes from literals, such as the number of elements of a mean.

JAX writes `jnp.sqrt(64)`, and the test whether a variance has a degree of freedom, as equations. An array counts if all
of its elements are one number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jointcut.partition.program.jax.jaxprs import Jaxpr, Literal, Var
from jointcut.partition.program.primitives import IDENTITY, ROUNDING, SAME_NUMBERS
from jointcut.partition.rewrite import simplify

#: A number, or a truth value.
Number = float | bool

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(SAME_NUMBERS | IDENTITY | ROUNDING, lambda x, *_: x),
    "abs": abs,
    "add": operator.add,
    "and": lambda x, y: x and y if isinstance(x, bool) else math.inf,
    "div": lambda x, y: x / y if y else math.nan,
    "eq": operator.eq,
    "exp": lambda x: math.exp(x) if x < 80 else math.inf,
    "ge": operator.ge,
    "gt": operator.gt,
    "integer_pow": lambda x, y: x**y if x else math.nan,
    "le": operator.le,
    "log": lambda x: math.log(x) if x > 0 else math.nan,
    "lt": operator.lt,
    "max": max,
    "min": min,
    "mul": operator.mul,
    "ne": operator.ne,
    "neg": operator.neg,
    "not": lambda x: not x if isinstance(x, bool) else math.inf,
    "or": lambda x, y: x or y if isinstance(x, bool) else math.inf,
    "rsqrt": lambda x: x**-0.5 if x > 0 else math.nan,
    "select_n": lambda which, *cases: cases[int(which)],
    "sqrt": lambda x: x**0.5 if x >= 0 else math.nan,
    "square": lambda x: x * x,
    "sub": operator.sub,
}


def numbers_in(jaxpr: Jaxpr, given: Sequence[Number | None]) -> dict[Var, Number]:
    """The variables of a jaxpr that are one number everywhere, given the numbers of its inputs.

    Numbers are not rounded as the program rounds them.
    """
    known = {v: number for v, number in zip(jaxpr.invars, given, strict=True) if number is not None}
    for eqn in jaxpr.eqns:
        now = [number_of(v, known) for v in eqn.invars]
        inner = simplify.callee(eqn)
        if inner is not None:
            inside = numbers_in(inner, now)
            known |= {
                v: number
                for v, out in zip(eqn.outvars, inner.outvars, strict=True)
                if (number := number_of(out, inside)) is not None
            }
        elif eqn.primitive.name in _FUNCTIONS and len(eqn.outvars) == 1 and None not in now:
            number = _within(_computed(eqn, now), eqn.outvars[0].aval)
            known |= {} if number is None else {eqn.outvars[0]: number}
    return known


def number_of(v: Any, known: Mapping[Var, Number]) -> Number | None:
    """The number that an atom is everywhere, or None."""
    if not isinstance(v, Literal):
        return known.get(v)
    value = np.asarray(v.val)
    if value.ndim or (value.dtype.kind not in "fiub" and value.dtype.name != "bfloat16"):
        return None
    return bool(value) if value.dtype == bool else float(value)


def _computed(eqn: Any, now: Sequence[Any]) -> Number:
    name = eqn.primitive.name
    powers = [eqn.params["y"]] if name == "integer_pow" else []
    try:
        return _FUNCTIONS[name](*now, *powers)
    except OverflowError:
        return math.nan


def _within(number: Number, aval: Any) -> Number | None:
    """The number; None if it is NaN, out of the range of the array's type, or not whole where the type is."""
    dtype = aval.dtype
    if jnp.issubdtype(dtype, np.floating):
        kind = jnp.finfo(dtype)
        return number if number == 0 or float(kind.tiny) <= abs(number) <= float(kind.max) else None
    if dtype == np.dtype(bool):
        return number if isinstance(number, bool) else None
    return number if abs(number) < 2**31 and number == int(number) else None
