"""Give guarded products and solutions in a program derivatives that are guarded, too.

Matrix products and solutions are calls by the name of guards. An elementwise product lies open, and is found by its
equations:

    r = mul a b
    n = ne r r
    z = eq a 0
    g = and n z
    c = select_n g b 0
    p = mul a c
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax import lax

from jointcut.partition.program.jax.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Var, inner_jaxprs, opened
from jointcut.partition.rewrite import simplify
from jointcut.partition.rewrite.matrices import Dot, Solve, dot_with_slopes, solve_with_slopes
from jointcut.partition.rewrite.product import GUARD, Product, is_test_of_guard, named, with_slopes

#: Primitives between the test of a factor for zero and the choice.
_BETWEEN = frozenset({"and", "or", "broadcast_in_dim", "reduce_and"})


def sloped(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, in which derivatives of guarded products and solutions are guarded, too."""
    jaxpr, consts = opened(closed)
    return ClosedJaxpr(_sloped(jaxpr), consts)


def _sloped(jaxpr: Jaxpr) -> Jaxpr:
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    eqns = [_changed(eqn, makers) for eqn in jaxpr.eqns]
    needed = simplify.live(eqns, jaxpr.outvars).places
    return jaxpr.replace(eqns=[eqn for i, eqn in enumerate(eqns) if i in needed])


def _changed(eqn: Equation, makers: Mapping[Var, Equation]) -> Equation:
    """The equation, with slopes if it is guarded, or with bodies that have slopes."""
    if eqn.params.get("name") == GUARD:
        found = _called(opened(eqn.params["jaxpr"])[0])
        return eqn if found is None else simplify.instead(eqn, named(found))
    if (found := _completed(eqn, makers)) is not None:
        product, guard = found
        return simplify.instead(eqn, named(with_slopes(_guarded(product, guard, makers))), product.invars)
    return simplify.with_bodies(eqn, _sloped) if any(inner_jaxprs(eqn)) else eqn


def _called(body: Jaxpr) -> Callable[..., Any] | None:
    """The function of a guarded call's body, with slopes; None for a body that has slopes."""
    eqn = body.eqns[0]
    primitive, params = eqn.primitive, tuple(sorted(eqn.params.items()))
    if primitive is lax.dot_general_p:
        compared = [test.invars[0] for test in body.eqns if test.primitive.name == "eq"]
        zeros = tuple(i for i, factor in enumerate(body.invars) if factor in compared)
        return dot_with_slopes(Dot(primitive, zeros, params))
    return solve_with_slopes(Solve(primitive, params)) if primitive.name == "triangular_solve" else None


def _completed(eqn: Equation, makers: Mapping[Var, Equation]) -> tuple[Equation, Equation] | None:
    """The product that an equation completes, and the equation that says where it is guarded; None if there is none."""
    name = eqn.primitive.name
    if name not in ("mul", "select_n"):
        return None
    for choice in [eqn] if name == "select_n" else [_made(v, "select_n", makers) for v in eqn.invars]:
        guard = None if choice is None else _made(choice.invars[0], "and", makers)
        test = None if guard is None else _made(guard.invars[0], "ne", makers)
        if guard is None or test is None or not is_test_of_guard(test):
            continue
        product = _made(test.invars[0], "mul" if name == "mul" else "div", makers)
        if product is not None and _completes(eqn, product, guard, makers):
            return product, guard
    return None


def _completes(eqn: Equation, product: Equation, guard: Equation, makers: Mapping[Var, Equation]) -> bool:
    """Whether an equation is a product of the same factors, or its choice, with zero where it is guarded."""

    def without_zero(v: Atom) -> Atom:
        choice = _made(v, "select_n", makers)
        return v if choice is None or choice.invars[0] is not guard.outvars[0] else choice.invars[1]

    if eqn.primitive.name == "select_n":
        return eqn.invars[1] is product.outvars[0]
    return all(without_zero(v) is factor for v, factor in zip(eqn.invars, product.invars, strict=True))


def _guarded(product: Equation, guard: Equation, makers: Mapping[Var, Equation]) -> Product:
    """The product with its guard."""
    behind = list(_behind(guard.invars[1], makers))
    compared = [one.invars[0] for one in behind if one.primitive.name == "eq"]
    zeros = tuple(i for i, factor in enumerate(product.invars) if any(factor is v for v in compared))
    of_lines = any(one.primitive.name == "reduce_and" for one in behind)
    return Product(product.primitive, zeros, tuple(sorted(product.params.items())), of_lines)


def _behind(v: Atom, makers: Mapping[Var, Equation]) -> Iterator[Equation]:
    """The equations that compute where factors are zero, the last first."""
    eqn = None if isinstance(v, Literal) else makers.get(v)
    if eqn is not None:
        yield eqn
        if eqn.primitive.name in _BETWEEN:
            for operand in eqn.invars:
                yield from _behind(operand, makers)


def _made(v: Atom, name: str, makers: Mapping[Var, Equation]) -> Equation | None:
    """The equation that makes a value, if it is of this primitive."""
    eqn = None if isinstance(v, Literal) else makers.get(v)
    return eqn if eqn is not None and eqn.primitive.name == name else None
