"""Find the slices that a loop takes of a stack which it carries, and writes slice by slice.

Such a loop updates a stack: each step reads its slice, and then writes it. What else in a step needs the slice can take
that one. So the stack is not read beside the loop that writes it, which would take a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jointcut.partition.program import jaxprs
from jointcut.partition.program.bodies import Inside
from jointcut.partition.program.primitives import BARRIER


def taken(inside: Inside, around: Sequence[Any]) -> dict[Any, Any]:
    """The variables of slices, as steps find them, by the operand from which the carried stack starts.

    `around` are the equations among which that of the loop stands.
    """
    numbers = _numbers(inside, around)
    if not numbers:
        return {}
    eqns = inside.program.eqns
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    found: dict[Any, Any] = {}
    for carry in inside.carries:
        if isinstance(carry.start, jaxprs.Literal) or not _writes_slices(carry, makers, numbers):
            continue
        shape = (1, *carry.variable.aval.shape[1:])
        reads = (eqn for eqn in eqns if eqn.primitive.name == "dynamic_slice" and eqn.invars[0] is carry.variable)
        own = (eqn for eqn in reads if _is_in(eqn.invars[1], numbers) and eqn.outvars[0].aval.shape == shape)
        if (first := next(own, None)) is not None:
            found[carry.start] = _held(eqns, first.outvars[0])
    return {start: v for start, v in found.items() if v is not None}


def _numbers(inside: Inside, around: Sequence[Any]) -> set[Any]:
    """The variables that stand for the number of a step."""
    counts = {eqn.outvars[0] for eqn in around if eqn.primitive.name == "iota" and len(eqn.params["shape"]) == 1}
    return {v for v, atom in inside.sliced if not isinstance(atom, jaxprs.Literal) and atom in counts}


def _writes_slices(carry: Any, makers: dict[Any, Any], numbers: set[Any]) -> bool:
    """Whether a step changes nothing of a carried stack but its own slice."""
    v, has_written = carry.following, False
    while v is not carry.variable:
        eqn = None if isinstance(v, jaxprs.Literal) else makers.get(v)
        name = "" if eqn is None else eqn.primitive.name
        if eqn is not None and name == BARRIER:
            v = eqn.invars[eqn.outvars.index(v)]
        elif eqn is not None and name == "dynamic_update_slice" and _is_in(eqn.invars[2], numbers):
            if eqn.invars[1].aval.shape[0] != 1:
                return False
            v, has_written = eqn.invars[0], True
        else:
            return False
    return has_written


def _held(eqns: Sequence[Any], v: Any) -> Any:
    """A slice without its first axis, behind the barrier that it waits at; None where there is none."""
    for eqn in eqns:
        if eqn.primitive.name == "squeeze" and eqn.invars[0] is v:
            v = eqn.outvars[0]
        elif eqn.primitive.name == BARRIER and any(u is v for u in eqn.invars):
            return eqn.outvars[[u is v for u in eqn.invars].index(True)]
    return None


def _is_in(v: Any, numbers: set[Any]) -> bool:
    return not isinstance(v, jaxprs.Literal) and v in numbers
