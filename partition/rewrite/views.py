"""Read a value back from an output that is a view of it.

The caller gets the outputs anyway, so they cost nothing to keep. An output may only move the elements of a value (a
reshape, a transpose). If the backward reads that value, it moves the output back and reads the result instead. Then the
value itself needs no second buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jointcut.partition.program.jax.abstract import is_plain, struct
from jointcut.partition.program.jax.jaxprs import (
    Atom,
    Equation,
    Literal,
    Var,
    fresh,
    opened,
    reading,
    rebound,
    variables,
)
from jointcut.partition.program.primitives import UNDONE
from jointcut.partition.rewrite.simplify import live, named


def read_back(
    eqns: Sequence[Equation], boundary: int, inputs: Sequence[Var], outputs: Sequence[Atom]
) -> tuple[list[Equation], int]:
    """Let the backward of a joint program read values back from outputs that are views of them.

    The first `boundary` equations are the forward's. `inputs` are the program's inputs, `outputs` the function's
    outputs. The new backward starts with the inverse moves. Then come the equations of the forward that no output
    needs. Returns the new equations and the new boundary.
    """
    makers = {eqn.outvars[0]: eqn for eqn in eqns[:boundary] if _is_move(eqn)}
    if makers.keys().isdisjoint(variables(outputs)):
        return list(eqns), boundary
    ours = live(eqns[:boundary], outputs).places
    others = [eqn for i, eqn in enumerate(eqns) if i not in ours]
    at_hand = {*inputs, *variables(outputs)}
    read = {v for eqn in others for v in variables(eqn.invars)}
    moved: list[Equation] = []
    rename: dict[Var, Atom] = {}
    for output in outputs:
        var, undone = output, output
        while not isinstance(var, Literal) and var in makers:
            eqn = makers[var]
            var = eqn.invars[0]
            if isinstance(var, Literal) or var in at_hand or var in rename:
                break
            move, undone = _undone(eqn, undone)
            moved.append(move)
            if var in read:
                rename[var] = undone
    if not rename:
        return list(eqns), boundary
    front = [eqn for i, eqn in enumerate(eqns) if i in ours]
    back = [moved[i] for i in sorted(live(moved, rename.values()).places)]
    late = [reading(eqn, [named(rename, v) for v in eqn.invars]) for eqn in others]
    return [*front, *back, *late], len(front)


def _is_move(eqn: Equation) -> bool:
    """Whether an equation only moves elements, all of them."""
    if len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return False
    source: Any = eqn.invars[0].aval
    aval: Any = eqn.outvars[0].aval
    if not is_plain(aval) or not is_plain(source):
        return False
    if eqn.primitive.name == "broadcast_in_dim":
        return source.size == aval.size
    if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
        return False  # the elements are first put into another order
    return eqn.primitive.name in UNDONE


def _undone(eqn: Equation, atom: Atom) -> tuple[Equation, Var]:
    """The inverse of a move, which takes `atom` in place of the move's result; return the equation and its result."""
    wanted: Any = eqn.invars[0].aval
    name = eqn.primitive.name

    def back(x: Any) -> Any:
        if name == "transpose":
            return lax.transpose(x, tuple(int(i) for i in np.argsort(eqn.params["permutation"])))
        if name == "rev":
            return lax.rev(x, eqn.params["dimensions"])
        return lax.reshape(x, wanted.shape)

    made = opened(jax.make_jaxpr(back)(struct(eqn.outvars[0].aval)))[0].eqns
    out = fresh(wanted)
    assert len(made) == 1, "a move that moves nothing is not traced"
    return rebound(made[0], [atom], [out]).replace(source_info=eqn.source_info, ctx=eqn.ctx), out
