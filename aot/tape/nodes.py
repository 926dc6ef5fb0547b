"""Record the ops that run on a tape, as PyTorch's graph of backward nodes.

The function runs on tracers that hold numbers. Each op runs at once; if a gradient can flow through it, a `Node` keeps
its record, the nodes that made its inputs, and the residuals that its backward reads. Nodes are held by the values that
they made, so that residuals are freed with the last value that needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.aot.tape.records import Record, Records
from jointcut.partition.errors import CallError, NonFiniteError, TraceError, message
from jointcut.partition.program import jaxprs
from jointcut.partition.program.places import line_at
from jointcut.wrappers.metadata.convention import is_inexact

#: A value of a tape: the node that made it, and its place among the outputs of the node.
Edge = tuple["Node", int]


class Node:
    """An op that ran, or a leaf.

    Attributes:
        record: the kind of op; None for a leaf.
        order: its place in the order in which the ops ran.
        edges: the values that get a gradient, in the order of the record.
        saved: the residuals, in the order of the record: arrays, or `Packed` ones.
        source: the user's line, see `jaxprs.source_here`.
        hooks: what is called with cotangents of the outputs, by place.
        place: the place of a leaf among the differentiated arrays.
        tape: the recording that it belongs to.
        types: of the outputs, for a node that hands cotangents on.
    """

    __slots__ = ("__weakref__", "edges", "hooks", "order", "place", "record", "saved", "source", "tape", "types")

    def __init__(self, tape: Recording, record: Record | None, edges: Sequence[Edge], saved: Sequence[Any]) -> None:
        """Add a node to a tape."""
        self.tape, self.record, self.edges, self.saved = tape, record, edges, saved
        self.order = tape.count
        tape.count += 1
        self.source: Any = None
        self.hooks: list[Any] = []
        self.place = -1
        self.types: tuple[Any, ...] = ()


class Recording:
    """One run of a function: `leaves` are its differentiated arrays, `paths` the user's names of them."""

    def __init__(self, name: str, records: Records, context: Any, check: bool = False) -> None:
        """Start with no ops; `context` is JAX's configuration, on which records depend.

        With `check`, the first op that makes a NaN or an infinity is an error.
        """
        self.name, self.records, self.context, self.check = name, records, context, check
        self.count = 0
        self.leaves: list[Node] = []
        self.tracers: list[Any] = []
        self.paths: list[str] = []
        self.trace: Any = None
        self.packing: list[Any] = []

    def leaf(self, array: Any, path: str) -> None:
        """Add an array that is differentiated, and its tracer."""
        node = Node(self, None, (), ())
        node.place = len(self.leaves)
        self.leaves.append(node)
        self.paths.append(path)
        self.tracers.append(jaxprs.EagerTracer(self.trace, array, (node, 0)))

    def edge(self, x: Any) -> Edge | None:
        """The node of a value of this tape, None for any other value; raises `CallError` for one of another tape."""
        if type(x) is not jaxprs.EagerTracer or x._trace is not self.trace:
            return None
        if x.edge[0].tape is not self:
            raise CallError(_another(self, x))
        return x.edge

    def __call__(self, op: jaxprs.Operation, args: Sequence[Any]) -> Any:
        """Run an op, and record it if a gradient flows through it."""
        edges = [self.edge(x) for x in args]
        values = [x if edge is None else x.value for x, edge in zip(args, edges, strict=True)]
        mask = tuple(edge is not None for edge in edges)
        refuse_references(self, op, values)
        record = self.records.of(op, values, mask, self.context)
        results = record.run(*record.consts, *values)
        outputs = results[: record.num_outputs]
        if self.check:
            refuse_nonfinite(outputs, f"The forward of {self.name}", record.name, jaxprs.source_here())
        if any(record.moving):
            outputs = self.noted(record, edges, values, results)
        return outputs if op.multiple else outputs[0]

    def noted(
        self, record: Record, edges: Sequence[Edge | None], values: Sequence[Any], results: Sequence[Any]
    ) -> list[Any]:
        """The outputs of an op that was run: tracers where a gradient can flow."""
        places = {
            "constant": record.consts,
            "input": values,
            "output": results,
            "saved": results[record.num_outputs :],
        }
        saved = [_array(places[kind][i]) for kind, i in record.routes]
        if self.packing:
            saved = list(map(self.packing[-1].packed, saved))
        node = Node(self, record, [edges[i] for i in record.wanted], saved)  # pyright: ignore[reportArgumentType]
        node.source = jaxprs.source_here()
        outputs = zip(results[: record.num_outputs], record.moving, strict=True)
        return [jaxprs.EagerTracer(self.trace, x, (node, i)) if on else x for i, (x, on) in enumerate(outputs)]


def recording_here() -> Recording | None:
    """The tape whose function runs, None outside of any or inside another transformation."""
    trace = jaxprs.eager_trace()
    return None if trace is None else trace.recorder


def value_of(x: Any) -> Any:
    """The array in a tracer of a tape, anything else as it is."""
    return x.value if type(x) is jaxprs.EagerTracer else x


def refuse_nonfinite(values: Sequence[Any], half: str, op: str, source: Any) -> None:
    """Raise `NonFiniteError` if one of the values of an op or hook is not finite."""
    for x in values:
        if x is not None and is_inexact(x.dtype) and not bool(jnp.all(jnp.isfinite(x))):
            kind = "a NaN" if bool(jnp.any(jnp.isnan(x))) else "an infinity"
            what = f"is not finite: {op} made {kind} at {line_at(source)}."
            cure = "See aot.first_nonfinite and aot.derivatives for cures; print what goes in there."
            raise NonFiniteError(message(half, what, cure))


def _array(x: Any) -> Any:
    """An array to keep, which nobody writes to."""
    if isinstance(x, jax.Array):
        return x
    aval: Any = jax.typeof(x)
    return jaxprs.typed(jnp.array(x), aval)


def _another(tape: Recording, x: Any) -> str:
    what = f"reads {jax.typeof(x).str_short()} that another call recorded, whose tape has ended."
    cure = "Return what later calls need, or take its numbers: jax.lax.stop_gradient(x) inside the function."
    return message(f"{tape.name} at {line_at(jaxprs.source_here())}", what, cure)


def refuse_references(tape: Recording, op: jaxprs.Operation, values: Sequence[Any]) -> None:
    """Raise `TraceError` for an op that writes a differentiated value to a reference."""
    if any(isinstance(x, jax.Ref) for x in values):
        what = f"writes a value that is differentiated to a jax.Ref ({op.name}), through which no gradient flows."
        cure = "Write jax.lax.stop_gradient(value), or make and use the reference inside one jax.jit function."
        raise TraceError(message(f"{tape.name} at {line_at(jaxprs.source_here())}", what, cure))
