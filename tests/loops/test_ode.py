"""The solver of `python -m benchmarks.loops ode`: right, and differentiated as it stands."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import loops_ode
from jointcut import aot


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def test_a_body_is_back_after_two_rounds():
    problem = loops_ode.orbit()
    found = jax.jit(lambda p: loops_ode.solved(problem.field(p), problem.start(p), problem.end))(problem.parameters)
    np.testing.assert_allclose(found.y, problem.parameters["start"], atol=1e-6)
    assert (found.time, found.tries > 100) == (problem.end, True)


def test_the_gradient_is_that_of_finite_differences():
    problem = loops_ode.neural(width=3, batch=4)
    loss = partial(loops_ode.loss_of, problem)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(loss)(problem.parameters)
    gradient = jax.jit(jax.grad(aot.function(loss)))(problem.parameters)
    assert loops_ode.differences_error(loss, problem.parameters, gradient) < loops_ode.MOST_ERROR


def test_a_wrong_gradient_is_told_from_finite_differences():
    assert loops_ode.differences_error(lambda x: jnp.sum(x**2), jnp.ones(3), jnp.ones(3)) > 0.1
