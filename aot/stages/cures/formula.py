"""Put a function of `aot.derivatives` in place of the equations that compute it.

A `Formula` looks at one equation, and at the equations of its operands: `mul` of `x` and `log y` is `xlogy(x, y)`. The
equations become one call of the function. Only equations of one line of the user's code are replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jointcut.partition.errors import JointcutError
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Jaxpr, Literal
from jointcut.partition.program.places import user_line
from jointcut.partition.program.primitives import OPENED, SAME_NUMBERS, WITH_BODIES
from jointcut.partition.rewrite.simplify import called, with_bodies

#: The replacement of an equation: functions, of which one has the equation's results, and their operands.
Use = tuple[Sequence[Callable[..., Any]], Sequence[Atom]]


@dataclass(frozen=True)
class Origins:
    """The equations that made the values of one jaxpr."""

    of: Mapping[Any, Equation]

    def get(self, v: Atom, *names: str) -> Equation | None:
        """Return the equation that made a value, if its primitive is one of `names`."""
        eqn = None if isinstance(v, Literal) else self.of.get(v)
        return eqn if eqn is not None and eqn.primitive.name in names else None

    def behind(self, v: Atom, *names: str) -> Equation | None:
        """Do the same as `get`, for the value that this value was moved or converted from."""
        while (eqn := self.get(v, *SAME_NUMBERS)) is not None:
            v = eqn.invars[0]
        return self.get(v, *names)


@dataclass(frozen=True)
class Formula:
    """A function of `aot.derivatives`, and the formula that it replaces.

    Attributes:
        name: the function with its arguments, `xlogy(x, y)`.
        instead: the replaced formula, `x * log(y)`.
        at: a function that finds the formula in an equation.
        is_named: whether a call's name tells the formula. Other formulas are found in a jaxpr with inlined calls.
        is_safer: whether its value can be finite where the formula's value is not. Other functions differ in
            derivatives alone.
    """

    name: str
    instead: str
    at: Callable[[Equation, Origins], Use | None]
    is_named: bool = False
    is_safer: bool = False

    def __str__(self) -> str:
        """`aot.derivatives.xlogy(x, y) in place of x * log(y)`."""
        return f"aot.derivatives.{self.name} in place of {self.instead}"


@dataclass
class Replacing:
    """Replaces a formula at one line of the user's code, and counts the replacements."""

    formula: Formula
    source: str
    count: int = 0

    def through(self, jaxpr: Jaxpr, around: str = "") -> Jaxpr:
        """Return the jaxpr with the formula replaced, also in bodies; `around` is the line of the surrounding call."""
        makers: dict[Any, Equation] = {}
        eqns = []
        for eqn in jaxpr.eqns:
            line = user_line(eqn) or around
            use = self.formula.at(eqn, Origins(makers)) if line == self.source else None
            new = None if use is None else _called(eqn, *use)
            if new is not None:
                self.count += 1
            elif eqn.primitive.name in WITH_BODIES | OPENED:
                new = with_bodies(eqn, functools.partial(self.through, around=line))
            elif eqn.primitive.name == "while_loop":
                new = self._looped(eqn, line)
            makers.update(dict.fromkeys(eqn.outvars, eqn))
            eqns.append(new or eqn)
        return jaxpr.replace(eqns=eqns)

    def _looped(self, eqn: Equation, line: str) -> Equation | None:
        """Return an `aot.while_loop` as a call of the plain loop with the formula replaced, or None without it."""
        (jaxpr, consts), before = jaxprs.opened(eqn.params["jaxpr"]), self.count
        closed = jaxprs.ClosedJaxpr(self.through(jaxpr, line), consts)
        return (
            None if self.count == before else _called(eqn, [lambda *flat: runtime.evaluate(closed, *flat)], eqn.invars)
        )


def _called(eqn: Equation, functions: Sequence[Callable[..., Any]], operands: Sequence[Atom]) -> Equation | None:
    """Return a call of the first function whose results have the types of the equation's results, or None."""
    wanted = [_type_of(v) for v in eqn.outvars]
    for function in functions:
        try:
            call = called(function, [abstract.struct(v.aval) for v in operands])
        except JointcutError:  # the function does not take such arguments
            continue
        if [_type_of(v) for v in call.outvars] == wanted:
            made = jaxprs.rebound(call, operands, eqn.outvars)
            return made.replace(source_info=eqn.source_info, ctx=eqn.ctx)
    return None


def _type_of(v: Any) -> tuple[Any, Any]:
    return v.aval.shape, v.aval.dtype
