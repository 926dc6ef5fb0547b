"""Give guarded products and solutions in a program derivatives that are guarded, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from jointcut.partition.program.jaxprs import ClosedJaxpr, Equation, Jaxpr, opened
from jointcut.partition.rewrite import simplify
from jointcut.partition.rewrite.matrices import Dot, Solve, dot_with_slopes, solve_with_slopes
from jointcut.partition.rewrite.product import GUARD, Product, named, with_slopes


def sloped(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, whose guarded products and solutions have such as their derivative."""

    def change(eqn: Equation, _: str) -> Equation:
        found = _guarded_in(opened(eqn.params["jaxpr"])[0]) if eqn.params["name"] == GUARD else None
        return eqn if found is None else simplify.instead(eqn, named(found))

    return simplify.replaced(closed, "jit", change)


def _guarded_in(body: Jaxpr) -> Callable[..., Any] | None:
    """What a body of that name computes, with slopes; None for one that has slopes, or for a part of a derivative."""
    compared = [eqn.invars[0] for eqn in body.eqns if eqn.primitive.name == "eq"]
    if not compared or list(body.outvars) != list(body.eqns[-1].outvars):
        return None
    eqn = body.eqns[0]
    if list(eqn.invars) != list(body.invars):
        return None
    primitive, params = eqn.primitive, tuple(sorted(eqn.params.items()))
    zeros = tuple(i for i, factor in enumerate(body.invars) if factor in compared)
    if primitive in (lax.mul_p, lax.div_p):
        of_lines = any(eqn.primitive.name == "reduce_and" for eqn in body.eqns)
        return with_slopes(Product(primitive, zeros, params, of_lines))
    if primitive is lax.dot_general_p:
        return dot_with_slopes(Dot(primitive, zeros, params))
    return solve_with_slopes(Solve(primitive, params)) if primitive.name == "triangular_solve" else None
