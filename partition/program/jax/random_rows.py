"""Make some rows of an array of random bits, the same bits as in the whole array.

JAX makes the bits of each element from its number in the array, if `jax_threefry_partitionable` is set, as it is by
default. So the bits of some rows need no others.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p, threefry_prng_impl

from jointcut.partition.program.jax.jaxprs import Equation

_MOST = 2**32  # elements, whose numbers are one word


def has_rows(eqn: Equation) -> bool:
    """Whether some rows of an equation's random bits can be made alone."""
    aval: Any = eqn.invars[0].aval
    shape = eqn.params["shape"]
    is_threefry = getattr(aval.dtype, "_impl", None) == threefry_prng_impl
    is_by_number = bool(jax.config.jax_threefry_partitionable)  # pyright: ignore[reportAttributeAccessIssue]
    return aval.shape == () and is_threefry and is_by_number and math.prod(shape) < _MOST


def bits_of_rows(eqn: Equation, axis: int, count: int, key: Any, start: Any) -> Any:
    """Return `count` rows of an equation's random bits along an axis, from the row `start` on."""
    shape, width = eqn.params["shape"], eqn.params["bit_width"]
    block = (*shape[:axis], count, *shape[axis + 1 :])
    number = jnp.zeros(block, jnp.uint32)
    for n, size in enumerate(shape):
        own = lax.broadcasted_iota(jnp.uint32, block, n)
        number = number * jnp.uint32(size) + (own + start.astype(jnp.uint32) if n == axis else own)
    first, second = jax.random.key_data(key)
    high, low = threefry2x32_p.bind(first, second, jnp.zeros_like(number), number)
    dtype = jnp.dtype(f"uint{width}")
    if width == 64:
        return lax.shift_left(high.astype(dtype), jnp.asarray(32, dtype)) | low.astype(dtype)
    return (high ^ low).astype(dtype)
