"""Say in which forms an array may wait for the backward: smaller ones, which are not exact.

A float may wait in bfloat16 or float16. In eight bits, as float8 or int8, it is first divided by a scale, so that the
largest number of a channel becomes the largest number of the form. A channel holds the numbers at one place of the last
axis. The backward reads the array brought back to its own dtype.

>>> FORMS["int8"].bytes((1024, 16), "float32"), FORMS["bfloat16"].bytes((1024, 16), "float32")
(16448, 32768)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.partition.errors import PolicyError, message

_FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}  # the bytes of one number

#: Channels of fewer numbers share one scale: a scale for each would take a good part of the bytes that the form saves.
LEAST_CHANNEL = 64


def plain_bytes(shape: Sequence[int], dtype: str) -> int:
    """The bytes of an array of floats in its own dtype."""
    return math.prod(shape) * _FLOATS[dtype]


@dataclass(frozen=True)
class StoredForm:
    """A form of floats: their dtype while they wait, and whether they are scaled to its largest number."""

    dtype: str
    is_scaled: bool = False

    def bytes(self, shape: Sequence[int], dtype: str) -> int:
        """The bytes of an array of this shape and dtype in the form, its scales included."""
        size = math.prod(shape) * jnp.dtype(self.dtype).itemsize
        return size + self.is_scaled * math.prod(_scales(shape)) * _wide(dtype).itemsize

    def is_smaller(self, shape: Sequence[int], dtype: str) -> bool:
        """Whether it is for arrays of this dtype, and takes fewer bytes."""
        return dtype in _FLOATS and self.bytes(shape, dtype) < plain_bytes(shape, dtype)

    def pack(self, x: Any) -> tuple[Any, ...]:
        """An array in the form: its numbers, then its scales if it has any."""
        if not self.is_scaled:
            return (_clipped(x, self.dtype),)
        x = _differentiated_once(x, self.dtype).astype(_wide(x.dtype.name))
        axes = tuple(i for i, (one, size) in enumerate(zip(_scales(x.shape), x.shape, strict=True)) if one != size)
        scales = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0) / self._largest
        scales = jnp.where(scales == 0, jnp.ones_like(scales), scales)
        numbers = x / scales
        return _clipped(jnp.round(numbers) if self.dtype == "int8" else numbers, self.dtype), scales

    def unpack(self, dtype: Any, arrays: Sequence[Any]) -> Any:
        """The array that was packed, in its own dtype again."""
        if not self.is_scaled:
            return arrays[0].astype(dtype)
        numbers, scales = arrays
        return (numbers.astype(scales.dtype) * scales).astype(dtype)

    @property
    def _largest(self) -> float:
        return 127.0 if self.dtype == "int8" else float(jnp.finfo(self.dtype).max)


#: The forms by name.
FORMS = {
    "bfloat16": StoredForm("bfloat16"),
    "float16": StoredForm("float16"),
    "float8_e4m3fn": StoredForm("float8_e4m3fn", True),
    "float8_e5m2": StoredForm("float8_e5m2", True),
    "int8": StoredForm("int8", True),
}


def _scales(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales: one for each channel, or one for all."""
    ones = (1,) * len(shape)
    is_known = all(isinstance(size, int) for size in shape)  # otherwise it has names in the place of sizes
    return (*ones[1:], shape[-1]) if shape and (not is_known or math.prod(shape[:-1]) >= LEAST_CHANNEL) else ones


def _wide(dtype: str) -> Any:
    """The dtype of scales, in which numbers are divided by them."""
    return jnp.dtype("float64" if dtype == "float64" else "float32")


def _clipped(x: Any, dtype: str) -> Any:
    """Numbers in another dtype; numbers beyond its range become its largest, and infinities stay."""
    if dtype == "int8":
        return jnp.clip(x, -127, 127).astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    if largest < float(jnp.finfo(x.dtype).max):
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    return x.astype(dtype)


def _differentiated_once(x: Any, name: str) -> Any:
    """The array itself, which may not be differentiated: its form in eight bits has no useful derivative."""

    @jax.custom_jvp
    def once(x: Any) -> Any:
        return x

    @once.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        what = f"is kept as {name} by the policy, and its gradient is differentiated once more."
        cure = 'Keep it as "bfloat16", or differentiate twice a function without that policy.'
        raise PolicyError(message(f"A residual {jax.typeof(x).str_short()}", what, cure))

    return once(x)


@dataclass(frozen=True)
class SaveAs:
    """A demand on values: where they are saved, they wait for the backward in a form of `FORMS`."""

    dtype: str

    @property
    def name(self) -> str:
        """The demand in the user's words."""
        return f"SAVE_AS({self.dtype!r})"
