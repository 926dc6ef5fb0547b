"""Branches: cond, switch and select, alone and inside loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from corpus.program import integers, normal, program


@program("A cond on the data.", lambda: (normal(200, 3), normal(201, 3)), argnums=(0, 1))
def cond_on_data(x, y):
    h = jnp.sin(x)
    h = lax.cond(jnp.sum(x) > 0, lambda a, b: a * jnp.exp(b), lambda a, b: jnp.tanh(a) - b**2, h, y)
    return jnp.sum(h**2)


@program("A cond of which one branch does nothing.", lambda: (normal(202, 3), True))
def cond_with_idle_branch(x, train):
    return jnp.sum(lax.cond(train, lambda h: jnp.sin(h) * jnp.exp(h), lambda h: h, jnp.cos(x)))


@program("A switch over three branches by an integer.", lambda: (normal(203, 3), jnp.int32(2)))
def switch_over_three(x, index):
    branches = (jnp.sin, lambda h: h * jnp.tanh(h), lambda h: jnp.exp(-(h**2)))
    return jnp.sum(lax.switch(index, branches, x * 2) ** 2)


@program(
    "A cond in the body of a scan, by a flag of each step.",
    lambda: (normal(204, 3), normal(205, 4, 3)),
    argnums=(0, 1),
    tags="scan",
)
def cond_in_scan(x, rows):
    def step(h, xs):
        flag, row = xs
        return lax.cond(flag, lambda a: jnp.sin(a * row), lambda a: a + jnp.exp(row), h), None

    last, _ = lax.scan(step, x, (jnp.array([True, False, False, True]), rows))
    return jnp.sum(last**2)


@program("A scan in a branch of a cond.", lambda: (normal(206, 3), normal(207, 3, 3)), argnums=(0, 1), tags="scan")
def scan_in_cond(x, rows):
    def long(h):
        return lax.scan(lambda g, row: (jnp.sin(g * row), None), h, rows)[0]

    return jnp.sum(lax.cond(x[0] > 0, long, jnp.cos, x) ** 2)


@program("A square root guarded against negative numbers, so that no gradient is nan.", lambda: (normal(208, 6),))
def guarded_root(x):
    positive = x > 0
    return jnp.sum(jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), jnp.sin(x)))


@program(
    "A mixture of two experts, each row sent to one of them.",
    lambda: (normal(209, 2, 3, 3), normal(210, 3, 2), normal(211, 4, 3)),
    argnums=(0, 1),
)
def mixture_of_experts(experts, gate, rows):
    shares = jax.nn.softmax(rows @ gate)
    chosen = jnp.argmax(shares, axis=-1)
    outputs = jnp.einsum("nd,ndk->nk", rows, experts[chosen])
    return jnp.sum(jnp.tanh(outputs) * jnp.take_along_axis(shares, chosen[:, None], 1))


@program(
    "Clamps, extrema and signs, whose derivatives are masks.",
    lambda: (normal(212, 6), integers(213, 6, below=3)),
)
def masks_of_comparisons(x, bins):
    capped = jnp.clip(x, -0.4, 0.4) + jnp.maximum(x, 0.1) * jnp.minimum(x, 0.3) + jnp.abs(x)
    return jnp.sum(capped * jnp.sign(x)) + jnp.max(x) * jnp.min(x) + jnp.sum(jnp.where(bins == 1, x, 0.0) ** 3)
