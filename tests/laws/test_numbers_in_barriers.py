"""A barrier may hold a number: one of the user's own, or the carry that a loop in segments starts with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.prices.cost import Roofline

STEADY = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
X = np.float32(0.7)
sines = aot.function(lambda x: jnp.sum(jnp.sin(x)))


def looped(length):
    """A loop whose carry starts with a number; of a prime number of trips segments leave a rest."""
    return lambda x: lax.scan(lambda c, _: (jnp.mean(jnp.sin(c * x)), None), 1.0, None, length=length)[0]


def with_a_barrier(x):
    sine, number = lax.optimization_barrier((jnp.sin(x), 1.0))
    return jnp.sum(jnp.cos(sine) * number)


def with_a_gradient(x):
    x *= jnp.arange(4.0)
    return jnp.sum(jnp.cos(x) * sines.grad(jnp.sin(x)))


def multiplied(x):
    """The cotangent of the number starts as one, in the backward's loop."""
    return jnp.sum(lax.scan(lambda h, _: (jnp.sin(jnp.cos(h * x)), None), jnp.ones(8), None, length=31)[0])


FUNCTIONS = {f"loop of {n}": looped(n) for n in (11, 13, 31, 101, 10007)} | {"a number in each step": multiplied}
FUNCTIONS |= {"a barrier of the user's": with_a_barrier, "a gradient of ours": with_a_gradient}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_plan_is_weighed_and_told_of_and_right(name):
    want = jax.value_and_grad(FUNCTIONS[name])(X)
    cut = aot.function(FUNCTIONS[name], cost=STEADY, budget=10**9).trace(X).partition()
    plans = {point.plan.values + point.plan.segments: point.plan for point in cut.pareto()}
    for plan in plans.values():
        again = cut.traced.partition(plan=plan)
        life = again.explain(measure=False).life
        assert bool(life.moments) == bool(cut.request.planner.replay(plan).peak_bytes)  # XLA may fuse everything
        for got, expected in zip(again.compile().value_and_grad(X), want, strict=True):
            np.testing.assert_allclose(got, expected, 1e-4, 1e-6)
