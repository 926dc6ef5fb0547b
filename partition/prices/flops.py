"""Count the operations and the bytes of one equation.

A call or a loop counts with the equations inside it. Bytes are the bytes of operands read and of results written, as if
the equation ran alone; `is_fused` names the primitives that move none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jointcut.partition.prices.counts import PER_ELEMENT, Arrays, Work, counted
from jointcut.partition.program.jax import abstract, jaxprs, own_primitives
from jointcut.partition.program.primitives import (
    BY_BODY,
    CHEAP,
    CUMULATIVE,
    OPAQUE,
    PICKING,
    REORDERING,
    SCAN,
    WEIGHTS,
    WHILE,
)
from jointcut.partition.program.sizes import names_in

#: Primitives that XLA folds into the loop that reads the result. XLA does not always do so with a primitive that takes
#: elements in another order or from several arrays. Other movement only changes how an index is computed.
_FUSED = CHEAP - REORDERING


def flops(eqn: jaxprs.Equation) -> float | None:
    """Flops of one run of an equation; None for a kernel that does not state them.

    An operation other than an addition or a multiplication counts as the additions that take as long: see
    `primitives.WEIGHTS`.
    """
    done = work(eqn)
    return None if done is None else done.products + done.weighted


def jaxpr_flops(closed: Any) -> float:
    """Operations of one run of a jaxpr, as people count them: an `exp` or a comparison is one, like an addition.

    Kernels that do not state their work count nothing.
    """
    done = _sequence(jaxprs.opened(closed)[0])
    return done.products + done.others


def work(eqn: jaxprs.Equation) -> Work | None:
    """The work of one run of an equation; None for a kernel that does not state it.

    A call counts the equations inside, a scan counts its body once per trip. For several branches, each kind of work
    counts as in the branch with most of it. How often a `while` runs is unknown: its body and its condition count once,
    so its count is a lower bound. A loop of ours counts as often as it is expected to run (`CallRules.runs`).
    """
    name = eqn.primitive.name
    if name in OPAQUE:
        told = eqn.params.get("cost_estimate")
        return None if told is None else _told(told.flops, told.transcendentals)
    if (inside := _inside(eqn)) is not None:
        parts = (_sequence(jaxpr).times(count) for jaxpr, count in inside)
        return Work.largest(parts) if _runs_one(eqn) else Work.sum(parts)
    reads, writes = ([getattr(v.aval, "shape", ()) for v in ends] for ends in (eqn.invars, eqn.outvars))
    is_complex = any(getattr(getattr(v.aval, "dtype", None), "kind", "") == "c" for v in eqn.outvars)
    if name in BY_BODY and (done := counted(name, reads, writes, eqn.params)) is not None:
        return Work.largest(map(_sequence, jaxprs.inner_jaxprs(eqn))).times(done.others)
    return counted(name, reads, writes, eqn.params, is_complex)


def products(eqn: jaxprs.Equation, count: float = 1.0) -> Iterator[tuple[jaxprs.Equation, float]]:
    """Yield the matrix products and convolutions of one run of an equation, and the flops of each, over all trips."""
    if (inside := _inside(eqn)) is not None:
        for jaxpr, trips in inside:
            for part in jaxpr.eqns:
                yield from products(part, count * trips)
    elif (done := work(eqn)) is not None and done.products:
        yield eqn, count * done.products


def _inside(eqn: jaxprs.Equation) -> Sequence[tuple[jaxprs.Jaxpr, int]] | None:
    """The programs inside a call or a loop, and how often each runs; None for other equations, and for kernels."""
    if eqn.primitive.name == SCAN:
        layout = jaxprs.scan_layout(eqn)
        return [(layout.body, layout.length)]
    if (runs := _runs(eqn)) is not None:
        return [(jaxprs.opened(closed)[0], count) for closed, count in runs]
    if eqn.primitive.name in PER_ELEMENT or eqn.primitive.name in OPAQUE:
        return None
    return [(jaxpr, 1) for jaxpr in jaxprs.inner_jaxprs(eqn)] or None


def _runs_one(eqn: jaxprs.Equation) -> bool:
    """Whether only one of the programs inside runs, as of branches."""
    return eqn.primitive.name not in (SCAN, WHILE) and _runs(eqn) is None


def _runs(eqn: jaxprs.Equation) -> Sequence[tuple[jaxprs.ClosedJaxpr, int]] | None:
    """As `runs_of`; None for programs of symbolic sizes, since the call's own jaxpr has numbers in their place."""
    runs = own_primitives.runs_of(eqn)
    return None if runs is None or any(names_in(closed) for closed, _ in runs) else runs


def _told(flops: float, transcendentals: float) -> Work:
    """The work that a kernel states in its `cost_estimate`; its flops count as flops of products."""
    return Work(float(flops), float(transcendentals), WEIGHTS["exp"] * float(transcendentals))


def _sequence(jaxpr: jaxprs.Jaxpr) -> Work:
    return Work.sum(done for eqn in jaxpr.eqns if (done := work(eqn)) is not None)


def moved_bytes(eqn: jaxprs.Equation) -> int:
    """Bytes that one run of an equation reads and writes, if it runs alone.

    A primitive that reads only some elements counts only those. A call moves at least its operands and results, and at
    least the bytes of the ops inside that are not fused. A scan counts this once per trip, branches count as the branch
    that moves most, and a `while` as one trip.
    """
    name = eqn.primitive.name
    if name in OPAQUE and (told := eqn.params.get("cost_estimate")) is not None:
        return int(told.bytes_accessed)
    if (inside := _inside(eqn)) is not None:
        parts = [count * _moved_inside(jaxpr) for jaxpr, count in inside]
        return max(parts) if _runs_one(eqn) else sum(parts)
    reads, writes = ([abstract.aval_bytes(v.aval) for v in ends] for ends in (eqn.invars, eqn.outvars))
    row = Arrays([getattr(v.aval, "shape", ()) for v in eqn.invars], [], eqn.params).row if name in CUMULATIVE else 1
    return traffic(name, reads, writes, row)


def _moved_inside(jaxpr: jaxprs.Jaxpr) -> int:
    ends = sum(abstract.aval_bytes(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars))
    return max(ends, sum(moved_bytes(eqn) for eqn in jaxpr.eqns if not is_fused(eqn.primitive.name)))


def is_fused(name: str) -> bool:
    """Whether XLA computes a primitive inside the loop of a neighbour, so that it moves no bytes of its own."""
    return name in _FUSED


def traffic(name: str, reads: Sequence[int], writes: Sequence[int], row: int = 1) -> int:
    """Bytes that a primitive reads and writes, from the bytes of its operands and results.

    A cumulative sum along rows of length `row` is computed in parallel, which passes over the rows log2(row) times.
    """
    written = sum(writes)
    if name in PICKING and reads:
        return min(reads[0], written) + sum(reads[1:]) + written
    passes = math.ceil(math.log2(max(2, row))) if name in CUMULATIVE else 1
    return passes * (sum(reads) + written)
