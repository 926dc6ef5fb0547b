"""Put a function of `aot.derivatives` in place of the equations that it stands for.

A `Formula` looks at one equation, and at those that made its operands: `mul` of `x` and `log y` is `xlogy(x, y)`. What
it finds becomes one call of the function. Only equations of one line of the user's are replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jointcut.partition.errors import JointcutError
from jointcut.partition.program import jaxprs
from jointcut.partition.program.jaxprs import Atom, Equation, Jaxpr, Literal
from jointcut.partition.program.places import user_line
from jointcut.partition.program.primitives import OPENED, WITH_BODIES
from jointcut.partition.rewrite.simplify import called, with_bodies

#: What an equation is in other words: functions of which one has its results, and their operands.
Use = tuple[Sequence[Callable[..., Any]], Sequence[Atom]]

#: What moves or converts elements.
MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy"})


@dataclass(frozen=True)
class Makers:
    """The equations that made the values of one jaxpr."""

    of: Mapping[Any, Equation]

    def get(self, v: Atom, *names: str) -> Equation | None:
        """The equation that made a value, if its primitive is one of these."""
        eqn = None if isinstance(v, Literal) else self.of.get(v)
        return eqn if eqn is not None and eqn.primitive.name in names else None

    def behind(self, v: Atom, *names: str) -> Equation | None:
        """Like `get`, for the value that this one was moved or converted from."""
        while (eqn := self.get(v, *MOVES)) is not None:
            v = eqn.invars[0]
        return self.get(v, *names)


@dataclass(frozen=True)
class Formula:
    """A function of `aot.derivatives`, and what it stands for.

    Attributes:
        name: the function with its arguments, `xlogy(x, y)`.
        instead: what it replaces, `x * log(y)`.
        at: finds it in an equation.
        is_named: whether it is found in a call by its name. Others are found in a jaxpr whose calls are open.
        is_safer: whether its value can be finite where that of what it replaces is not. Others differ in derivatives.
    """

    name: str
    instead: str
    at: Callable[[Equation, Makers], Use | None]
    is_named: bool = False
    is_safer: bool = False

    def __str__(self) -> str:
        """`aot.derivatives.xlogy(x, y) in place of x * log(y)`."""
        return f"aot.derivatives.{self.name} in place of {self.instead}"


@dataclass
class Replacing:
    """Replaces what is found of a formula at one line of the user's, and counts how often it was found."""

    formula: Formula
    source: str
    count: int = 0

    def through(self, jaxpr: Jaxpr, around: str = "") -> Jaxpr:
        """The jaxpr with the formula, also in its bodies; `around` is the line of the call that holds it."""
        makers: dict[Any, Equation] = {}
        eqns = []
        for eqn in jaxpr.eqns:
            line = user_line(eqn) or around
            use = self.formula.at(eqn, Makers(makers)) if line == self.source else None
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
        """An `aot.while_loop` as a call of the plain loop with the formula; None where that is not in it."""
        (jaxpr, consts), before = jaxprs.opened(eqn.params["jaxpr"]), self.count
        closed = jaxprs.ClosedJaxpr(self.through(jaxpr, line), consts)
        return (
            None if self.count == before else _called(eqn, [lambda *flat: jaxprs.evaluate(closed, *flat)], eqn.invars)
        )


def _called(eqn: Equation, functions: Sequence[Callable[..., Any]], operands: Sequence[Atom]) -> Equation | None:
    """A call of the first of these functions whose results have the types of the equation's, or None."""
    wanted = [_type_of(v) for v in eqn.outvars]
    for function in functions:
        try:
            call = called(function, [jaxprs.struct(v.aval) for v in operands])
        except JointcutError:  # it does not take such arguments
            continue
        if [_type_of(v) for v in call.outvars] == wanted:
            made = jaxprs.rebound(call, operands, eqn.outvars)
            return made.replace(source_info=eqn.source_info, ctx=eqn.ctx)
    return None


def _type_of(v: Any) -> tuple[Any, Any]:
    return v.aval.shape, v.aval.dtype
