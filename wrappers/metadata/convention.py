"""Describe the flat arrays that enter and leave a program.

A `Slot` describes one array: its path and its type. A `Convention` holds the slots of all inputs and outputs. Each
wrapper turns one convention into the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.partition.program.jax import abstract


@dataclass(frozen=True)
class Slot:
    """One flat input or output.

    Attributes:
        path: its path for the user, such as `args[0]['w']`.
        shape: its lengths.
        dtype: the type of its elements.
        weak_type: whether it takes the dtype of the other operand, like a Python number.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False

    def __str__(self) -> str:
        """`args[0]['w']: float32[128,64]`."""
        return f"{self.path}: {self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The slot as a `jax.ShapeDtypeStruct`."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak_type)


@dataclass(frozen=True)
class Convention:
    """The flat inputs and outputs of a program, in order, and the caller's trees.

    Attributes:
        inputs: a slot for each array that enters.
        outputs: a slot for each array that is returned.
        in_tree: the `jax.tree` structure of the arguments, or None if they are flat.
        out_tree: the same for the results.
        states: positions of the inputs whose new states are extra results after the outputs.
    """

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    in_tree: Any = None
    out_tree: Any = None
    states: tuple[int, ...] = ()


def slot(path: str, leaf: Any) -> Slot:
    """Return the slot of an array, scalar, tracer, reference or `ShapeDtypeStruct`."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return Slot(path, leaf.shape, leaf.dtype, bool(leaf.weak_type))
    aval = jax.typeof(leaf)
    inner = getattr(aval, "inner_aval", aval)
    return Slot(path, inner.shape, inner.dtype, bool(getattr(inner, "weak_type", False)))


def is_inexact(dtype: Any) -> bool:
    """Whether a dtype can carry a derivative: a real or complex float of any width, or a dtype with tangents."""
    return jnp.issubdtype(dtype, np.inexact) or abstract.extends_floats(dtype)


def is_real(dtype: Any) -> bool:
    """Whether a dtype is real floating point, of any width."""
    return jnp.issubdtype(dtype, np.floating)


def slots(paths: Sequence[str], leaves: Sequence[Any]) -> tuple[Slot, ...]:
    """Return the slots of several leaves."""
    return tuple(slot(path, leaf) for path, leaf in zip(paths, leaves, strict=True))
