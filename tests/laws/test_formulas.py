"""With `derivatives="finite"` roots of squares, angles and powers have finite slopes at singular points."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot


def apart(x):
    return x[:, None] - x[None]


def with_square(x):
    return jnp.sum(jnp.sqrt(jnp.sum(jnp.stack([x, 2 * x]) ** 2, axis=0)))


# Functions of four numbers, with the slope 0 at zero in PyTorch.
SINGULAR = {
    "norm": jnp.linalg.norm,
    "norm of rows": lambda x: jnp.sum(jnp.linalg.norm(x.reshape(2, 2), axis=1)),
    "norm of order 3": lambda x: jnp.linalg.norm(x, ord=3),
    "norm of complex numbers": lambda x: jnp.linalg.norm(lax.complex(x, 2 * x)),
    "Frobenius norm": lambda x: jnp.linalg.norm(x.reshape(2, 2)),
    "standard deviation": jnp.std,
    "standard deviation of a sample": lambda x: jnp.std(x, ddof=1),
    "root mean square": lambda x: jnp.sqrt(jnp.mean(x**2)),
    "distances": lambda x: jnp.sum(jnp.sqrt(jnp.sum(apart(x.reshape(2, 2)) ** 2, axis=-1))),
    "distances in one dimension": lambda x: jnp.sum(jnp.sqrt(jnp.square(apart(x)))),
    "power of a half": lambda x: jnp.sum(x * x) ** 0.5,
    "angle": lambda x: jnp.sum(jnp.arctan2(x, -x)),
    "in a scan": lambda x: jax.lax.scan(lambda c, y: (c + jnp.sqrt(y * y), None), 0.0, x)[0],
    "in a branch": lambda x: jax.lax.cond(x[0] > 5, jnp.sum, jnp.linalg.norm, x),
    "under checkpoint": lambda x: jax.checkpoint(jnp.linalg.norm)(x),
    "of stacked numbers": with_square,
}
singular = pytest.mark.parametrize("name", SINGULAR)


@singular
def test_slopes_at_zero_are_zero(name):
    function = SINGULAR[name]
    zeros = jnp.zeros(4)
    assert not np.all(np.isfinite(jax.grad(function)(zeros))), "JAX's own would do"
    finite = aot.function(function, derivatives="finite")
    np.testing.assert_array_equal(finite.grad(zeros), np.zeros(4))
    np.testing.assert_array_equal(jax.grad(finite)(zeros), np.zeros(4))


@singular
def test_elsewhere_values_and_slopes_are_those_of_jax(name):
    function = SINGULAR[name]
    x = jnp.array([0.3, -1.2, 2.0, 0.7])
    value, grad = aot.function(function, derivatives="finite").value_and_grad(x)
    want = np.nan_to_num(jax.grad(function)(x)) if "distances" not in name else difference(function, x)
    np.testing.assert_allclose(value, function(x), rtol=1e-6)
    np.testing.assert_allclose(grad, want, rtol=2e-5 if "distances" not in name else 1e-2, atol=1e-6)


def difference(function, x):
    """Central differences, for functions whose gradient in JAX is NaN: every number is at distance zero from itself."""
    return [(function(x + step) - function(x - step)) / 2e-2 for step in 1e-2 * np.eye(4, dtype=np.float32)]


def test_what_is_no_sum_of_squares_keeps_its_slope():
    """The root of x is infinitely steep at 0, and so is the root of a square less another, or times a number."""
    for function in (jnp.sqrt, lambda x: jnp.sqrt(x * x - 4 * x), lambda x: jnp.sqrt(x * (x + 1) ** 2)):
        assert not np.isfinite(aot.function(function, derivatives="finite").grad(jnp.float32(0)))


def test_a_derivative_rule_of_the_user_stays():
    @jax.custom_jvp
    def root(x):
        return jnp.sqrt(x * x)

    root.defjvp(lambda primals, tangents: (root(*primals), 7 * tangents[0]))
    assert aot.function(root, derivatives="finite").grad(jnp.float32(0)) == 7


def test_powers_and_absolute_values_of_complex_numbers_are_finite_at_zero():
    finite = aot.function(
        lambda x, y: jnp.sum(x**y) + jnp.sum(jnp.abs(lax.complex(x, y))), argnums=(0, 1), derivatives="finite"
    )
    assert np.all(np.isfinite(finite.grad(jnp.array([0.0, 0.0, 2.0]), jnp.array([2.0, 1.0, 0.5]))))
