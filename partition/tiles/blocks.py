"""Write equations again for fewer rows.

Rows are numbers along one axis of a value (`program/axes`). An equation that treats each row alone computes the rows
of its results from the same rows of its operands. So it can be written for fewer rows: its operands and results are
shorter along that axis, and a parameter that names a shape is changed to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from jointcut.partition.program.axes import Place, Rows
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Var
from jointcut.partition.program.jax.random_rows import bits_of_rows, has_rows
from jointcut.partition.program.primitives import CALLS, COND, DRAWN, REGION, RULED
from jointcut.partition.rewrite import simplify
from jointcut.partition.rewrite.simplify import named


def shorter(aval: Any, axis: int, count: int) -> Any:
    """The type of an array with `count` rows along an axis."""
    return aval.update(shape=(*aval.shape[:axis], count, *aval.shape[axis + 1 :]))


@dataclass(frozen=True)
class Block:
    """A block of rows: their number, and the variable of the first; None where no equation asks for it."""

    count: int
    start: Atom | None = None


def for_rows(
    eqns: Sequence[Equation], rows: Rows, block: Block, names: Mapping[Var, Atom]
) -> tuple[list[Equation], dict[Var, Atom]]:
    """Write equations for a block of rows. `names` maps the variables around them to variables of a block.

    Returns the equations, and the new name of each variable. Joined values keep their types.
    """
    known: dict[Var, Atom] = dict(names)
    written: list[Equation] = []
    for eqn in eqns:
        place = rows.place(eqn.outvars[0]) if eqn.outvars else None
        inside = rows.inside.get(id(eqn))
        if isinstance(place, int) and is_numbered(eqn, place):
            assert block.start is not None, "the rows have numbers"
            made, results = _numbered(eqn, place, block, [named(known, v) for v in eqn.invars])
        elif inside is not None and eqn.primitive.name in RULED:  # its rule is for all rows
            jaxpr, _ = jaxprs.opened(eqn.params["call_jaxpr"])
            ends = zip(jaxpr.invars, eqn.invars, strict=True)
            made, inner = for_rows(jaxpr.eqns, inside[0], block, {v: named(known, end) for v, end in ends})
            results = [named(inner, v) for v in jaxpr.outvars]
        else:
            made, results = _written(eqn, rows, block, known)
        written += made
        known.update(zip(eqn.outvars, results, strict=True))
    return written, known


def is_numbered(eqn: Equation, axis: int) -> bool:
    """Whether the rows of a result along an axis depend on their numbers."""
    name = eqn.primitive.name
    if name == "iota":
        return not eqn.invars and axis == eqn.params["dimension"]
    return name == DRAWN and has_rows(eqn)


def asks_for_numbers(eqns: Iterable[Equation], rows: Rows) -> bool:
    """Whether some equations, or equations inside them, depend on the numbers of rows."""
    for eqn in eqns:
        if any(isinstance(p := rows.place(v), int) and is_numbered(eqn, p) for v in eqn.outvars):
            return True
        if any(asks_for_numbers(*pair) for pair in _with_rows(eqn, rows)):
            return True
    return False


def _with_rows(eqn: Equation, rows: Rows) -> Iterator[tuple[Sequence[Equation], Rows]]:
    """The equations of each program inside an equation, and its rows."""
    for jaxpr, own in zip(jaxprs.inner_jaxprs(eqn), rows.inside.get(id(eqn), ()), strict=False):
        yield jaxpr.eqns, own


def _numbered(eqn: Equation, axis: int, block: Block, operands: Sequence[Atom]) -> tuple[list[Equation], list[Atom]]:
    """Number the rows of a block as those of the whole array are numbered, or draw their bits."""
    aval: Any = eqn.outvars[0].aval
    shape = shorter(aval, axis, block.count).shape

    def numbers(start: Any) -> Any:
        return lax.broadcasted_iota(aval.dtype, shape, axis) + start.astype(aval.dtype)

    def bits(key: Any, start: Any) -> Any:
        return bits_of_rows(eqn, axis, block.count, key, start)

    assert block.start is not None, "the rows have numbers"
    return simplify.equations_of(bits if operands else numbers, [*operands, block.start])


def _written(eqn: Equation, rows: Rows, block: Block, known: Mapping[Var, Atom]) -> tuple[list[Equation], list[Atom]]:
    places = [rows.place(v) for v in eqn.outvars]
    invars: list[Atom] = [named(known, v) for v in eqn.invars]
    outvars = [_outvar(v, place, block.count) for v, place in zip(eqn.outvars, places, strict=True)]
    inside = rows.inside.get(id(eqn))
    if inside is None:
        params = _params(eqn, rows, places, block.count)
        return [jaxprs.rebound(eqn.replace(params=params), invars, outvars)], [*outvars]
    is_asked = any(asks_for_numbers(*pair) for pair in _with_rows(eqn, rows))
    assert block.start is not None or not is_asked, "the rows have numbers"
    extra = [] if block.start is None or not is_asked else [block.start]
    return [_with_bodies(eqn, inside, block.count, invars, outvars, extra)], [*outvars]


def _outvar(v: Var, place: Place, count: int) -> Var:
    return jaxprs.fresh(shorter(v.aval, place, count) if isinstance(place, int) else v.aval)


def _params(eqn: Equation, rows: Rows, places: Sequence[Place], count: int) -> dict[str, Any]:
    rule = _SHAPES.get(eqn.primitive.name)
    if rule is None or not places or not isinstance(places[0], int):
        return eqn.params
    return {**eqn.params, **rule(eqn, rows, places[0], count)}


# ------------------------------------------------------------------------------------ parameters that name shapes


def _at(key: str) -> Callable[..., dict[str, Any]]:
    """The rule of a parameter that holds a size for each axis of the result."""

    def rule(eqn: Equation, rows: Rows, axis: int, count: int) -> dict[str, Any]:
        del rows
        return {key: _with(eqn.params[key], axis, count)}

    return rule


def _with(sizes: Sequence[int], axis: int, count: int) -> tuple[int, ...]:
    return (*sizes[:axis], count, *sizes[axis + 1 :])


def _gathered(eqn: Equation, rows: Rows, axis: int, count: int) -> dict[str, Any]:
    """A slice is shorter where the rows lie along an axis of the operand that is taken whole."""
    del axis
    operand, numbers = rows.place(eqn.invars[0]), eqn.params["dimension_numbers"]
    if not isinstance(operand, int) or operand in numbers.operand_batching_dims:
        return {}
    return {"slice_sizes": _with(eqn.params["slice_sizes"], operand, count)}


_SHAPES: dict[str, Callable[..., dict[str, Any]]] = {
    "broadcast_in_dim": _at("shape"),
    "dynamic_slice": _at("slice_sizes"),
    "gather": _gathered,
    "iota": _at("shape"),
    "reshape": _at("new_sizes"),
    "slice": _at("limit_indices"),
}


# ------------------------------------------------------------------------------------------------ programs inside


def _with_bodies(
    eqn: Equation,
    inside: Sequence[Rows],
    count: int,
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    extra: Sequence[Atom],
) -> Equation:
    """An equation with programs inside, each written for a block; they read the `extra` operand, if there is one."""
    name, params = eqn.primitive.name, eqn.params
    if name == SCAN:
        layout = jaxprs.scan_layout(eqn)
        body = _program(params["jaxpr"], inside[0], count, extra, layout.num_consts)
        consts, carry, xs = layout.parts(invars)
        return jaxprs.scan(eqn, body, [*consts, *extra], carry, xs, outvars)
    if name == COND:
        pairs = zip(params["branches"], inside, strict=True)
        params = {**params, "branches": tuple(_program(branch, own, count, extra) for branch, own in pairs)}
    else:
        assert name in CALLS or name == REGION, f"{name} is followed"
        key = "jaxpr" if "jaxpr" in params else "call_jaxpr"
        params = {**params, key: _program(params[key], inside[0], count, extra)}
    return jaxprs.rebound(eqn.replace(params=params), [*invars, *extra], outvars)


def _program(program: Any, rows: Rows, count: int, extra: Sequence[Atom], at: int | None = None) -> Any:
    """A jaxpr for a block, closed if it was, with inputs for the extra operands at a place, by default the end."""
    jaxpr, consts = jaxprs.opened(program)
    fresh = {v: _outvar(v, rows.place(v), count) for v in jaxpr.invars}
    more = [jaxprs.fresh(v.aval) for v in extra]
    at = len(jaxpr.invars) if at is None else at
    eqns, known = for_rows(jaxpr.eqns, rows, Block(count, next(iter(more), None)), fresh)
    inputs = [fresh[v] for v in jaxpr.invars]
    outvars = [named(known, v) for v in jaxpr.outvars]
    invars = [*inputs[:at], *more, *inputs[at:]]
    made = jaxpr.replace(invars=invars, outvars=outvars, eqns=eqns, debug_info=jaxprs.no_debug_info(invars, outvars))
    return jaxprs.ClosedJaxpr(made, consts) if isinstance(program, jaxprs.ClosedJaxpr) else made
