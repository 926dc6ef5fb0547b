"""A random draw is the same in the forward and in the backward, under every plan."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from corpus.draws import dropped, masked, masked_in_nested_scans, masked_in_scan
from jointcut import aot
from jointcut.partition.errors import PlanError
from jointcut.partition.plans.plan import Plan
from jointcut.partition.split import decide
from oracle import STRATEGIES

X = jnp.linspace(0.5, 1.5, 24).reshape(4, 6)


def recompute_most(graph):
    """A plan by hand: of what "save_all" keeps, give up each value without which the plan still closes."""
    plan = decide(graph, "save_all")
    for value in plan.values:
        with contextlib.suppress(PlanError):
            plan = Plan.of(graph, set(plan.values) - {value}, strategy="recompute_most")
    return plan


pytestmark = pytest.mark.parametrize("strategy", [*STRATEGIES, recompute_most], ids=[*STRATEGIES, "recompute_most"])
generators = pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])


def survivors(gradients):
    """Where a gradient came through: nothing in these losses has the slope zero but the mask."""
    return np.asarray(gradients) != 0


@generators
@pytest.mark.parametrize(
    "function", [masked, masked_in_scan, masked_in_nested_scans], ids=lambda function: function.__name__
)
def test_the_gradient_is_zero_just_where_the_forward_dropped(function, generator, strategy):
    compiled = aot.function(function, has_aux=True, strategy=strategy)
    (_, mask), gradients = compiled.value_and_grad(X, jax.random.key(3, impl=generator))
    assert 0 < np.sum(mask) < X.size
    np.testing.assert_array_equal(survivors(gradients), mask)


@generators
@pytest.mark.parametrize("function", [masked, masked_in_scan], ids=lambda function: function.__name__)
def test_two_executables_draw_one_mask(function, generator, strategy):
    """By vjp the halves run apart: the backward sees nothing but the residuals."""
    out, pullback, mask = aot.function(function, has_aux=True, strategy=strategy).vjp(
        X, jax.random.key(4, impl=generator)
    )
    for _ in range(2):
        gradients, _ = pullback(jnp.ones_like(out))
        np.testing.assert_array_equal(survivors(gradients), mask)


@pytest.mark.parametrize("function", [masked, masked_in_scan], ids=lambda function: function.__name__)
def test_masks_agree_under_jit_and_vmap(function, strategy):
    compiled = aot.function(function, has_aux=True, strategy=strategy)
    step = jax.jit(jax.vmap(jax.value_and_grad(compiled, has_aux=True), in_axes=(None, 0)))
    (_, masks), gradients = step(X, jax.random.split(jax.random.key(5), 3))
    np.testing.assert_array_equal(survivors(gradients), masks)
    assert not np.array_equal(masks[0], masks[1])


def test_another_key_draws_another_mask_without_compiling_anew(strategy):
    compiled = aot.function(masked, has_aux=True, strategy=strategy)
    masks = []
    for seed in range(2):
        (_, mask), gradients = compiled.value_and_grad(X, jax.random.key(seed))
        np.testing.assert_array_equal(survivors(gradients), mask)
        masks.append(np.asarray(mask))
    assert not np.array_equal(*masks)


def test_a_key_of_the_old_kind_and_a_captured_key(strategy):
    captured = jax.random.key(6)

    def both(x, old):
        first, first_mask = dropped(old, x)
        second, second_mask = dropped(captured, x)
        return jnp.sum(first**2) + jnp.sum(second**2), (first_mask, second_mask)

    (_, masks), gradients = aot.function(both, has_aux=True, strategy=strategy).value_and_grad(X, jax.random.PRNGKey(7))
    np.testing.assert_array_equal(survivors(gradients), np.logical_or(*masks))


def test_the_draw_is_the_one_of_plain_jax(strategy):
    """Not only equal on both sides: the very mask that the user's key stands for."""
    key = jax.random.key(8)
    (value, mask), gradients = aot.function(masked, has_aux=True, strategy=strategy).value_and_grad(X, key)
    (want, want_mask), want_gradients = jax.value_and_grad(masked, has_aux=True)(X, key)
    np.testing.assert_array_equal(mask, want_mask)
    np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients, want_gradients, rtol=1e-5, atol=1e-6)


def test_the_mask_is_drawn_again_where_the_plan_says_so(strategy):
    """Else the laws of this file would hold for want of a recomputed draw."""
    traced = aot.function(masked, has_aux=True).trace(X, jax.random.key(9))
    most = traced.partition(recompute_most).plan
    assert not most.saved
    assert most.bytes_saved <= traced.partition(strategy).plan.bytes_saved
