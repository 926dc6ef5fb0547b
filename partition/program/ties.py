"""Say along which axes an equation treats each row alone.

A `Tie` names one axis of each operand and of each result: row `i` of the results needs row `i` of the operands and no
other. A sum over rows is a tie too: its result has no rows, and the results of parts of the rows are joined by a sum.
`ties` lists all ties of an equation that holds no program. A primitive without a rule has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jointcut.partition.program.jax.jaxprs import Atom, Equation
from jointcut.partition.program.primitives import (
    CUMULATIVE,
    DRAWING,
    ELEMENTWISE,
    FOLDS,
    REDUCTIONS,
    SERIES,
    SOLVING,
    SUMS,
)

#: The primitive that joins the results of parts of a sum.
ADD = "add"


@dataclass(frozen=True)
class Tie:
    """Axes along which an equation treats each row alone.

    Attributes:
        operands: the axis of the rows of each operand; None where a row of the result may need any of it.
        results: the axis of the rows of each result; None where it has none.
        joins: for results without rows, the primitive that joins the results for parts of the rows.
        starts: whether the first operand counts once, not for each part.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    joins: str = ""
    starts: bool = False

    def fits(self, places: Sequence[object]) -> bool:
        """Whether the rows of all operands with rows lie along these axes; any row may read the other operands."""
        return all(p is None or p == axis for p, axis in zip(places, self.operands, strict=True))


def ties(eqn: Equation) -> Iterator[Tie]:
    """The ties of an equation."""
    for tie in RULES.get(eqn.primitive.name, lambda _: iter(()))(eqn):
        yield replace(tie, operands=_whole(tie.operands), results=_whole(tie.results))


def _whole(axes: Sequence[int | None]) -> tuple[int | None, ...]:
    """Axes as numbers of Python; parameters of equations hold some of NumPy's."""
    return tuple(None if a is None else int(a) for a in axes)


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _first(eqn: Equation, pairs: Iterator[tuple[int, int]], count: int = 1) -> Iterator[Tie]:
    """Ties of the first operands with all results; rows may read the other operands whole."""
    others = (None,) * (len(eqn.invars) - count)
    return (Tie((a,) * count + others, (b,) * len(eqn.outvars)) for a, b in pairs)


def _same(eqn: Equation, axes: Iterator[int]) -> Iterator[Tie]:
    """Ties of axes that all operands and results share."""
    return _first(eqn, ((a, a) for a in axes), len(eqn.invars))


# ----------------------------------------------------------------------------------------- element by element, and rows


def _elementwise(eqn: Equation) -> Iterator[Tie]:
    """An operand of fewer numbers, without axes or with one of length 1, is read by all rows."""
    shapes, whole = [_shape(v) for v in eqn.invars], _shape(eqn.outvars[0])
    if {len(shape) for shape in shapes} <= {0, len(whole)} and all(_shape(v) == whole for v in eqn.outvars):
        for a, n in enumerate(whole):
            yield Tie(tuple(a if shape and shape[a] == n else None for shape in shapes), (a,) * len(eqn.outvars))


def _but(key: str) -> Callable[[Equation], Iterator[Tie]]:
    """The rule of a primitive that works along the axis or the axes of a parameter, and leaves all axes in place."""

    def rule(eqn: Equation) -> Iterator[Tie]:
        given = eqn.params[key]
        taken = {*given} if isinstance(given, tuple | list) else {given}
        return _same(eqn, (a for a in range(len(_shape(eqn.invars[0]))) if a not in taken))

    return rule


def _behind(count: Callable[[Equation], int]) -> Callable[[Equation], Iterator[Tie]]:
    """The rule of a primitive that works within its last axes, `count` of them; the axes before them are a batch."""

    def rule(eqn: Equation) -> Iterator[Tie]:
        batch = _shape(eqn.invars[0])[: len(_shape(eqn.invars[0])) - count(eqn)]
        if all(_shape(v)[: len(batch)] == batch for v in (*eqn.invars, *eqn.outvars)):
            yield from _same(eqn, iter(range(len(batch))))

    return rule


def _solved(eqn: Equation) -> Iterator[Tie]:
    """A triangular system: a batch of them, and the columns or rows on the right."""
    last = len(_shape(eqn.invars[0])) - 1
    yield from _same(eqn, iter(range(last - 1)))
    column = last if eqn.params["left_side"] else last - 1
    yield Tie((None, column), (column,))


#: The primitives that join the results of a reduction for parts, if they have another name than the reduction.
_JOINS = {"reduce_sum": ADD, "reduce_prod": "mul"}


def _reduced(eqn: Equation) -> Iterator[Tie]:
    axes, name = eqn.params["axes"], eqn.primitive.name
    left = [a for a in range(len(_shape(eqn.invars[0]))) if a not in axes]
    yield from _first(eqn, ((a, i) for i, a in enumerate(left)))
    if name in FOLDS:
        joins = _JOINS.get(name, name.removeprefix("reduce_"))
        yield from (Tie((a,), (None,), joins) for a in axes)


# -------------------------------------------------------------------------------------------- other places, or shapes


def _broadcast(eqn: Equation) -> Iterator[Tie]:
    old, new = _shape(eqn.invars[0]), eqn.params["shape"]
    sources = {b: a for a, b in enumerate(eqn.params["broadcast_dimensions"]) if old[a] == new[b]}
    others = (None,) * (len(eqn.invars) - 1)
    return (Tie((sources.get(b), *others), (b,)) for b in range(len(new)))


def _transposed(eqn: Equation) -> Iterator[Tie]:
    return _first(eqn, ((a, b) for b, a in enumerate(eqn.params["permutation"])))


def _squeezed(eqn: Equation) -> Iterator[Tie]:
    left = [a for a in range(len(_shape(eqn.invars[0]))) if a not in eqn.params["dimensions"]]
    return _first(eqn, ((a, i) for i, a in enumerate(left)))


def _reshaped(eqn: Equation) -> Iterator[Tie]:
    """The axes that are as long as before, with as many elements in the axes before them."""
    old, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if eqn.params["dimensions"] is None:
        for a, n in enumerate(old):
            before = math.prod(old[:a])
            found = [b for b, m in enumerate(new) if m == n and math.prod(new[:b]) == before]
            yield from _first(eqn, ((a, b) for b in found[:1]))


def _cut(eqn: Equation) -> Iterator[Tie]:
    """The axes that are taken whole; all rows read the indices."""
    old, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    strides = eqn.params.get("strides") or (1,) * len(old)
    return _first(eqn, ((a, a) for a, n in enumerate(new) if n == old[a] and strides[a] == 1))


def _written(eqn: Equation) -> Iterator[Tie]:
    """The axes along which an update is as long as the array that it is written into."""
    old, new = _shape(eqn.invars[0]), _shape(eqn.invars[1])
    return _first(eqn, ((a, a) for a, n in enumerate(new) if n == old[a]), 2)


def _padded(eqn: Equation) -> Iterator[Tie]:
    return _first(eqn, ((a, a) for a, by in enumerate(eqn.params["padding_config"]) if tuple(by) == (0, 0, 0)))


def _laid(eqn: Equation) -> Iterator[Tie]:
    """The axes that lie on the devices of a mesh as before; automatic axes do."""
    before, after = (
        (*getattr(getattr(v.aval, "sharding", None), "spec", ()),) for v in (eqn.invars[0], eqn.outvars[0])
    )
    rank = len(_shape(eqn.outvars[0]))
    pairs = zip((*before, *(None,) * (rank - len(before))), (*after, *(None,) * (rank - len(after))), strict=True)
    return _same(eqn, (a for a, (old, new) in enumerate(pairs) if old == new))


def _iota(eqn: Equation) -> Iterator[Tie]:
    given = (None,) * len(eqn.invars)
    return (Tie(given, (a,)) for a in range(len(eqn.params["shape"])) if a != eqn.params["dimension"])


# ------------------------------------------------------------------------------------------------ rows by their number


def _gathered(eqn: Equation) -> Iterator[Tie]:
    """Batches, axes that are taken whole, and the rows of the indices."""
    operand, indices = map(_shape, eqn.invars)
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batch = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    rows = [b for b in range(len(_shape(eqn.outvars[0]))) if b not in numbers.offset_dims]
    window = [a for a in range(len(operand)) if a not in (*numbers.collapsed_slice_dims, *batch)]
    yield from (Tie((a, i), (rows[i],)) for a, i in batch.items())
    places = zip(window, numbers.offset_dims, strict=True)
    yield from (Tie((a, None), (b,)) for a, b in places if sizes[a] == operand[a])
    yield from (Tie((None, i), (rows[i],)) for i in range(len(indices) - 1) if i not in batch.values())


def _scattered(eqn: Equation) -> Iterator[Tie]:
    """Batches, and axes that are written whole; for sums also the rows of the updates."""
    operand, indices, updates = map(_shape, eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    batch = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    rows = [u for u in range(len(updates)) if u not in numbers.update_window_dims]
    window = [a for a in range(len(operand)) if a not in (*numbers.inserted_window_dims, *batch)]
    yield from (Tie((a, i, rows[i]), (a,)) for a, i in batch.items())
    places = zip(window, numbers.update_window_dims, strict=True)
    yield from (Tie((a, None, u), (a,)) for a, u in places if updates[u] == operand[a])
    if eqn.primitive.name in SUMS:
        free = (i for i in range(len(indices) - 1) if i not in batch.values())
        yield from (Tie((None, i, rows[i]), (None,), ADD, starts=True) for i in free)


# ------------------------------------------------------------------------------------------------ products, and windows


def _multiplied(eqn: Equation) -> Iterator[Tie]:
    """Batches of products, and rows and columns of one operand. Over axes that are summed up, a product is a sum."""
    contracted, batch = eqn.params["dimension_numbers"]
    free = [
        [a for a in range(len(_shape(v))) if a not in (*batch[k], *contracted[k])] for k, v in enumerate(eqn.invars)
    ]
    count = len(batch[0])
    yield from (Tie((a, b), (i,)) for i, (a, b) in enumerate(zip(*batch, strict=True)))
    yield from (Tie((a, None), (count + i,)) for i, a in enumerate(free[0]))
    yield from (Tie((None, b), (count + len(free[0]) + i,)) for i, b in enumerate(free[1]))
    yield from (Tie((a, b), (None,), ADD) for a, b in zip(*contracted, strict=True))


def _convolved(eqn: Equation) -> Iterator[Tie]:
    """The batch, and the features of the kernel; along space, windows overlap."""
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    if eqn.params["batch_group_count"] == 1:
        yield Tie((numbers.lhs_spec[0], None), (numbers.out_spec[0],))
        if groups == 1:
            yield Tie((None, numbers.rhs_spec[0]), (numbers.out_spec[1],))
    if groups == 1:
        yield Tie((numbers.lhs_spec[1], numbers.rhs_spec[1]), (None,), ADD)


def _windowed(eqn: Equation) -> Iterator[Tie]:
    """The axes along which each window is one element, and no element is skipped."""
    rank, params = len(_shape(eqn.outvars[0])), eqn.params
    ones = [params.get(key, (1,) * rank) for key in ("base_dilation", "window_dilation")]
    ones += [params["window_dimensions"], params["window_strides"]]
    alone = [a for a in range(rank) if all(one[a] == 1 for one in ones) and tuple(params["padding"][a]) == (0, 0)]
    return _same(eqn, iter(alone))


RULES: dict[str, Callable[[Equation], Iterator[Tie]]] = {
    **dict.fromkeys((ELEMENTWISE | SERIES) - DRAWING, _elementwise),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(CUMULATIVE, _but("axis")),
    **dict.fromkeys(SOLVING - {"custom_linear_solve"}, _behind(lambda _: 2)),
    "broadcast_in_dim": _broadcast,
    "concatenate": _but("dimension"),
    "conv_general_dilated": _convolved,
    "dot_general": _multiplied,
    "dynamic_slice": _cut,
    "dynamic_update_slice": _written,
    "fft": _behind(lambda eqn: len(eqn.params["fft_lengths"])),
    "gather": _gathered,
    "iota": _iota,
    "pad": _padded,
    "pvary": _elementwise,
    "reduce_window_max": _windowed,
    "reduce_window_min": _windowed,
    "reduce_window_sum": _windowed,
    "reshape": _reshaped,
    "reshard": _laid,
    "rev": _but("dimensions"),
    "scatter": _scattered,
    "scatter-add": _scattered,
    "scatter-max": _scattered,
    "scatter-min": _scattered,
    "scatter-mul": _scattered,
    "scatter-sub": _scattered,
    "select_and_gather_add": _windowed,
    "select_and_scatter_add": _windowed,
    "slice": _cut,
    "sort": _but("dimension"),
    "split": _but("axis"),
    "squeeze": _squeezed,
    "threefry2x32": _elementwise,
    "top_k": _but("axis"),
    "transpose": _transposed,
    "triangular_solve": _solved,
}
