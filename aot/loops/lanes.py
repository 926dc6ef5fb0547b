"""Say whether a program keeps the lanes of a mapped axis apart.

Where `jax.vmap` has mapped a loop, its body is a program of arrays with one more axis, the lanes. A lane that has
finished may be given other values only if no other lane reads them. Nothing in a jaxpr says where the axis came from.
So it is followed through the program, beginning at the carry (`axes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jointcut.partition.program import axes
from jointcut.partition.program.jax import jaxprs


def of_inputs(programs: Sequence[Any], avals: Sequence[Any], num_consts: int) -> list[int | None] | None:
    """Return which inputs of a mapped loop have the lanes, as their first axis: all of the carry, and some constants.

    The programs keep the lanes of all of these apart. Returns None where they mix the lanes of the carry.
    """
    carry = avals[num_consts:]

    def are_apart(dims: Sequence[int | None]) -> bool:
        return all(apart(closed, [*dims, *[0] * len(carry)], 0) for closed in programs)

    dims: list[int | None] = [None] * num_consts
    if not are_apart(dims):
        return None
    for i in may_have(avals, num_consts):
        more = [0 if i == j else d for j, d in enumerate(dims)]
        dims = more if are_apart(more) else dims
    return [*dims, *[0] * len(carry)]


def may_have(avals: Sequence[Any], num_consts: int) -> list[int]:
    """Return the constants of a mapped loop whose first axis is as long as the carry's."""
    lanes = avals[-1].shape[:1]
    return [i for i, aval in enumerate(avals[:num_consts]) if getattr(aval, "shape", ())[:1] == lanes]


def apart(closed: Any, dims: Sequence[int | None], outs: int) -> bool:
    """Whether all results have the lanes at `outs`, each from that lane of the inputs alone.

    `dims` gives the axis of the lanes in each input; None for an input that every lane may read as a whole.
    """
    rows = axes.followed(closed, dims)
    return rows.is_apart and all(rows.place(v) in (None, outs) for v in jaxprs.opened(closed)[0].outvars)
