"""Draw the random numbers of a forward where they are used, not when the program starts.

XLA:CPU runs first what is ready first, and random numbers need a key alone: so those of all layers would be made at the
start, each with the counters that it is made from. Here a key waits for the last matrix product or convolution before
it in the program. The numbers are the same.
"""

from __future__ import annotations

import jax

from jointcut.partition.program import jaxprs
from jointcut.partition.program.jaxprs import ClosedJaxpr, Equation, Literal, Var
from jointcut.partition.program.primitives import DRAWN, PACKING
from jointcut.partition.rewrite.simplify import renamed


def drawn_late(half: ClosedJaxpr) -> ClosedJaxpr:
    """A forward in which keys wait."""
    jaxpr, consts = jaxprs.opened(half)
    eqns, last = list[Equation](), None
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PACKING:
            last = eqn.outvars[0]
        elif eqn.primitive.name == DRAWN and last is not None and isinstance(eqn.invars[0], Var):
            waiting, key = _waiting(eqn.invars[0], last)
            like = {"source_info": eqn.source_info, "ctx": eqn.ctx}
            eqns += [more.replace(**like) for more in waiting]
            eqn = jaxprs.rebound(eqn, [key], eqn.outvars)
        eqns.append(eqn)
    return ClosedJaxpr(jaxpr.replace(eqns=eqns), consts)


def _waiting(key: Var, last: Var) -> tuple[list[Equation], Var]:
    """The equations of a key that waits for another array, and that key."""

    def program(key: jax.Array, last: jax.Array) -> jax.Array:
        data, _ = jaxprs.held([jax.random.key_data(key), last])
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))

    closed = jax.make_jaxpr(program)(jaxprs.struct(key.aval), jaxprs.struct(last.aval))
    inner, _ = jaxprs.opened(closed)
    eqns, (waited,) = renamed(inner, dict(zip(inner.invars, [key, last], strict=True)))
    assert not isinstance(waited, Literal)
    return eqns, waited
