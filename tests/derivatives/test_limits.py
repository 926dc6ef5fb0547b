"""At points where PyTorch or JAX has no finite derivative, or a wrong one, ours is the limit of what stands around."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut.aot import derivatives as d


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True):
        yield


def slope(function, *at, argnum=0):
    """At numbers, or at each of arrays of them."""
    return _mapped(jax.grad(function, argnum), at)


def bend(function, *at, argnums=(0, 0)):
    return _mapped(jax.grad(jax.grad(function, argnums[0]), argnums[1]), at)


def _mapped(derivative, at):
    return np.asarray(jax.jit(jnp.vectorize(derivative))(*(np.asarray(x, float) for x in at)))


def test_the_cardinal_sine_is_a_series_near_zero():
    x = np.array([0.0, 1e-200, 1e-8, 1e-3])
    np.testing.assert_allclose(bend(d.sinc, x), -(np.pi**2) / 3 * (1 - 3 * (np.pi * x) ** 2 / 10), rtol=1e-9)
    np.testing.assert_allclose(slope(d.sinc, x), -(np.pi**2) / 3 * x * (1 - (np.pi * x) ** 2 / 10), rtol=1e-9)
    x = np.array([0.29999999, 0.3])  # where the series ends
    np.testing.assert_allclose(slope(d.sinc, x), (np.cos(np.pi * x) - np.sinc(x)) / x, rtol=1e-13)


def test_equal_legs_bend_as_unequal_ones_do():
    equal, unequal = bend(d.hypot, 1.0, [1.0, 1.0 + 1e-9])
    np.testing.assert_allclose(equal, unequal, rtol=1e-8)
    np.testing.assert_allclose(equal, 0.5 / np.sqrt(2), rtol=1e-14)


def test_lengths_survive_numbers_whose_squares_do_not():
    scale = np.array([1e-200, 1e200])
    np.testing.assert_allclose(slope(d.hypot, 3 * scale, 4 * scale), 0.6, rtol=1e-14)
    np.testing.assert_allclose(slope(d.arctan2, 3 * scale, 4 * scale) * scale, 0.16, rtol=1e-14)


def test_the_mixed_second_derivative_of_a_power_is_its_limit():
    x = np.array([0.5, 2.0])
    near, there = bend(d.power, x, [[1e-9], [0.0]], argnums=(0, 1))
    np.testing.assert_allclose(there, near, rtol=1e-8)
    np.testing.assert_allclose(bend(d.power, x, 0.0, argnums=(1, 0)), 1 / x, rtol=1e-14)


def test_one_of_two_exponentials_far_below_the_other_bends_nothing():
    low = np.array([-np.inf, -1e300, -800.0])
    assert (slope(d.logaddexp, 0.0, low) == 1).all() and (slope(d.logaddexp, 0.0, low, argnum=1) == 0).all()
    assert (bend(d.logaddexp, 0.0, low) == 0).all() and (bend(d.logaddexp, low, 0.0) == 0).all()
    assert slope(d.logaddexp, -np.inf, -np.inf) == 0.5


@pytest.mark.parametrize("name", ["gelu", "silu", "mish", "softplus", "sigmoid", "soft_sign", "tanhshrink"])
def test_activations_are_straight_far_from_zero(name):
    function = getattr(d, name)
    up = {"sigmoid": 0.0, "soft_sign": 0.0}.get(name, 1.0)
    x = np.array([1e4, 1e200, np.finfo(float).max])
    down = np.full(3, 1.0 if name == "tanhshrink" else 0.0)
    np.testing.assert_allclose(slope(function, np.concatenate([x, -x])), [*np.full(3, up), *down], atol=1e-7)
    np.testing.assert_allclose(bend(function, np.concatenate([x, -x])), 0, atol=1e-7)


def test_slopes_of_the_normal_distribution_meet_where_the_formula_ends():
    x = np.array([39.999999, 40.000001, -39.999999, -40.000001])
    for approximate in (True, False):
        slopes = slope(lambda x, approximate=approximate: d.gelu(x, approximate), x)
        np.testing.assert_array_equal(slopes, x > 0)


def test_a_row_that_is_masked_out_takes_no_part():
    rows = jnp.array([[-jnp.inf, -jnp.inf], [0.0, -jnp.inf], [1.0, 2.0]])
    for function in (d.logsumexp, d.softmax, d.log_softmax):
        grads = jax.grad(lambda x, f=function: jnp.where(jnp.isfinite(y := f(x, axis=1)), y, 0).sum())(rows)
        assert (grads[0] == 0).all() and np.isfinite(grads).all()


def test_ties_share_evenly_and_follow_pytorch_where_it_chooses_one():
    x = np.array([2.0, 2.0, 1.0, 2.0])
    np.testing.assert_allclose(jax.grad(d.amax)(x), [1 / 3, 1 / 3, 0, 1 / 3])
    np.testing.assert_allclose(jax.grad(lambda x: d.vector_norm(x, ord=np.inf))(-x), [-1 / 3, -1 / 3, 0, -1 / 3])
    np.testing.assert_allclose(jax.grad(d.median)(jnp.array([2.0, 2.0, 1.0])), [0.5, 0.5, 0])
    np.testing.assert_allclose(jax.grad(d.median)(jnp.array([3.0, 1.0, 2.0, 2.0])), [0, 0, 0.5, 0.5])
    np.testing.assert_allclose(jax.grad(d.nanmedian)(jnp.array([jnp.nan, 1.0, 3.0])), [0, 0.5, 0.5])
    np.testing.assert_allclose(jax.jacobian(lambda x: d.cummax(x, 0)[-1])(x), [0, 0, 0, 1])


@pytest.mark.parametrize("order", [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, np.inf])
def test_a_norm_of_zeros_is_flat_in_both_orders(order):
    for x in (np.zeros(3), np.zeros(3, complex)):

        def norm(x):
            return d.vector_norm(x, ord=order)

        slopes, bends = jax.jit(lambda x: jax.jvp(jax.grad(norm), (x,), (jnp.ones_like(x),)))(x)
        assert (slopes == 0).all() and (bends == 0).all()
