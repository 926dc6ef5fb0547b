"""Make an update a part of a joint program.

Its results are then the outputs, with new parameters and state instead of the gradients. So a plan, its peak and a
budget know when each gradient dies, and that new parameters take the memory of the old ones. The roles name the
equations with which each parameter is updated. The schedule lets the rest of the backward wait for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jointcut.aot.trace.joint import Joint
from jointcut.aot.update.step import Noted, in_sweeps, refuse_twice, run
from jointcut.aot.update.updates import Updates
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.roles import Role, UpdateOps
from jointcut.partition.rewrite import simplify
from jointcut.partition.rewrite.hooks import called_early, stages_of


def with_update(
    program: Joint, updates: Updates, params: Sequence[int], state: Sequence[int], kept: Collection[int] = ()
) -> Joint:
    """Return the program `(constants, leaves, cotangents) -> (outputs, new parameters, new state)`.

    `params` and `state` are places among the leaves; there is a gradient for each parameter. Leaves in `kept` are
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
    back = called_early(stages_of(eqns[ahead:]), [*jaxprs.variables(gradients)])
    inner, _ = jaxprs.opened(jaxprs.build([*read, *cotangents], gradients, back))
    traced = _UpdatedBackward.of(inner, updates, [read.index(v) for v in replaced], len(read))
    whole, results, boundary = traced.joined(eqns[:ahead], jaxpr.outvars[:count], [*read, *cotangents])
    end, more = count + updates.count, len(traced.consts)
    names = (*roles.input_paths[:start], *(f"constant {start + i}" for i in range(more)))
    closed = jaxprs.build([*inputs[:start], *traced.jaxpr.constvars, *inputs[start:]], results[:end], whole)
    roles = replace(
        roles,
        inputs=(Role.PRIMAL,) * more + roles.inputs,
        outputs=(Role.OUTPUT,) * count + (Role.GRADIENT,) * updates.count,
        forward_ops=boundary,
        input_paths=(*names, *roles.input_paths[start:]),
        replaced=tuple(sorted({start + more + place for place in (*params, *state) if place not in kept})),
        updates=tuple(traced.ops(whole, results[end:], [start + more + place for place in params])),
    )
    return replace(program, closed=closed, consts=(*program.consts, *traced.consts), is_updated=True, roles=roles)


@dataclass(frozen=True)
class _UpdatedBackward:
    """A backward with its update: `(inputs, cotangents, cotangents of a second sweep) -> results`.

    The results are new parameters and state; then, for each update that ran, its results again.
    """

    jaxpr: Any
    consts: Sequence[Any]
    noted: Sequence[Noted]

    @classmethod
    def of(cls, inner: Any, updates: Updates, replaced: Sequence[int], count: int) -> _UpdatedBackward:
        """Trace a backward of `count` inputs and the cotangents; `replaced` are the places of parameters and state."""
        num_params, noted = len(updates.parts), list[Noted]()

        def whole(known: Sequence[Any], *cts: Sequence[Any]) -> list[Any]:
            arrays = [known[i] for i in replaced]
            params, state = arrays[:num_params], arrays[num_params:]
            results, noted[:] = in_sweeps(
                updates, params, state, lambda to: run(inner, to, (*known, *cts[to.sweep - 1]))
            )
            return [*results, *(x for update in noted for x in update.made)]

        structs = [abstract.struct(v.aval) for v in inner.invars]
        traced = jax.make_jaxpr(whole)(structs[:count], structs[count:], structs[count:])
        return cls(*jaxprs.opened(simplify.inlined(traced)), noted)

    def joined(self, ahead: Sequence[Any], ends: Sequence[Any], read: Sequence[Any]) -> tuple[Any, Any, int]:
        """Append it to the equations `ahead`, whose results are `ends`; it reads the variables `read`.

        Returns the equations and results, and the number of equations ahead. Equations that compute the same are
        merged. A second sweep has its own cotangents until then, so that none of it is merged with the first.
        """
        late, results = simplify.renamed(self.jaxpr, dict(zip(self.jaxpr.invars, read, strict=False)))
        eqns, outvars, boundary = simplify.merged([*ahead, *late], [*ends, *results], len(ahead))
        again = self.jaxpr.invars[len(read) :]
        whole, _ = jaxprs.opened(jaxprs.build(again, outvars, eqns))
        return *simplify.renamed(whole, dict(zip(again, read[len(read) - len(again) :], strict=True))), boundary

    def ops(self, eqns: Sequence[Any], made: Sequence[Any], params: Sequence[int]) -> Iterator[UpdateOps]:
        """Return the equations that make the results of each update, which are the variables `made`."""
        makers, left = {v: n for n, eqn in enumerate(eqns) for v in eqn.outvars}, iter(made)
        for update in self.noted:
            results = jaxprs.variables(itertools.islice(left, len(update.made)))
            places = {makers[v] for v in results if v in makers}
            yield UpdateOps(params[update.place], tuple(sorted(places)), update.sweep)


def _read(eqns: Sequence[Any], ends: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Return the variables that equations and results read from outside of them, without the cotangents."""
    atoms = (*(v for eqn in eqns for v in eqn.invars), *ends)
    inner = {*cotangents, *(v for eqn in eqns for v in eqn.outvars)}
    return list(dict.fromkeys(v for v in jaxprs.variables(atoms) if v not in inner))
