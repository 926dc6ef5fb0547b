"""Write a program anew, with some of its equations computed otherwise.

This is how a pass over the joint program (`wrapper.JointPass`) is written most simply. Here every tanh becomes a sine:

>>> from jointcut import wrappers
>>> def change(place, eqn, operands, run):
...     return [jnp.sin(operands[0])] if eqn.primitive.name == "tanh" else run(*operands)
>>> given = jax.make_jaxpr(lambda x: jnp.tanh(x) + 1.0)(1.0)
>>> [eqn.primitive.name for eqn in wrappers.rerun(given, change).jaxpr.eqns]
['sin', 'add']
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import abstract, jaxprs, runtime, user_source

#: Computes an equation: its place, itself, its operands, and a function that runs it on operands; returns its results.
Change = Callable[[int, Any, list[Any], Callable[..., list[Any]]], Sequence[Any]]


def rerun(program: Any, change: Change) -> Any:
    """Return a closed jaxpr anew, with the results of each equation from `change`; the given one has no constants.

    What `change` computes gets the source line and the scope of the equation, so that plans and reports name it like
    the equation. Raises `TraceError` if the results of an equation have other types.
    """
    jaxpr, _ = jaxprs.opened(program)

    def anew(*arrays: Any) -> list[Any]:
        known = dict(zip(jaxpr.invars, arrays, strict=True))
        for place, eqn in enumerate(jaxpr.eqns):
            operands = [v.val if isinstance(v, jaxprs.Literal) else known[v] for v in eqn.invars]
            with user_source.under(eqn):
                results = list(change(place, eqn, operands, partial(_run, eqn)))
                known.update(zip(eqn.outvars, _fitting(eqn, results), strict=True))
        return [abstract.typed(v.val, v.aval) if isinstance(v, jaxprs.Literal) else known[v] for v in jaxpr.outvars]

    return jax.make_jaxpr(anew)(*abstract.input_structs(program))


def _run(eqn: Any, *operands: Any) -> list[Any]:
    """Run one equation on other operands."""
    invars, outvars = ([jaxprs.fresh(v.aval) for v in vs] for vs in (eqn.invars, eqn.outvars))
    alone = user_source.without_scope(jaxprs.rebound(eqn, invars, outvars))
    return runtime.evaluate(jaxprs.build(invars, outvars, [alone]), *operands)


def _fitting(eqn: Any, results: Sequence[Any]) -> list[Any]:
    """Return the results of an equation as arrays; raises `TraceError` if their number or a type is another."""
    avals = [v.aval for v in eqn.outvars]
    if len(results) == len(avals):
        pairs = zip(results, avals, strict=True)
        results = [jnp.asarray(x, a.dtype) if isinstance(x, int | float | complex) else x for x, a in pairs]
    old, new = (", ".join(aval.str_short().lstrip("~") for aval in each) for each in (avals, map(jax.typeof, results)))
    if old != new:
        where = f"The change of {eqn.primitive.name} at {user_source.source_of(eqn) or 'an unknown line'}"
        what = f"gives {new or 'nothing'}, where the equation gives {old or 'nothing'}."
        cure = "Return a list of its results; run(*operands) computes the equation itself."
        raise TraceError(message(where, what, cure))
    return list(results)
