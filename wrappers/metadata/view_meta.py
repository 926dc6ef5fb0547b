"""List the operations that only move elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jointcut.wrappers.record import Record

VIEWS: dict[str, tuple[str, ...]] = {
    "broadcast_in_dim": ("shape", "broadcast_dimensions"),
    "dynamic_slice": ("slice_sizes",),
    "reshape": ("new_sizes", "dimensions"),
    "rev": ("dimensions",),
    "slice": ("start_indices", "limit_indices", "strides"),
    "split": ("sizes", "axis"),
    "squeeze": ("dimensions",),
    "transpose": ("permutation",),
}
"""Operations of `jax.lax` that only move elements, with the names of their parameters after the array, in order."""


@dataclass(frozen=True)
class ViewMeta(Record):
    """One step of a view: an operation of `jax.lax` that only moves elements (PyTorch's `ViewMeta`).

    Attributes:
        op: its name in `jax.lax`, such as `transpose`.
        shape: the shape of the result.
        arguments: names and values of its other arguments, in the order of `jax.lax`. A `split` has the number of the
            piece last, as `index`. A `dynamic_slice` has `start_indices`; an index computed by the program is None.
    """

    op: str
    shape: tuple[int, ...]
    arguments: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        """`transpose`, or `split[1]` for the second piece."""
        return f"split[{dict(self.arguments)['index']}]" if self.op == "split" else self.op
