"""Open the regions under `jax.checkpoint`, so that a plan runs them again op by op.

JAX's derivative of such a region is one equation of the backward, which runs all of the region again at once. A plan
cannot choose where it does, and XLA:CPU up to JAX 0.11 takes out the barriers that keep it from being merged with the
forward. So a region is opened before it is differentiated. Scopes on the name stacks of its equations say that they
belong to a region, and whether its policy lets them be saved; `prices.rules` reads these. A region stays closed if it
holds a loop, or an op that must run once, or if its policy offloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.partition.program.jax.abstract import is_plain, struct
from jointcut.partition.program.jax.barriers import as_before
from jointcut.partition.program.jax.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    fresh,
    inner_jaxprs,
    is_dropped,
    opened,
    rebound,
)
from jointcut.partition.program.jax.side_effects import has_effects
from jointcut.partition.program.jax.user_source import asked
from jointcut.partition.program.places import RESULT, SAVED, region_scope
from jointcut.partition.program.primitives import CHECKPOINT_SCOPE, COLLECTIVES, HIGH, LOOPS, REGION
from jointcut.partition.rewrite.simplify import holds, named, with_bodies

#: Primitives that keep a region closed.
_CLOSED = LOOPS | COLLECTIVES


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Open all regions under `jax.checkpoint` that can be, and put scopes on all equations under one, however deep."""
    if not has_regions(closed):
        return closed
    jaxpr, consts = opened(closed)
    return ClosedJaxpr(_opened(jaxpr, ()), consts)


def has_regions(closed: ClosedJaxpr) -> bool:
    """Whether a program holds a region, however deep, in JAX's newer form (`jax_remat3`) too."""
    return holds(closed, REGION) or (holds(closed, HIGH) and _is_newer(opened(closed)[0]))


def _is_newer(jaxpr: Jaxpr) -> bool:
    return any(as_before(eqn) is not eqn or any(map(_is_newer, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


@dataclass(frozen=True)
class _Region:
    """An open region: the number of other regions around it, and the values of it that may be saved."""

    depth: int
    policy: Callable[..., Any] | None

    def scope(self, eqn: Equation) -> str:
        """The scope of one of its equations."""
        is_saved = self.policy is not None and not any(inner_jaxprs(eqn)) and bool(asked(self.policy, eqn))
        return region_scope(self.depth, SAVED if is_saved else "")


def _opened(jaxpr: Jaxpr, regions: Sequence[_Region]) -> Jaxpr:
    """A jaxpr that lies in some regions, with its own regions open."""
    eqns: list[Equation] = []
    names: dict[Var, Atom] = {}
    for eqn in jaxpr.eqns:
        eqn = rebound(as_before(eqn), [named(names, v) for v in eqn.invars], eqn.outvars)
        if eqn.primitive.name != REGION:
            eqn = with_bodies(eqn, partial(_opened, regions=regions)) if any(inner_jaxprs(eqn)) else eqn
            eqns.append(_scoped(eqn, regions))
        elif _can_be_open(eqn):
            names.update(zip(eqn.outvars, _in_place(eqn, regions, eqns), strict=True))
        else:
            eqns.append(with_bodies(eqn, _under))
    return jaxpr.replace(eqns=eqns, outvars=[named(names, v) for v in jaxpr.outvars])


def _in_place(call: Equation, regions: Sequence[_Region], eqns: list[Equation]) -> list[Atom]:
    """Append the equations of a region to others, with variables of their own; return the results of the region.

    A result is a copy, so that its scope is on no equation of the region that computes something.
    """
    region = _Region(len(regions), call.params["policy"])
    inner = _opened(call.params["jaxpr"], [*regions, region])
    names: dict[Var, Atom] = dict(zip(inner.invars, call.invars, strict=True))
    made: dict[Atom, Equation] = {}
    for eqn in inner.eqns:
        outvars = [v if is_dropped(v) else fresh(v.aval) for v in eqn.outvars]
        names.update(zip(eqn.outvars, outvars, strict=True))
        info = eqn.source_info.replace(name_stack=call.source_info.name_stack + eqn.source_info.name_stack)
        invars = [v if isinstance(v, Literal) else names[v] for v in eqn.invars]
        eqns.append(rebound(eqn, invars, outvars).replace(source_info=info))
        made.update(dict.fromkeys(outvars, eqn))
    results = [v if isinstance(v, Literal) else names[v] for v in inner.outvars]
    for i, v in enumerate(results):
        if not isinstance(v, Literal) and v in made and is_plain(v.aval):
            info = call.source_info.replace(traceback=made[v].source_info.traceback)
            (copy,) = opened(jax.make_jaxpr(jnp.copy)(struct(v.aval)))[0].eqns
            copy = rebound(copy, [v], [fresh(v.aval)]).replace(source_info=info, ctx=call.ctx)
            eqns.append(_in_scopes(_scoped(copy, regions), [CHECKPOINT_SCOPE, region_scope(region.depth, RESULT)]))
            results[i] = copy.outvars[0]
    return results


def _under(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr in a region that stays closed, with the scope that says so on all its equations."""
    eqns = [with_bodies(eqn, _under) if any(inner_jaxprs(eqn)) else eqn for eqn in map(as_before, jaxpr.eqns)]
    return jaxpr.replace(eqns=[_in_scopes(eqn, [CHECKPOINT_SCOPE]) for eqn in eqns])


def _scoped(eqn: Equation, regions: Sequence[_Region]) -> Equation:
    """An equation with the scopes of the regions to which it belongs."""
    return _in_scopes(eqn, [CHECKPOINT_SCOPE, *(region.scope(eqn) for region in regions)]) if regions else eqn


def _in_scopes(eqn: Equation, scopes: Iterable[str]) -> Equation:
    """An equation with scopes around it, without scopes that it already has."""
    stack = eqn.source_info.name_stack
    around = type(stack)()
    for scope in scopes:
        around = around if scope in str(stack) else around.extend(scope)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=around + stack))


def _can_be_open(eqn: Equation) -> bool:
    """Whether a region may be opened: all its ops may run again, one by one, and its policy offloads nothing."""
    policy, work = eqn.params["policy"], [eqn.params["jaxpr"]]
    while work:
        jaxpr = work.pop()
        if jaxpr.constvars:
            return False
        for inner in map(as_before, jaxpr.eqns):
            if inner.primitive.name in _CLOSED or inner.primitive.name.startswith("jointcut") or has_effects(inner):
                return False
            if inner.primitive.name == REGION and not _can_be_open(inner):
                return False
            if policy is not None and not any(inner_jaxprs(inner)) and isinstance(asked(policy, inner), str):
                return False
            work += inner_jaxprs(inner)
    return True
