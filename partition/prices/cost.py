"""Price every value in bytes and every op in seconds.

A residual costs the bytes that stay alive between the halves: one copy of the array per trip of its loops. Inputs of
the program cost nothing, since the caller holds them. Outputs cost nothing, since the caller gets them anyway. A price
in bytes is an exact integer.

An op costs the seconds of one more run, which a *cost model* estimates. `Roofline` (Williams, Waterman and Patterson,
2009) knows three rates of a device: an op takes as long as its flops or as its bytes, whichever is longer. An op that
XLA fuses into a neighbour moves no bytes of its own and costs only its flops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, Protocol, Self, TypeGuard

from jointcut.partition.errors import PlanError, message
from jointcut.partition.prices.counts import PER_ELEMENT, Shape, Work, counted
from jointcut.partition.prices.flops import is_fused, moved_bytes, traffic, work
from jointcut.partition.prices.rules import heavy
from jointcut.partition.program.graph import LITERAL, OPEN, STEP, Graph, Op
from jointcut.partition.program.primitives import CALLS, COLLECTIVES, TOTALS
from jointcut.partition.program.sides import Sides

#: The seconds that a collective of few bytes takes, about as nccl-tests tells on eight GPUs of one host.
LINK_S = 2e-5

#: With fewer bytes of temporaries than this, by the model, no fresh memory is needed: C libraries keep buffers up to 32
#: MB for the next call, and XLA takes about a quarter more than the model says.
REUSED_BYTES = 24_000_000


def saving_bytes(graph: Graph, sides: Sides) -> list[int]:
    """Return, for each value, the bytes that saving it keeps alive between the halves.

    Branches share the space of their values. Each value counts for its share of the space, which is never too much for
    all.
    """
    free = {v for v, _ in graph.inputs} | sides.outputs
    return [0 if v.id in free else v.saved_bytes // graph.rivals[v.loop] for v in graph.values]


class CostModel(Protocol):
    """An estimate of how long ops take, and how long bytes take to write and read; users may bring their own."""

    def seconds(self, graph: Graph, op: Op) -> float:
        """The seconds that one run of the op takes: finite, and not below zero."""
        ...

    def saving_seconds(self, num_bytes: int) -> float:
        """The seconds that writing the bytes for the backward and reading them take.

        They are finite, above zero, and in proportion to the bytes.
        """
        ...


@dataclass(frozen=True)
class Roofline:
    """The rates of a device, each per second.

    Attributes:
        flops_per_s: flops of matrix products and convolutions.
        elementwise_per_s: additions of vectors. Every other operation counts as additions, by its weight in
            `primitives`.
        bytes_per_s: bytes read and written.
        fresh_bytes_per_s: the same for memory that is newly handed to the program: on a CPU the system hands out large
            buffers page by page, at a tenth of the speed. None means that this rate is `bytes_per_s`.
        host_bytes_per_s: bytes copied between the device's memory and the host's, each way. None means that it is
            measured where something may be offloaded.

    Raises `PlanError` for a rate that is not positive and finite.
    """

    flops_per_s: float
    elementwise_per_s: float
    bytes_per_s: float
    fresh_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse rates that are not positive and finite."""
        for rate in fields(self):
            given = getattr(self, rate.name)
            if given is None and rate.default is None:
                continue
            if not (_is_finite(given) and given > 0):
                cure = "Give what the device does in a second, or measure it."
                raise PlanError(message(f"Roofline.{rate.name}", f"is {given!r}, not a positive number.", cure))

    def seconds(self, graph: Graph, op: Op) -> float:
        """The time to compute or to move the bytes, the longer of the two; moving only if the flops are unknown.

        For an op among devices it is the time of its bytes on the links.
        """
        if op.name in _FREE:
            return 0.0
        if op.name in COLLECTIVES:
            moved = max(sum(graph.values[v].bytes for v in ends) for ends in (op.inputs, op.outputs))
            return LINK_S + moved * (2 if op.name in TOTALS else 1) / self.moved_per_s
        done = _work(graph, op)
        products = done.products / self.product_rate(graph, op) if done.products else 0.0
        computing = products + done.weighted / self.elementwise_per_s
        moving = 0.0 if _is_fused(graph, op) else _moved_bytes(graph, op) / self.bytes_per_s
        return max(computing, moving)

    @property
    def moved_per_s(self) -> float:
        """Bytes a second from other devices to one; those of a host share its memory."""
        return self.bytes_per_s

    def product_rate(self, graph: Graph, op: Op) -> float:
        """The flops per second of an op's products."""
        del graph, op
        return self.flops_per_s

    def saving_seconds(self, num_bytes: int) -> float:
        """The seconds to write the bytes once and read them once."""
        return 2 * num_bytes / (self.fresh_bytes_per_s or self.bytes_per_s)

    def within(self, num_bytes: int) -> Self:
        """The rates for a program that saves at most `num_bytes`; if these are few, it needs no fresh memory."""
        return replace(self, fresh_bytes_per_s=None) if num_bytes < REUSED_BYTES else self


def _is_finite(given: Any) -> TypeGuard[float]:
    """Whether an object is a real number, of Python's or numpy's, that a float can hold."""
    if not isinstance(given, Real) or isinstance(given, bool):
        return False
    try:
        return math.isfinite(given)
    except OverflowError:
        return False


_FREE = (STEP, LITERAL, *OPEN)  # a scan's body lies in the graph itself, op by op


def _is_fused(graph: Graph, op: Op) -> bool:
    """Whether XLA folds the op into a neighbour's loop, as it also does with a call that holds nothing heavy."""
    return is_fused(op.name) or (op.name in CALLS and not heavy(graph, op))


def _work(graph: Graph, op: Op) -> Work:
    """The op's work, from its equation if there is one; else from its shapes, as if each primitive ran once on them."""
    if op.payload is not None:
        return work(op.payload) or Work()
    names = [op.name] if op.name in PER_ELEMENT else sorted(op.inner) or [op.name]
    reads = [_shape(graph, v) for v in op.operands]
    writes = [graph.values[v].shape for v in op.outputs]
    is_complex = any(graph.values[v].dtype.startswith("complex") for v in op.outputs)
    return Work.sum(counted(name, reads, writes, is_complex=is_complex) or Work() for name in names)


def _shape(graph: Graph, v: int | None) -> Shape:
    return () if v is None else graph.values[v].shape


def _moved_bytes(graph: Graph, op: Op) -> int:
    if op.payload is not None:
        return moved_bytes(op.payload)
    reads = [0 if v is None else graph.values[v].bytes for v in op.operands]
    shape = _shape(graph, op.operands[0]) if op.operands else ()
    return traffic(op.name, reads, [graph.values[v].bytes for v in op.outputs], shape[-1] if shape else 1)


def op_seconds(graph: Graph, op: Op, model: CostModel) -> float:
    """Return the seconds of one run of an op: the figure that the op carries itself, else the model's.

    An op on values in parts takes one device its share of the time.

    Raises `PlanError` where the figure is negative, infinite or not a number.
    """
    if op.name in _FREE:
        return 0.0
    taken = model.seconds(graph, op) if op.seconds is None else op.seconds
    if _is_finite(taken) and taken >= 0:
        is_given = op.seconds is not None
        return float(taken) if is_given else float(taken) / graph.parts_of(op) + moving_seconds(graph, op, model)
    where = graph.where(op.outputs[0]) if op.outputs else f"op {op.id} ({op.name})"
    what = f"takes {taken!r} seconds, says {'the op itself' if op.seconds is not None else type(model).__name__}."
    raise PlanError(message(where, what, "Give a finite number of seconds, not below zero."))


def moving_seconds(graph: Graph, op: Op, model: CostModel) -> float:
    """Return the seconds in which devices exchange what an op needs or makes, on axes that the compiler lays out.

    A sum over devices passes each link twice. A model that is no `Roofline` has no price for it.
    """
    moves = graph.moves_of.get(op.id, ())
    if not moves or not isinstance(model, Roofline):
        return 0.0
    moved_bytes = sum(move.bytes * (2 if move.kind == "all-reduce" else 1) for move in moves)
    return len(moves) * LINK_S + moved_bytes / model.moved_per_s


def recompute_seconds(graph: Graph, sides: Sides, model: CostModel) -> list[float]:
    """Return, for each op, the seconds that running it again in the backward takes, over all trips of its loops.

    They are zero for an op that the forward does not need, since it runs once on either side, and for pseudo-ops and
    loops. Only one of several branches runs, so each counts for its share.
    """
    return [
        op_seconds(graph, op, model) * graph.trips[loop] / graph.rivals[loop] if op.id in sides.forward else 0.0
        for op in graph.ops
        for loop in [graph.loop_of(op)]
    ]
