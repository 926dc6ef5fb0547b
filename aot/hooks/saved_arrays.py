"""Hold two functions that saved arrays pass through: one where they are kept, one where they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jointcut.aot.hooks.closures import described
from jointcut.aot.hooks.hook import Hook, hook_of
from jointcut.partition.errors import CallError, choices, message
from jointcut.partition.packing.packing import WHICH
from jointcut.wrappers.record import Record
from jointcut.wrappers.table import Table

_UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclass(frozen=True)
class SavedArrays(Record):
    """The functions of `saved_arrays`, and the arrays they are for.

    Attributes:
        pack: turns an array into the value that is kept.
        unpack: turns that value back into the array.
        which: one of `WHICH`; None means `"intermediates"` in `aot.function`, and all saved arrays on a tape.
    """

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    which: str | None = None

    def __post_init__(self) -> None:
        """Raise `CallError` for objects that cannot be called, and for an unknown choice of arrays."""
        for name, function in (("pack", self.pack), ("unpack", self.unpack)):
            if not callable(function) and not isinstance(function, Hook):
                what = f"{name} is a {type(function).__name__}, which cannot be called."
                raise CallError(message("saved_arrays", what, "Give two functions, pack(array) and unpack(packed)."))
        if self.which is not None and self.which not in WHICH:
            raise CallError(message("saved_arrays", f"which={self.which!r} is unknown.", choices(self.which, WHICH)))

    @cached_property
    def packing(self) -> HookPacking:
        """The functions as a form of saved values."""
        return HookPacking(self.pack, hook_of(self.unpack).function)


@dataclass(frozen=True)
class _Look:
    """The traceability and the results of the functions for arrays of one type.

    Attributes:
        is_packed_inside, is_unpacked_inside: whether each is traced into its half; else it is called back.
        types: of the arrays that are kept.
        tree: of the kept value.
        returned: the type that comes back, in words; empty if it is the array's own.
    """

    is_packed_inside: bool
    is_unpacked_inside: bool
    types: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any
    returned: str


@dataclass(frozen=True)
class HookPacking:
    """Two functions as a form (a `Packing`): traced into the halves where JAX can trace them, or called back.

    A function that is called back gets numpy arrays. It is first called with zeros, to learn the types of its result.
    """

    function: Callable[[Any], Any]
    back: Callable[[Any], Any]

    @cached_property
    def _looks(self) -> Table[_Look]:
        return Table(1024)

    def pack(self, x: Any) -> Sequence[Any]:
        """Return the arrays that wait for the backward."""
        look = self._look(x)
        if look.is_packed_inside:
            return jax.tree.leaves(self.function(x))

        def outside(x: Any) -> list[np.ndarray]:
            leaves = jax.tree.leaves(self.function(np.asarray(x)))
            return [np.asarray(leaf, t.dtype) for leaf, t in zip(leaves, look.types, strict=True)]

        return jax.pure_callback(outside, list(look.types), x, vmap_method="sequential")

    def unpack(self, aval: Any, arrays: Sequence[Any]) -> Any:
        """Return the array that they were made from."""
        look = self._look(aval)
        if look.is_unpacked_inside:
            return self.back(jax.tree.unflatten(look.tree, arrays))

        def outside(*arrays: Any) -> np.ndarray:
            return np.asarray(self.back(jax.tree.unflatten(look.tree, [np.asarray(x) for x in arrays])))

        struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        return jax.pure_callback(outside, struct, *arrays, vmap_method="sequential")

    def check(self, aval: Any, where: Callable[[], str]) -> None:
        """Raise `CallError` if the shape or dtype that comes back is not the packed one; `where` names the value."""
        if returned := self._look(aval).returned:
            what = f"is packed as {_shown(aval)}, and {described(self.back)} gives back {returned}."
            raise CallError(message(f"saved_arrays: {where()}", what, f"Return {_shown(aval)} from unpack."))

    def _look(self, aval: Any) -> _Look:
        struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        return self._looks.of((struct.shape, struct.dtype), lambda: self._looked(struct))

    def _looked(self, struct: jax.ShapeDtypeStruct) -> _Look:
        kept = _traced(self.function, struct)
        is_packed_inside = kept is not None
        kept = kept if is_packed_inside else self.function(_zeros(struct))
        leaves, tree = jax.tree.flatten(kept)
        for leaf in leaves:
            if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
                what = f"returned a {type(leaf).__name__} for {_shown(struct)}."
                cure = "Return arrays, of shapes and dtypes that depend on those of its argument alone."
                raise CallError(message(f"saved_arrays: {described(self.function)}", what, cure))
        types = tuple(jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves)
        packed = jax.tree.unflatten(tree, types)
        given = _traced(self.back, packed)
        is_unpacked_inside = given is not None
        returned = _shown(given if is_unpacked_inside else self.back(jax.tree.unflatten(tree, [*map(_zeros, types)])))
        return _Look(is_packed_inside, is_unpacked_inside, types, tree, returned * (returned != _shown(struct)))


def _traced(function: Callable[[Any], Any], struct: Any) -> Any:
    """Return the result of a function while it is traced; None where it needs the numbers."""
    results: list[Any] = []
    try:
        jax.eval_shape(lambda x: results.append(function(x)), struct)
    except _UNTRACEABLE:
        return None
    return results[0]


def _zeros(struct: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.zeros(struct.shape, struct.dtype)


def _shown(x: Any) -> str:
    """Return `float32[64,16]`, or the class of an object that is no array."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return f"a {type(x).__name__}"
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
