"""Keep the backwards that a function needed: each structure is traced and compiled once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.progress.progress import Stage
from jointcut.aot.tape.program import Backward
from jointcut.aot.tape.roll import structure_of
from jointcut.aot.tape.sweep import Sweep
from jointcut.aot.tape.walk import Structure
from jointcut.aot.tape.words import Sketch, why
from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.program import jaxprs
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.text import show
from jointcut.wrappers.table import Table

KEPT_CAPTURES = 256


@dataclass(eq=False)
class Capture:
    """One structure of a backward, traced and compiled.

    Attributes:
        why: why it was needed, in words.
        ops: the number of ops of the forward that it goes back through.
        residual_bytes: bytes of the arrays that the forward kept for it, when it was captured.
        backward: the program.
        sketch: what the `why` of later captures is told from.
        hits: how many later calls used it.
        holds: the update that is a part of it, if there is one.
    """

    why: str
    ops: int
    residual_bytes: int
    backward: Backward = field(repr=False)
    sketch: Sketch = field(repr=False)
    hits: int = 0
    holds: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        """`120 ops, 3 hits, 1.2 MB kept: 24 steps instead of 23 in train.py:41`."""
        kept = human_bytes(self.residual_bytes)
        return f"{counted(self.ops, 'op')}, {counted(self.hits, 'hit')}, {kept} kept: {self.why}"

    @property
    def jaxpr(self) -> Any:
        """The whole backward as a closed jaxpr `(constants, references, residuals, cotangents) -> gradients`."""
        return self.backward.closed

    @property
    def graph(self) -> Graph:
        """The backward as ops and values, which can be printed, drawn and planned."""
        return self.backward.graph

    @property
    def text(self) -> str:
        """The backward as graph text."""
        return show(self.graph)


class Captures(Sequence[Capture]):
    """The captures of a function, the oldest first. Print them to see why each was needed.

    At most 256 are kept; then the oldest is dropped.
    """

    def __init__(self, name: str) -> None:
        """Start with none."""
        self._name = name
        self._table: Table[Capture] = Table(KEPT_CAPTURES)
        self.made = 0

    def __len__(self) -> int:
        """The number of captures."""
        return len(self._table)

    def __getitem__(self, i: Any) -> Any:
        """The capture with a number, in the order in which they were made."""
        return list(self)[i]

    def __iter__(self) -> Iterator[Capture]:
        """The captures, oldest first."""
        found = (self._table.get(key) for key in self._table)
        return (capture for capture in found if capture is not None)

    def __repr__(self) -> str:
        """A line for each capture."""
        lines = [f"{self._name}: {counted(len(self), 'capture')}"]
        return "\n".join([*lines, *(f"  {i}: {capture}" for i, capture in enumerate(self))])

    def of(
        self,
        sweep: Sweep,
        cotangents: Sequence[Any],
        refs: Sequence[Any],
        arrays: Callable[[], dict[str, str]],
        more: Any = None,
        program: Callable[[Structure], Backward] | None = None,
    ) -> Capture:
        """The capture of a sweep, made if there is none.

        `refs` are the references that gradients are added to, None for a leaf without one; `arrays` returns the types
        of the arguments. `program` makes the program, which depends on `more`; by default it returns the gradients.
        """
        made: list[Capture] = []
        types = tuple(map(jax.typeof, cotangents)), tuple(None if ref is None else jax.typeof(ref) for ref in refs)

        def make() -> Capture:
            of_gradients = functools.partial(Backward.of, flat=sweep.flat, cotangents=cotangents, refs=refs)
            added = any(ref is not None for ref in refs)
            fate = "added to references" if added else "returned" if program is None else "used for an update"
            made.append(self._made(sweep, program or of_gradients, fate, arrays()))
            return made[0]

        capture = self._table.of((sweep.key, types, more, jaxprs.trace_context()), make)
        capture.hits += not made
        return capture

    def _made(
        self, sweep: Sweep, program: Callable[[Structure], Backward], fate: str, arrays: dict[str, str]
    ) -> Capture:
        with Stage("capture", self._name) as now:
            sketch = Sketch.of(sweep, arrays, fate)
            reason = why(sketch, [capture.sketch for capture in self])
            backward = program(structure_of(sweep))
            bytes_kept = sum(jaxprs.aval_bytes(jax.typeof(x)) for x in sweep.kept)
            self.made += 1
            now.ends(lambda: f"captured the backward of {counted(sweep.count, 'op')} in {now}: {reason}")
        return Capture(reason, sweep.count, bytes_kept, backward, sketch)
