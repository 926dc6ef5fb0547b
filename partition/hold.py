"""Hold recomputation back where a compiler expands barriers.

What a segment of the backward starts from is made to depend on a *witness*, the cotangent that needs the segment, by a
predicate that is always true but that XLA cannot fold. So the segment is neither merged with equal equations of the
forward nor started before the witness is there. A residual waits in a branch of `lax.cond`, which also keeps XLA from
fusing what made it into the backward; inputs, which a branch would have to copy, are selected.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jointcut.partition.jaxprs import (
    Atom,
    Equation,
    Literal,
    Var,
    build,
    evaluate,
    first_element,
    fresh,
    full,
    is_dropped,
    is_plain,
    opened,
    rebound,
    struct,
    trace_context,
)


def waiting(atoms: Sequence[Atom], witness: Atom) -> tuple[list[Equation], list[Var]]:
    """Hand arrays on once `witness` is there, through one branch of `lax.cond` that does nothing.

    No fusion reaches across it, and where nothing else reads an array afterwards it works in place. (The branch taken
    must be the first, which is the one for false: XLA copies what a later branch returns of its operands.) Branches
    take XLA most of the time that it compiles for longer than without them: so one for several arrays.
    """
    return _equations(_wait, [witness, *atoms])


def _wait(seed: Any, *xs: Any) -> list[Any]:
    never = lax.bitwise_not(always(seed))
    return lax.cond(never, lambda *xs: [lax.full_like(x, 0) for x in xs], lambda *xs: list(xs), *xs)


def branched(eqn: Equation, witness: Atom) -> tuple[list[Equation], list[Var]]:
    """Run an equation in a branch of `lax.cond` that is always taken; what the compiler adds to it stays in there."""
    inputs = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
    run, avals = build(inputs, eqn.outvars, [eqn]), [v.aval for v in eqn.outvars]

    def held(seed: Any, *xs: Any) -> list[Any]:
        zeros = [full(aval, 0) for aval in avals]
        return lax.cond(always(seed), lambda *xs: evaluate(run, *xs), lambda *xs: zeros, *xs)

    atoms = [witness, *inputs]
    return _renamed(_traced(held, *(struct(v.aval) for v in atoms)), atoms)


def begun(witness: Atom, atoms: Sequence[Atom]) -> tuple[list[Equation], Var, list[Var]]:
    """The first element of `witness` as a number of its own, in a buffer of its own, and arrays that wait for it.

    Made in a branch, like `waiting`: otherwise XLA may fuse the whole computation of that element into each of its
    readers, and keep the operands of that computation alive for them.
    """
    eqns, (there, *held) = _equations(_begin, [witness, *atoms])
    return eqns, there, held


def _begin(seed: Any, *xs: Any) -> list[Any]:
    first = first_element(seed)
    return _wait(first, first, *xs)


def tied(atoms: Sequence[Atom], witness: Atom) -> tuple[list[Equation], list[Var]]:
    """Select each array under a predicate of `witness` that is always true but that XLA cannot fold.

    What is computed from the results is neither merged with equal equations elsewhere nor started before `witness` is
    there. Where the array feeds an elementwise op the selection is fused into it and costs nothing.
    """
    return _equations(_select, [witness, *atoms])


def _select(seed: Any, *xs: Any) -> list[Any]:
    true = always(seed)
    return [lax.select_n(true, lax.full_like(x, 0), x) for x in xs]


def _equations(function: Callable[..., Any], atoms: Sequence[Atom]) -> tuple[list[Equation], list[Var]]:
    """The equations of one of the functions above, and the variables of its results.

    Traced once for arguments of one kind: tracing each anew took most of the time to emit a large program.
    """
    return _renamed(_traced_once(function, trace_context(), *(struct(v.aval) for v in atoms)), atoms)


def _traced(function: Callable[..., Any], *avals: Any) -> Any:
    return opened(jax.make_jaxpr(function)(*avals))[0]


@functools.lru_cache(maxsize=1024)
def _traced_once(function: Callable[..., Any], context: Any, *avals: Any) -> Any:
    del context  # equations know the mesh that they were traced under
    return _traced(function, *avals)


def _renamed(jaxpr: Any, atoms: Sequence[Atom]) -> tuple[list[Equation], list[Var]]:
    """The equations of a jaxpr with atoms for its inputs and new variables for all else."""
    rename: dict[Var, Atom] = dict(zip(jaxpr.invars, atoms, strict=True))
    eqns: list[Equation] = []
    for eqn in jaxpr.eqns:
        invars = [v if isinstance(v, Literal) else rename[v] for v in eqn.invars]
        outvars = [v if is_dropped(v) else fresh(v.aval) for v in eqn.outvars]
        rename.update(zip(eqn.outvars, outvars, strict=True))
        eqns.append(rebound(eqn, invars, outvars))
    return eqns, [rename[v] for v in jaxpr.outvars]


def always(seed: Any) -> Any:
    """A predicate that is true for every value of `seed` but depends on it, so that no compiler pass folds it."""
    first = first_element(seed)
    below, above = lax.lt(first, np.float32(2)), lax.gt(first, np.float32(1))
    return lax.bitwise_or(lax.bitwise_or(below, above), lax.ne(first, first))


def can_witness(aval: Any) -> bool:
    """Whether `always` can make a predicate of an array: it has an element."""
    return is_plain(aval) and _has_element(aval.shape)


def _has_element(shape: Sequence[Any]) -> bool:
    """Whether an array is never empty; a symbolic size that may be 0, as in `b - 1`, leaves it open."""
    try:
        return math.prod(shape) > 0
    except jax.errors.InconclusiveDimensionOperation:
        return False
