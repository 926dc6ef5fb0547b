"""Multiply the elements that come to one place, also zeros.

The derivative of a product by one factor is the product of the others. Dividing the whole product by the factor gives
NaN at zero. So the zeros are counted, and the product of the nonzero factors is divided. The second derivative leaves
out two factors in the same way.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_jvp
def grouped_product(x: jax.Array, group: jax.Array, into: jax.Array) -> jax.Array:
    """Multiply each x into the place of `into` that its group names."""
    return into.at[group].multiply(x)


@grouped_product.defjvp
def _grouped_rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, group, into), (dx, _, dinto) = primals, tangents
    joined, places, changes = _joined(x, group, into, dx, dinto)
    tangent = jnp.zeros_like(into).at[places].add(changes * one_left_out(joined, places, into))
    return grouped_product(x, group, into), tangent


def _joined(x: jax.Array, group: jax.Array, into: jax.Array, dx: jax.Array, dinto: jax.Array) -> Any:
    """Add the previous value of each place as one more factor."""
    own = jnp.arange(into.size, dtype=group.dtype)
    return jnp.concatenate([x, into]), jnp.concatenate([group, own]), jnp.concatenate([dx, dinto])


@jax.custom_jvp
def one_left_out(x: jax.Array, group: jax.Array, like: jax.Array) -> jax.Array:
    """Return, for each x, the product of the others in its group; `like` has a place for each group."""
    zero = x == 0
    zeros, product = _counted(x, group, like)
    return jnp.where(zeros[group] == zero.astype(zeros.dtype), product[group] / jnp.where(zero, 1, x), 0)


@one_left_out.defjvp
def _left_out_rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, group, like), (dx, _, _) = primals, tangents
    zero = x == 0
    zeros, product = _counted(x, group, like)
    rate = dx / jnp.where(zero, 1, x)
    sums = [jnp.zeros_like(like).at[group].add(jnp.where(kind, rate, 0))[group] for kind in (~zero, zero)]
    of_others, of_zeros = sums[0] - jnp.where(zero, 0, rate), sums[1] - jnp.where(zero, rate, 0)
    count = zeros[group] - zero.astype(zeros.dtype)
    partner = jnp.where(count == 0, of_others, jnp.where(count == 1, of_zeros, 0))
    return one_left_out(x, group, like), product[group] / jnp.where(zero, 1, x) * partner


def _counted(x: jax.Array, group: jax.Array, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return, for each group, the number of its zeros and the product of its other factors.

    The number is a float: XLA on CPU (JAX 0.10 and 0.12) adds at most one integer to a single place, if it compiles a
    batch of such sums with known places.
    """
    zeros = jnp.zeros(like.shape, jnp.float32).at[group].add((x == 0).astype(jnp.float32))
    return zeros, jnp.ones_like(like).at[group].multiply(jnp.where(x == 0, 1, x))
