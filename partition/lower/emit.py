"""Write a schedule out as two jaxprs.

The forward is `primals -> (outputs, residuals)`, the backward `(residuals, primals, cotangents) -> gradients`. Both are
written step by step. A loop's forward gets new stacks for saved values and loses the stacks of other values; its
backward gets the recomputation in its body. An optimisation barrier lets a value wait, or writes it to memory.
Equations keep their name stack and source line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jointcut.partition.errors import PlanError, message
from jointcut.partition.lower.follow import flat
from jointcut.partition.lower.listing import Schedule
from jointcut.partition.lower.steps import Zeros
from jointcut.partition.lower.writer import Key, Writer
from jointcut.partition.packing.packing import Packings
from jointcut.partition.program.graph import SHARDS, TOP, Graph
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.partition.program.jax.meshes import laid_over
from jointcut.partition.program.roles import Role
from jointcut.partition.rewrite.fills import zeros_apart


@dataclass(frozen=True)
class Residual:
    """The origin of one residual: `kind` is "saved", "output" or "input".

    `index` is its place among the forward's saved results, its outputs, or the program's primals. `parts` is the number
    of devices that each have a part of it.
    """

    kind: str
    index: int
    value: int
    parts: int = 1


@dataclass(frozen=True)
class Halves:
    """The two jaxprs; `residuals` describes the leading inputs of the backward, in order.

    `waits` is true if the backward computes something again. If both halves then run in one program, the residuals wait
    for the cotangents.
    """

    forward: Any
    backward: Any
    residuals: tuple[Residual, ...]
    waits: bool = False

    @property
    def residual_bytes(self) -> int:
        """Bytes alive in the memory of one device between the halves, beyond the arrays that the caller holds."""
        return sum(size for aval, size in self._saved() if not abstract.is_on_host(aval))

    @property
    def host_bytes(self) -> int:
        """Bytes alive in host memory between the halves, for one device."""
        return sum(size for aval, size in self._saved() if abstract.is_on_host(aval))

    def _saved(self) -> Iterator[tuple[Any, int]]:
        """The types of the forward's results that only the backward reads, each with the bytes of one device."""
        backward, _ = jaxprs.opened(self.backward)
        pairs = zip(backward.invars, self.residuals, strict=False)
        return ((v.aval, -(-abstract.aval_bytes(v.aval) // r.parts)) for v, r in pairs if r.kind == "saved")


def emit(graph: Graph, schedule: Schedule, packings: Packings | None = None) -> Halves:
    """Write both halves of a schedule, with the forms that it names.

    Raises `PlanError` where the graph was read from text.
    """
    if any(v.payload is None for v in graph.values):
        what = "was read from text, so it has no equations that halves could be written of."
        raise PlanError(message("The graph", what, "Trace a function; of text, plans are made by min_cut and Front."))
    with runtime.paused_collection():
        top = Writer(graph, graph.regions[TOP], None, packings=packings or Packings())
        forward, kept = _forward(graph, schedule, top)
        backward, residuals = _backward(graph, schedule, kept, top.another(TOP, None))
        zeros = {(step.shape, step.dtype) for step in schedule.backward if isinstance(step, Zeros)}
        forward, backward = (zeros_apart(half, zeros) for half in (forward, backward))
        return Halves(forward, backward, residuals, schedule.waits)


def _forward(graph: Graph, schedule: Schedule, top: Writer) -> tuple[Any, list[tuple[Key, Any]]]:
    """Write the forward; also return the values kept for loops in segments, each with its type."""
    outputs = graph.role_outputs(Role.OUTPUT)
    handed = [v for v in schedule.handed if v not in outputs or v in schedule.stored]
    primals = graph.role_inputs(Role.PRIMAL)
    invars = [top.define(v, top.fresh(v, TOP)) for v in primals]
    top.run(schedule.forward)
    results = [lit if v is None else top.want(v) for v, lit in _ends(graph, Role.OUTPUT)]
    kept = [(key, atom) for key, atoms in top.kept.items() for atom in atoms]
    left = flat(map(top.leaving, handed))
    waiting = [part for (v, _), atom in kept for part in top.hooked(v, atom)]
    closed = jaxprs.build(invars, [*results, *left, *waiting], top.eqns)
    return closed, [(key, atom.aval) for key, atom in kept]


def _backward(
    graph: Graph, schedule: Schedule, kept: Sequence[tuple[Key, Any]], top: Writer
) -> tuple[Any, tuple[Residual, ...]]:
    primals = graph.role_inputs(Role.PRIMAL)
    values = [*schedule.handed, *(v for v in primals if v not in schedule.stored)]
    top.on_host.update(schedule.offloaded)
    top.forms.update(schedule.stored)
    fed = [top.define(v, top.given(v, schedule.steps_apart.get(v))) for v in values]
    hooks = ((aval, top.hook(v, aval)) for (v, _), aval in kept)
    first = [[*map(jaxprs.fresh, [aval] if hook is None else hook.types)] for aval, hook in hooks]
    for (key, aval), atoms in zip(kept, first, strict=True):
        top.kept.setdefault(key, []).append(top.unhooked(key[0], aval, atoms))
    cotangents = [top.define(v, top.fresh(v, TOP)) for v in graph.role_inputs(Role.COTANGENT)]
    top.run(schedule.backward)
    results = [lit if v is None else top.want(v) for v, lit in _ends(graph, Role.GRADIENT)]
    read = {v for atoms in (*(eqn.invars for eqn in top.eqns), results) for v in jaxprs.variables(atoms)}
    counts = {v: len(atom) for v, atom in zip(values, fed, strict=True) if isinstance(atom, tuple)}
    parts = [v for ((v, _), _), atoms in zip(kept, first, strict=True) for _ in atoms]
    places = _residuals(graph, schedule, parts, counts)
    residuals = [(r, var) for r, var in zip(places, [*flat(fed), *itertools.chain(*first)], strict=True) if var in read]
    invars = [*(var for _, var in residuals), *cotangents]
    return jaxprs.build(invars, results, top.eqns), tuple(r for r, _ in residuals)


def _residuals(graph: Graph, schedule: Schedule, kept: Iterable[int], counts: Mapping[int, int]) -> Iterator[Residual]:
    """List the origin of each residual: handed values, the program's inputs, and values kept for loops in segments.

    `counts` gives the number of arrays of each value in another form.
    """
    outputs = graph.role_outputs(Role.OUTPUT)
    saved = 0
    for v in schedule.handed:
        if v in outputs and v not in schedule.stored:
            yield Residual("output", outputs.index(v), v)
        else:
            count = counts.get(v, 1)
            yield from (Residual("saved", i, v, _parts(graph, v)) for i in range(saved, saved + count))
            saved += count
    for i, v in enumerate(graph.role_inputs(Role.PRIMAL)):
        if v not in schedule.stored:
            yield Residual("input", i, v)
    for i, v in enumerate(kept, saved):
        yield Residual("saved", i, v, _parts(graph, v))


def _parts(graph: Graph, v: int) -> int:
    """The number of devices that each have a part of a value; inside `jax.shard_map` each has a value of its own."""
    value = graph.values[v]
    holders = (graph.ops[r.holder] for r in graph.regions if r.holder is not None and r.loop == graph.branch_of(v, TOP))
    laid = next((op.payload for op in holders if op.name == SHARDS), None)
    return value.parts if laid is None else math.prod(dict(laid_over(laid, value.payload)).values())


def _ends(graph: Graph, role: Role) -> list[tuple[int | None, Any]]:
    pairs = zip(graph.outputs, graph.literals or (None,) * len(graph.outputs), strict=True)
    return [(v, lit) for (v, r), lit in pairs if r is role]
