"""Make an update a part of a joint program.

Its results then are the outputs, and new parameters and state where the gradients were. So a plan, its peak and a
budget know when each gradient dies, and that new parameters take the memory of the old ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax

from jointcut.aot.trace.joint import Joint
from jointcut.aot.update.step import BackwardPass, Filling, after, in_sweeps, refuse_twice
from jointcut.aot.update.updates import Updates
from jointcut.partition.program import jaxprs
from jointcut.partition.program.roles import Role
from jointcut.partition.rewrite import simplify


def with_update(
    program: Joint, updates: Updates, params: Sequence[int], state: Sequence[int], kept: Collection[int] = ()
) -> Joint:
    """The program `(constants, leaves, cotangents) -> (outputs, new parameters, new state)`.

    `params` and `state` are places among the leaves; there is a gradient for each parameter. Those that are `kept` are
    not replaced: somebody else holds them. Raises `TraceError` for two sweeps of a backward that calls back.
    """
    jaxpr, _ = jaxprs.opened(program.closed)
    start, roles, count = len(program.consts), program.roles, len(program.results.avals)
    inputs, gradients = jaxpr.invars, jaxpr.outvars[count:]
    eqns, ahead = jaxpr.eqns, len(jaxpr.eqns) if roles.forward_ops is None else roles.forward_ops
    cotangents = [v for v, role in zip(inputs, roles.inputs, strict=True) if role is Role.COTANGENT]
    replaced = [inputs[start + place] for place in (*params, *state)]
    if updates.num_kept and any(eqn.effects for eqn in eqns[ahead:]):
        refuse_twice("a hook of it")
    read = _read(eqns[ahead:], [*gradients, *replaced], cotangents)
    inner, _ = jaxprs.opened(jaxprs.build([*read, *cotangents], gradients, eqns[ahead:]))
    backward = BackwardPass(inner, len(read), range(len(gradients)))
    made, consts = _traced(backward, updates, [read.index(v) for v in replaced], len(params))
    late, results = simplify.renamed(made, dict(zip(made.invars, [*read, *cotangents], strict=True)))
    whole_eqns, outvars, boundary = simplify.merged([*eqns[:ahead], *late], [*jaxpr.outvars[:count], *results], ahead)
    names = (*roles.input_paths[:start], *(f"constant {start + i}" for i in range(len(consts))))
    return replace(
        program,
        closed=jaxprs.build([*inputs[:start], *made.constvars, *inputs[start:]], outvars, whole_eqns),
        consts=(*program.consts, *consts),
        is_updated=True,
        roles=replace(
            roles,
            inputs=(Role.PRIMAL,) * len(consts) + roles.inputs,
            outputs=(Role.OUTPUT,) * count + (Role.GRADIENT,) * len(results),
            forward_ops=boundary,
            input_paths=(*names, *roles.input_paths[start:]),
            replaced=tuple(sorted({start + len(consts) + place for place in (*params, *state) if place not in kept})),
        ),
    )


def _traced(backward: BackwardPass, updates: Updates, replaced: Sequence[int], count: int) -> tuple[Any, Sequence[Any]]:
    """The backward with its update as a jaxpr, and its constants; `replaced` are places among what it reads."""

    def whole(known: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        arrays = [known[i] for i in replaced]

        def sweep(filling: Filling, before: Sequence[Any]) -> None:
            backward(filling, known, after(cts, before))

        return in_sweeps(updates, arrays[:count], arrays[count:], sweep)

    structs = [jaxprs.struct(v.aval) for v in backward.jaxpr.invars]
    traced = jax.make_jaxpr(whole)(structs[: backward.count], structs[backward.count :])
    return jaxprs.opened(simplify.inlined(traced))


def _read(eqns: Sequence[Any], ends: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """The variables that equations and results read from outside of them, without the cotangents."""
    atoms = (*(v for eqn in eqns for v in eqn.invars), *ends)
    inner = {*cotangents, *(v for eqn in eqns for v in eqn.outvars)}
    return list(dict.fromkeys(v for v in atoms if not isinstance(v, jaxprs.Literal) and v not in inner))
