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

from jointcut.aot.choices.limits import limit
from jointcut.partition.errors import BudgetError, message
from jointcut.partition.program import jaxprs
from jointcut.partition.program.sizes import is_symbolic

#: Bytes of checkpoints where nobody says: of a loop that is known to run often enough to fill them, and of any other.
#: All are allocated and cleared before the first step, and most loops that end by themselves end soon.
FILLED_BYTES, DEFAULT_BYTES = 64 * 2**20, 2 * 2**20
FEWEST, MOST = 16, 1024  # checkpoints, where nobody says
_CURE = (
    "Give a number of checkpoints (an int), bytes (a text such as '64MiB'), 'stack' or 'sqrt' (both with max_trips), "
    "or leave memory out."
)


@dataclass(frozen=True)
class Memory:
    """How many checkpoints a loop may keep, of which exactly one field says.

    Attributes:
        checkpoints: so many.
        num_bytes: as many as fit into so many bytes, with the row that the reverse sweep needs beside them.
        most: no more than this, because the loop makes no more trips; None if that is not known.
        expected: no more than this, because the loop is expected to make so many trips; it may make more. None if
            nothing is expected. It says nothing where `checkpoints` does.
    """

    checkpoints: int | None = None
    num_bytes: int | None = None
    most: int | None = None
    expected: int | None = None

    @classmethod
    def read(cls, memory: Any, max_trips: int | None, carry_bytes: int) -> Memory:
        """Read the argument `memory` of a loop whose carry takes `carry_bytes`. Raises `BudgetError`."""
        if memory is None:
            return cls(most=max_trips, expected=max_trips)
        if isinstance(memory, str):
            return cls._of_text(memory, max_trips, carry_bytes)
        if isinstance(memory, bool) or not isinstance(memory, numbers.Integral):
            raise BudgetError(message("memory", f"is {memory!r}, of type {type(memory).__name__}.", _CURE))
        if memory < 1:
            cure = "Give at least 1; with one checkpoint, every step starts again from the first."
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
        """Whether nobody said how many checkpoints there are."""
        return self.checkpoints is None and self.num_bytes is None

    def within(self, num_bytes: int) -> Memory:
        """So many bytes for checkpoints, for as many trips."""
        return Memory(num_bytes=num_bytes, most=self.most, expected=self.expected)

    def fixed(self, slots: int) -> Memory:
        """So many checkpoints, for as many trips."""
        return Memory(slots, most=self.most)

    def bounded(self, most: int | None, expected: int | None) -> Memory:
        """The same memory of a loop that makes at most so many trips, and is expected to make so many."""
        bounds = [n for n in (self.most, most) if n is not None]
        return replace(self, most=min(bounds, default=None), expected=self.expected if expected is None else expected)

    def slots(self, kept: Sequence[Any]) -> int:
        """The number of checkpoints of arrays of these types; the fewest, where only an export's caller knows sizes."""
        row = sum(map(jaxprs.aval_bytes, kept))
        row = row if is_symbolic((row,)) else max(1, row)
        ends = [n for n in (self.most, None if self.checkpoints else self.expected) if n is not None]
        if self.checkpoints is not None:
            found = self.checkpoints
        elif is_symbolic((row,)):
            found = FEWEST
        elif self.num_bytes is not None:
            found = self.num_bytes // row - 1
        else:
            num_bytes = DEFAULT_BYTES if self.expected is None else FILLED_BYTES
            found = min(max(num_bytes // row, FEWEST), MOST)
        return max(1, min(found, *ends) if ends else found)


def steps_again(trips: int, slots: int) -> int:
    """How many steps at least run again to pull back `trips` steps from so many checkpoints; see `sweeping`.

    >>> steps_again(10, 10), steps_again(10, 3)
    (0, 7)
    """
    if trips <= slots:
        return 0
    again = next(r for r in range(1, trips + 1) if math.comb(slots + r, r) >= trips)
    return max(again * trips - math.comb(slots + again, again - 1) - trips, trips - slots)
