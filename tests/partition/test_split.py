"""The whole folder in one function: any joint jaxpr, a strategy by name or by hand, and two jaxprs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.partition import Plan, Roles, Saved, split
from jointcut.partition.errors import PlanError, StrategyError


def joint(x, ct):
    y, pullback = jax.vjp(lambda x: jnp.sum(jnp.tanh(x @ x)), x)
    return y, *pullback(ct)


X = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)


def halves_of(strategy):
    closed = jax.make_jaxpr(joint)(X, np.float32(1))
    return split(closed, Roles.simple(1, 1, 1, 1), strategy)


def products(graph):
    """A strategy by hand: save what a matrix product writes in the forward."""
    return Plan.of(graph, [op.outputs[0] for op in graph.ops[:1] if op.name == "dot_general"], strategy="products")


def nothing_to_see(graph):
    return [graph]


def saves_a_gradient(graph):
    """A record that never saw `Plan.of`."""
    last = graph.values[-1]
    return Plan("mine", (Saved(last.id, last.shape, last.dtype, 1, last.bytes, "", "", "", ""),), (), ())


@pytest.mark.parametrize("strategy", ["min_cut", "save_all", products], ids=["min_cut", "save_all", "by hand"])
def test_the_halves_compute_what_the_joint_program_does(strategy):
    (value,), (gradient,) = halves_of(strategy)([jnp.asarray(X)], [jnp.float32(2)])
    want_value, want_gradient = joint(jnp.asarray(X), jnp.float32(2))
    np.testing.assert_allclose(value, want_value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-5, atol=1e-6)


def test_a_strategy_by_hand_makes_the_plan():
    halves = halves_of(products)
    assert (halves.plan.strategy, halves.plan.bytes_saved, len(halves.plan.saved)) == ("products", 36, 1)


def test_a_strategy_by_hand_goes_through_aot():
    def loss(x):
        return jnp.sum(jnp.tanh(x @ x))

    ours = aot.function(loss, strategy=products)
    for got, want in zip(ours.value_and_grad(X), jax.value_and_grad(loss)(X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(StrategyError) as refusal:
        halves_of("min-cut")
    assert str(refusal.value) == (
        "strategy 'min-cut' is unknown.\n"
        "Known names: 'best', 'min_cut', 'save_all'. Did you mean 'min_cut'? "
        "A function Graph -> Plan is welcome as well."
    )


def test_a_strategy_that_returns_no_plan_is_refused():
    with pytest.raises(StrategyError) as refusal:
        halves_of(nothing_to_see)
    assert str(refusal.value) == (
        "strategy nothing_to_see returned list, not a Plan.\n"
        "Return Plan.of(graph, saved=[...]) from jointcut.partition."
    )


def test_a_plan_that_was_not_completed_is_held_to_the_same_rules():
    with pytest.raises(PlanError) as refusal:
        halves_of(saves_a_gradient)
    assert str(refusal.value) == (
        f"plan.saved[%{len(halves_of('min_cut').graph.values) - 1}] does not exist in the forward.\n"
        "Save values of the forward only: see Graph.values and Value.maker."
    )


def test_times_are_told():
    halves = halves_of("min_cut")
    assert halves.cut_ms > 0 and halves.emit_ms > 0
