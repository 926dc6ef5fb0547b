"""Write the equations that bring a value to another form, and back.

A form is one of `stored`, or another that is given: a pair of functions, such as a user's. Each becomes a call, so that
it stays one equation of a half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

import jax

from jointcut.partition.program import jaxprs
from jointcut.partition.program.graph import Value
from jointcut.partition.rewrite.simplify import call_of
from jointcut.partition.stored.forms import FORMS


class Packing(Protocol):
    """A form: what makes arrays of one, and gives it back."""

    def pack(self, x: Any) -> Sequence[Any]:
        """The arrays that wait for the backward."""
        ...

    def unpack(self, aval: Any, arrays: Sequence[Any]) -> Any:
        """The array of which they were made; `aval` is its type."""
        ...

    def check(self, aval: Any, where: Callable[[], str]) -> None:
        """Raise if another shape or dtype comes back than was packed; `where` says of which value."""
        ...


#: The form that some compilers widen.
BFLOAT16 = "bfloat16"

#: The form whose range is too small for cotangents.
FLOAT16 = "float16"

#: The name in schedules of the form that a user's functions make.
HOOK = "hook"


@dataclass(frozen=True)
class Hooks:
    """A user's functions, through which passes what is saved.

    Attributes:
        packing: the functions.
        which: `"intermediates"` for what the program computes, `"no_params"` also for its inputs but for `params`,
            `"all"` for those too.
        params: ids of the inputs that are differentiated.
    """

    packing: Packing
    which: str
    params: frozenset[int]

    def takes(self, value: Value) -> bool:
        """Whether a value passes through the functions."""
        if value.maker is not None or self.which == "all":
            return True
        return self.which == "no_params" and value.id not in self.params


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
        return call_of(_mapped(_list_of(self.form), self.depth), (jaxprs.struct(self.aval),))

    @cached_property
    def unpack(self) -> Any:
        """The equation that gives back the array."""
        inner = self.aval
        for _ in range(self.depth):
            inner = jaxprs.unstacked(inner)
        return call_of(_mapped(_back(self.form, inner), self.depth), tuple(map(jaxprs.struct, self.types)))


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
    """A form of `stored`; with `in_bits`, an array of bfloat16 waits as integers of the same bits.

    Without, one of float16 waits as bfloat16 of the same bits. When the gradient is differentiated again, the cotangent
    of what waits has its dtype, and many cotangents are beyond the largest float16, 65504.
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
        """Each of them gives back what it was given."""


def _as_float16_bits(x: Any, dtype: str) -> Any:
    """Numbers as float16 in an array of bfloat16 with the same bits, or back from it to a dtype."""
    if dtype == BFLOAT16:
        (numbers,) = FORMS[FLOAT16].pack(x)
        return jax.lax.bitcast_convert_type(numbers, BFLOAT16)
    return jax.lax.bitcast_convert_type(x, FLOAT16).astype(dtype)


_float16_bits = jaxprs.elementwise_primitive("float16_bits", _as_float16_bits)


@dataclass(frozen=True)
class Packings:
    """The forms that a schedule names; those in `more` beside those of `stored`.

    With `in_bits`, bfloat16 waits as integers and float16 as itself, and what reads them is not differentiated.
    """

    more: Mapping[str, Packing] = field(default_factory=dict)
    in_bits: bool = False

    def of(self, form: str, aval: Any, depth: int = 0) -> Packed:
        """A form for arrays of a type, its leading axes those of `depth` loops."""
        return _packed(self.named(form), aval, depth)

    def named(self, form: str) -> Packing:
        """The form of a name."""
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
