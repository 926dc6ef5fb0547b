"""Repeat an array inside the loops that read it, not before them.

JAX moves values that are the same in each step of a scan out of its derivative. So a mask, repeated over the batch and
the heads, becomes an array that the whole loop holds. XLA makes no array of it in a loop over elements that repeats the
mask itself. So if the body of a scan reads the array only in such loops, the mask enters the scan instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Jaxpr, Literal, Var
from jointcut.partition.program.primitives import ELEMENTWISE, REPEATING
from jointcut.partition.program.sizes import is_symbolic
from jointcut.partition.rewrite.simplify import callee, with_bodies


def repeated_inside(eqns: Sequence[Equation], ends: Sequence[Atom], boundary: int) -> tuple[list[Equation], int]:
    """Equations whose scans repeat arrays themselves, without the equations that only made such arrays for them.

    `ends` are the results of the equations. `boundary` counts the leading equations of the forward; the new count is
    returned.
    """
    changed = _changed(eqns)
    read = {v for atoms in (*(eqn.invars for eqn in changed), ends) for v in jaxprs.variables(atoms)}
    dead = {place for place, eqn in enumerate(changed) if _is_repeated(eqn) and read.isdisjoint(eqn.outvars)}
    kept = [eqn for place, eqn in enumerate(changed) if place not in dead]
    return kept, boundary - sum(place < boundary for place in dead)


def _changed(eqns: Sequence[Equation]) -> list[Equation]:
    """The equations, with each scan reading the sources of the arrays that it can repeat itself."""
    made: dict[Var, Equation] = {}
    out: list[Equation] = []
    for eqn in eqns:
        if _is_repeated(eqn):
            made[eqn.outvars[0]] = eqn
        out.append(_with_own(eqn, made) if eqn.primitive.name == SCAN else eqn)
    return out


def _is_repeated(eqn: Equation) -> bool:
    """Whether an equation repeats a plain array or number of known size, without asking for a sharding."""
    if eqn.primitive.name not in REPEATING or len(eqn.invars) != 1 or eqn.params.get("sharding") is not None:
        return False
    source: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    if not (abstract.is_plain(source) and abstract.is_plain(result)) or abstract.is_on_host(source):
        return False
    has_sizes = not (is_symbolic(source.shape) or is_symbolic(result.shape))
    return has_sizes and 2 * abstract.aval_bytes(source) <= abstract.aval_bytes(result)


def _with_own(scan: Equation, made: Mapping[Var, Equation]) -> Equation:
    """A scan that repeats those constants itself which only loops over elements read; or the scan unchanged."""
    layout = jaxprs.scan_layout(scan)
    if layout.body_consts:
        return scan
    read_whole = _read_whole(layout.body)
    operands, inputs, first = list(scan.invars), list(layout.body.invars), list[Equation]()
    for place in range(layout.num_consts):
        operand, inner = operands[place], inputs[place]
        maker = made.get(operand) if isinstance(operand, Var) else None
        if maker is None or inner in read_whole:
            continue
        (source,) = maker.invars
        operands[place], inputs[place] = source, jaxprs.fresh(source.aval)
        first.append(jaxprs.rebound(maker, [source if isinstance(source, Literal) else inputs[place]], [inner]))

    def own(body: Jaxpr) -> Jaxpr:
        return body.replace(invars=inputs, eqns=_changed([*first, *body.eqns]), debug_info=body.debug_info)

    if not first and all(eqn.primitive.name != SCAN for eqn in layout.body.eqns):
        return scan
    return jaxprs.rebound(with_bodies(scan, own), operands, scan.outvars)


def _read_whole(body: Jaxpr) -> Collection[Atom]:
    """The inputs of a body that it returns, or reads otherwise than in a loop over elements."""
    whole = set(jaxprs.variables(body.outvars))
    for eqn in body.eqns:
        reads = zip(eqn.invars, _reads_whole(eqn), strict=True)
        whole.update(v for v, is_whole in reads if is_whole and isinstance(v, Var))
    return whole.intersection(body.invars)


def _reads_whole(eqn: Equation) -> list[bool]:
    """For each operand, whether an equation reads it otherwise than in a loop over elements.

    A call reads as its program does. A scan that takes a constant may repeat it itself.
    """
    if (inner := callee(eqn)) is not None:
        whole = _read_whole(inner)
        return [v in whole for v in inner.invars]
    constants = jaxprs.scan_layout(eqn).num_consts if eqn.primitive.name == SCAN else 0
    return [isinstance(v, Var) and eqn.primitive.name not in ELEMENTWISE and place >= constants
            for place, v in enumerate(eqn.invars)]  # fmt: skip
