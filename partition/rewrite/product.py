"""Write an elementwise product in which zero times infinity is zero, with such products as its derivative.

A guarded product is `where(product is NaN and a factor is zero, 0, product)`. JAX's derivative of it has products
without a guard: the zero cotangent meets an infinite tangent of the other factor. This matters when a backward is
differentiated once more. Then the product gets slopes of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jointcut.partition.program.jax.jaxprs import Equation
from jointcut.partition.program.jax.own_primitives import LinearRules, linear_primitive
from jointcut.partition.program.jax.user_source import scope_of

#: The name of a guarded product, a call.
GUARD = "derivatives.zero_cotangent"


@dataclass(frozen=True)
class Product:
    """An elementwise product or quotient of two factors, `mul` or `div`.

    Where it would be NaN, it is zero if one of the factors at the places `zeros` is zero. With `of_lines` that factor
    must be zero along its whole last axis.
    """

    primitive: Any
    zeros: tuple[int, ...]
    params: tuple[tuple[str, Any], ...] = ()
    of_lines: bool = False

    def __call__(self, *factors: Any) -> Any:
        """The product.

        The factor that a zero meets is replaced by zero, not the product: XLA can then still add the product in the
        same instruction.
        """
        result = self._bound(*factors)
        is_guarded, zero = self._is_guarded(factors, result), lax.full_like(result, 0)
        if self.primitive is lax.div_p:
            return lax.select(is_guarded, zero, result)
        calm = list(factors)
        for i in range(len(factors)):
            if any(place != i for place in self.zeros):
                calm[i] = lax.select(is_guarded, zero, jnp.broadcast_to(factors[i], result.shape))
        return self._bound(*calm)

    def is_guarded(self, *factors: Any) -> Any:
        """Where the product is zero instead of NaN."""
        return self._is_guarded(factors, self._bound(*factors))

    def _bound(self, *factors: Any) -> Any:
        """The product without a guard; if there are no parameters, it has JAX's defaults."""
        if not self.params:
            return (lax.mul if self.primitive is lax.mul_p else lax.div)(*factors)
        return self.primitive.bind(*factors, **dict(self.params))

    def _is_guarded(self, factors: Sequence[Any], result: Any) -> Any:
        zeros = [lax.eq(factors[i], lax.full_like(factors[i], 0)) for i in self.zeros]
        if self.of_lines and result.ndim:
            zeros = [jnp.broadcast_to(jnp.all(zero, axis=-1, keepdims=True), zero.shape) for zero in zeros]
        return lax.bitwise_and(lax.ne(result, result), functools.reduce(lax.bitwise_or, zeros))


@dataclass(frozen=True)
class Masked:
    """A product of a cotangent, at this place, and a mask: zero where the mask is zero, whatever the cotangent.

    It is written as a choice, which is linear in the cotangent. `product` guards the rest, if it is guarded.
    """

    primitive: Any
    place: int
    params: tuple[tuple[str, Any], ...] = ()
    product: Product | None = None

    def __call__(self, *factors: Any) -> Any:
        """The product."""
        calm, mask, moved = list(factors), factors[1 - self.place], factors[self.place]
        calm[self.place] = jnp.where(lax.eq(mask, lax.full_like(mask, 0)), lax.full_like(moved, 0), moved)
        return named(self.product)(*calm) if self.product else self.primitive.bind(*calm, **dict(self.params))


@functools.lru_cache(maxsize=4096)
def named(product: Callable[..., Any]) -> Callable[..., Any]:
    """A product under the name by which reports find it."""

    def guarded_product(*factors: Any) -> Any:
        return product(*factors)

    guarded_product.__name__ = GUARD
    return guarded_product


def is_test_of_guard(eqn: Equation) -> bool:
    """Whether an equation of an open guarded product, one in each, tests for NaN."""
    is_test = eqn.primitive.name == "ne" and eqn.invars[0] is eqn.invars[1]
    return is_test and GUARD in scope_of(eqn)


# ------------------------------------------------------------------------------------------------------ second order


@functools.lru_cache(maxsize=4096)
def with_slopes(product: Product) -> Callable[..., Any]:
    """A product whose derivative consists of such products; it is flat where it is guarded.

    A zero of a tangent counts like a zero of a factor.
    """

    @jax.custom_jvp
    def guarded_product(*factors: Any) -> Any:
        return product(*factors)

    @guarded_product.defjvp
    def _(factors: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        result, is_guarded = guarded_product(*factors), product.is_guarded(*factors)
        first, second = (jnp.broadcast_to(factor, result.shape) for factor in factors)
        moves = [jnp.where(is_guarded, 0, tangent) for tangent in tangents]
        of_first = along(product, 0, second, moves[0])
        if product.primitive is lax.mul_p:
            return result, of_first + along(product, 1, first, moves[1])
        quotient = guarded_product(result, second)
        return result, of_first - along(Product(lax.mul_p, (0,)), 1, quotient, moves[1])

    return guarded_product


def along(product: Product, place: int, other: Any, tangent: Any) -> Any:
    """The product of a tangent in one place with another number, as a linear map of the tangent.

    It is zero where the tangent is. It is also zero where the other number is, if that is at a place where a zero
    counts.
    """
    zeros = tuple(sorted({*product.zeros, place}))
    rules = _rules(replace(product, zeros=zeros), place)
    return linear_p.bind(other, tangent, rules=rules, num_residuals=1)[0]


@functools.lru_cache(maxsize=4096)
def _rules(product: Product, place: int) -> LinearRules:
    """The map from the factor at a place to the product, which is its own transpose."""
    run = jax.jit(named(with_slopes(product)))

    def apply(others: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
        (other,), (factor,) = others, moved
        return [run(factor, other) if place == 0 else run(other, factor)]

    def transpose(others: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
        return [None] if cotangents[0] is None else list(apply(others, cotangents))

    return LinearRules(lambda others, moved: [moved[0]], apply, transpose)


linear_p = linear_primitive("guarded_product")
