"""Read how much memory the derivative of a loop may have, and count its checkpoints.

>>> import jax
>>> Memory.read(12, None, 8).slots([jax.core.ShapedArray((2,), "float32")])
12
>>> Memory.read("1KiB", None, 8).slots([jax.core.ShapedArray((2,), "float32")])
127
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jointcut.aot.options.limits import limit
from jointcut.partition.errors import BudgetError, message
from jointcut.partition.program.jax import abstract
from jointcut.partition.program.sizes import is_symbolic

#: Default bytes of checkpoints: of a loop that is known to run often enough to fill them, and of any other. All are
#: allocated and cleared before the first step, and most loops that end by themselves end soon.
FILLED_BYTES, DEFAULT_BYTES = 2 * 2**20, 32 * 2**10
FEWEST, MOST = 10, 1024  # checkpoints, by default
MOST_TRIPS = 2**31 - 1  # of any loop, which counts them in int32
#: What a budget may give: bytes of a loop that is known to fill them, and checkpoints of any other.
BUDGET_BYTES, BUDGET_FEWEST = 64 * 2**20, 64
_CURE = (
    "Give a number of checkpoints (an int), bytes (a text such as '64MiB'), 'stack' or 'sqrt' (both with max_trips), "
    "or leave memory out."
)


@dataclass(frozen=True)
class Memory:
    """How many checkpoints a loop may keep; at most one of `checkpoints` and `num_bytes` is set.

    Attributes:
        checkpoints: the number of checkpoints.
        num_bytes: the bytes that the checkpoints may take, with the spare row of the reverse sweep.
        most: no more than this, because the loop makes no more trips; None if that is not known.
        expected: no more than this, because the loop is expected to make this number of trips; it may make more. None
            if nothing is expected. It has no effect where `checkpoints` is set.
    """

    checkpoints: int | None = None
    num_bytes: int | None = None
    most: int | None = None
    expected: int | None = None

    @classmethod
    def read(cls, memory: Any, max_trips: int | None, carry_bytes: int) -> Memory:
        """Read the argument `memory` of a loop whose carry takes `carry_bytes`. Raises `BudgetError`."""
        if memory is None:
            return cls(most=max_trips)
        if isinstance(memory, str):
            return cls._of_text(memory, max_trips, carry_bytes)
        if isinstance(memory, bool) or not isinstance(memory, numbers.Integral):
            raise BudgetError(message("memory", f"is {memory!r}, of type {type(memory).__name__}.", _CURE))
        if memory < 1:
            cure = "Give at least 1; with one checkpoint, every step starts again from the first."
            raise BudgetError(message("memory", f"is {memory} checkpoints.", cure))
        if int(memory) > MOST_TRIPS:
            cure = f"Give at most {MOST_TRIPS}, as many as a loop can make trips."
            raise BudgetError(message("memory", f"is {memory} checkpoints.", cure))
        return cls(int(memory), most=max_trips)

    @classmethod
    def _of_text(cls, memory: str, max_trips: int | None, carry_bytes: int) -> Memory:
        if memory in ("stack", "sqrt"):
            if max_trips is None:
                cure = "Give max_trips, the most trips that the loop makes; a number of checkpoints needs none."
                raise BudgetError(message(f"memory={memory!r}", "needs to know how long the loop may run.", cure))
            return cls(max_trips if memory == "stack" else math.isqrt(max(max_trips, 1) - 1) + 1, most=max_trips)
        try:
            num_bytes = limit(memory).peak_bytes
        except BudgetError as error:
            raise BudgetError(message("memory", str(error).partition("\n")[0].partition(" ")[2], _CURE)) from None
        if num_bytes is None:
            raise BudgetError(message("memory", f"is {memory!r}, which is no number of bytes.", _CURE))
        least = 2 * carry_bytes
        if num_bytes < least:
            what = f"is {memory!r}, and one carry takes {carry_bytes:,} bytes."
            cure = f"Give at least '{least}B', for one checkpoint and the carry that the reverse sweep works on."
            raise BudgetError(message("memory", what, cure))
        return cls(num_bytes=num_bytes, most=max_trips)

    @property
    def is_default(self) -> bool:
        """Whether the user gave no number of checkpoints."""
        return self.checkpoints is None and self.num_bytes is None

    def fixed(self, slots: int) -> Memory:
        """Return a memory of `slots` checkpoints, for as many trips."""
        return Memory(slots, most=self.most)

    def bounded(self, most: int | None, expected: int | None) -> Memory:
        """Return the same memory of a loop that makes at most `most` trips, and is expected to make `expected`."""
        bounds = [n for n in (self.most, most) if n is not None]
        return replace(self, most=min(bounds, default=None), expected=self.expected if expected is None else expected)

    def slots(self, kept: Sequence[Any]) -> int:
        """Return the number of checkpoints of these types; the fewest, where only an export's caller knows sizes.

        By default they are those that pay: more than fit into few bytes only until no step runs again twice.
        """
        row = _row_bytes(kept)
        if self.checkpoints is not None:
            return self._within(self.checkpoints, None)
        if is_symbolic((row, self.expected)):
            return self._within(FEWEST, None)
        if self.num_bytes is not None:
            return self._within(self.num_bytes // row - 1, self.expected)
        if self.expected is None:
            return self._within(min(max(DEFAULT_BYTES // row, FEWEST), MOST), None)
        once = (math.isqrt(8 * self.expected + 1) - 1) // 2  # so many run no step of the loop again twice
        once = max(FEWEST, min(once, BUDGET_BYTES // row))
        return self._within(max(min(FILLED_BYTES // row, MOST), once), self.expected)

    def most_slots(self, kept: Sequence[Any]) -> int:
        """Return the number of checkpoints that a budget may give to the loop; more would not pay, as far as is known.

        It is the number of trips, where that is known. Nothing can be given where the user gave the memory.
        """
        own, row = self.slots(kept), _row_bytes(kept)
        if not self.is_default or is_symbolic((row, self.expected)):
            return own
        if self.expected is None:
            return max(own, self._within(min(max(FILLED_BYTES // row, BUDGET_FEWEST), MOST), None))
        return max(own, self._within(max(BUDGET_BYTES // row, BUDGET_FEWEST), self.expected))

    def _within(self, number: int, expected: int | None) -> int:
        return max(1, min([number, *(n for n in (self.most, expected) if n is not None and not is_symbolic((n,)))]))


def _row_bytes(kept: Sequence[Any]) -> Any:
    row = sum(map(abstract.aval_bytes, kept))
    return row if is_symbolic((row,)) else max(1, row)
