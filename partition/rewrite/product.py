"""Write an elementwise product in which zero times infinity is zero, with such products as its derivative.

A guarded product is `where(product is NaN and a factor is zero, 0, product)`. In JAX's derivative of it there are
products without a guard: the cotangent that is zero meets an infinite tangent of the other factor. That matters when a
backward is differentiated once more; then the product is given slopes of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax

from jointcut.partition.program.jaxprs import ClosedJaxpr, Equation, LinearRules, linear_primitive, opened
from jointcut.partition.rewrite import simplify

#: The name of a guarded product, a call.
GUARD = "derivatives.zero_cotangent"


@dataclass(frozen=True)
class Product:
    """An elementwise product or quotient of two factors, `mul` or `div`.

    Where it would be NaN, and one of the factors at the places `zeros` is zero, it is zero.
    """

    primitive: Any
    zeros: tuple[int, ...]
    params: tuple[tuple[str, Any], ...]

    def __call__(self, *factors: Any) -> Any:
        """The product."""
        result = self.primitive.bind(*factors, **dict(self.params))
        nothing = lax.full_like(result, 0)
        is_zero = functools.reduce(lax.bitwise_or, [lax.eq(factors[i], nothing) for i in self.zeros])
        return lax.select(lax.bitwise_and(lax.ne(result, result), is_zero), nothing, result)


@functools.lru_cache(maxsize=4096)
def named(product: Callable[..., Any]) -> Callable[..., Any]:
    """A product under the name by which reports find it."""

    def guarded_product(*factors: Any) -> Any:
        return product(*factors)

    guarded_product.__name__ = GUARD
    return jax.jit(guarded_product)


# ------------------------------------------------------------------------------------------------------ second order


def sloped(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, whose guarded products have guarded products as their derivative.

    In JAX's derivative of a guarded product there are products without a guard, such as that of a cotangent that is
    zero with an infinite tangent of the other factor.
    """

    def change(eqn: Equation, _: str) -> Equation:
        if eqn.params.get("name") != GUARD:
            return eqn
        inner = opened(eqn.params["jaxpr"])[0].eqns
        compared = [step.invars[0] for step in inner if step.primitive.name == "eq"]
        if not compared:  # it has its slopes already
            return eqn
        zeros = tuple(i for i, factor in enumerate(inner[0].invars) if factor in compared)
        product = Product(inner[0].primitive, zeros, tuple(sorted(inner[0].params.items())))
        return simplify.instead(eqn, named(_sloped(product)))

    return simplify.replaced(closed, "jit", change)


@functools.lru_cache(maxsize=4096)
def _sloped(product: Product) -> Callable[..., Any]:
    """A product whose derivative is made of such products; a zero of a tangent counts as the zeros of factors do."""
    value = jax.custom_jvp(product.__call__)

    @value.defjvp
    def _(factors: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        result, (first, second) = value(*factors), factors
        of_first = _along(product, 0, second, tangents[0])
        if product.primitive is lax.mul_p:
            return result, of_first + _along(product, 1, first, tangents[1])
        quotient = value(result, second)
        return result, of_first - _along(Product(lax.mul_p, (0,), ()), 1, quotient, tangents[1])

    return value


def _along(product: Product, place: int, other: Any, tangent: Any) -> Any:
    """The product with a tangent in one place, as a linear map of the tangent."""
    zeros = tuple(sorted({*product.zeros, place}))
    rules = _rules(replace(product, zeros=zeros), place)
    return _linear_p.bind(other, tangent, rules=rules, num_residuals=1)[0]


@functools.lru_cache(maxsize=4096)
def _rules(product: Product, place: int) -> LinearRules:
    """The map from the factor at a place to the product, which is its own transpose."""
    run = named(_sloped(product))

    def apply(others: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
        (other,), (factor,) = others, moved
        return [run(factor, other) if place == 0 else run(other, factor)]

    def transpose(others: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
        return [None] if cotangents[0] is None else list(apply(others, cotangents))

    return LinearRules(lambda others, moved: [moved[0]], apply, transpose)


_linear_p = linear_primitive("guarded_product")
