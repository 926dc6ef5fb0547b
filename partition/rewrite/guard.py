"""Let a product with a cotangent of zero be zero in a backward, whatever the other factor is.

A backward is linear in its cotangents: where a cotangent is zero, the other factor does not matter. In floating point
it does, since zero times infinity is not a number. So `where(x > 0, sqrt(x), 0.0)` has no gradient at 0 in JAX: the
branch that was not taken gets a cotangent of zero, and multiplies it with infinity. TorchScript's `GradOf` skips a
backward whose gradients are all undefined; here each element counts for itself.

A guarded product gives zero where it would give NaN and the cotangent is zero; every other element keeps its bits. The
compiled program may still round differently, because XLA fuses it into other loops. In one loop a product is added to a
number with one rounding; in two loops there are two. Run op by op, the gradients of the benchmark's programs equal the
gradients of the backward without guards.

Elementwise products and quotients are guarded, also in the bodies of loops, branches and calls. They are guarded where
the cotangent may have zeros because of its origin: a choice, a mask, a scatter, a pad, or the caller. After a matrix
product or a convolution a cotangent is assumed to have no zeros, unless all products are guarded. Matrix products and
convolutions themselves are not guarded, nor are the derivative rules of foreign calls.

A slope that is a mask, such as the slope of a maximum or of a clip, is zero where the function does not move. There an
infinite cotangent is made zero too: `sqrt(maximum(x, 0))` is flat below 0. A slope that is zero by its value gives NaN
with infinity: it may stand for a small number that was rounded to zero, or the product may have a limit.

Inverses, solutions and factors of matrices are NaN as a whole where the matrix is singular. Values computed from them
are guarded wherever they meet a cotangent: in matrix products, where a row or a column of zeros gives zeros, and in
solutions of systems, where a right side is zero. So a matrix that was not chosen, alone or among others, takes no part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jax
import numpy as np

from jointcut.partition.program.jax.abstract import is_reference
from jointcut.partition.program.jax.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    inner_primitives,
    opened,
    scan_layout,
)
from jointcut.partition.program.primitives import (
    BILINEAR,
    COND,
    ELEMENTWISE,
    ENCLOSING,
    MAKES_ZEROS,
    MASKS,
    MOVEMENT,
    OPENED,
    PRODUCTS,
    SCAN,
    SOLVING,
    SUMS,
    TRANSFORMS,
    WHILE,
)
from jointcut.partition.rewrite import simplify
from jointcut.partition.rewrite.matrices import Dot, Solve
from jointcut.partition.rewrite.numbers import Number, number_of, numbers_in
from jointcut.partition.rewrite.product import Masked, Product, named

#: Primitives that are linear in one operand at a time, and the places of these operands.
_LINEAR_IN = {"mul": (0, 1), "div": (0,)}

#: Primitives that make sums in which zeros are lost.
_MIXES = TRANSFORMS | (BILINEAR & PRODUCTS)

#: Primitives that run their one body once.
_CALLS = OPENED | ENCLOSING


class Known(IntEnum):
    """The knowledge about a value in a backward.

    A value without a cotangent in it is a `CONSTANT`, or a `MASK`, or computed from a `SOLUTION`, which may be NaN as a
    whole. A mask may have zeros, and moves only in jumps when the differentiated inputs move. A value with a cotangent
    in it is a `COTANGENT` that is assumed to have no zeros, or one `WITH_LINES` of zeros along its last axis, or
    `WITH_ZEROS`.
    """

    CONSTANT = 0
    MASK = 1
    SOLUTION = 2
    COTANGENT = 3
    WITH_LINES = 4
    WITH_ZEROS = 5


def guarded(
    forward: ClosedJaxpr, backward: ClosedJaxpr, num_outputs: int, moved: Collection[int], everywhere: bool = False
) -> ClosedJaxpr:
    """Guard the products of a backward.

    The first inputs of the backward are the forward's results after its `num_outputs` outputs, the last ones are
    cotangents. The forward's inputs at the positions `moved` are differentiated; any other input may be a mask. With
    `everywhere` all cotangents are assumed to have zeros, also after matrix products and sums.
    """
    guarding = _Guarding(everywhere)
    first = opened(forward)[0]
    given = [Known.CONSTANT if i in moved else Known.MASK for i in range(len(first.invars))]
    residuals = guarding.jaxpr(first, given)[1][num_outputs:]
    numbers = numbers_in(first, [None] * len(given))
    kept = [number_of(v, numbers) for v in first.outvars[num_outputs:]]
    jaxpr, consts = opened(backward)
    count = len(jaxpr.invars) - len(residuals)
    references = sum(is_reference(v.aval) for v in jaxpr.invars)
    inputs = [*residuals, *[Known.CONSTANT] * references, *[Known.WITH_ZEROS] * (count - references)]
    return ClosedJaxpr(guarding.jaxpr(jaxpr, inputs, kept)[0], consts)


def guarded_together(joint: ClosedJaxpr, num_cotangents: int, moved: Collection[int], everywhere: bool) -> ClosedJaxpr:
    """As `guarded`, for a forward and its backward as one program, whose last inputs are cotangents."""
    jaxpr, consts = opened(joint)
    primals = range(len(jaxpr.invars) - num_cotangents)
    given = [*(Known.CONSTANT if i in moved else Known.MASK for i in primals), *[Known.WITH_ZEROS] * num_cotangents]
    return ClosedJaxpr(_Guarding(everywhere).jaxpr(jaxpr, given)[0], consts)


def guarded_tangents(pushed: ClosedJaxpr, num_tangents: int) -> ClosedJaxpr:
    """Guard the products of a forward derivative, whose last inputs are tangents.

    A backward meets the slopes nearest to the output first; a forward derivative meets the slopes nearest to the input
    first. So here a slope of zero makes a tangent that became infinite zero, just as a zero tangent does with a slope.
    """
    jaxpr, consts = opened(pushed)
    given = [Known.CONSTANT] * (len(jaxpr.invars) - num_tangents) + [Known.WITH_ZEROS] * num_tangents
    return ClosedJaxpr(_Guarding(everywhere=True, by_slopes=True).jaxpr(jaxpr, given)[0], consts)


@dataclass(frozen=True)
class _Guarding:
    """Guards the products of a jaxpr that may meet a zero; with `everywhere`, all products that read a cotangent.

    With `by_slopes` the zero may also be the slope's.
    """

    everywhere: bool
    by_slopes: bool = False

    def jaxpr(
        self, jaxpr: Jaxpr, given: Sequence[Known], kept: Sequence[Number | None] = ()
    ) -> tuple[Jaxpr, list[Known]]:
        """The jaxpr with guarded products, and the knowledge about its outputs; `kept` are its first numbers."""
        known = dict(zip(jaxpr.invars, given, strict=True))
        numbers = numbers_in(jaxpr, [*kept, *[None] * (len(given) - len(kept))])
        eqns: list[Equation] = []

        def read(v: Atom) -> Known:
            return Known.CONSTANT if isinstance(v, Literal) else known.get(v, Known.CONSTANT)

        for eqn in jaxpr.eqns:
            now = [read(v) for v in eqn.invars]
            if max(now, default=Known.CONSTANT) < Known.COTANGENT:
                fixed = [number_of(v, numbers) for v in eqn.invars]
                known.update(zip(eqn.outvars, self._constants(eqn, now, fixed), strict=True))
                eqns.append(eqn)
                continue
            fixed = [number_of(v, numbers) for v in eqn.invars]
            nested = self._nested(eqn, now)
            new = [nested[0]] if nested else _product(eqn, now, fixed, self.everywhere, self.by_slopes)
            ends = nested[1] if nested else [self._moved(eqn, now, fixed)] * len(eqn.outvars)
            eqns += new
            known.update(zip(eqn.outvars, ends, strict=True))
        return jaxpr.replace(eqns=eqns), [read(v) for v in jaxpr.outvars]

    def _constants(self, eqn: Equation, now: Sequence[Known], fixed: Sequence[Number | None]) -> list[Known]:
        """The knowledge about each result of an equation that reads no cotangent."""
        is_solution = eqn.primitive.name == "custom_linear_solve"
        nested = None if is_solution else self._nested(eqn, now)
        return nested[1] if nested else [_constant(eqn, now, fixed)] * len(eqn.outvars)

    def _moved(self, eqn: Equation, now: Sequence[Known], fixed: Sequence[Number | None]) -> Known:
        """The knowledge about the results of an equation that reads a cotangent, given the numbers that it reads."""
        name = eqn.primitive.name
        if name == "select_n" and fixed[0] is not None:
            return now[1 + int(fixed[0])]
        if self.everywhere or name in MAKES_ZEROS or (name == "mul" and Known.MASK in now):
            return Known.WITH_ZEROS
        if name in _MIXES or name in SOLVING:
            return Known.WITH_LINES if name in SOLVING or Known.SOLUTION in now else Known.COTANGENT
        moving = [one for one in now if one >= Known.COTANGENT]
        return min(moving) if name in SUMS & ELEMENTWISE else max(moving)

    def _nested(self, eqn: Equation, now: Sequence[Known]) -> tuple[Equation, list[Known]] | None:
        """An equation with its bodies guarded, and the knowledge about its results; None where it has no such body."""
        name = eqn.primitive.name
        if name == SCAN:
            return self._scan(eqn, now)
        if name == WHILE:
            return self._while(eqn, now)
        if name == COND:
            return self._once(eqn, now[1:])
        if name == "custom_linear_solve":
            return self._solve(eqn, now)
        return self._once(eqn, now) if name in _CALLS else None

    def _once(self, eqn: Equation, now: Sequence[Known]) -> tuple[Equation, list[Known]]:
        """A call or a conditional, whose bodies are given `now`."""
        ends: list[list[Known]] = []

        def change(jaxpr: Jaxpr) -> Jaxpr:
            new, after = self.jaxpr(jaxpr, now)
            ends.append(after)
            return new

        return simplify.with_bodies(eqn, change), [max(end) for end in zip(*ends, strict=True)]

    def _solve(self, eqn: Equation, now: Sequence[Known]) -> tuple[Equation, list[Known]] | None:
        """A solution by functions of the user's, or of JAX's: the functions that solve are guarded."""
        lengths, bodies = eqn.params["const_lengths"], eqn.params["jaxprs"]
        starts = [sum(lengths[:i]) for i in range(5)]
        if max(now[: starts[4]], default=Known.CONSTANT) >= Known.COTANGENT:
            return None
        sides = [Known.WITH_LINES] * (len(now) - starts[4])
        solvers = {}
        for place, name in ((2, "solve"), (3, "transpose_solve")):
            if bodies[place] is not None:
                jaxpr, consts = opened(bodies[place])
                given = [*now[starts[place] : starts[place + 1]], *sides]
                solvers[name] = ClosedJaxpr(self.jaxpr(jaxpr, given)[0], consts)
        params = {**eqn.params, "jaxprs": bodies._replace(**solvers)}
        return eqn.replace(params=params), [Known.WITH_LINES] * len(eqn.outvars)

    def _scan(self, eqn: Equation, now: Sequence[Known]) -> tuple[Equation, list[Known]]:
        layout = scan_layout(eqn)
        carries = slice(layout.num_consts, layout.num_consts + layout.num_carry)
        body, ends = self._repeated(eqn.params["jaxpr"], list(now), carries)
        return eqn.replace(params={**eqn.params, "jaxpr": body}), ends

    def _while(self, eqn: Equation, now: Sequence[Known]) -> tuple[Equation, list[Known]]:
        """The body of a `while`; its condition computes no cotangent."""
        start = eqn.params["cond_nconsts"]
        inner = list(now[start:])
        body, ends = self._repeated(eqn.params["body_jaxpr"], inner, slice(eqn.params["body_nconsts"], len(inner)))
        return eqn.replace(params={**eqn.params, "body_jaxpr": body}), ends

    def _repeated(self, held: ClosedJaxpr, now: list[Known], carries: slice) -> tuple[ClosedJaxpr, list[Known]]:
        """The body of a loop; the knowledge about a carry holds at the start and after every step."""
        jaxpr, consts = opened(held)
        while True:
            body, ends = self.jaxpr(jaxpr, now)
            count = len(now[carries])
            after = [max(a, b) for a, b in zip(now[carries], ends[:count], strict=True)]
            if after == now[carries]:
                return ClosedJaxpr(body, consts), [*after, *ends[count:]]
            now[carries] = after


def _constant(eqn: Equation, now: Sequence[Known], fixed: Sequence[Number | None]) -> Known:
    """The knowledge about the results of an equation that reads no cotangent, given the numbers that it reads."""
    name, operands = eqn.primitive.name, eqn.invars
    moves = [_is_inexact(v) and not isinstance(v, Literal) for v in operands]
    moves = [does and number is None for does, number in zip(moves, fixed, strict=True)]
    is_of_masks = all(one is Known.MASK for one, does in zip(now, moves, strict=True) if does)
    if name in MOVEMENT | MASKS and is_of_masks and (any(moves) or not all(map(_is_inexact, operands))):
        return Known.MASK
    solves = Known.SOLUTION in now or name in SOLVING or bool(SOLVING & inner_primitives(eqn))
    return Known.SOLUTION if solves and _is_inexact(eqn.outvars[0]) else Known.CONSTANT


# ------------------------------------------------------------------------------------------------------ one product


def _product(
    eqn: Equation, now: Sequence[Known], fixed: Sequence[Number | None], everywhere: bool, by_slopes: bool
) -> list[Equation]:
    """The equation, guarded if it multiplies a cotangent that may be zero with a value that may be infinite.

    An elementwise product becomes its equations, so that a plan prices the ops that XLA fuses. Other products become a
    call.

    With `everywhere` a solution may be the zero, too: in a gradient that is differentiated again, its right side is a
    cotangent.
    """
    name, params = eqn.primitive.name, tuple(sorted(eqn.params.items()))
    moving = [i for i, one in enumerate(now) if one >= Known.COTANGENT]
    if len(moving) != 1 or not _is_inexact(eqn.outvars[0]):
        return [eqn]
    place, is_solution = moving[0], Known.SOLUTION in now
    if name in ("triangular_solve", "tridiagonal_solve") and place == len(now) - 1:
        return [simplify.instead(eqn, named(Solve(eqn.primitive, params)))]
    if name == "dot_general" and is_solution:
        return [simplify.instead(eqn, named(Dot(eqn.primitive, (0, 1) if everywhere else (place,), params)))]
    is_masked = name == "mul" and (Known.MASK in now or fixed[1 - place] == 0)
    if place not in _LINEAR_IN.get(name, ()) or (_is_harmless(fixed[1 - place]) and not is_masked):
        return [eqn]
    zeros = (0, 1) if by_slopes and name == "mul" else (place,)
    may_be_zero = now[place] > Known.COTANGENT or is_solution
    product = Product(eqn.primitive, zeros, params, now[place] is not Known.WITH_ZEROS) if may_be_zero else None
    if is_masked:
        return simplify.in_place(eqn, Masked(eqn.primitive, place, params, product))
    return [eqn] if product is None else simplify.in_place(eqn, named(product))


def _is_inexact(v: Any) -> bool:
    return jax.numpy.issubdtype(v.aval.dtype, np.inexact)


def _is_harmless(number: Number | None) -> bool:
    """Whether a factor, or a divisor, is a number that gives no NaN with zero or infinity."""
    return number is not None and math.isfinite(number) and number != 0
