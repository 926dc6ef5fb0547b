"""Lay the values of a conditional's branches in slots that they share, since only one branch runs.

Arrays of equally many elements share a *slot*. If this would take more than the largest branch needs, all arrays of
a dtype lie one after another in one slot. In a `jax.shard_map`, arrays that vary from device to device share no slot
with others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jointcut.partition.program.jax import abstract, meshes

#: The most bytes that slots by number of elements may take, as a multiple of the bytes of the largest branch.
_MOST_PADDING = 1.05


@dataclass(frozen=True)
class Space:
    """Slots that the arrays of several branches share; only one of the branches runs.

    Attributes:
        avals: the types of the slots.
        places: for each branch and each of its arrays the slot, and the first element in it.
        kept: the types of these arrays.
    """

    avals: tuple[Any, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]
    kept: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, kept: Sequence[Sequence[Any]]) -> Space:
        """The slots for the arrays of each branch, given by their types."""
        avals: list[Any] = []
        places: list[dict[int, tuple[int, int]]] = [{} for _ in kept]
        for sort, like in {_sort(aval): aval for branch in kept for aval in branch}.items():
            arrays = [[i for i, aval in enumerate(branch) if _sort(aval) == sort] for branch in kept]
            sizes = [[math.prod(branch[i].shape) for i in mine] for branch, mine in zip(kept, arrays, strict=True)]
            slots, shared = _shared(sizes)
            for branch, mine, there in zip(places, arrays, shared, strict=True):
                branch.update((i, (len(avals) + slot, start)) for i, (slot, start) in zip(mine, there, strict=True))
            avals += [abstract.flat(like, size) for size in slots]
        ordered = tuple(tuple(branch[i] for i in range(len(branch))) for branch in places)
        return cls(tuple(avals), ordered, tuple(map(tuple, kept)))

    def pack(self, branch: int, arrays: Sequence[Any]) -> list[Any]:
        """The slots with the arrays of one branch in them, and zeros where it has none."""
        parts: list[list[Any]] = [[] for _ in self.avals]
        for (slot, _), array in zip(self.places[branch], arrays, strict=True):
            parts[slot].append(jnp.ravel(array))
        return [_filled(mine, aval) for mine, aval in zip(parts, self.avals, strict=True)]

    def unpack(self, branch: int, slots: Sequence[Any]) -> list[Any]:
        """The arrays of one branch, from the slots."""
        places, kept = self.places[branch], self.kept[branch]
        sizes = (math.prod(aval.shape) for aval in kept)
        ranges = (slots[slot][start : start + size] for (slot, start), size in zip(places, sizes, strict=True))
        return [jnp.reshape(part, aval.shape) for part, aval in zip(ranges, kept, strict=True)]


def _sort(aval: Any) -> tuple[Any, ...]:
    """The arrays that may lie in one slot: those of a dtype that vary over the same axes of a mesh."""
    return aval.dtype, meshes.varying(aval)


def _shared(sizes: Sequence[Sequence[int]]) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Slots for arrays of these numbers of elements in each branch: their sizes, and the place of each array."""
    most = Counter[int]()
    for mine in sizes:
        most |= Counter(mine)
    slots, largest = sorted(most.elements()), max(map(sum, sizes))
    if sum(slots) > _MOST_PADDING * largest:
        return [largest], [[(0, sum(mine[:n])) for n in range(len(mine))] for mine in sizes]
    return slots, [[(slots.index(size) + mine[:n].count(size), 0) for n, size in enumerate(mine)] for mine in sizes]


def _filled(parts: Sequence[Any], aval: Any) -> Any:
    """Arrays one after another, then zeros up to the size of a slot."""
    rest = aval.shape[0] - sum(part.shape[0] for part in parts)
    zeros = [abstract.typed(jnp.zeros(rest, aval.dtype), aval)] if rest or not parts else []
    parts = [*parts, *zeros]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
