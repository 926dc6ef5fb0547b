"""Follow rows into the programs that an equation holds.

Rows are followed both ways: an operand may be read by rows because a result has rows. Each program is followed until
the places at its ends agree with those around it, and with the other branches or the next step of the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jointcut.partition.program.axes import Joined, Place, Rows, is_sum, moved
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.jax.jaxprs import Equation
from jointcut.partition.program.primitives import CALLS, COND, REGION, RULED

#: The place of a value that every block computes alike.
SAME = Joined("same")

#: Calls whose rule for derivatives holds for any number of rows.
_CALLS = (CALLS - RULED) | {REGION, "custom_jvp_call"}


@dataclass(frozen=True)
class Ends:
    """The places of the rows at the ends of a program, or of an equation, and in the programs inside."""

    ins: tuple[Place, ...]
    outs: tuple[Place, ...]
    rows: tuple[Rows, ...]


#: Follows rows through a program, given known places of its inputs and results; None where rows meet. Otherwise, if it
#: is not strict, values that depend on sums are guessed to be sums.
Follow = Callable[[Any, Sequence[Place], Sequence[Place], bool], Ends | None]


def holds_program(eqn: Equation) -> bool:
    """Whether rows may be followed into an equation."""
    if eqn.primitive.name in _CALLS:
        return "jaxpr" in eqn.params or "call_jaxpr" in eqn.params
    return eqn.primitive.name in (COND, SCAN)


def through(
    eqn: Equation, ins: Sequence[Place], outs: Sequence[Place], zeros: Sequence[bool], follow: Follow
) -> Ends | None:
    """Follow rows through an equation with programs inside, given what is known of its operands and results.

    `zeros` tells which operands hold zeros. None where rows meet.
    """
    name = eqn.primitive.name
    if name == COND:
        return _branched(eqn, ins, outs, follow)
    if name == SCAN:
        return _scanned(eqn, ins, outs, zeros, follow)
    program = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return follow(program, ins, outs, True)


def _branched(eqn: Equation, ins: Sequence[Place], outs: Sequence[Place], follow: Follow) -> Ends | None:
    if ins[0] is not None:
        return None
    ins = ins[1:]
    while True:
        found = [follow(branch, ins, outs, True) for branch in eqn.params["branches"]]
        branches = [branch for branch in found if branch is not None]
        if len(branches) < len(found):
            return None
        new_ins = _agreed([ins, *(branch.ins for branch in branches)])
        new_outs = _agreed([outs, *(branch.outs for branch in branches)])
        if new_ins is None or new_outs is None:
            return None
        if all((branch.ins, branch.outs) == (new_ins, new_outs) for branch in branches):
            return Ends((None, *new_ins), new_outs, tuple(branch.rows[0] for branch in branches))
        if (new_ins, new_outs) == (tuple(ins), tuple(outs)):
            return None
        ins, outs = new_ins, new_outs


def _scanned(
    eqn: Equation, ins: Sequence[Place], outs: Sequence[Place], zeros: Sequence[bool], follow: Follow
) -> Ends | None:
    layout = jaxprs.scan_layout(eqn)
    first, last = layout.num_consts, layout.num_consts + layout.num_carry
    ends: list[Place] = [*outs[: layout.num_carry], *(moved(p, -1) for p in outs[layout.num_carry :])]
    starts: list[Place] = [*ins[:last], *(moved(p, -1) for p in ins[last:])]
    if any(p == -1 for p in (*ends, *starts)):  # the steps are rows
        return None
    is_strict = False
    while True:
        found = follow(eqn.params["jaxpr"], starts, ends, is_strict)
        if found is None:
            return None
        carry = _agreed([found.ins[first:last], found.outs[: layout.num_carry]])
        if carry is None:
            return None
        new_starts = [*found.ins[:first], *carry, *found.ins[last:]]
        new_ends = [*(p if isinstance(p, int) else None for p in carry), *found.outs[layout.num_carry :]]
        is_settled = new_starts == list(found.ins) and carry == found.outs[: layout.num_carry]
        if is_settled and is_strict:
            break
        if (new_starts, new_ends) == (starts, ends) and not is_settled:
            return None
        is_strict = is_settled
        starts, ends = new_starts, new_ends
    if not all(zero for p, zero in zip(carry, zeros[first:last], strict=True) if is_sum(p)):
        return None
    given = [None if isinstance(p, Joined) else p for p in carry]
    stacks = (moved(p, 1) for p in found.ins[last:])
    ends = [*(SAME if p is None else p for p in carry), *(moved(p, 1) for p in found.outs[layout.num_carry :])]
    return Ends((*found.ins[:first], *given, *stacks), tuple(ends), found.rows)


def _agreed(several: Sequence[Sequence[Place]]) -> tuple[Place, ...] | None:
    """The places that each value has in all of several; None where two differ. An unknown place agrees with any."""
    agreed: list[Place] = []
    for places in zip(*several, strict=True):
        known = {p for p in places if p is not None and p != SAME} or {p for p in places if p is not None}
        if len(known) > 1:
            return None
        agreed.append(next(iter(known), None))
    return tuple(agreed)
