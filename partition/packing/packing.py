"""Write the equations that bring a value to another form, and back.

A form is one of `forms`, or another that is given: a pair of functions, such as a user's. Each becomes a call, so that
it stays one equation of a half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

import jax

from jointcut.partition.packing.forms import FORMS
from jointcut.partition.program.graph import Value
from jointcut.partition.program.jax import abstract, meshes, own_primitives
from jointcut.partition.rewrite.simplify import call_of


class Packing(Protocol):
    """A form: a function that makes arrays from an array, and its inverse."""

    def pack(self, x: Any) -> Sequence[Any]:
        """The arrays that wait for the backward."""
        ...

    def unpack(self, aval: Any, arrays: Sequence[Any]) -> Any:
        """The array from which they were made; `aval` is its type."""
        ...

    def check(self, aval: Any, where: Callable[[], str]) -> None:
        """Raise if the array that comes back has another shape or dtype; `where` names the value."""
        ...


#: The form that some compilers widen.
BFLOAT16 = "bfloat16"

#: The form whose range is too small for cotangents.
FLOAT16 = "float16"

#: The arrays that pass through a user's functions: computed values; also undifferentiated inputs; or all inputs too.
WHICH = ("intermediates", "no_params", "all")

#: The name in schedules of the form that a user's functions make.
HOOK = "hook"


@dataclass(frozen=True)
class Hooks:
    """A user's functions that saved values pass through.

    Attributes:
        packing: the functions.
        which: one of `WHICH`.
        params: ids of the inputs that are differentiated.
    """

    packing: Packing
    which: str
    params: frozenset[int]

    def takes(self, value: Value) -> bool:
        """Whether a value passes through the functions."""
        if value.maker is not None or self.which == WHICH[2]:
            return True
        return self.which == WHICH[1] and value.id not in self.params


@dataclass(frozen=True)
class Packed:
    """A form for arrays of one type: the types of the arrays that wait, and the functions, over `depth` more axes."""

    form: Packing
    aval: Any
    depth: int = 0

    @cached_property
    def types(self) -> tuple[Any, ...]:
        """The types of the arrays that wait."""
        return tuple(v.aval for v in self.pack.outvars)

    @cached_property
    def pack(self) -> Any:
        """The equation that makes the arrays."""
        with meshes.where_they_vary(self.aval):
            return call_of(_mapped(_list_of(self.form), self.depth), (abstract.struct(self.aval),))

    @cached_property
    def unpack(self) -> Any:
        """The equation that gives back the array."""
        inner = self.aval
        for _ in range(self.depth):
            inner = abstract.unstacked(inner)
        with meshes.where_they_vary(self.aval):
            return call_of(_mapped(_back(self.form, inner), self.depth), tuple(map(abstract.struct, self.types)))


@lru_cache(maxsize=1024)
def _list_of(form: Packing) -> Callable[..., Any]:
    def pack(x: Any) -> list[Any]:
        return list(form.pack(x))

    return pack


@lru_cache(maxsize=4096)
def _back(form: Packing, aval: Any) -> Callable[..., Any]:
    def unpack(*arrays: Any) -> Any:
        return form.unpack(aval, arrays)

    return unpack


@lru_cache(maxsize=4096)
def _mapped(function: Callable[..., Any], depth: int) -> Callable[..., Any]:
    for _ in range(depth):
        function = jax.vmap(function)
    return function


@dataclass(frozen=True)
class _Stored:
    """A form of `packing`; with `in_bits`, an array of bfloat16 waits as integers of the same bits.

    Without `in_bits`, an array of float16 waits as bfloat16 of the same bits. When the gradient is differentiated
    again, the cotangent of a waiting array has the array's dtype, and many cotangents are beyond the largest float16,
    65504.
    """

    name: str
    in_bits: bool = False

    def pack(self, x: Any) -> Sequence[Any]:
        if self.name == FLOAT16 and not self.in_bits:
            return [_float16_bits.bind(x, dtype=BFLOAT16)]
        arrays = FORMS[self.name].pack(x)
        return [jax.lax.bitcast_convert_type(a, "uint16") for a in arrays] if self._is_in_bits else arrays

    def unpack(self, aval: Any, arrays: Sequence[Any]) -> Any:
        if self.name == FLOAT16 and not self.in_bits:
            return _float16_bits.bind(arrays[0], dtype=aval.dtype.name)
        if self._is_in_bits:
            arrays = [jax.lax.bitcast_convert_type(a, self.name) for a in arrays]
        return FORMS[self.name].unpack(aval.dtype, arrays)

    @property
    def _is_in_bits(self) -> bool:
        return self.in_bits and self.name == BFLOAT16

    def check(self, aval: Any, where: Callable[[], str]) -> None:
        """Do nothing: each of these forms gives back the same shape and dtype."""


def _as_float16_bits(x: Any, dtype: str) -> Any:
    """Numbers as float16 in an array of bfloat16 with the same bits, or converted back from it to a dtype."""
    if dtype == BFLOAT16:
        (numbers,) = FORMS[FLOAT16].pack(x)
        return jax.lax.bitcast_convert_type(numbers, BFLOAT16)
    return jax.lax.bitcast_convert_type(x, FLOAT16).astype(dtype)


_float16_bits = own_primitives.elementwise_primitive("float16_bits", _as_float16_bits)


@dataclass(frozen=True)
class Packings:
    """The forms that a schedule names: the forms of `packing`, and the forms in `more`.

    With `in_bits`, bfloat16 waits as integers and float16 in its own dtype, and their readers are not differentiated.
    """

    more: Mapping[str, Packing] = field(default_factory=dict)
    in_bits: bool = False

    def of(self, form: str, aval: Any, depth: int = 0) -> Packed:
        """A form for arrays of a type whose leading axes are the axes of `depth` loops."""
        return _packed(self.named(form), aval, depth)

    def seen(
        self, form: str, aval: Any, before: Sequence[str], lengths: Sequence[int], where: Callable[[], str]
    ) -> list[Packed]:
        """One more form for each array of a value that is in forms `before`, stacked by the loops around it."""
        types = self.types(aval, before)
        for inner in types:
            self.named(form).check(inner, where)
        return [self.of(form, abstract.stacked(inner, lengths), len(lengths)) for inner in types]

    def hook(self, aval: Any, where: Callable[[], str]) -> Packed | None:
        """A user's functions for arrays of a type, if there are any."""
        if HOOK not in self.more:
            return None
        self.named(HOOK).check(aval, where)
        return self.of(HOOK, aval)

    def named(self, form: str) -> Packing:
        """The form with this name."""
        return self.more[form] if form in self.more else _Stored(form, self.in_bits)

    def types(self, aval: Any, forms: Sequence[str]) -> list[Any]:
        """The types of the arrays of an array in some forms, taken one after the other."""
        avals = [aval]
        for form in forms:
            avals = [inner for each in avals for inner in self.of(form, each).types]
        return avals


@lru_cache(maxsize=4096)
def _packed(form: Packing, aval: Any, depth: int) -> Packed:
    return Packed(form, aval, depth)
