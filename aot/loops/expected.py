"""Tell how often a loop is expected to run.

The number is kept in the name stack, so that it reaches the loops of libraries as well.
"""

from __future__ import annotations

import numbers
import re
from contextlib import AbstractContextManager

import jax

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.places import TRIPS_SCOPE

_TRIPS = re.compile(re.escape(TRIPS_SCOPE) + r"(\d+)")


def trips(count: int) -> AbstractContextManager[object]:
    """Say how often the loops that are traced under it are expected to run.

    It changes no result. The cost model counts that number of trips, where it would else count one: in reports, in
    plans, and in the search for a budget. A loop without a `memory` of its own keeps at most that number of
    checkpoints. If it runs more often, its steps run again more often. The innermost number counts. Raises `CallError`
    for anything but a whole number.

    >>> from jax import lax
    >>> def root(a):
    ...     with trips(6):
    ...         return lax.while_loop(lambda x: abs(x * x - a) > 1e-4, lambda x: (x + a / x) / 2, a)
    >>> print(root(2.0).round(3))
    1.414
    """
    if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 0:
        raise CallError(message("trips", f"is {count!r}.", "Give a whole number, how often the loops run."))
    return jax.named_scope(f"{TRIPS_SCOPE}{int(count)}")


def expected_trips(scope: str) -> int | None:
    """Return the number in a name stack, None where it has none."""
    found = _TRIPS.findall(scope)
    return int(found[-1]) if found else None
