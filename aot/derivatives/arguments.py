"""Refuse bad arguments early, with the place, the cause and the cure."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jointcut.partition.errors import CallError, choices, message

Axis = int | Sequence[int] | None


def refused(where: str, what: str, cure: str) -> CallError:
    """Return the error for an argument; `where` names the function and the argument, as in `norm: ord`."""
    return CallError(message(f"derivatives.{where}", what, cure))


def inexact(function: str, name: str, value: ArrayLike, *, real: bool = False) -> jax.Array:
    """Return `value` as an array; refuse integers and booleans, which have no derivative, and complex ones if `real`.

    A Python number is converted to a weakly typed float, as in JAX.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return jnp.asarray(float(value))
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        what = f"has type {array.dtype}, which has no derivative."
        cure = "Convert it first, for example with `.astype(jnp.float32)`."
        raise refused(f"{function}: {name}", what, cure)
    if real and jnp.iscomplexobj(array):
        what = f"has type {array.dtype}, but the function is defined for real numbers only."
        raise refused(f"{function}: {name}", what, "Pass its real part, or its absolute value.")
    return array


def promoted(function: str, **values: ArrayLike) -> list[jax.Array]:
    """Return all as arrays of one type, which JAX's promotion chooses, in the order given."""
    arrays = [inexact(function, name, value) for name, value in values.items()]
    dtype = jnp.result_type(*arrays)
    return [array.astype(dtype) for array in arrays]


def one_axis(function: str, axis: int, ndim: int) -> int:
    """Return `axis` counted from the front; refuse an axis that the array does not have."""
    try:
        index = operator.index(axis)
    except TypeError:
        what = f"is {axis!r}, which is no whole number."
        raise refused(f"{function}: axis", what, "Pass an int.") from None
    if not -ndim <= index < ndim:
        what = f"is {index}, but the array has {ndim} {'dimension' if ndim == 1 else 'dimensions'}."
        cure = f"Pass an axis from {-ndim} to {ndim - 1}." if ndim else "A scalar has no axis to go along."
        raise refused(f"{function}: axis", what, cure)
    return index % ndim


def some_axes(function: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return the axes to reduce, counted from the front: all axes for None; refuse an axis that is named twice."""
    if axis is None:
        return tuple(range(ndim))
    given = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    axes = tuple(one_axis(function, one, ndim) for one in given)
    if len(set(axes)) < len(axes):
        what = f"is {tuple(given)}, which names one axis twice."
        raise refused(f"{function}: axis", what, "Name each axis once.")
    return axes


def not_negative(function: str, name: str, value: float) -> float:
    """Return `value`; refuse a negative number, and NaN."""
    if not value >= 0:
        what = f"is {value}, but it must not be negative."
        raise refused(f"{function}: {name}", what, "Pass zero or a positive number.")
    return value


def nonempty(function: str, array: jax.Array, axes: tuple[int, ...]) -> None:
    """Refuse a reduction over no elements, for a function that has no value there."""
    if any(array.shape[axis] == 0 for axis in axes):
        what = f"has shape {array.shape}, with no elements along the axes {axes}, and has no value without any."
        raise refused(f"{function}: the array", what, "Pass at least one element.")


def one_of(function: str, name: str, value: object, known: Sequence[str]) -> None:
    """Refuse an unknown name, and propose the nearest known one."""
    if value not in known:
        raise refused(f"{function}: {name}", f"is {value!r}.", choices(value, known))


def square(function: str, name: str, array: jax.Array) -> None:
    """Refuse an array that is not a square matrix or a batch of square matrices."""
    if array.ndim < 2 or array.shape[-1] != array.shape[-2]:
        what = f"has shape {array.shape}, which is no square matrix."
        raise refused(f"{function}: {name}", what, "Pass an array of shape (..., n, n).")
