"""Tell how often a loop is expected to run.

The number is kept in the name stack, so that it reaches the loops of libraries as well. A trace has a name stack of its
own, so it is also kept in a context of JAX, which is part of the keys of `jax.jit` and of ours.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.places import TRIPS_SCOPE

_TRIPS = re.compile(re.escape(TRIPS_SCOPE) + r"(\d+)")
_expected: Any = jax.make_user_context()


def trips(count: int) -> AbstractContextManager[object]:
    """Say how often the loops that are traced under it are expected to run.

    It changes no result. The cost model counts that number of trips: in reports, in plans, and in the search for a
    budget. A loop without a `memory` of its own keeps as many checkpoints as pay for that number, and no more than it.
    If it runs more often, its steps run again more often. `aot.count_trips` finds the number. The innermost number
    counts. Under another number `jax.jit` and `aot.function` trace anew. Raises `CallError` for anything but a whole
    number.

    >>> from jax import lax
    >>> def root(a):
    ...     with trips(6):
    ...         return lax.while_loop(lambda x: abs(x * x - a) > 1e-4, lambda x: (x + a / x) / 2, a)
    >>> print(root(2.0).round(3))
    1.414
    """
    if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 0:
        raise CallError(message("trips", f"is {count!r}.", "Give a whole number, how often the loops run."))
    return _expecting(int(count))


@contextmanager
def _expecting(count: int) -> Iterator[None]:
    with _expected(count), _named(count):
        yield


def _named(count: int) -> AbstractContextManager[object]:
    return jax.named_scope(f"{TRIPS_SCOPE}{count}")


def named() -> AbstractContextManager[object]:
    """Have the number in the name stack of a trace too, whose loops are looked at when the statement has ended."""
    return nullcontext() if _expected.value is None else _named(_expected.value)


def expected_trips(scope: str) -> int | None:
    """Return the number in a name stack, else that of the statement around the caller; None where there is none."""
    found = _TRIPS.findall(scope)
    return int(found[-1]) if found else _expected.value
