"""Split gradients of tables into the rows that were read, and their places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jointcut.aot.trace.joint import Joint
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.roles import Role
from jointcut.partition.rewrite import simplify, sparse


def with_rows(program: Joint, chosen: Mapping[int, str]) -> Joint:
    """Split some gradients of a program into rows and places.

    `chosen` maps their positions among the gradients to paths. Raises `TraceError` for one that is not a sum of rows.
    """
    jaxpr, _ = jaxprs.opened(program.closed)
    count = len(program.results.avals)
    outvars, eqns = list(jaxpr.outvars[:count]), list(jaxpr.eqns)
    for k, end in enumerate(jaxpr.outvars[count:]):
        scatters = sparse.scatters(jaxpr.eqns, end) if k in chosen else None
        if k not in chosen:
            outvars.append(end)
        elif scatters is not None:
            more, pair = sparse.taken_apart(scatters, end.aval)
            eqns.extend(more)
            outvars.extend(pair)
        else:
            what = "has a gradient that is not a sum of rows: only a table that is read by rows, table[indices], has."
            raise TraceError(message(chosen[k], what, "Take it out of sparse_gradients."))
    roles = program.roles
    outputs = (Role.OUTPUT,) * count + (Role.GRADIENT,) * (len(outvars) - count)
    live = simplify.live(eqns, outvars).places
    boundary = None if roles.forward_ops is None else sum(i in live for i in range(roles.forward_ops))
    return replace(
        program,
        closed=jaxprs.build(jaxpr.invars, outvars, [eqns[i] for i in sorted(live)]),
        roles=replace(roles, outputs=outputs, forward_ops=boundary),
        sparse=frozenset(chosen),
    )
