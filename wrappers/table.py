"""Keep one value for each key, and make it once for all threads.

Programs are slow to make and often called, from any number of threads. Reading a value takes no lock. The first thread
that asks for a missing value makes it. Other threads wait only if they ask for the same key. A full table drops its
oldest values.

>>> table = Table(most=2)
>>> [table.of(word, lambda: word.upper()) for word in ("a", "b", "a", "c")]
['A', 'B', 'A', 'C']
>>> list(table)
['b', 'c']
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_ABSENT: Any = object()


class Table(Generic[T]):
    """Values by key: at most `most` values, or any number if it is None."""

    def __init__(self, most: int | None = None) -> None:
        """Make an empty table."""
        self._most = most
        self._made: dict[Hashable, T] = {}
        self._makers: dict[Hashable, tuple[threading.RLock, list[int]]] = {}  # lock of a key, number of its users
        self._lock = threading.RLock()  # for both; reentrant, since a user's `__eq__` of a key may call the table

    def of(self, key: Hashable, make: Callable[[], T], *, keeps: Callable[[T], bool] = lambda value: True) -> T:
        """Return the value of a key. If there is none, `make` it, and keep it if `keeps(value)` is true.

        If `make` raises, the next call makes the value. If `make` asks for its own key, it is called again.
        """
        value: Any = self._made.get(key, _ABSENT)
        if value is not _ABSENT:
            return value
        with self._alone(key):
            value = self._made.get(key, _ABSENT)
            if value is _ABSENT:
                value = make()
                if keeps(value):
                    self._keep(key, value)
        return value

    def get(self, key: Hashable) -> T | None:
        """Return the value of a key, or None."""
        return self._made.get(key)

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._made)

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the keys, oldest first."""
        with self._lock:
            return iter(list(self._made))

    def __reduce__(self) -> Any:
        """Make a copy an empty table."""
        return type(self), (self._most,)

    @contextmanager
    def _alone(self, key: Hashable) -> Iterator[None]:
        """Let one thread at a time make the value of a key."""
        with self._lock:
            lock, users = self._makers.setdefault(key, (threading.RLock(), [0]))
            users[0] += 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                users[0] -= 1
                if not users[0]:
                    self._makers.pop(key, None)

    def _keep(self, key: Hashable, value: T) -> None:
        with self._lock:
            self._made[key] = value
            while self._most is not None and len(self._made) > self._most:
                del self._made[next(iter(self._made))]
