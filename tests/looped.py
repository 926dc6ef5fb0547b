"""The same loop three ways: ours, unrolled by Python, and as a masked scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jointcut import aot

MOST = 20
RNG = np.random.default_rng(0)
VECTOR = RNG.uniform(0.1, 0.9, 4)
MATRIX = RNG.normal(size=(4, 4))


def step(i, y, w):
    """One step; it reads the counter, the carry, and a closed-over matrix."""
    return jnp.sin(w @ y) * 1.1 + (0.1 * i).astype(y.dtype)


def ours(x, w, n, memory=3, max_trips=None):
    """The loop as `aot.while_loop`."""

    def body(c):
        return (c[0] + 1, step(c[0], c[1], w))

    return aot.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x), memory=memory, max_trips=max_trips)[1]


def unrolled(x, w, n):
    """The loop unrolled by Python; `n` is a number."""
    for i in range(n):
        x = step(jnp.int32(i), x, w)
    return x


def masked(x, w, n):
    """The loop as people write it today: a scan of fixed length; `n` is at most `MOST`."""

    def body(y, i):
        return (jnp.where(i < n, step(i, y, w), y), None)

    return jax.lax.scan(body, x, jnp.arange(MOST, dtype=jnp.int32))[0]


def near(a, b, rtol=1e-8):
    """Assert that two trees of numbers are equal up to rounding."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.complex128), np.asarray(y, np.complex128)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * max(1e-3, float(np.max(np.abs(y), initial=0))))
