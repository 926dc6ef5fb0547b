"""Keep the zeros that a scatter adds to apart from the zeros that loops over elements read.

A scatter, and the gradient of a pooling, fills an array of zeros. XLA:GPU takes all zeros of one shape for one array.
So a relu, which reads zeros as a number in its own loop, reads that array too, and it is held from the first relu of
the forward to the last scatter of the backward. Here loops over elements read zeros that stand behind a barrier, which
nothing fills, and which cost no array.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from jointcut.partition.program import jaxprs
from jointcut.partition.program.jaxprs import Atom, ClosedJaxpr, Equation, Literal, Var
from jointcut.partition.program.primitives import CALLS, ELEMENTWISE, those
from jointcut.partition.rewrite import simplify

_FILLING = those("scatters") | {"select_and_scatter_add"}


def zeros_apart(*halves: ClosedJaxpr) -> list[ClosedJaxpr]:
    """The halves of one step, in which zeros that are filled are read by nothing else."""
    opened = [jaxprs.opened(half) for half in halves]
    eqns = [eqn for jaxpr, _ in opened for eqn in jaxpr.eqns]
    filled = {_type(v) for eqn in eqns if eqn.primitive.name in _FILLING for v in eqn.outvars}
    return [ClosedJaxpr(_apart(jaxpr, filled), consts) if filled else half
            for (jaxpr, consts), half in zip(opened, halves, strict=True)]  # fmt: skip


def _apart(jaxpr: Any, filled: set[Any]) -> Any:
    """A jaxpr whose loops over elements read other zeros than those of the types that are filled."""
    made: dict[Any, Var] = {}
    zeros: set[Var] = set()
    eqns: list[Equation] = []

    def is_zero(v: Atom) -> bool:
        return _is_zero(v) if isinstance(v, Literal) else v in zeros

    def other(v: Atom, kind: Any) -> Atom:
        if _type(v)[1] != kind[1] or not is_zero(v):
            return v
        if kind not in made:
            new = _behind_barrier(kind)
            eqns.extend(new)
            (made[kind],) = new[-1].outvars
        return made[kind]

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("broadcast_in_dim", "convert_element_type") and is_zero(eqn.invars[0]):
            zeros.update(eqn.outvars)
        kind = _type(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
        if kind in filled and name in ELEMENTWISE | {"select_n"}:
            invars = [other(v, kind) for v in eqn.invars]
            if any(a is not b for a, b in zip(invars, eqn.invars, strict=True)):
                eqn = jaxprs.rebound(eqn, invars, eqn.outvars)
        eqns.append(simplify.with_bodies(eqn, lambda body: _apart(body, filled)) if name in CALLS else eqn)
    return jaxpr.replace(eqns=eqns)


def _behind_barrier(kind: Any) -> list[Equation]:
    """Equations that make zeros of a shape and dtype, the last one the array."""
    shape, dtype = kind

    def zeros() -> jax.Array:
        return lax.broadcast(lax.optimization_barrier(lax.full((), 0, dtype)), shape)

    return list(jaxprs.opened(jax.make_jaxpr(zeros)())[0].eqns)


def _type(v: Any) -> Any:
    return getattr(v.aval, "shape", None), getattr(v.aval, "dtype", None)


def _is_zero(v: Atom) -> bool:
    """Whether an atom is the number zero."""
    shape, dtype = _type(v)
    return isinstance(v, Literal) and shape == () and isinstance(dtype, np.dtype) and not np.any(v.val)
