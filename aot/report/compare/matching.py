"""Match the arrays of two steps by scope, op and type.

An array is known by its scope, op, dtype and shape, and not by its line, which moves when lines above it do. Arrays
without such a match are matched by less: a scope or an op may have another name, and at last an array another type.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jointcut.aot.report.compare.snapshot import Array

Key = Callable[[Array], Hashable]

#: What matches two arrays, the surest first.
_KEYS: tuple[Key, ...] = (
    lambda a: (a.scope, a.op, a.type),
    lambda a: (a.op, a.type, _function(a.line)),
    lambda a: (a.op, a.type),
    lambda a: (a.scope, a.type),
    lambda a: a.type,
    lambda a: (a.scope, a.op, a.type.partition("[")[0]),
    lambda a: (a.scope, a.op, a.type.partition("[")[2]),
)


@dataclass(frozen=True)
class Change:
    """What became of some arrays of one kind.

    Attributes:
        bytes_before: their bytes in the first step.
        bytes_after: their bytes in the second step.
        before: the largest of them in the first step; None if they are new.
        after: the same in the second step; None if they are gone.
    """

    bytes_before: int
    bytes_after: int
    before: Array | None
    after: Array | None

    @property
    def bytes_more(self) -> int:
        """Bytes after minus bytes before."""
        return self.bytes_after - self.bytes_before

    @property
    def how(self) -> str:
        """What became of them: "new", "gone", "larger", "smaller" or "same"."""
        if self.before is None or self.after is None:
            return "new" if self.before is None else "gone"
        return "larger" if self.bytes_more > 0 else "smaller" if self.bytes_more else "same"

    @property
    def array(self) -> Array:
        """The array as it is now, or as it was."""
        array = self.after or self.before
        assert array is not None, "a change is of an array"
        return array

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain JSON."""
        return {"how": self.how, "bytes_more": self.bytes_more, **asdict(self)}


def changes(before: Sequence[Array], after: Sequence[Array]) -> tuple[Change, ...]:
    """Return what became of the arrays of a step, what grew most first, and what shrank most last."""
    left, right, found = list(before), list(after), list[Change]()
    for key in _KEYS:
        olds, news = _by(key, left), _by(key, right)
        matched = olds.keys() & news.keys()
        found += [_change(olds[name], news[name]) for name in matched]
        left = [array for array in left if key(array) not in matched]
        right = [array for array in right if key(array) not in matched]
    found += [_change([array], []) for array in left]
    found += [_change([], [array]) for array in right]
    return tuple(sorted(found, key=lambda c: (-c.bytes_more, c.array.line, c.array.op, c.array.type)))


def _by(key: Key, arrays: Iterable[Array]) -> dict[Hashable, list[Array]]:
    groups: dict[Hashable, list[Array]] = defaultdict(list)
    for array in arrays:
        groups[key(array)].append(array)
    return groups


def _change(before: Sequence[Array], after: Sequence[Array]) -> Change:
    old, new = (max(arrays, key=lambda a: a.bytes, default=None) for arrays in (before, after))
    return Change(sum(a.bytes for a in before), sum(a.bytes for a in after), old, new)


def _function(line: str) -> str:
    """Return the function of a `file:line (function)`."""
    return line.rpartition(" (")[2].removesuffix(")")
