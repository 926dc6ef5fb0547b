"""Keep what was made for a key, made once whichever thread asks for it.

Programs are made slowly and called often, from as many threads as the user likes. A look at what is there takes no
lock. What is not there is made by the first thread that asks; others that ask for the same key wait for it, and those
that ask for another do not. Where there are too many, the oldest are forgotten.

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
    """Values by the keys that they were made for, at `most` so many, or any number."""

    def __init__(self, most: int | None = None) -> None:
        """Begin with nothing."""
        self._most = most
        self._made: dict[Hashable, T] = {}
        self._makers: dict[Hashable, tuple[threading.RLock, list[int]]] = {}
        self._lock = threading.RLock()  # of both: a key's `__eq__` may be the user's, and call us

    def of(self, key: Hashable, make: Callable[[], T], *, keeps: Callable[[T], bool] = lambda made: True) -> T:
        """The value kept for a key, or the one that `make` returns now, kept if it `keeps`.

        What raises is made again by the next that asks, and a `make` that asks for its own key makes it once more.
        """
        found: Any = self._made.get(key, _ABSENT)
        if found is not _ABSENT:
            return found
        with self._alone(key):
            found = self._made.get(key, _ABSENT)
            if found is _ABSENT:
                found = make()
                if keeps(found):
                    self._keep(key, found)
        return found

    def get(self, key: Hashable) -> T | None:
        """What is kept for a key, None where nothing is."""
        return self._made.get(key)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._made)

    def __iter__(self) -> Iterator[Hashable]:
        """The keys there are, the oldest first."""
        with self._lock:
            return iter(list(self._made))

    def __reduce__(self) -> Any:
        """A copy begins with nothing: what was made belongs to whom it was made for."""
        return type(self), (self._most,)

    @contextmanager
    def _alone(self, key: Hashable) -> Iterator[None]:
        """Let one thread at a time make what belongs to a key."""
        with self._lock:
            maker, waiting = self._makers.setdefault(key, (threading.RLock(), [0]))
            waiting[0] += 1
        try:
            with maker:
                yield
        finally:
            with self._lock:
                waiting[0] -= 1
                if not waiting[0]:
                    self._makers.pop(key, None)

    def _keep(self, key: Hashable, made: T) -> None:
        with self._lock:
            self._made[key] = made
            while self._most is not None and len(self._made) > self._most:
                del self._made[next(iter(self._made))]
