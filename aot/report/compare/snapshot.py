"""Hold the figures and arrays of a step, to be compared with those of another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from jointcut.partition.lower.memory.lifetimes import Lifetimes
from jointcut.partition.program.places import Name, names

JSON = dict[str, Any]

FORMAT = 1

#: The figures of a step, with the words for them. A step has some of them.
FIGURES = {
    "peak_bytes": "peak of a step",
    "temp_bytes": "temporaries",
    "residual_bytes": "saved for the backward",
    "collective_bytes": "moved between devices",
    "flops": "flops",
}


@dataclass(frozen=True)
class Array:
    """Arrays of one type that one op makes in one scope: their bytes together.

    `scope` are the user's modules and functions, `line` is `file:line (function)`.
    """

    bytes: int
    type: str
    op: str
    scope: str
    line: str


@dataclass(frozen=True)
class Snapshot:
    """What a step takes: figures, and the arrays that take it.

    Attributes:
        function: the name of the function.
        backend: the backend or target that it was compiled for.
        jax: the version of JAX.
        account: who says so: "XLA", or "the model" where nothing was compiled.
        figures: a number for some of `FIGURES`.
        at_peak: the temporaries that are alive at their peak, largest first.
        saved: the arrays that the forward hands to the backward, largest first.
        memory: the memory over the step, as a section of a page; None where it was not kept.
    """

    function: str
    backend: str
    jax: str
    account: str
    figures: dict[str, float]
    at_peak: tuple[Array, ...] = ()
    saved: tuple[Array, ...] = ()
    memory: JSON | None = None

    def to_dict(self) -> JSON:
        """Return the snapshot as plain JSON, which `stored.from_dict` reads."""
        return {"format": FORMAT, **asdict(self)}

    @property
    def made_by(self) -> str:
        """Where its figures come from: `JAX 0.12, cpu`."""
        model = "" if self.account == "XLA" else f", by {self.account}"
        return f"JAX {self.jax}, {self.backend}{model}"


def alive_at_peak(lives: Lifetimes) -> tuple[Array, ...]:
    """Return the buffers that are alive at the peak, one row for those of one type, op, scope and line."""
    alive = lives.alive(lives.peak) if lives.moments else ()
    paths = names([moment.place for moment in lives.moments] + [b.place for b in alive])[len(lives.moments) :]
    return together(Array(b.bytes, b.type, b.op, _text(p), b.place.line) for b, p in zip(alive, paths, strict=True))


def together(arrays: Iterable[Array]) -> tuple[Array, ...]:
    """Return one row for arrays that differ in their bytes alone, largest first."""
    sizes: dict[Array, int] = defaultdict(int)
    for array in arrays:
        sizes[replace(array, bytes=0)] += array.bytes
    rows = [replace(array, bytes=size) for array, size in sizes.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.type, row.op, row.scope, row.line)))


def _text(path: Iterable[Name]) -> str:
    """Return a path as text; a function that runs several lines of its own is named once."""
    return "/".join(text for text, _ in groupby(name.text for name in path))
