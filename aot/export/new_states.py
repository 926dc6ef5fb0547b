"""Write the new states of a loaded function's objects into the caller's arguments.

If the class of an object can be imported, the caller passes the object itself, and it is written as in every other
call. Otherwise the caller passes a dict in its place, and the new array replaces the old one in the dict.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.partition.errors import CallError, message
from jointcut.wrappers.arguments import objects
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.metadata.descriptors import Size


@dataclass(frozen=True)
class GivenCall(Bound):
    """A call of an artefact, with the caller's arguments.

    `passed` is `(args, kwargs)`, `keys` are the keys of each leaf in it.
    """

    passed: tuple[Sequence[Any], Mapping[str, Any]] = field(default=((), {}), compare=False, repr=False)
    keys: tuple[tuple[Size, ...], ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, bound: Bound, args: Sequence[Any], kwargs: Mapping[str, Any], keys: Any) -> GivenCall:
        """Return the bound call with the caller's arguments."""
        fields = {name: getattr(bound, name) for name in Bound.__dataclass_fields__}
        return cls(**fields, passed=(args, kwargs), keys=tuple(keys))

    def write(self, states: Mapping[int, Any]) -> None:
        """Write like `Bound.write`; raises `CallError` if an argument cannot be written, and then writes nothing."""
        inside = self.in_objects
        holders = {i: self._holder(i) for i in states if i not in inside}
        super().write({i: state for i, state in states.items() if i in inside})
        for i, (holder, key) in holders.items():
            if objects.is_owned(holder):
                objects.put(holder, states[i])
            elif isinstance(holder, MutableMapping | MutableSequence):
                holder[key] = states[i]
            else:
                setattr(holder, str(key), states[i])

    def _holder(self, i: int) -> tuple[Any, Any]:
        """Return the container of a leaf, and its key there."""
        half, *path, last = self.keys[i]
        holder: Any = self.passed[half == "kwargs"]
        for key in path:
            holder = _part(holder, key)
        if not _can_be_written(holder):
            what = f"is written by the function, and a {type(holder).__name__} cannot be."
            cure = "Pass a dict there, which gets the new value, or the object that was exported."
            raise CallError(message(self.paths()[i], what, cure))
        return holder, last


def _can_be_written(holder: Any) -> bool:
    if isinstance(holder, Mapping | Sequence):
        return isinstance(holder, MutableMapping | MutableSequence)
    rules: Any = getattr(type(holder), "__dataclass_params__", None)
    return rules is None or not rules.frozen


def _part(holder: Any, key: Size) -> Any:
    """Return the item or attribute of a container at a key."""
    return getattr(holder, str(key)) if hasattr(holder, str(key)) and not hasattr(holder, "keys") else holder[key]
