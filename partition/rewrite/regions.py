"""Open the regions under `jax.checkpoint`, so that a plan runs them again op by op.

JAX's derivative of such a region is one equation of the backward, which runs all of the region again at once. Where it
does is not for a plan to choose, and XLA:CPU up to JAX 0.11 takes out the barriers that keep it from being merged with
the forward. So a region is opened before it is differentiated. Scopes on the name stacks of its equations say which
region they are of, and whether its policy lets their results be saved; `prices.rules` reads them. A region stays as it
is if it holds a loop, a conditional, or an op that must run once, or if its policy offloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from jointcut.partition.program.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    asked,
    fresh,
    has_effects,
    inner_jaxprs,
    is_dropped,
    opened,
    rebound,
)
from jointcut.partition.program.places import RESULT, SAVED, region_scope
from jointcut.partition.program.primitives import CHECKPOINT_SCOPE, COLLECTIVES, LOOPS
from jointcut.partition.rewrite.simplify import holds, with_bodies

REGION = "remat2"

#: A region that holds one of these stays closed.
_CLOSED = LOOPS | COLLECTIVES | {"cond"}


def marked(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Open all regions under `jax.checkpoint` that can be, and put scopes on all equations under one, however deep."""
    if not holds(closed, REGION):
        return closed
    jaxpr, consts = opened(closed)
    return ClosedJaxpr(_Marks().marked(jaxpr, ()), consts)


@dataclass(frozen=True)
class _Region:
    """A region that is opened: its number, what may be saved of it, and the variables that are its results."""

    number: int
    policy: Callable[..., Any] | None
    results: frozenset[Any]

    def within(self, call: Equation, inner: Jaxpr) -> _Region:
        """The same region as seen in one inside: its results there."""
        inside = zip(inner.outvars, call.outvars, strict=True)
        return replace(
            self, results=frozenset(v for v, w in inside if not isinstance(v, Literal) and w in self.results)
        )

    def scope(self, eqn: Equation) -> str:
        """The scope of one of its equations."""
        if self.policy is not None and not any(inner_jaxprs(eqn)) and asked(self.policy, eqn):
            return region_scope(self.number, SAVED)
        return region_scope(self.number, RESULT if self.results.intersection(eqn.outvars) else "")


@dataclass
class _Marks:
    """The regions of one program, numbered as they are opened."""

    numbers: Iterator[int] = field(default_factory=count)

    def marked(self, jaxpr: Jaxpr, regions: Sequence[_Region]) -> Jaxpr:
        """A jaxpr with its regions open, which is in some regions itself."""
        eqns: list[Equation] = []
        names: dict[Var, Atom] = {}
        for eqn in jaxpr.eqns:
            eqn = rebound(eqn, [v if isinstance(v, Literal) else names.get(v, v) for v in eqn.invars], eqn.outvars)
            if eqn.primitive.name != REGION:
                eqn = with_bodies(eqn, partial(self.marked, regions=regions)) if any(inner_jaxprs(eqn)) else eqn
                eqns.append(_scoped(eqn, regions))
            elif _can_be_open(eqn):
                inner, around = eqn.params["jaxpr"], [region.within(eqn, eqn.params["jaxpr"]) for region in regions]
                results = frozenset(v for v in inner.outvars if not isinstance(v, Literal))
                region = _Region(next(self.numbers), eqn.params["policy"], results)
                opened_region = self.marked(inner, [*around, region])
                names.update(zip(eqn.outvars, _inlined(opened_region, eqn, eqns), strict=True))
            else:
                eqns.append(with_bodies(eqn, _under))
        outvars = [v if isinstance(v, Literal) else names.get(v, v) for v in jaxpr.outvars]
        return jaxpr.replace(eqns=eqns, outvars=outvars)


def _under(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr in a region that stays as it is, with the scope that says so on all its equations."""
    eqns = [with_bodies(eqn, _under) if any(inner_jaxprs(eqn)) else eqn for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=[_in_scopes(eqn, [CHECKPOINT_SCOPE]) for eqn in eqns])


def _inlined(inner: Jaxpr, call: Equation, eqns: list[Equation]) -> list[Atom]:
    """Append the equations of a region to others, with variables of their own; returns the results of the region."""
    names: dict[Var, Atom] = dict(zip(inner.invars, call.invars, strict=True))
    stack = call.source_info.name_stack

    def read(v: Atom) -> Atom:
        return v if isinstance(v, Literal) else names[v]

    for eqn in inner.eqns:
        outvars = [v if is_dropped(v) else fresh(v.aval) for v in eqn.outvars]
        names.update(zip(eqn.outvars, outvars, strict=True))
        info = eqn.source_info.replace(name_stack=stack + eqn.source_info.name_stack)
        eqns.append(rebound(eqn, list(map(read, eqn.invars)), outvars).replace(source_info=info))
    return list(map(read, inner.outvars))


def _scoped(eqn: Equation, regions: Sequence[_Region]) -> Equation:
    """An equation with the scopes that say of which regions it is."""
    return _in_scopes(eqn, [CHECKPOINT_SCOPE, *(region.scope(eqn) for region in regions)]) if regions else eqn


def _in_scopes(eqn: Equation, scopes: Iterable[str]) -> Equation:
    stack = eqn.source_info.name_stack
    around = type(stack)()
    for scope in scopes:
        around = around.extend(scope)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=around + stack))


def _can_be_open(eqn: Equation) -> bool:
    """Whether a region may be opened: all its ops may run again, one by one, and its policy offloads nothing."""
    policy, work = eqn.params["policy"], [eqn.params["jaxpr"]]
    while work:
        jaxpr = work.pop()
        if jaxpr.constvars:
            return False
        for inner in jaxpr.eqns:
            if inner.primitive.name in _CLOSED or inner.primitive.name.startswith("jointcut") or has_effects(inner):
                return False
            if inner.primitive.name == REGION and not _can_be_open(inner):
                return False
            if policy is not None and not any(inner_jaxprs(inner)) and isinstance(asked(policy, inner), str):
                return False
            work += inner_jaxprs(inner)
    return True
