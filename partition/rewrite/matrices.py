"""Write a matrix product, and the solution of a triangular system, in which a line of zeros gives zeros.

If a row of the first factor is zero, this row of the product is zero, whatever the second factor holds. The same holds
for a column of the second factor, and for the solution of a system whose right side is zero. In floating point both are
NaN where the other matrix is, and the inverse and the factors of a singular matrix are NaN. Elements that are not NaN
do not change.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.partition.program.jax.own_primitives import LinearRules
from jointcut.partition.rewrite.product import linear_p, named

Params = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Dot:
    """A product of two arrays, as in the primitive `dot_general`.

    An element that would be NaN is zero if one of the factors at the places `zeros` has only zeros to sum over.
    """

    primitive: Any
    zeros: tuple[int, ...]
    params: Params

    def __call__(self, *factors: Any) -> Any:
        """The product."""
        result = self.primitive.bind(*factors, **dict(self.params))
        return lax.select(self._is_guarded(factors, result), lax.full_like(result, 0), result)

    def is_guarded(self, *factors: Any) -> Any:
        """Where the product is zero instead of NaN."""
        return self._is_guarded(factors, self.primitive.bind(*factors, **dict(self.params)))

    def _is_guarded(self, factors: Sequence[Any], result: Any) -> Any:
        lines = [self._is_zero(place, factors[place] == 0, result.shape) for place in self.zeros]
        return lax.bitwise_and(result != result, functools.reduce(operator.or_, lines))

    def _is_zero(self, place: int, zeros: Any, shape: Sequence[int]) -> Any:
        """For each element of the result whether a factor sums only zeros; `zeros` tells where the factor is zero."""
        kept = [*self.batch[place], *self.free(place, zeros.ndim)]
        start = len(shape) - len(kept) + len(self.batch[place]) if place == 1 else len(self.batch[place])
        lines = jnp.all(zeros, axis=self.summed[place]) if self.summed[place] else zeros
        left = sorted(kept)
        places = [*range(len(self.batch[place])), *range(start, start + len(kept) - len(self.batch[place]))]
        return lax.broadcast_in_dim(lines.transpose([left.index(axis) for axis in kept]), shape, places)

    @property
    def summed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of both factors that are summed over."""
        return dict(self.params)["dimension_numbers"][0]

    @property
    def batch(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of both factors that count the products."""
        return dict(self.params)["dimension_numbers"][1]

    def free(self, place: int, ndim: int) -> list[int]:
        """The other axes of a factor."""
        return [axis for axis in range(ndim) if axis not in (*self.summed[place], *self.batch[place])]


@dataclass(frozen=True)
class Solve:
    """A solution x of a·x = b, or of x·a = b, as in the primitives `triangular_solve` and `tridiagonal_solve`.

    The operands are a, one array or three, and b. Where the solution would be NaN, it is zero if the column of b is
    zero (without `left_side`, the row).
    """

    primitive: Any
    params: Params

    def __call__(self, *operands: Any) -> Any:
        """The solution."""
        result = self.primitive.bind(*operands, **dict(self.params))
        return lax.select(self._is_guarded(operands[-1], result), lax.full_like(result, 0), result)

    def is_guarded(self, *operands: Any) -> Any:
        """Where the solution is zero instead of NaN."""
        return self._is_guarded(operands[-1], self.primitive.bind(*operands, **dict(self.params)))

    def _is_guarded(self, b: Any, result: Any) -> Any:
        is_left = self.primitive.name != "triangular_solve" or self.has("left_side")
        return jnp.all(b == 0, axis=-2 if is_left else -1, keepdims=True) & (result != result)

    def has(self, name: str) -> bool:
        """Whether a parameter is true."""
        return bool(dict(self.params)[name])

    def flipped(self) -> Solve:
        """The solution with the transpose of a."""
        flip = not self.has("transpose_a")
        return replace(self, params=tuple((k, flip if k == "transpose_a" else v) for k, v in self.params))


# ------------------------------------------------------------------------------------------------------ second order


@functools.lru_cache(maxsize=4096)
def dot_with_slopes(dot: Dot) -> Callable[..., Any]:
    """A product whose derivative consists of such products; it is flat where it is guarded.

    A line of zeros in a tangent counts like a line of zeros in a factor.
    """

    @jax.custom_jvp
    def guarded_product(*factors: Any) -> Any:
        return dot(*factors)

    @guarded_product.defjvp
    def _(factors: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moved = _along(dot, 0, factors[1], tangents[0]) + _along(dot, 1, factors[0], tangents[1])
        return guarded_product(*factors), jnp.where(dot.is_guarded(*factors), 0, moved)

    return guarded_product


def _along(dot: Dot, place: int, other: Any, tangent: Any) -> Any:
    """The product with a tangent in one place, as a linear map of the tangent."""
    rules = _rules_of_dot(replace(dot, zeros=tuple(sorted({*dot.zeros, place}))), place)
    return linear_p.bind(other, tangent, rules=rules, num_residuals=1)[0]


@functools.lru_cache(maxsize=4096)
def _rules_of_dot(dot: Dot, place: int) -> LinearRules:
    """The map from the factor at a place to the product."""
    run = jax.jit(named(dot_with_slopes(dot)))

    def apply(others: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
        (other,), (factor,) = others, moved
        return [run(factor, other) if place == 0 else run(other, factor)]

    def transpose(others: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
        (other,), (cotangent,) = others, cotangents
        return [None if cotangent is None else _transposed(dot, place, other, cotangent)]

    def avals(others: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
        return list(jax.make_jaxpr(apply)(others, moved).out_avals)

    return LinearRules(avals, apply, transpose)


def _transposed(dot: Dot, place: int, other: Any, cotangent: Any) -> Any:
    """The cotangent of the factor at a place, given the other factor."""
    mine, its, batch = dot.summed[place], dot.summed[1 - place], dot.batch[1 - place]
    free, first = dot.free(1 - place, other.ndim), len(batch)
    count = cotangent.ndim - first - len(free)
    start = first + count if place == 0 else first
    numbers = ((tuple(range(start, start + len(free))), tuple(free)), (tuple(range(first)), tuple(batch)))
    back = replace(dot, zeros=(0, 1), params=_with(dot.params, dimension_numbers=numbers, out_sharding=None))
    result = jax.jit(named(dot_with_slopes(back)))(cotangent, other)
    axes = [*dot.batch[place], *dot.free(place, result.ndim), *(mine[its.index(axis)] for axis in sorted(its))]
    return result.transpose(np.argsort(axes))


def _with(params: Params, **new: Any) -> Params:
    return tuple((key, new.get(key, value)) for key, value in params)


@functools.lru_cache(maxsize=4096)
def solve_with_slopes(solve: Solve) -> Callable[..., Any]:
    """A solution whose derivative consists of such solutions and of guarded products; it is flat where it is guarded.

    From a·x = b follows a·dx = db - da·x.
    """

    @jax.custom_jvp
    def guarded_product(a: Any, b: Any) -> Any:
        return solve(a, b)

    @guarded_product.defjvp
    def _(points: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        (a, b), (da, db), x = points, tangents, guarded_product(*points)
        rest = db - _applied(solve, _of_triangle(solve, da), x)
        moved = linear_p.bind(a, rest, rules=_rules_of_solve(solve), num_residuals=1)[0]
        return x, jnp.where(solve.is_guarded(a, b), 0, moved)

    return guarded_product


def _of_triangle(solve: Solve, da: Any) -> Any:
    """The part of a tangent of a that the system reads."""
    offset = int(solve.has("unit_diagonal"))
    part = jnp.tril(da, -offset) if solve.has("lower") else jnp.triu(da, offset)
    part = part.swapaxes(-1, -2) if solve.has("transpose_a") else part
    return part.conj() if solve.has("conjugate_a") else part


def _applied(solve: Solve, da: Any, x: Any) -> Any:
    """The product of a tangent of a with the solution, zero where the solution is."""
    batch = tuple(range(x.ndim - 2))
    place, axes = (0, (x.ndim - 1, x.ndim - 2)) if solve.has("left_side") else (1, (x.ndim - 2, x.ndim - 1))
    mine, its = (axes[:1], axes[1:])
    summed = (mine, its) if place == 0 else (its, mine)
    params = {
        "dimension_numbers": (summed, (batch, batch)),
        "out_sharding": None,
        "precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST),
        "preferred_element_type": x.dtype,
    }
    return _along(Dot(lax.dot_general_p, (1 - place,), tuple(params.items())), place, x, da)


@functools.lru_cache(maxsize=4096)
def _rules_of_solve(solve: Solve) -> LinearRules:
    """The map from the right side to the solution."""
    run, back = (jax.jit(named(solve_with_slopes(one))) for one in (solve, solve.flipped()))

    def apply(others: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
        return [run(others[0], moved[0])]

    def transpose(others: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
        return [None if cotangents[0] is None else back(others[0], cotangents[0])]

    return LinearRules(lambda others, moved: [moved[0]], apply, transpose)
