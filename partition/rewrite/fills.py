"""Keep the zeros that a scatter adds to apart from the zeros that loops over elements read.

A scatter, and the gradient of a pooling, fills an array of zeros. XLA:GPU uses one array for all zeros of one shape. So
a relu, which reads zeros as a number in its own loop, reads that array too. The array is then held from the first relu
of the forward to the last scatter of the backward. Here loops over elements read zeros behind a barrier, which nothing
fills, and which take no array. A schedule says for which types this is done (`Zeros` in `lower/steps`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax import lax

from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.jax.jaxprs import Atom, ClosedJaxpr, Equation, Literal, Var
from jointcut.partition.program.primitives import CALLS, ELEMENTWISE, those
from jointcut.partition.rewrite import simplify

#: A shape and the name of a dtype.
Type = tuple[tuple[int, ...], str]

#: Ops that fill zeros.
FILLING = those("scatters") | {"select_and_scatter_add"}


def zeros_apart(half: ClosedJaxpr, types: Collection[Type]) -> ClosedJaxpr:
    """A half in which nothing else reads the filled zeros of some types."""
    jaxpr, consts = jaxprs.opened(half)
    return ClosedJaxpr(_apart(jaxpr, types), consts) if types else half


def _apart(jaxpr: Any, filled: Collection[Type]) -> Any:
    """A jaxpr whose loops over elements read other zeros than the filled zeros of these types."""
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
            eqn = jaxprs.reading(eqn, [other(v, kind) for v in eqn.invars])
        eqns.append(simplify.with_bodies(eqn, lambda body: _apart(body, filled)) if name in CALLS else eqn)
    return jaxpr.replace(eqns=eqns)


def _behind_barrier(kind: Any) -> list[Equation]:
    """Equations that make zeros of a shape and dtype, the last one the array."""
    shape, dtype = kind

    def zeros() -> jax.Array:
        return lax.broadcast(lax.optimization_barrier(lax.full((), 0, dtype)), shape)

    return list(jaxprs.opened(jax.make_jaxpr(zeros)())[0].eqns)


def _type(v: Any) -> Any:
    return getattr(v.aval, "shape", None), str(getattr(v.aval, "dtype", None))


def _is_zero(v: Atom) -> bool:
    aval: Any = v.aval
    is_number = isinstance(v, Literal) and aval.shape == () and isinstance(aval.dtype, np.dtype)
    return is_number and not np.any(v.val)
