"""Hold recomputation back where a compiler expands barriers.

A segment of the backward is put into a branch of `lax.cond` under a predicate that is always true but that XLA cannot
fold. So it is neither merged with equal equations of the forward nor started before the value that the predicate is
made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.partition.jaxprs import (
    Atom,
    Equation,
    Literal,
    Var,
    build,
    evaluate,
    fresh,
    is_dropped,
    is_explicit,
    is_plain,
    opened,
    rebound,
    struct,
    typed,
)


def guarded(
    segment: Sequence[Equation], inputs: Sequence[Atom], outputs: Sequence[Atom], witness: Atom
) -> list[Equation]:
    """Run a segment inside `lax.cond` under a predicate that is always true but that XLA cannot fold.

    So the segment is neither merged with equal equations outside nor started before `witness` is there. The other
    branch, zeros, is never taken.
    """
    run = build(inputs, outputs, segment)

    def held(seed: Any, *operands: Any) -> list[Any]:
        zeros = [typed(lax.full(v.aval.shape, 0, v.aval.dtype), v.aval) for v in outputs]
        true = always(seed)
        return lax.cond(true, lambda *xs: evaluate(run, *xs), lambda *xs: zeros, *operands)

    traced, _ = opened(jax.make_jaxpr(held)(*(struct(v.aval) for v in (witness, *inputs))))
    rename: dict[Var, Atom] = dict(zip(traced.invars, (witness, *inputs), strict=True))
    ends = dict(zip(traced.outvars, outputs, strict=True))
    return [_renamed(eqn, rename, ends) for eqn in traced.eqns]


def _renamed(eqn: Equation, rename: dict[Var, Atom], ends: dict[Var, Var]) -> Equation:
    invars = [v if isinstance(v, Literal) else rename[v] for v in eqn.invars]
    outvars = []
    for var in eqn.outvars:
        new = ends.get(var, var if is_dropped(var) else fresh(var.aval))
        rename[var] = new
        outvars.append(new)
    return rebound(eqn, invars, outvars)


def always(seed: Any) -> Any:
    """A predicate that is true for every value of `seed` but depends on it, so that no compiler pass folds it."""
    first = lax.reshape(lax.slice(seed, (0,) * seed.ndim, (1,) * seed.ndim), ())
    if jnp.issubdtype(first.dtype, np.complexfloating):
        first = lax.real(first)
    number = lax.convert_element_type(first, np.float32)
    below, above = lax.lt(number, np.float32(2)), lax.gt(number, np.float32(1))
    return lax.bitwise_or(lax.bitwise_or(below, above), lax.ne(number, number))


def can_witness(aval: Any) -> bool:
    """Whether `always` can make a predicate of an array: it has an element, and no sharding in its type."""
    return is_plain(aval) and math.prod(aval.shape) > 0 and not is_explicit(getattr(aval, "sharding", None))
