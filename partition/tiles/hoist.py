"""Move the backward of some equations to the forward, for a cotangent of one.

If the loss is one number, all that these equations leave in the backward is linear in one number: the cotangent, or
the cotangent divided by the number of examples. So the backward can be done for one, before that number is known, and
its results are multiplied by the number later. Forward and backward of a block are then one step of one loop, and
nothing is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from jointcut.partition.program.axes import Rows
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Literal, Var
from jointcut.partition.program.jax.meshes import on_all_devices, varying
from jointcut.partition.rewrite.simplify import equations_of, named
from jointcut.partition.tiles.grow import Growing, Tiling, levelled
from jointcut.partition.tiles.linearity import follow, is_wide, zeros_of


@dataclass(frozen=True)
class Hoist:
    """A tiling whose backward can be done in the forward.

    Attributes:
        tiling: the tiling.
        factor: the number in which its backward is linear.
        chain: the equations that make several such numbers from one.
        linear: the values of the tiling and the chain that are.
        order: the places of the equations of the new forward.
    """

    tiling: Tiling
    factor: Var
    chain: frozenset[int]
    linear: tuple[Var, ...]
    order: tuple[int, ...]


def grown_early(
    closed: Any,
    boundary: int,
    cotangents: Sequence[Var],
    v: Any,
    axis: int,
    least_bytes: int,
    fixed: Collection[int] = (),
) -> Hoist | None:
    """Return the tiling that grows from one axis of a value, with all of its backward that depends on cotangents.

    None where there is no such backward, or it is not linear in one number, or holds float16: numbers for a cotangent
    of one might be too small for that.
    """
    jaxpr, _ = jaxprs.opened(closed)
    eqns, late = jaxpr.eqns, reached(jaxpr.eqns, cotangents)
    growing = Growing.of(jaxpr, v.aval.shape[axis], least_bytes, fixed, late)
    growing.start(v, axis)
    while True:
        order = [*range(boundary), *_needed(eqns, boundary, growing.inside, late)]
        count = len(growing.inside)
        if not growing.close(order):
            return None
        if len(growing.inside) == count:
            break
    read = _late_reads(eqns, growing.inside, late)
    if any(v.aval.shape or not is_wide(v) for v in read):
        return None
    chain = frozenset(_needed_late(eqns, read, late)) if len(read) > 1 else frozenset[int]()
    roots = read if not chain else _late_reads(eqns, chain, late) & {*cotangents}
    if len(roots) != 1 or (chain and any(v.aval.shape for v in roots)):
        return None
    (factor,), apart = roots, chain | growing.inside
    order = [*range(boundary), *_needed(eqns, boundary, apart, late)]
    linear = _linear_in(factor, [eqns[i] for i in order[boundary:] if i in apart], zeros_of(eqns))
    tiling = levelled(eqns, [order], growing.tiling())
    if linear is None or [*tiling.levels] != [growing.inside]:
        return None
    return Hoist(tiling, factor, chain, tuple(linear), tuple(order))


def hoisted(closed: Any, boundary: int, early: Hoist, one: Var | None = None) -> tuple[Any, int, Tiling]:
    """Return the program with a tiling wholly in its forward, the new number of forward equations, and the tiling.

    The cotangent of one is a literal, or a variable `one` with an equation of its own.
    """
    jaxpr, _ = jaxprs.opened(closed)
    eqns, tiling, order, ends = jaxpr.eqns, early.tiling, early.order, early.linear
    factor: Any = early.factor
    unit = {v: jaxprs.fresh(v.aval) for v in ends}
    literal = Literal(np.ones((), factor.aval.dtype), on_all_devices(factor.aval))
    one = jaxprs.fresh(factor.aval) if one is None and varying(factor.aval) else one
    names: dict[Var, Atom] = {factor: literal if one is None else one, **unit}
    first = [] if one is None else _ending(lambda x: _apart(x, factor.aval), [literal], one)
    forward = [_renamed(eqns[i], names) if i in tiling.eqns | early.chain else eqns[i] for i in order]
    rest = [eqns[i] for i in range(boundary, len(eqns)) if i not in {*order}]
    wanted = {*jaxprs.variables([*(v for eqn in rest for v in eqn.invars), *jaxpr.outvars])}
    scaled = [eqn for v in ends if v in wanted for eqn in _ending(_times, [unit[v], factor], v)]
    at = next((n + 1 for n, eqn in enumerate(rest) if factor in eqn.outvars), 0)
    made = jaxprs.build(jaxpr.invars, jaxpr.outvars, [*first, *forward, *rest[:at], *scaled, *rest[at:]])
    places = {unit.get(v, v): place for v, place in tiling.rows.places.items()}
    inside = frozenset(n + len(first) for n, i in enumerate(order) if i in tiling.eqns)
    bodies = {id(new): tiling.rows.inside.get(id(eqns[i])) for new, i in zip(forward, order, strict=True)}
    rows = Rows(places, inside={key: several for key, several in bodies.items() if several is not None})
    return made, len(first) + len(order), Tiling(inside, rows, tiling.count, (inside,))


def reached(eqns: Iterable[Equation], start: Iterable[Var]) -> set[Any]:
    """The variables that are computed from some."""
    reached = set[Any](start)
    for eqn in eqns:
        if not reached.isdisjoint(jaxprs.variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def _late_reads(eqns: Sequence[Equation], inside: Collection[int], late: set[Any]) -> set[Any]:
    """The values that depend on cotangents, and that some equations read and do not make."""
    made = {v for i in inside for v in eqns[i].outvars}
    return {v for i in inside for v in jaxprs.variables(eqns[i].invars) if v in late and v not in made}


def _needed_late(eqns: Sequence[Equation], wanted: Collection[Var], late: set[Any]) -> Iterator[int]:
    """The places of the equations that make values from cotangents."""
    wanted = set(wanted)
    for i in range(len(eqns) - 1, -1, -1):
        if not wanted.isdisjoint(eqns[i].outvars):
            wanted.update(v for v in jaxprs.variables(eqns[i].invars) if v in late)
            yield i


def _linear_in(factor: Var, own: Sequence[Equation], zeros: set[Var]) -> list[Var] | None:
    """The values that are linear in a number; None where one that depends on it is not, or is float16."""
    linear = {factor}
    if not follow(own, linear, zeros):
        return None
    return [v for eqn in own for v in eqn.outvars if v in linear]


def _needed(eqns: Sequence[Equation], boundary: int, inside: Collection[int], late: set[Any]) -> list[int]:
    """The places of the equations of the backward that are inside, and of those that they need and do not wait."""
    wanted, needed = set[Any](), list[int]()
    for i in range(len(eqns) - 1, boundary - 1, -1):
        is_needed = not wanted.isdisjoint(eqns[i].outvars) and late.isdisjoint(eqns[i].outvars)
        if i in inside or is_needed:
            needed.append(i)
            wanted.update(jaxprs.variables(eqns[i].invars))
    return needed[::-1]


def _renamed(eqn: Equation, names: dict[Var, Atom]) -> Equation:
    return jaxprs.rebound(eqn, [named(names, v) for v in eqn.invars], [names.get(v, v) for v in eqn.outvars])


def _apart(x: Any, aval: Any) -> Any:
    """A number of another type in its varying axes, by ops that nothing folds."""
    return abstract.typed(lax.squeeze(lax.expand_dims(x, [0]), [0]), aval)


def _times(x: Any, factor: Any) -> Any:
    return x * factor.astype(x.dtype)


def _ending(function: Callable[..., Any], atoms: Sequence[Atom], result: Var) -> list[Equation]:
    """The equations of a function of atoms that end in a variable."""
    eqns, (last,) = equations_of(function, atoms)
    return [jaxprs.rebound(e, e.invars, [result if v is last else v for v in e.outvars]) for e in eqns]
