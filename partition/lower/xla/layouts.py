"""Say which operands and results of products and convolutions are copied into another order.

A product wants its left operand as (batch, free, contracted) and its right one as (batch, contracted, free). Where just
the last two axes stand the other way round, the kernel reads them so; any other order is a copy. A convolution wants
(batch, space, feature), and a kernel as (space, in, out).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from jointcut.partition.lower.memory import Row
from jointcut.partition.lower.xla.instructions import CONVOLUTION, DOT, Kind, Program, Type, equation
from jointcut.partition.program.jaxprs import Equation


def product(program: Program, eqn: Equation, reads: Sequence[int], made: Type, row: Row) -> int:
    """Add a product, with copies of its operands where it wants them in another order.

    One that sums nothing up is a multiplication of its operands, each repeated along the other's free axes.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    if not contracted[0]:
        return _outer(program, eqn, reads, made, row)
    (left, is_left_turned), (right, is_right_turned) = (
        _ordered(program, reads[k], shape, (batch[k], contracted[k]), k == 0, row)
        for k, shape in enumerate(shapes(eqn))
    )
    n = program.add(Kind.ALONE, DOT, [left, right], made, row)
    program.turned[n] = is_left_turned, is_right_turned
    return n


def _outer(program: Program, eqn: Equation, reads: Sequence[int], made: Type, row: Row) -> int:
    """Add the multiplication that a product without contracted axes is."""
    batch = eqn.params["dimension_numbers"][1]
    place_of = [0, *accumulate(length != 1 for length in made.shape)]
    spread, first = [], len(batch[0])
    for n, shape, shared in zip(reads, shapes(eqn), batch, strict=True):
        free = [d for d in range(len(shape)) if d not in shared]
        at = {**{d: k for k, d in enumerate(shared)}, **{d: first + k for k, d in enumerate(free)}}
        first += len(free)
        places = [place_of[at[d]] for d in range(len(shape)) if shape[d] != 1]
        is_whole = math.prod(shape) == math.prod(made.shape) or program.is_number(n)
        spread.append(n if is_whole else program.spread(n, places, made, row))
    return program.add(Kind.POINT, "mul", spread, made, row)


def _ordered(
    program: Program, n: int, shape: Sequence[int], axes: tuple[Sequence[int], Sequence[int]], is_left: bool, row: Row
) -> tuple[int, bool]:
    """One operand in the order that a product wants, or turned, and whether it is turned.

    `axes` are its batch axes and those that are contracted.
    """
    batch, contracted = axes
    free = [d for d in range(len(shape)) if d not in batch and d not in contracted]
    parts = [list(batch), free, list(contracted)]
    if program.names[n] == "transpose" and program.params(n) and program.types[n].shape == tuple(shape):
        moves = program.params(n)["permutation"]  # two changes of order are one
        parts = [[moves[d] for d in part] for part in parts]
        shape = [length for _, length in sorted(zip(moves, shape, strict=True))]
        n = program.reads[n][0]
    batch, free, contracted = ([d for d in part if shape[d] != 1] for part in parts)
    wanted = [*batch, *free, *contracted] if is_left else [*batch, *contracted, *free]
    turned = [*batch, *contracted, *free] if is_left else [*batch, *free, *contracted]
    if wanted == sorted(wanted):
        return n, False
    if turned == sorted(turned) and len(free) == len(contracted) == 1:
        return n, True
    return program.add(Kind.MOVE, "transpose", [n], _moved(program, n, [shape[d] for d in wanted]), row), False


def swap(program: Program, n: int) -> None:
    """Swap the operands of a product: the right one is the left one then, and turned unless it was."""
    is_left_turned, is_right_turned = program.turned[n]
    program.turned[n] = not is_right_turned, not is_left_turned


def only_swaps(program: Program, n: int, permutation: Sequence[int]) -> bool:
    """Whether a change of a product's order swaps what its two operands give: then XLA swaps the operands instead."""
    row = program.rows[n]
    if program.names[n] != DOT or row is None or not program.params(n):
        return False
    contracted, batch = program.params(n)["dimension_numbers"]
    eqn = equation(row)
    left, right = (len(shape) - len(batch[0]) - len(contracted[0]) for shape in ([] if eqn is None else shapes(eqn)))
    first = len(batch[0])
    order = *range(first), *range(first + left, first + left + right), *range(first, first + left)
    return tuple(permutation) == order


def flattens(program: Program, n: int, operand: int) -> bool:
    """Whether an instruction is a product that sees one axis in the place of several of an operand."""
    row = program.rows[n]
    if program.names[n] != DOT or row is None or (eqn := equation(row)) is None or not eqn.params:
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    ranks = map(len, shapes(eqn))
    merged = (max(len(c), rank - len(c) - len(b)) > 1 for c, b, rank in zip(contracted, batch, ranks, strict=True))
    return any(is_merged for v, is_merged in zip(program.reads[n], merged, strict=True) if v == operand)


def shapes(eqn: Equation) -> list[tuple[int, ...]]:
    """The shapes of an equation's operands."""
    types: list[Any] = [v.aval for v in eqn.invars]
    return [t.shape for t in types]


def convolution(program: Program, eqn: Equation, reads: Sequence[int], made: Type, row: Row) -> int:
    """Add a convolution, with copies of its operands and its result where it wants them in another order.

    The gradient of a grouped convolution's kernel is computed for all pairs of groups. A mask picks the right ones,
    which are summed up: two arrays that are as many times as large as there are groups.
    """
    axes, groups = eqn.params["dimension_numbers"], eqn.params.get("batch_group_count", 1)
    image, kernel = shapes(eqn)
    lhs = _in_order(program, reads[0], image, [axes.lhs_spec[0], *axes.lhs_spec[2:], axes.lhs_spec[1]], row)
    rhs = _in_order(program, reads[1], kernel, [*axes.rhs_spec[2:], axes.rhs_spec[1], axes.rhs_spec[0]], row)
    if groups > 1:
        all_pairs = Type((groups, *made.shape), made.dtype, groups * made.bytes)
        whole = program.add(Kind.ALONE, CONVOLUTION, [lhs, rhs], all_pairs, row)
        masked = program.add(Kind.MOVE, "select_n", [whole], all_pairs, row)
        return program.add(Kind.REDUCE, "reduce_sum", [masked], made, row)
    order = [axes.out_spec[0], *axes.out_spec[2:], axes.out_spec[1]]
    result = Type(tuple(made.shape[d] for d in order), made.dtype, made.bytes)
    convolved = program.add(Kind.ALONE, CONVOLUTION, [lhs, rhs], result, row)
    if _is_sorted(order, made.shape):
        return convolved
    return program.add(Kind.MOVE, "transpose", [convolved], made, row)


def _in_order(program: Program, n: int, shape: Sequence[int], order: Sequence[int], row: Row) -> int:
    if _is_sorted(order, shape):
        return n
    return program.add(Kind.MOVE, "transpose", [n], _moved(program, n, [shape[d] for d in order]), row)


def _is_sorted(order: Sequence[int], shape: Sequence[int]) -> bool:
    long = [d for d in order if shape[d] != 1]
    return long == sorted(long)


def _moved(program: Program, n: int, shape: Sequence[int]) -> Type:
    return Type(tuple(shape), program.types[n].dtype, program.types[n].bytes)
