"""Say what stays independent along an axis of the arguments, and which ops mix its rows."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.aot.planning.asked import named_shapes, rows_of
from jointcut.aot.trace.data import Trace
from jointcut.aot.trace.joint import Joint
from jointcut.partition.drawing.displays import graph_page
from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.drawing.picture import file_and_line
from jointcut.partition.errors import TraceError, message
from jointcut.partition.figures import counted
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.axes import TOTAL, Place, is_sum
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.roles import Role, Side
from jointcut.partition.program.text import show
from jointcut.partition.tiles.apart import Mixing, apart, in_graph, labelled, told
from jointcut.partition.tiles.tile import variables

_WIDTH, _MOST = 100, 6  # columns of a line, and items of a list


@dataclass(frozen=True)
class Axes:
    """The rows along an axis of the arguments, such as the examples of a batch, in all values of the joint program.

    A value keeps the rows apart if it has one row for each of the arguments, computed from that row and from values
    without rows. In the backward it may also be computed from sums over rows of the forward, such as the number by
    which a weighted mean divides. Where no op mixes the rows, they can run in blocks (`tiles`), but for loops over the
    rows, ops with effects, and functions under `jax.custom_vjp`.

    Attributes:
        name: of the function.
        axis: as it was asked for: the path of an argument, or the name of a size.
        count: the number of rows, or its name.
        places: where the rows are in each value that has rows or is computed from rows, by its id in the graph.
        results: the path of each output and gradient, and in words where its rows are.
        mixing: the ops that mix rows, in order.
        graph: the program; the label of each value says where its rows are.
        plan: the plan of the cut.
    """

    name: str
    axis: str
    count: Any
    places: Mapping[int, Place]
    results: tuple[tuple[str, str], ...]
    mixing: tuple[Mixing, ...]
    graph: Graph = field(repr=False, compare=False)
    plan: Plan | None = field(default=None, repr=False, compare=False)

    @property
    def values(self) -> dict[int, int]:
        """The axis of the rows in each value that keeps them apart, by its id in the graph.

        Of a value in the steps of a loop it is an axis of one step. Where the steps are the rows, these have none.
        """
        return {v: place for v, place in self.places.items() if isinstance(place, int)}

    @property
    def text(self) -> str:
        """The graph as text, with the labels."""
        return show(self.graph)

    def __str__(self) -> str:
        """Name the ops that mix rows, and count the values of each half and the results by the place of their rows."""
        first, *others = dict.fromkeys(map(_mixing, self.mixing)) or ("no op",)
        rows = "" if str(self.count) == self.axis else f", {self.count} rows"
        lines = [f"{self.name} along {self.axis}{rows}: mixed {'first ' * bool(others)}by {first}"]
        lines += [f"then by {_listed(others)}"] * bool(others)
        lines += [f"values of the {side.value}: {text}" for side in Side if (text := self._shares(side))]
        groups = dict[str, list[str]]()
        for path, place in self.results:
            groups.setdefault(place, []).append(path)
        lines += [f"{place}: {_listed(paths)}" for place, paths in groups.items()]
        return "\n".join(
            textwrap.fill(text, _WIDTH, initial_indent="  " * (i > 0), subsequent_indent="    ", break_on_hyphens=False)
            for i, text in enumerate(lines)
        )

    def _shares(self, side: Side) -> str:
        """The number of values of a half that keep the rows apart, their share of the bytes, and how many do not."""
        late = {v for op in self.graph.ops if op.origin is Side.BACKWARD for v in op.outputs}
        late |= {*self.graph.role_inputs(Role.COTANGENT)}
        arrays = self.graph.arrays & late if side is Side.BACKWARD else self.graph.arrays - late
        read = {v: p for v, p in self.places.items() if v in arrays}
        own, sums = self.values.keys() & read, sum(p == TOTAL or is_sum(p) for p in read.values())
        every, kept = (sum(self.graph.values[v].saved_bytes for v in several) for several in (read, own))
        share = f" ({kept / every:.0%} of the bytes)" if isinstance(every, int) and every else ""
        mixed = len(read) - len(own) - sums
        return f"{len(own):,} with rows{share}, {sums:,} from sums over rows, {mixed:,} mixed" if read else ""

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the graph with the labels, for notebooks."""
        title, *rest = str(self).splitlines()
        data = graph_page(self.name, f"{title}. {' '.join(map(str.strip, rest))}", self.graph, self.plan)
        return {"text/plain": str(self), "text/html": framed(page(data))}


def _mixing(op: Mixing) -> str:
    line = f" at {file_and_line(op.source)}" if op.source else ""
    total = " (reads a total)" if op.reads_total else ""
    return f"{op.op}{line}{total}{' in the backward' if op.side is Side.BACKWARD else ''}"


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _MOST} more" if len(items) > _MOST else ""
    return ", ".join(items[:_MOST]) + more


def axes_of(trace: Trace, program: Joint, graph: Graph, axis: str, plan: Plan | None = None) -> Axes:
    """Follow the rows along an axis through a joint program: of the arguments at a path, or of all with a named size.

    The graph was read from the program. Of a program with rows in blocks, the one before it ran in blocks is followed.
    Sizes may have names by the options. Raises `TraceError` for an axis that the arguments do not have.
    """
    while program.roles.tiles and program.unopened is not None:
        program, graph, plan = program.unopened, program.unopened.graph, None
    given = rows_of(program, axis, f"axes({axis!r})", named_shapes(program, dict(trace.options.shapes)))
    count = next(variables(program.closed)[n].aval.shape[a] for n, a in given.items())
    if isinstance(count, int) and count < 2:
        raise TraceError(message(f"axes({axis!r})", f"names arrays of {counted(count, 'row')}.", "Give more rows."))
    rows, mixing = apart(program.closed, program.roles, given, program.carries)
    places = in_graph(rows, graph)
    gradient = "new" if program.is_updated else "gradient of"
    paths = (*program.results.paths, *(f"{gradient} {trace.bound.paths()[i]}" for i in trace.owners))
    ends = (told(rows.place(v)) for v in jaxprs.opened(program.closed)[0].outvars)
    known = trace.name, axis, count, places, tuple(zip(paths, ends, strict=True)), mixing
    return Axes(*known, labelled(graph, places), plan)
