"""Describe the habits of a compiler, so that the two halves are written for it once.

Barriers hold on every backend (`barriers.held`). A `Backend` records other habits of a compiler. It is chosen before a
plan is scheduled, so that the verified halves are the halves that run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax

from jointcut.partition.program.graph import STEP, Graph, Op, Value
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.primitives import (
    CALLS,
    CHEAP,
    ELEMENTWISE,
    LIBRARY,
    PACKING,
    REDUCTIONS,
    RESHAPING,
    SCATTERS,
    VIEWS,
)
from jointcut.partition.program.roles import Side
from jointcut.partition.program.sides import Sides

#: Ops of an elementwise chain.
_CHAIN = ELEMENTWISE | CALLS | RESHAPING


@dataclass(frozen=True)
class Backend:
    """The habits of a compiler that matter to the halves.

    Attributes:
        name: the platform, as `jax.default_backend()` tells it, or "portable" for a program that runs on several.
        taken_apart: ops of the backward that the compiler splits into several. The part that needs only a residual
            could then start before the cotangent is there. So each of these ops is called in a computation of its own.
        read_written: ops that are faster if their operands are written to memory, not computed while they are read.
        spreading: ops that the compiler hands to a library of kernels, with the elementwise chain before them. If an op
            elsewhere, such as one of the backward, reads a number of that chain too, the compiler spreads the number
            over an array.
        most_read: how many arrays an elementwise chain may read if several ops read its end. The compiler computes the
            chain again for each of these ops, and the sums of a deep network grow with its depth. So longer chains are
            written out.
        sums_alone: whether, of these chains, only chains that end in a sum of cotangents are written out.
        shares_zeros: whether the compiler uses one array for all zeros of a shape, which it makes where a scatter fills
            it; see `rewrite.fills`.
        sums_late: whether the compiler adds up the cotangents of a value in one loop at the end, and holds all of them
            until then. So each sum of two is written out where there are many.
        moves_inside: whether an array that a program copies to host memory lies there inside the program too. Otherwise
            only arrays that pass from one program to another do.
        moves_in_nested: whether it can move values that a loop inside a loop makes.
        puts_off: whether the compiler may run ops last that nothing else reads, such as gradients of weights, and hold
            their operands. So cotangents wait for them; see `lower/among`.
        widens_bfloat16: whether the compiler also holds stacks of bfloat16, which loops make, as float32.
        holds_products: whether the compiler holds a product of matrices that is added to an array, and the array. So
            blocks of rows add large products in pieces; see `tiles/pieces`.
        runs_early: whether the compiler runs ops as soon as they are ready, such as the zeros that loops fill and
            random numbers. So these wait; see `lower/among`.
        remats: whether the compiler computes again by itself where the device has too little memory. It does not do so
            across the barriers of a plan.
        calibration: the compiler's bytes of temporaries for each byte of a replay, at the median.
        several: whether values may lie over several devices. A sharded value that waits is gathered anew, so as few
            values wait as hold an op back; see `lower/roots`.
    """

    name: str
    taken_apart: frozenset[str] = frozenset()
    read_written: frozenset[str] = frozenset()
    spreading: frozenset[str] = frozenset()
    widens_bfloat16: bool = False
    holds_products: bool = False
    runs_early: bool = False
    most_read: int | None = None
    sums_late: bool = False
    sums_alone: bool = False
    shares_zeros: bool = False
    moves_inside: bool = True
    moves_in_nested: bool = True
    puts_off: bool = False
    remats: bool = False
    calibration: float = 1.25
    several: bool = False

    @classmethod
    def here(cls) -> Backend:
        """The backend that JAX compiles for by default."""
        return cls.of((jax.default_backend(),)).among(jax.device_count())

    def among(self, count: int) -> Backend:
        """The backend where so many devices run a program; over several a TPU's compiler hides sums, too."""
        return replace(self, several=count > 1, puts_off=self.puts_off or (count > 1 and self.name == "tpu"))

    @classmethod
    def of(cls, platforms: Sequence[str]) -> Backend:
        """The backend for a program that is to run on each of these platforms."""
        if len(platforms) > 1:
            return PORTABLE
        name = platforms[0]
        if name in _GPUS:
            return replace(GPU, name=name)
        return {"cpu": CPU, "tpu": TPU}.get(name) or cls(name)

    def written_forward(self, graph: Graph, saved: Collection[int], again: Collection[int]) -> frozenset[int]:
        """Values that the forward writes to memory for one of its ops, although the backward computes them again.

        `saved` are the values that a plan saves, `again` the ops of the forward that it runs again. Plain JAX saves the
        values returned here, so its forward writes them too. Only values outside loops are returned: inside loops,
        writing them gained nothing.
        """
        top = [op for op in graph.ops if graph.loop_of(op) in graph.once]
        read = {v for op in top if op.name in self.read_written for v in op.inputs}
        chained = {v for v in read if graph.values[v].maker in again and self.ends_chain(graph, v)}
        spread = {v for op in top if op.name in self.spreading and op.origin is Side.FORWARD for v in op.inputs}
        return frozenset(chained | (spread & _spread(graph, saved, again) if spread else spread))

    def ends_chain(self, graph: Graph, v: int) -> bool:
        """Whether a value is made by an elementwise op, a call, or a change of shape.

        Over several devices a part of an input is no such value: one that is written would be gathered for its reader,
        and once more for others.
        """
        maker = graph.maker_of(v)
        return maker is not None and maker.name in _CHAIN and not (self.several and is_input(graph, v))

    def written_sums(self, graph: Graph, sides: Sides, saved: Collection[int]) -> frozenset[int]:
        """Values that the halves write to memory: ends of chains that read many arrays, and sums of cotangents.

        They end elementwise chains that read more arrays than `most_read`, or add to a sum of many cotangents. A chain
        begins at `saved` values, at values of other loops, and at the end of another chain that is written. Numbers and
        repeated rows are no arrays.
        """
        if self.most_read is None:
            return frozenset()
        arrays: dict[int, set[int]] = {}  # by the value that ends the chain; no more are listed than are needed
        written = _partial_sums(graph, saved) if self.sums_late else set[int]()
        for op in graph.ops:
            if op.name not in _CHAIN and op.name != "broadcast_in_dim":
                continue
            half = sides.forward if op.id in sides.forward else sides.backward
            for v in op.outputs:
                value, found = graph.values[v], set[int]()
                for before in map(graph.values.__getitem__, op.inputs):
                    if before.id not in arrays or before.id in saved or before.loop != value.loop:
                        found.update({before.id} if _is_large(before, value) else ())
                    else:
                        found |= arrays[before.id]
                is_shared = len(found) > self.most_read and sum(i in half for i in graph.consumers[v]) > 1
                counts = op.name == "add_any" or not self.sums_alone
                if (is_shared and counts) or v in written:
                    written.add(v)
                    found = {v}
                arrays[v] = set(islice(found, self.most_read + 1))
        return frozenset(written.difference(saved))


#: The number of cotangents from which each sum of two is written out.
_MANY = 4

#: The number of shared numbers or rows from which a chain's are spread over arrays.
_SEVERAL = 2

#: Names of GPUs. With jaxlib 0.11.2 on an H200, XLA ends with an internal error ("Expected instruction to have shape
#: equal to") if a program moves the results of a scan inside a scan to host memory.
_GPUS = ("gpu", "cuda", "rocm")

#: Nothing is known of the compiler.
PORTABLE = Backend("portable")

#: Measured on the suite (`make bench`) with JAX 0.10 and 0.12.
#:
#: The gradient of a maximum pooling first finds the places of the maxima, in eight arrays of the residual's size.
#:
#: An elementwise chain before a product is fused in one of two ways. It may be fused into the copy that brings an
#: operand into another layout. Then each array of the chain is read in an order that the cache is bad at. Or it may be
#: fused into the kernel. Then XLA writes out any op in the midst of the chain that the kernel library does not know. If
#: the chain ends in an array of its own, the times relative to plain JAX are: the unrolled GPT 0.65 instead of 0.75,
#: the diffusion step 0.69 instead of 0.81, the variational autoencoder 0.93 instead of 1.10.
#:
#: The mean of a gelu of a product takes 10.5 MB of temporaries if the gelu's four numbers are spread, 4.2 MB if the
#: gelu ends in an array of its own, and 6.3 MB in plain JAX.
#:
#: The gradient of a residual stream is a sum over all later layers. If dropout or a norm stands between it and each
#: product, a loop for each of them computes the whole sum. If sums that read eight arrays or more are written, a vision
#: transformer of Equinox takes 0.73 of plain's time, and not 0.97. With four, other programs gain nothing.
#:
#: The gradient of a matrix that is used in 32 steps, one written after the other, is a sum of 32 gradients. If each sum
#: of two is written, a recurrent network of width 512 takes 2.6 MB of temporaries and not 64 MB, in 0.43 of plain's
#: time and not 0.99. If each fifth sum is written, it takes 8.5 MB. If all sums of two are, a variational autoencoder
#: loses.
CPU = Backend(
    "cpu",
    taken_apart=frozenset({"select_and_scatter_add"}),
    read_written=PACKING,
    spreading=LIBRARY & REDUCTIONS,
    widens_bfloat16=True,
    holds_products=True,
    runs_early=True,
    most_read=7,
    sums_late=True,
    moves_inside=False,
)


#: Measured with JAX 0.10.2 by XLA's account for an H100.
#:
#: A value that several layers read, such as the features of edges, has a sum of cotangents, and each layer reads a part
#: of it. XLA computes such a sum in the loop of each reader, and holds all its terms until the last reader. If a term
#: is a slice of a product, it holds the whole product. If each sum that several ops read is written, the suite's graph
#: network takes 84 MB of temporaries and not 131 (plain JAX 210), one with features of edges 111 and not 140 (264), the
#: GPT in a scan 18.4 and not 21.0. If other elementwise chains are written too, a perceptron takes 42 and not 38.
#:
#: With several devices XLA schedules to hide latency, by default also on devices that it has a model of. Then the
#: products for weights run last. A GPT of 12 blocks, its batch sharded over eight, took 4,470 MB of a device's
#: temporaries unrolled and 1,250 in a scan. If cotangents wait for gradients, these are 1,260 and 1,266. Without that
#: scheduler they are 992 and 1,015, as before. On one device the suite's perceptron takes 33.6 MB and not 37.8, its
#: unrolled GPT 18.6 and not 20.1, mamba 25.7 and not 27.5; other programs take at most 0.1% more than before.
#:
#: A VGG takes 403 MB and not 432 (662) if the zeros of its poolings' gradients are other zeros than its relus'.
GPU = Backend(
    "gpu",
    most_read=1,
    sums_alone=True,
    sums_late=True,
    shares_zeros=True,
    moves_in_nested=False,
    puts_off=True,
    calibration=1.0,
)

#: By XLA's account for a v5e, with JAX 0.10.2.
#:
#: A perceptron for which plain JAX keeps 34 GB takes 12.3 GB there, because XLA computes values again; a plan that
#: keeps 39 GB is not compiled. Small last axes need no habit. XLA lays the longest axis along its tiles of 8 x 128: an
#: array of [1048576, 3] takes 16.8 MB, 4/3 of its size. Arrays that fit into 128 MB of VMEM take no temporaries of the
#: memory.
TPU = Backend("tpu", remats=True, calibration=1.0)


def _partial_sums(graph: Graph, saved: Collection[int]) -> set[int]:
    """The sums of cotangents that only add to longer ones, where at least `_MANY` are added up.

    A cotangent counts if nothing else reads it, and no loop over elements computes it.
    """
    terms, longer = dict[int, int](), dict[int, int]()
    for op in graph.ops:
        if op.name == "add_any":
            (result,) = op.outputs
            own = [
                v for v in op.inputs if _is_alone(graph, v, saved) and graph.values[v].loop == graph.values[result].loop
            ]
            terms[result] = sum(terms[v] if v in terms else _is_apart(graph, v, saved) for v in own)
            longer.update((v, result) for v in own if v in terms)
    for v in reversed([*longer]):
        terms[v] = terms[longer[v]]
    return {v for v in longer if terms[v] >= _MANY and graph.values[v].shape}


def _is_alone(graph: Graph, v: int, saved: Collection[int]) -> bool:
    """Whether just one op reads a value, which is computed and not saved."""
    return len(graph.consumers[v]) == 1 and graph.values[v].maker is not None and v not in saved


def _is_apart(graph: Graph, v: int, saved: Collection[int]) -> bool:
    """Whether a value, or its source in another form, is the result of an op that no loop over elements computes."""
    while (op := graph.maker_of(v)) is not None and op.name in CHEAP:
        if len(op.inputs) != 1 or not _is_alone(graph, op.inputs[0], saved):
            return False
        (v,) = op.inputs
    return op is not None


def _is_large(operand: Value, result: Value) -> bool:
    return bool(result.shape) and 2 * operand.bytes >= result.bytes


def scattered_bytes(graph: Graph) -> int:
    """The sum over all scatters of the bytes of the largest array that each reads."""
    scatters = [op for op in graph.ops if op.name in SCATTERS]
    return sum(max((graph.values[v].bytes for v in op.inputs), default=0) for op in scatters)


def is_input(graph: Graph, v: int) -> bool:
    """Whether a value is an input of the program, a step of one, or a part of one."""
    maker = graph.maker_of(v)
    return maker is None or (maker.name in {*VIEWS, STEP} and all(is_input(graph, v) for v in maker.inputs))


def _spread(graph: Graph, saved: Collection[int], again: Collection[int]) -> set[int]:
    """Values whose elementwise chains share two numbers or repeated rows with other readers.

    The compiler spreads each of them over an array. The chain begins at saved values that the backward reads, which are
    written out. A number is shared if its op runs again in the backward, a repeated row if several ops read it.
    """
    shared: dict[int, set[Any]] = {}  # by the value that ends the chain; two of them are enough
    for op in graph.ops:
        is_chain, is_row = op.name in _CHAIN, op.name == "broadcast_in_dim"
        if graph.loop_of(op) not in graph.once or not (is_chain or is_row):
            continue
        found = set[Any]()
        for v in op.inputs if is_chain else ():
            if len(found) < _SEVERAL:
                found |= shared.get(v, set())
        if is_chain and op.id in again and len(found) < _SEVERAL:
            found |= _numbers(op)
        for v in op.outputs:
            readers = [graph.ops[i] for i in graph.consumers[v]] if is_row or v in saved else []
            if v in saved and any(r.id in again or r.origin is Side.BACKWARD for r in readers):
                continue
            if mine := found | {v} if is_row and len(readers) > 1 else found:
                shared[v] = mine
    return {v for v, found in shared.items() if len(found) >= _SEVERAL}


def _numbers(op: Op) -> set[Any]:
    """The numbers in an op; a call such as relu holds one."""
    atoms = () if op.payload is None else op.payload.invars  # none for a graph read from text
    found = {str(atom) for atom in atoms if isinstance(atom, jaxprs.Literal)}
    return found | {op.id} if op.name in CALLS else found
