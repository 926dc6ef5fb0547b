"""Keep an index in the smallest integer that holds it, where the program says how large it may be.

A position on an axis of 100 places fits one byte, and JAX keeps four or eight. The range of an integer is known if it
comes from `iota`, `argmax`, `top_k` or a sort of such, or is a number of the program. It stays known while the integer
is moved, selected, added or clamped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import LITERAL, OPEN, STEP, Form, Graph, Value
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.primitives import CALLS, KEEPING
from jointcut.partition.search.forms.bits import LEAST_BYTES
from jointcut.partition.search.forms.readers import is_fixed, is_usual
from jointcut.partition.search.forms.written import Rewriting

KIND = "an index in fewer bytes"

#: The cost of converting an element and back, in additions of floats: by the measurement in `choose`, at most this.
ADDITIONS = 0.5

_SMALL = ("uint8", "int8", "uint16", "int16", "uint32", "int32")

_ENTRYWISE = frozenset({"add", "sub", "mul", "max", "min"})


class Range(NamedTuple):
    """The least and the greatest value of an array of integers."""

    low: int
    high: int

    def with_all_of(self, other: Range) -> Range:
        """The smallest range that contains both."""
        return Range(min(self.low, other.low), max(self.high, other.high))

    @property
    def dtype(self) -> str:
        """The smallest integer that holds it."""
        return next((name for name in _SMALL if self.fits(name)), "int64")

    def fits(self, dtype: Any) -> bool:
        """Whether an integer dtype holds it."""
        info = np.iinfo(dtype)
        return info.min <= self.low and self.high <= info.max


def candidates(problem: Problem) -> Iterator[tuple[Value, Range]]:
    """The integers that may have to be kept, that fit fewer bytes, and that are worth converting."""
    graph, sides = problem.graph, problem.sides
    large = [v for v in graph.values if v.saved_bytes >= LEAST_BYTES and _is_integer(v.payload) and is_usual(v)]
    known = ranges(graph) if large else {}
    for value in large:
        maker, found = graph.maker_of(value.id), known.get(value.id)
        if maker is None or found is None or maker.id in sides.backward or value.id in sides.outputs:
            continue
        is_smaller = np.dtype(found.dtype).itemsize < np.dtype(value.dtype).itemsize
        if is_smaller and maker.name not in (*OPEN, STEP, LITERAL) and graph.loop_of(maker) == value.loop:
            yield value, found


def write(new: Rewriting, problem: Problem, plan: Plan, places: Iterable[tuple[Value, Range]]) -> None:
    """Keep the integers that a plan saves in fewer bytes. Their readers convert them back, in the forward too."""
    graph, saved = problem.graph, frozenset(plan.values)
    for value, found in places:
        v, maker = value.id, graph.ops[value.maker or 0]
        readers = [graph.ops[i] for i in graph.consumers[v]]
        if v not in saved or any(map(is_fixed, readers)):
            continue
        small = new.after(maker, _converting(found.dtype), [v])
        new.instead(readers, v, new.after(maker, _converting(value.dtype), [small]))
        new.forms.append(Form(KIND, v, small, value.saved_bytes - new.value(small).saved_bytes))


def work(place: tuple[Value, Range]) -> tuple[float, int]:
    """The work of converting an index and back, in additions of vectors of floats, and the bytes that it spares."""
    value, found = place
    elements = value.copies * math.prod(value.shape)
    return ADDITIONS * elements, elements * (np.dtype(value.dtype).itemsize - np.dtype(found.dtype).itemsize)


@functools.cache
def _converting(dtype: str) -> Callable[[Any], Any]:
    def to_integer(x: Any) -> Any:
        return x.astype(dtype)

    return to_integer


def ranges(graph: Graph) -> dict[int, Range]:
    """The known ranges of the integers of a program, by value."""
    known: dict[int, Range] = {}
    size = -1
    while size < len(known):  # a value of a loop may be read before it stands in the list of ops
        size = len(known)
        for op in graph.ops:
            if op.name in OPEN or op.payload is None or all(v in known for v in op.outputs):
                if op.name == STEP and op.inputs[0] in known:
                    known[op.outputs[0]] = known[op.inputs[0]]
                continue
            if op.name == LITERAL:
                found = [_number(op.payload)]
            else:
                given = [known.get(v) if v is not None else None for v in op.operands]
                found = _results(op.payload, given)
            known.update((v, r) for v, r in zip(op.outputs, found, strict=False) if r is not None)
    return known


def _results(eqn: Any, given: Sequence[Range | None]) -> Sequence[Range | None]:
    """The ranges of an equation's results; `given` are the ranges of its operands."""
    read = [_number(v) if isinstance(v, jaxprs.Literal) else r for v, r in zip(eqn.invars, given, strict=True)]
    name = eqn.primitive.name
    if name == "sort":
        return read
    if name == "top_k":
        return None, Range(0, eqn.invars[0].aval.shape[eqn.params.get("axis", -1)] - 1)
    if name in CALLS:
        inner = list(jaxprs.inner_jaxprs(eqn))
        return _called(inner[0], read) if len(inner) == 1 and len(inner[0].invars) == len(read) else ()
    out = eqn.outvars[0].aval
    found = _result(eqn, name, read) if _is_integer(out) else None
    return (found if found is not None and found.fits(out.dtype) else None,)


def _called(jaxpr: Any, read: Sequence[Range | None]) -> Sequence[Range | None]:
    """The ranges of the results of an inner program."""
    known = dict(zip(jaxpr.invars, read, strict=True))
    for eqn in jaxpr.eqns:
        given = [None if isinstance(v, jaxprs.Literal) else known.get(v) for v in eqn.invars]
        known.update(zip(eqn.outvars, _results(eqn, given), strict=False))
    return [_number(v) if isinstance(v, jaxprs.Literal) else known.get(v) for v in jaxpr.outvars]


def _result(eqn: Any, name: str, read: Sequence[Range | None]) -> Range | None:
    """The range of an equation's only result, an array of integers."""
    if name == "iota":
        return Range(0, max(eqn.params["shape"][eqn.params["dimension"]] - 1, 0))
    if name in ("argmax", "argmin"):
        return Range(0, eqn.invars[0].aval.shape[eqn.params["axes"][0]] - 1)
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == bool:
        return Range(0, 1)
    if name in KEEPING or name == "convert_element_type":
        return read[0] if eqn.invars[0].aval.size else None
    if name in ("select_n", "concatenate"):
        return _all_of(read[1:] if name == "select_n" else read)
    if name == "pad":
        return _all_of(read[:2])
    if name == "gather":
        is_inside = "FILL" not in str(eqn.params["mode"])
        return read[0] if is_inside else None
    a, b, *more = [*read, None, None][: max(2, len(read))]
    if name == "clamp" and a is not None and more and more[0] is not None:
        return Range(a.low, more[0].high) if a.high <= more[0].low else None
    if name == "rem" and a is not None and b is not None and a.low >= 0 and b.low > 0:
        return Range(0, min(a.high, b.high - 1))
    return _entrywise(name, a, b) if name in _ENTRYWISE and a is not None and b is not None else None


def _entrywise(name: str, a: Range, b: Range) -> Range:
    if name in ("max", "min"):
        pick = max if name == "max" else min
        return Range(pick(a.low, b.low), pick(a.high, b.high))
    if name == "mul":
        ends = [x * y for x in a for y in b]
        return Range(min(ends), max(ends))
    return Range(a.low + b.low, a.high + b.high) if name == "add" else Range(a.low - b.high, a.high - b.low)


def _all_of(read: Sequence[Range | None]) -> Range | None:
    found = [r for r in read if r is not None]
    return functools.reduce(Range.with_all_of, found) if found and len(found) == len(read) else None


def _number(literal: Any) -> Range | None:
    """The range of a literal; None where it is no integer."""
    if not _is_integer(literal.aval) or not np.size(literal.val):
        return None
    return Range(int(np.min(literal.val)), int(np.max(literal.val)))


def _is_integer(aval: Any) -> bool:
    return aval is not None and abstract.is_plain(aval) and np.issubdtype(aval.dtype, np.integer)
