"""Hold two functions that what is saved passes through: one where it is kept, one where it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jointcut.aot.hooks.hook import Hook, hook_of
from jointcut.aot.hooks.looks import can_be_traced, described
from jointcut.partition.errors import CallError, choices, message
from jointcut.wrappers.record import Record
from jointcut.wrappers.table import Table

#: What is packed: what the function computes, also arguments that are not differentiated, or all that is read again.
WHICH = ("intermediates", "no_params", "all")


@dataclass(frozen=True)
class SavedArrays(Record):
    """The functions of `saved_arrays`, and which arrays they are for.

    Attributes:
        pack: makes of an array what is kept.
        unpack: makes the array of that again.
        which: one of `WHICH`; None means `"intermediates"` in `aot.function`, and all that is saved on a tape.
    """

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    which: str | None = None

    def __post_init__(self) -> None:
        """Raise `CallError` for what cannot be called, and for an unknown choice of arrays."""
        for name, function in (("pack", self.pack), ("unpack", self.unpack)):
            if not callable(function) and not isinstance(function, Hook):
                what = f"{name} is a {type(function).__name__}, which cannot be called."
                raise CallError(message("saved_arrays", what, "Give two functions, pack(array) and unpack(packed)."))
        if self.which is not None and self.which not in WHICH:
            raise CallError(message("saved_arrays", f"which={self.which!r} is unknown.", choices(self.which, WHICH)))

    @cached_property
    def packing(self) -> HookPacking:
        """The functions as a form of what is saved."""
        return HookPacking(self.pack, hook_of(self.unpack).function)


@dataclass(frozen=True)
class _Look:
    """What the functions make of arrays of one type.

    Attributes:
        is_packed_inside, is_unpacked_inside: whether each is traced into its half; else it is called back.
        types: of the arrays that are kept.
        tree: of what is kept.
        returned: the type that comes back, in words; empty if it is that of the array.
    """

    is_packed_inside: bool
    is_unpacked_inside: bool
    types: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any
    returned: str


@dataclass(frozen=True)
class HookPacking:
    """Two functions as a form (a `Packing`): traced into the halves where JAX can trace them, or called back.

    A function that is called back gets numpy arrays. It is called with zeros first, to see what it returns.
    """

    function: Callable[[Any], Any]
    back: Callable[[Any], Any]

    @cached_property
    def _looks(self) -> Table[_Look]:
        return Table(1024)

    def pack(self, x: Any) -> Sequence[Any]:
        """The arrays that wait for the backward."""
        look = self._look(x)
        if look.is_packed_inside:
            return jax.tree.leaves(self.function(x))

        def outside(x: Any) -> list[np.ndarray]:
            leaves = jax.tree.leaves(self.function(np.asarray(x)))
            return [np.asarray(leaf, t.dtype) for leaf, t in zip(leaves, look.types, strict=True)]

        return jax.pure_callback(outside, list(look.types), x, vmap_method="sequential")

    def unpack(self, aval: Any, arrays: Sequence[Any]) -> Any:
        """The array of which they were made."""
        look = self._look(aval)
        if look.is_unpacked_inside:
            return self.back(jax.tree.unflatten(look.tree, arrays))

        def outside(*arrays: Any) -> np.ndarray:
            return np.asarray(self.back(jax.tree.unflatten(look.tree, [np.asarray(x) for x in arrays])))

        struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        return jax.pure_callback(outside, struct, *arrays, vmap_method="sequential")

    def check(self, aval: Any, where: Callable[[], str]) -> None:
        """Raise `CallError` if another shape or dtype comes back than was packed; `where` says of which value."""
        if returned := self._look(aval).returned:
            what = f"is packed as {_shown(aval)}, and {described(self.back)} gives back {returned}."
            raise CallError(message(f"saved_arrays: {where()}", what, f"Return {_shown(aval)} from unpack."))

    def _look(self, aval: Any) -> _Look:
        struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        return self._looks.of((struct.shape, struct.dtype), lambda: self._looked(struct))

    def _looked(self, struct: jax.ShapeDtypeStruct) -> _Look:
        is_packed_inside = can_be_traced(self.function, [struct], ())
        kept = _traced(self.function, struct) if is_packed_inside else self.function(_zeros(struct))
        leaves, tree = jax.tree.flatten(kept)
        for leaf in leaves:
            if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
                what = f"returned a {type(leaf).__name__} for {_shown(struct)}."
                cure = "Return arrays, of shapes and dtypes that depend on those of its argument alone."
                raise CallError(message(f"saved_arrays: {described(self.function)}", what, cure))
        types = tuple(jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves)
        packed = jax.tree.unflatten(tree, types)
        is_unpacked_inside = can_be_traced(self.back, [packed], ())
        zeros = jax.tree.unflatten(tree, [*map(_zeros, types)])
        given = _traced(self.back, packed) if is_unpacked_inside else self.back(zeros)
        returned = _shown(given)
        return _Look(is_packed_inside, is_unpacked_inside, types, tree, returned * (returned != _shown(struct)))


def _traced(function: Callable[[Any], Any], struct: Any) -> Any:
    """What a function returns while it is traced."""
    results: list[Any] = []
    jax.eval_shape(lambda x: results.append(function(x)), struct)
    return results[0]


def _zeros(struct: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.zeros(struct.shape, struct.dtype)


def _shown(x: Any) -> str:
    """`float32[64,16]`; of what is no array, its class."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return f"a {type(x).__name__}"
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
