"""Read and make the types of values, and arrays of a type."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import core as _core
from jax._src.lax import lax as _lax
from jax.sharding import SingleDeviceSharding

from jointcut.partition.program.jax.jaxprs import ClosedJaxpr, opened
from jointcut.partition.program.jax.meshes import is_explicit, sharding_in_type, varying

#: The host's kind of memory that a device copies to and from by itself.
HOST = "pinned_host"


def is_reference(aval: Any) -> bool:
    """Whether an abstract value is a mutable array reference (`jax.Ref`)."""
    return type(aval).__name__ == "AbstractRef"


def is_plain(aval: Any) -> bool:
    """Whether an abstract value is an ordinary array: not a reference, a random key, a token or float0."""
    if not hasattr(aval, "dtype") or is_reference(aval) or aval.dtype == jax.dtypes.float0:
        return False
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def aval_bytes(aval: Any) -> int:
    """Bytes of one array of this abstract value; random keys count as their raw data, references as nothing."""
    if not hasattr(aval, "shape") or is_reference(aval):
        return 0
    return math.prod(aval.shape) * dtype_bytes(aval.dtype)


def extends_floats(dtype: Any) -> bool:
    """Whether a library's dtype has tangents, such as Flax's numbers whose gradients are not summed up."""
    return (
        jnp.issubdtype(dtype, jax.dtypes.extended) and _core.primal_dtype_to_tangent_dtype(dtype) != jax.dtypes.float0
    )


@functools.cache
def dtype_bytes(dtype: Any) -> int:
    """Bytes of one element of a dtype; if it stands for an array of another dtype, as random keys do, all its bytes."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        data = _core.physical_aval(_core.ShapedArray((), dtype))
        return math.prod(data.shape) * data.dtype.itemsize
    return 0 if dtype == jax.dtypes.float0 else dtype.itemsize


def is_on_host(aval: Any) -> bool:
    """Whether an abstract value is of an array in host memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def on_host(aval: Any) -> Any:
    """The abstract value of the same array in host memory."""
    return aval.update(memory_space=jax.memory.Space.Host)


class HostStruct(jax.ShapeDtypeStruct):
    """The type of an array in host memory; with JAX's own struct, an argument would be lowered as on the device."""


_core.pytype_aval_mappings[HostStruct] = lambda x: on_host(jax.core.ShapedArray(x.shape, x.dtype, x.weak_type))


def lies_on_host(placed: Any) -> bool:
    """Whether a sharding, or None, puts an array into host memory."""
    return getattr(placed, "memory_kind", None) == HOST


def unplaced(struct: Any) -> Any:
    """A type without its sharding, unless that says that it is in host memory; references do not change."""
    return struct if is_reference(struct) or lies_on_host(struct.sharding) else struct.update(sharding=None)


def host_bytes(variables: Sequence[Any]) -> int:
    """Bytes of the variables that are in host memory."""
    return sum(aval_bytes(v.aval) for v in variables if is_on_host(v.aval))


def stacked(aval: Any, lengths: Sequence[int]) -> Any:
    """The abstract value of a per-step value once the loops around it have stacked it."""
    if not lengths:
        return aval
    return _reshaped(aval, (*lengths, *aval.shape), lambda spec: (*(None for _ in lengths), *spec))


def unstacked(aval: Any) -> Any:
    """The abstract value of one step of a stack."""
    return _reshaped(aval, aval.shape[1:], lambda spec: spec[1:])


def resized(aval: Any, count: int) -> Any:
    """The abstract value of a stack of another length."""
    return _reshaped(aval, (count, *aval.shape[1:]), lambda spec: spec)


def flat(aval: Any, size: int) -> Any:
    """The abstract value of a row of `size` numbers that lies on a mesh, and varies there, as another value does."""
    return _reshaped(aval.update(weak_type=False), (size,), lambda spec: (None,))


def row(stack: Any, i: Any) -> Any:
    """Row `i` of a stack, given as an unsigned number; `lax.dynamic_index_in_dim` would be a call."""
    zeros = [np.uint32(0)] * (stack.ndim - 1)
    return lax.squeeze(lax.dynamic_slice(stack, [i, *zeros], (1, *stack.shape[1:])), [0])


def with_row(stack: Any, new: Any, i: Any) -> Any:
    """The stack with another row `i`."""
    return lax.dynamic_update_slice(stack, lax.expand_dims(new, [0]), [i, *([np.uint32(0)] * new.ndim)])


def _reshaped(aval: Any, shape: tuple[int, ...], spec: Callable[[Any], Any]) -> Any:
    """The abstract value with another shape, and with other parts of its axes on an explicit mesh."""
    if not is_explicit(aval.sharding):
        return aval.update(shape=shape)
    old = aval.sharding.spec
    return aval.update(shape=shape, sharding=aval.sharding.update(spec=old.update(partitions=spec(old.partitions))))


def tangent_aval(aval: Any) -> Any:
    """The abstract value of a tangent or cotangent of an array."""
    return aval.to_tangent_aval()


def cotangent_aval(aval: Any) -> Any:
    """The abstract value of a cotangent of an array: the tangent's, unless it is summed over a mesh's axis."""
    return aval.to_ct_aval()


def struct(aval: Any) -> Any:
    """The abstract value as `jax.ShapeDtypeStruct`, with the sharding in its type, its varying axes and its memory."""
    if is_reference(aval):
        return aval
    weak, axes = bool(getattr(aval, "weak_type", False)), getattr(aval, "manual_axis_type", None)
    sharding = sharding_in_type(aval)
    if sharding is None and is_on_host(aval):
        sharding = SingleDeviceSharding(jax.local_devices()[0], memory_kind=HOST)
    make = HostStruct if is_on_host(aval) else jax.ShapeDtypeStruct
    return make(aval.shape, aval.dtype, weak_type=weak, sharding=sharding, manual_axis_type=axes)


def input_structs(closed: ClosedJaxpr) -> list[Any]:
    """The inputs of a jaxpr as `jax.ShapeDtypeStruct`."""
    return [struct(v.aval) for v in opened(closed)[0].invars]


def typed(x: Any, aval: Any) -> Any:
    """The array `x` with the dtype and weak type of an abstract value, varying over the same axes as that."""
    x = _lax._convert_element_type(x, aval.dtype, weak_type=aval.weak_type)
    axes = varying(aval) - varying(jax.typeof(x))
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


def full(aval: Any, number: Any) -> Any:
    """An array that holds one number, of an abstract value's type."""
    return typed(lax.full(aval.shape, number, aval.dtype, sharding=sharding_in_type(aval)), aval)
