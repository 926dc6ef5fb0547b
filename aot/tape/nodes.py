"""Record the ops that run on a tape, as PyTorch's graph of backward nodes.

The function runs on tracers that hold numbers. Each op runs at once; if a gradient can flow through it, a `Node` keeps
its record, the nodes that made its inputs, and the residuals that its backward reads. Nodes are held by the values that
they made, so that residuals are freed with the last value that needs them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.aot.hooks.islands import Island
from jointcut.aot.stages.padding.named import NamedSizes
from jointcut.aot.tape.records import NUMBERS, Record, Records, crossing
from jointcut.partition.errors import CallError, NonFiniteError, TraceError, message
from jointcut.partition.program.jax import abstract, eager, jaxprs, runtime, user_source
from jointcut.partition.program.places import line_at
from jointcut.partition.program.primitives import FREEZES_REFERENCE, MAKES_REFERENCE, READS_REFERENCE
from jointcut.partition.program.sizes import holds_sizes, is_symbolic
from jointcut.wrappers.metadata.convention import is_inexact

#: A value of a tape: the node that made it, and its place among the node's outputs.
Edge = tuple["Node", int]


class Node:
    """An op that ran, or a leaf.

    Attributes:
        record: the kind of op; None for a leaf.
        order: its number in running order.
        edges: the values that get a gradient, in the order of the record.
        saved: the residuals, in the order of the record, as arrays or as `Packed`.
        source: the user's line, see `user_source.source_here`.
        hooks: the hooks on the cotangents of the outputs, by place.
        place: the place of a leaf among the differentiated arrays.
        tape: the recording that it belongs to.
        types: the types of the outputs, for a node that passes cotangents on.
        given: all inputs, as edges or arrays, if the tape keeps no residuals.
    """

    __slots__ = (
        "__weakref__", "edges", "given", "hooks", "order", "place", "record", "saved", "source", "tape", "types",
    )  # fmt: skip

    def __init__(self, tape: Recording, record: Record | None, edges: Sequence[Edge], saved: Sequence[Any]) -> None:
        """Add a node to a tape."""
        self.tape, self.record, self.edges, self.saved = tape, record, edges, saved
        self.order = tape.count
        tape.count += 1
        self.source: Any = None
        self.hooks: list[Any] = []
        self.place = -1
        self.types: tuple[Any, ...] = ()
        self.given: tuple[Any, ...] = ()


class Recording:
    """One run of a function: `leaves` are its differentiated arrays, `paths` the user's names of them."""

    def __init__(
        self,
        name: str,
        records: Records,
        context: Any,
        check: bool = False,
        keeps_residuals: bool = True,
        sizes: NamedSizes | None = None,
    ) -> None:
        """Start with no ops; `context` is JAX's configuration, on which records depend.

        With `check`, the first op that makes a NaN or an infinity is an error. Without `keeps_residuals`, a program
        runs the ops again; then the tape also knows the nodes of results without a gradient. With `sizes`, ops run on
        padded arrays, and Python sees the names of the sizes.
        """
        self.name, self.records, self.context, self.check = name, records, context, check
        self.keeps_residuals, self.sizes = keeps_residuals, sizes
        self.references = References(self)
        self._others: dict[int, tuple[weakref.ref[Any], Edge]] = {}
        self.count = 0
        self.leaves: list[Node] = []
        self.tracers: list[Any] = []
        self.paths: list[str] = []
        self.trace: Any = None
        self.packing: list[Any] = []
        self._still = Node(self, None, (), ())

    def leaf(self, array: Any, path: str, shape: Sequence[Any] | None = None) -> None:
        """Add an array that is differentiated, and its tracer; with a `shape`, its sizes get these names."""
        node = Node(self, None, (), ())
        node.place = len(self.leaves)
        self.leaves.append(node)
        self.paths.append(path)
        self.tracers.append(self.named(array, shape, (node, 0)))

    def named(self, array: Any, shape: Sequence[Any] | None, edge: Edge | None = None) -> Any:
        """Return the tracer of an array among the arguments, padded if a `shape` gives names to its sizes."""
        if shape is None or self.sizes is None:
            return eager.EagerTracer(self.trace, array, edge)
        aval: Any = jax.typeof(array)
        return self._padded(self.sizes.padded(array, shape), edge, aval.update(shape=tuple(shape)))

    def _padded(self, array: Any, edge: Edge | None, aval: Any) -> Any:
        assert self.sizes is not None, "only a tape with sizes has padded arrays"
        return eager.EagerTracer(self.trace, array, edge or (self._still, 0), aval, self.sizes.cut)

    def wants(self, params: dict[str, Any]) -> bool:
        """Whether an op that reads no value of this tape is for it nevertheless: it reads sizes."""
        return self.sizes is not None and holds_sizes(tuple(params.values()))

    def made(self, ref: Any) -> None:
        """Note a reference that the function made."""
        self.references.made[id(ref)] = ref

    def follows(self, ref: Any) -> bool:
        """Whether a gradient flows through what a reference holds."""
        return id(ref) in self.references.held

    def edge(self, x: Any) -> Edge | None:
        """Return the edge of a value of this tape, or None; raises `CallError` for a value of another tape."""
        if type(x) is not eager.EagerTracer or x._trace is not self.trace:
            return None
        if x.edge[0].tape is not self:
            raise CallError(_another(self, x))
        return None if x.edge[0] is self._still else x.edge

    def __call__(self, op: eager.Operation, args: Sequence[Any]) -> Any:
        """Run an op, and record it if a gradient flows through it."""
        if op.name == MAKES_REFERENCE or eager.references_in(args, op.params):
            refuse_padded(self, "a jax.Ref", args)
            return self.references(op, args)
        edges = [self.edge(x) for x in args]
        values = list(map(self._held, args))
        mask = tuple(edge is not None for edge in edges)
        kind = self.records.of(op, args if self.sizes else values, mask, self.context, self.sizes)
        record = kind.record
        if record is NUMBERS:
            refuse_padded(self, op.name, args)
            return self._island(op, edges, values)
        if self.sizes is not None and kind.names:
            values = [*(self.sizes.scalars[name] for name in kind.names), *values]
            edges = [*(None for _ in kind.names), *edges]
        results = record.run(*record.consts, *values)
        outputs = results[: record.num_outputs]
        if self.check:
            refuse_nonfinite(outputs, f"The forward of {self.name}", record.name, user_source.source_here())
        if not self.keeps_residuals:
            outputs = self.listed(record, edges, values, outputs)
        elif record.same:
            pairs = [(x, edges[i]) for x, i in zip(outputs, record.same, strict=True)]
            outputs = [x if edge is None else eager.EagerTracer(self.trace, x, edge) for x, edge in pairs]
        elif any(record.moving):
            outputs = self.noted(record, edges, values, results)
        if kind.outputs:
            outputs = list(map(self._with_sizes, outputs, kind.outputs))
        return outputs if op.multiple else outputs[0]

    def _held(self, x: Any) -> Any:
        """Return the array of a value of this tape, padded where it has sizes; return any other value unchanged."""
        return x.held if type(x) is eager.EagerTracer and x._trace is self.trace else x

    def _with_sizes(self, x: Any, aval: Any) -> Any:
        """Return a result with the type that Python sees."""
        if not is_symbolic(getattr(aval, "shape", ())):
            return x
        return self._padded(self._held(x), self.edge(x), aval)

    def noted(
        self, record: Record, edges: Sequence[Edge | None], values: Sequence[Any], results: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of an op that ran, as tracers where a gradient can flow, and note its residuals."""
        places = {
            "constant": record.consts,
            "input": values,
            "output": results,
            "saved": results[record.num_outputs :],
        }
        given = [places[kind][i] for kind, i in record.routes]
        saved = list(map(_array, given))
        if self.packing:  # Python numbers are kept as they are
            pairs = zip(saved, given, strict=True)
            saved = [self.packing[-1].packed(x) if isinstance(y, jax.Array) else x for x, y in pairs]
        node = Node(self, record, [edges[i] for i in record.wanted], saved)  # pyright: ignore[reportArgumentType]
        return self._behind(node, results[: record.num_outputs])

    def _island(self, op: eager.Operation, edges: Sequence[Edge | None], values: Sequence[Any]) -> Any:
        """Return the outputs of an op whose derivative rule needs numbers, and note its backward."""
        source, wanted = user_source.source_here(), [i for i, edge in enumerate(edges) if edge is not None]
        name = getattr(op.functions[0].f, "__name__", op.name)
        where = f"{name} at {line_at(source)}"
        if not self.keeps_residuals:
            why = "by a budget, policy or another option all ops are one program"
            what = f"calls {name}, whose derivative rule needs numbers: {why}."
            cure = "Compute with jax.numpy in the rule, call numpy through jax.pure_callback, or leave the option out."
            raise CallError(message(f"{self.name} at {line_at(source)}", what, cure))
        island, outputs, moving = Island.of(op, values, wanted, where)
        if self.check:
            refuse_nonfinite(outputs, f"The forward of {self.name}", name, source)
        if self.packing:
            island.kept = list(map(self.packing[-1].packed, island.kept))
        node = Node(self, crossing(name, island.types, len(outputs), moving), [edges[i] for i in wanted], ())  # pyright: ignore[reportArgumentType]
        node.hooks.append(island.place([abstract.cotangent_aval(jax.typeof(outputs[i])) for i in moving]))
        made = self._behind(node, outputs)
        return made if op.multiple else made[0]

    def listed(
        self, record: Record, edges: Sequence[Edge | None], values: Sequence[Any], outputs: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of an op that ran, and note its inputs alone."""
        node = Node(self, record, [edges[i] for i in record.wanted], ())  # pyright: ignore[reportArgumentType]
        node.given = tuple(edge or self._other(x) for edge, x in zip(edges, values, strict=True))
        for i, x in enumerate(outputs):
            if not record.moving[i]:
                self._others[id(x)] = weakref.ref(x, functools.partial(self._others.pop, id(x))), (node, i)
        return self._behind(node, outputs)

    def _other(self, x: Any) -> Any:
        """Return the edge of an array that an op made without a gradient; return any other array itself."""
        found = self._others.get(id(x))
        return found[1] if found is not None and found[0]() is x else _array(x)

    def _behind(self, node: Node, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of a node, as tracers where a gradient can flow."""
        assert node.record is not None, "leaves are not run"
        node.source = user_source.source_here()
        moving = zip(outputs, node.record.moving, strict=True)
        return [eager.EagerTracer(self.trace, x, (node, i)) if on else x for i, (x, on) in enumerate(moving)]


def recording_here(hook: str = "") -> Recording | None:
    """Return the tape whose function runs; None outside of tapes or inside another transformation.

    Raises `CallError` if `hook` names a hook and the tape keeps no residuals.
    """
    trace = eager.eager_trace()
    if hook and trace is not None and not trace.recorder.keeps_residuals:
        name = trace.recorder.name
        what = f"is used in {name}, a tape whose ops are one program, by its budget, policy or another option."
        cure = "Use it in an aot.function with these options, or on a tape without."
        raise CallError(message(hook, what, cure))
    return None if trace is None else trace.recorder


def refuse_padded(tape: Recording, hook: str, values: Sequence[Any] | None = None) -> None:
    """Raise `TraceError` for a hook that would be given a padded array; then the call runs with numbers for sizes.

    `values` are the values that it reads; None means all of the tape.
    """
    if tape.sizes is not None and (values is None or any(is_symbolic(getattr(x, "shape", ())) for x in values)):
        what = "reads an array whose size varies, and is called with arrays of the true size."
        raise TraceError(message(f"{hook} at {line_at(user_source.source_here())}", what, "Leave sizes out."))


def value_of(x: Any) -> Any:
    """Return the array in a tracer of a tape; return any other value unchanged."""
    return x.value if type(x) is eager.EagerTracer else x


def refuse_nonfinite(values: Sequence[Any], half: str, op: str, source: Any) -> None:
    """Raise `NonFiniteError` if one of the values of an op or hook is not finite."""
    for x in values:
        if x is not None and is_inexact(x.dtype) and not bool(jnp.all(jnp.isfinite(x))):
            kind = "a NaN" if bool(jnp.any(jnp.isnan(x))) else "an infinity"
            what = f"is not finite: {op} made {kind} at {line_at(source)}."
            cure = "See aot.first_nonfinite and aot.derivatives for cures; print what goes in there."
            raise NonFiniteError(message(half, what, cure))


def _array(x: Any) -> Any:
    """Return an array to keep, which nobody writes to."""
    if isinstance(x, jax.Array):
        return x
    aval: Any = jax.typeof(x)
    return abstract.typed(jnp.array(x), aval)


def _another(tape: Recording, x: Any) -> str:
    what = f"reads {jax.typeof(x).str_short()} that another call recorded, whose tape has ended."
    cure = "Return what later calls need, or take its numbers: jax.lax.stop_gradient(x) inside the function."
    return message(f"{tape.name} at {line_at(user_source.source_here())}", what, cure)


class References:
    """The references that a function made, and what references hold where a gradient flows through it.

    An op on references is recorded as a pure one: it takes what they hold, and returns what they hold after it. The
    references themselves hold the numbers, for everyone who reads them.
    """

    def __init__(self, tape: Recording) -> None:
        """Start with none."""
        self._tape = tape
        self.made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.held: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def __call__(self, op: eager.Operation, args: Sequence[Any]) -> Any:
        """Run an op that makes, reads or writes references, and record it."""
        if op.name == MAKES_REFERENCE:
            made = op.bind(value_of(args[0]))
            self._tape.made(made)
            self._hold(made, args[0])
            return made
        op, args = _opened(op, args)
        if op.functions:
            what = "has a derivative rule of its own and takes a jax.Ref, which the rule cannot give a gradient."
            self._refuse(op, what, "Give the function what the reference holds: ref[...].")
        refs = list({id(x): x for x in eager.references_in(args, {})}.values())
        holds = [self.held[id(ref)][1] if id(ref) in self.held else ref[...] for ref in refs]
        if op.name == FREEZES_REFERENCE:
            return holds[0]
        at = {id(ref): i for i, ref in enumerate(refs)}
        pure = _pure(op, tuple(at.get(id(x)) for x in args), len(refs))
        results = self._tape(pure, [*holds, *(x for x in args if id(x) not in at)])
        outputs, after = results[: len(results) - len(refs)], results[len(results) - len(refs) :]
        if op.name != READS_REFERENCE:
            for ref, x in zip(refs, after, strict=True):
                if type(x) is eager.EagerTracer and id(ref) not in self.made:
                    what = (
                        "writes a value that is differentiated to a jax.Ref from outside, to which no gradient flows."
                    )
                    self._refuse(op, what, "Write jax.lax.stop_gradient(value), or make the reference inside.")
                ref[...] = value_of(x)
                self._hold(ref, x)
        return outputs if op.multiple else outputs[0]

    def _refuse(self, op: eager.Operation, what: str, cure: str) -> None:
        raise TraceError(message(f"{op.name} at {line_at(user_source.source_here())}", what, cure))

    def _hold(self, ref: Any, x: Any) -> None:
        """Note what a reference holds, if a gradient flows through it."""
        self.held.pop(id(ref), None)
        if type(x) is eager.EagerTracer:
            self.held[id(ref)] = weakref.ref(ref, functools.partial(_forget, self.held, id(ref))), x


def _forget(held: dict[int, Any], key: int, ref: Any) -> None:
    """Drop what a reference held that is gone, unless another one took its number."""
    if key in held and held[key][0] is ref:
        del held[key]


def _opened(op: eager.Operation, args: Sequence[Any]) -> tuple[eager.Operation, Sequence[Any]]:
    """Return a call with the references that its function closes over as operands."""
    jaxpr, consts = jaxprs.opened(op.params.get("jaxpr"))
    closed_over = eager.references_in(consts, {})
    if not closed_over:
        return op, args
    program = jaxprs.constants_first(jaxpr)

    def bind(*flat: Any) -> list[Any]:
        refs, rest = iter(flat[: len(closed_over)]), flat[len(closed_over) :]
        return runtime.evaluate(program, *(next(refs) if isinstance(c, jax.Ref) else c for c in consts), *rest)

    return replace(op, bind=bind, params=op.params | {"jaxpr": program}), [*closed_over, *args]


def _pure(op: eager.Operation, at: tuple[int | None, ...], count: int) -> eager.Operation:
    """Return an op on `count` references as one from what they hold to what they hold; `at` is theirs by operand."""

    def bind(*flat: Any) -> list[Any]:
        refs, others = [jax.new_ref(x) for x in flat[:count]], iter(flat[count:])
        out = op.bind(*(next(others) if i is None else refs[i] for i in at))
        return [*(out if op.multiple else [out]), *(ref[...] for ref in refs)]

    params = {name: x for name, x in op.params.items() if name != "rules"}  # which are of the op on references
    return eager.Operation(op.name, None if op.key is None else (op.key, at), bind, params, True)
