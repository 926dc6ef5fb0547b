"""Follow rows through a program: find the axis along which each value keeps the rows of the inputs apart.

Rows are numbers along one axis of some inputs, such as the examples of a batch, or the lanes of a mapped loop. A value
with an axis of rows has one row for each row of the inputs. Its row is computed from that row of the inputs and from
values without rows. Programs inside calls, branches and loops are followed too. Where an equation mixes rows, or has no
known rule, the rows meet.

    rows = axes.followed(jax.make_jaxpr(lambda x, w: jnp.sum(jnp.sin(x @ w), axis=1)), [0, None])
    rows.is_apart
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.jax.jaxprs import Equation, Jaxpr, Literal, Var
from jointcut.partition.program.primitives import (
    BARRIER,
    BILINEAR,
    CALLS,
    COND,
    LINEAR,
    LINEAR_FIRST,
    REGION,
    WHILE,
    WITH_BODIES,
)
from jointcut.partition.program.ties import ADD, ties


@dataclass(frozen=True)
class Joined:
    """The place of a value without rows.

    Attributes:
        by: the primitive that joins the results for parts of the rows; "total" or empty where no primitive does.
        starts: whether a value that reads no rows is added, once and not for each part.
    """

    by: str = ""
    starts: bool = False


#: Rows have met: the value needs all of them.
MET = Joined()

#: The value is computed from sums over rows, and reads no rows besides.
TOTAL = Joined("total")

#: The place of a value's rows: their axis, or `Joined`; None if the value reads no rows.
Place = int | Joined | None


@dataclass
class Rows:
    """The rows in one program.

    Attributes:
        places: the places of the variables that have rows, or are computed from rows.
        ends: the equations at which rows meet, or are joined otherwise than in a sum, including equations of inner
            programs; each with the places of its operands.
        inside: the rows in programs inside equations, by the identity of the equation.
        shares: whether any row may read a total.
    """

    places: dict[Var, Place] = field(default_factory=dict)
    ends: list[tuple[Equation, list[Place]]] = field(default_factory=list)
    inside: dict[int, list[Rows]] = field(default_factory=dict)
    shares: bool = False

    def place(self, atom: Any) -> Place:
        """The place of a variable or literal."""
        return None if isinstance(atom, Literal) else self.places.get(atom)

    @property
    def is_apart(self) -> bool:
        """Whether no value is computed from several rows."""
        apart = not self.ends and not any(isinstance(p, Joined) for p in self.places.values())
        return apart and all(rows.is_apart for several in self.inside.values() for rows in several)

    def put(self, variables: Sequence[Any], places: Sequence[Place]) -> None:
        """Note the places of variables."""
        self.places.update((v, p) for v, p in zip(variables, places, strict=True) if p is not None)

    def follow(self, eqns: Iterable[Equation]) -> None:
        """Note the places of the results of equations."""
        for eqn in eqns:
            places = [self.place(v) for v in eqn.invars]
            if self.shares and {*places} - {None, TOTAL}:
                places = [None if p == TOTAL else p for p in places]
            if given := [p for p in places if p is not None]:
                found, met = through(self, eqn, places), _met(given)
                results = [met] * len(eqn.outvars) if found is None else found
                self.put(eqn.outvars, results)
                ends = [end for inner in self.inside.get(id(eqn), ()) for end in inner.ends]
                meets = met == MET if found is None else MET in results
                folds = any(map(_is_fold, results)) and not any(map(_is_fold, given))
                self.ends += ends or [(eqn, places)] * (MET not in given and (meets or folds))

    def look_into(self, eqn: Equation, programs: Sequence[tuple[Any, Sequence[Place]]]) -> list[list[Place]]:
        """Follow rows through programs inside an equation, from the places of inputs to the places of results."""
        inside = [_through(type(self)(), program, places) for program, places in programs]
        self.inside[id(eqn)] = inside
        outvars = [jaxprs.opened(program)[0].outvars for program, _ in programs]
        return [[rows.place(v) for v in variables] for rows, variables in zip(inside, outvars, strict=True)]


def followed(program: Any, places: Sequence[Place]) -> Rows:
    """The rows in a jaxpr, given their places in its inputs; None for an input that any row may read whole."""
    return _through(Rows(), program, places)


def _through(rows: Rows, program: Any, places: Sequence[Place]) -> Rows:
    jaxpr: Jaxpr = jaxprs.opened(program)[0]
    rows.put(jaxpr.invars, places)
    rows.follow(jaxpr.eqns)
    return rows


def through(rows: Rows, eqn: Equation, places: Sequence[Place]) -> Sequence[Place] | None:
    """The places of the results of an equation; None where rows meet."""
    name = eqn.primitive.name
    if name == BARRIER:
        return places
    if name in _BODIES:
        return _BODIES[name](rows, eqn, places)
    if any(isinstance(p, Joined) for p in places):
        return _summed(eqn, places)
    tie = next((tie for tie in ties(eqn) if tie.fits(places)), None)
    if tie is None:
        return None
    return [Joined(tie.joins, tie.starts) if axis is None else int(axis) for axis in tie.results]


def _summed(eqn: Equation, places: Sequence[Place]) -> Sequence[Place] | None:
    """The places of values computed from sums over rows: they are sums as well, if the equation is linear in these."""
    name, given = eqn.primitive.name, [p for p in places if p is not None]
    if not all(map(is_sum, given)) or not all(map(_is_inexact, eqn.outvars)):
        return None
    if name in LINEAR:
        starts = any(p is None and not jaxprs.is_zero(v) for v, p in zip(eqn.invars, places, strict=True))
    elif len(given) == 1 and given[0] in places[: 2 if name in BILINEAR else int(name in LINEAR_FIRST)]:
        starts = False
    else:
        return None
    return [Joined(ADD, starts or Joined(ADD, True) in given)] * len(eqn.outvars)


def is_sum(place: Place) -> bool:
    """Whether a value is a sum over rows."""
    return isinstance(place, Joined) and place.by == ADD


def _is_fold(place: Place) -> bool:
    """Whether parts of a value for parts of the rows are joined otherwise than in a sum."""
    return isinstance(place, Joined) and place.by not in ("", ADD, TOTAL.by)


def _met(given: Sequence[Place]) -> Joined:
    """The place of a value that an equation computes from such places, as if from all at once."""
    return TOTAL if all(isinstance(p, Joined) and p != MET for p in given) else MET


def _is_inexact(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


# ------------------------------------------------------------------------------------------------------ programs inside


def _called(rows: Rows, eqn: Equation, places: Sequence[Place]) -> Sequence[Place] | None:
    program = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if program is None or len(jaxprs.opened(program)[0].invars) != len(places):
        return None
    return rows.look_into(eqn, [(program, places)])[0]


def _branched(rows: Rows, eqn: Equation, places: Sequence[Place]) -> Sequence[Place] | None:
    if places[0] is not None:
        return None
    outs = rows.look_into(eqn, [(branch, places[1:]) for branch in eqn.params["branches"]])
    return [functools.reduce(_agreed, several) for several in zip(*outs, strict=True)]


def _scanned(rows: Rows, eqn: Equation, places: Sequence[Place]) -> Sequence[Place] | None:
    """The places of a scan's results; steps that are rows must carry nothing, others must keep the rows apart."""
    layout = jaxprs.scan_layout(eqn)
    consts, carry, stacks = _parted(places, layout.num_consts, layout.num_carry)
    if 0 in stacks:
        is_map = not carry and all(p is None for p in consts) and all(p in (None, 0) for p in stacks)
        return [0] * len(eqn.outvars) if is_map else None
    steps = [moved(p, -1) for p in stacks]

    def step(carry: Sequence[Place]) -> list[Place]:
        return rows.look_into(eqn, [(eqn.params["jaxpr"], [*consts, *carry, *steps])])[0]

    carry, outs = _settled(carry, step)
    return None if carry is None else [*carry, *(moved(p, 1) for p in outs[layout.num_carry :])]


def _looped(rows: Rows, eqn: Equation, places: Sequence[Place]) -> Sequence[Place] | None:
    """The places of a while loop's results. All rows make equally many trips, since the predicate reads no rows."""
    tests, consts, carry = _parted(places, eqn.params["cond_nconsts"], eqn.params["body_nconsts"])

    def step(carry: Sequence[Place]) -> list[Place]:
        programs = [(eqn.params["body_jaxpr"], [*consts, *carry]), (eqn.params["cond_jaxpr"], [*tests, *carry])]
        outs, (goes_on,) = rows.look_into(eqn, programs)
        return outs if goes_on is None else [MET] * len(outs)

    return _settled(carry, step)[0]


_BODIES: dict[str, Callable[[Rows, Equation, Sequence[Place]], Sequence[Place] | None]] = {
    **dict.fromkeys(WITH_BODIES & CALLS, _called),
    REGION: _called,
    COND: _branched,
    SCAN: _scanned,
    WHILE: _looped,
}


def _parted(places: Sequence[Place], first: int, second: int) -> tuple[Sequence[Place], ...]:
    return places[:first], places[first : first + second], places[first + second :]


def moved(place: Place, by: int) -> Place:
    """The place in an array that has more or fewer axes in front."""
    return place + by if isinstance(place, int) else place


def _agreed(one: Place, other: Place) -> Place:
    """The place of a value that is one or the other. A value without rows counts as the same in all rows."""
    known = [p for p in (one, other) if p is not None]
    if one == other:
        return one
    if all(map(is_sum, known)):
        return Joined(ADD, starts=True)
    if _met(known) == TOTAL:
        return TOTAL
    return known[0] if len(known) == 1 and isinstance(known[0], int) else MET


def _settled(
    carry: Sequence[Place], step: Callable[[Sequence[Place]], list[Place]]
) -> tuple[Sequence[Place] | None, list[Place]]:
    """The places of a loop's carried values, and of the results of its step; None where rows meet."""
    while True:
        outs = step(carry)
        after = [_agreed(a, b) for a, b in zip(carry, outs[: len(carry)], strict=True)]
        if MET in after:
            return None, outs
        if after == list(carry):
            return carry, outs
        carry = after
