"""A report of plain JAX tells what jointcut would keep where the function has conditionals, whose branches it opens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jointcut import aot


def test_the_default_of_a_function_with_branches_is_told():
    def loss(w, x, flag):
        h = lax.cond(flag, lambda h: h + jnp.tanh(jax.nn.gelu(h @ w) @ w.T), lambda h: jnp.sin(h) * jnp.exp(-h * h), x)
        return jnp.mean(h**2)

    arguments = jnp.ones((64, 256)), jnp.ones((128, 64)), True
    kept = aot.function(loss).trace(*arguments).partition().plan.bytes_saved
    report = aot.explain(loss, *arguments)
    assert report.default_saved_bytes == kept < report.totals.saved_bytes
    assert "ith jointcut it would keep" in str(report)
