"""Name the operations that only move elements, and do them again on another array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jointcut.partition.errors import CallError, message
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
"""The operations of `jax.lax` that only move elements, with their parameters beside the array, in its order."""


@dataclass(frozen=True)
class ViewMeta(Record):
    """One step of a view: an operation of `jax.lax` that only moves elements (PyTorch's `ViewMeta`).

    Attributes:
        op: its name in `jax.lax`, such as `transpose`.
        shape: of the result.
        arguments: what the operation takes beside the array, by name, in the order of `jax.lax`. A `split` has the
            number of its piece as the last one, `index`. A `dynamic_slice` has `start_indices`, with None for each that
            is known only when the program runs.
    """

    op: str
    shape: tuple[int, ...]
    arguments: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        """`transpose`, or `split[1]` for the second piece."""
        return f"split[{dict(self.arguments)['index']}]" if self.op == "split" else self.op

    @property
    def can_be_replayed(self) -> bool:
        """Whether the operation is known whole: not so a slice that starts where the program says."""
        return self.op != "dynamic_slice" or None not in dict(self.arguments)["start_indices"]

    def replay(self, base: Any) -> Any:
        """The view of another array of the same shape; raises `CallError` where it cannot be replayed."""
        arguments = [value for _, value in self.arguments]
        if not self.can_be_replayed:
            cure = "Run the function: the program computes where the slice starts."
            raise CallError(message(self.op, "starts at a place that is known only when the program runs.", cure))
        if self.op == "split":
            *arguments, index = arguments
            return jax.lax.split(base, *arguments)[index]
        return getattr(jax.lax, self.op)(base, *arguments)
