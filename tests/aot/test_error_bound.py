"""Smaller forms that a budget's search chooses under a bound on the gradient's error."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.planning.budgets import inexact
from jointcut.aot.planning.budgets.inexact import Rounding, relative_error
from jointcut.partition.errors import BudgetError, TraceError, UncheckedWarning
from jointcut.partition.prices.cost import Roofline

COST = Roofline(5e10, 1e10, 2e10)
W = (np.random.default_rng(0).standard_normal((5, 64, 64)) / 8).astype(np.float32)
X = np.random.default_rng(1).standard_normal((256, 64)).astype(np.float32)


def loss(w, x):
    for i in range(4):
        x = x + jnp.tanh(x @ w[i]) @ w[i + 1]
    return jnp.mean(x**2)


def small(w, x):
    return jnp.mean((x + jnp.tanh(x @ w[0]) @ w[1]) ** 2)


WANT = jax.grad(loss)(W, X)


def bounded(error, budget=0.7, function=loss, **options):
    return aot.function(function, budget=budget, error=error, cost=COST, **options)


def test_a_budget_is_met_by_smaller_forms_and_the_error_is_measured():
    cut = bounded(1e-2).trace(W, X).partition()
    exact = bounded(None).trace(W, X).partition()
    assert exact.plan.seconds > 0 and not exact.plan.stored
    assert cut.plan.stored and set(cut.plan.stored.values()) == {"bfloat16"}
    assert cut.plan.seconds < exact.plan.seconds
    plain = exact.traced.plain_memory.temp_bytes
    run = cut.compile()
    assert run.activation_bytes <= 0.7 * plain
    error = cut.plan.gradient_error
    assert 0 < error.relative <= 1e-2 and not error.are_drawn and cut.traced.examples is None
    assert relative_error(run.value_and_grad(W, X)[1], WANT) == pytest.approx(error.relative, rel=0.05)
    told = (
        f"relative error of the gradient {error.relative:.1e}, at most 1.0e-02: measured at the arguments of the call"
    )
    assert cut.plan.remarks[-1] == told
    tight = bounded(9e-4).trace(W, X).partition().plan
    assert len(tight.stored) < len(cut.plan.stored) and (tight.gradient_error.relative or 0) <= 9e-4
    report = cut.explain(measure=False)
    assert told[1:] in str(report) and report.to_dict()["gradient_error"]["relative"] == error.relative
    assert json.loads(json.dumps(report.to_dict()))["gradient_error"]["most"] == 1e-2


def test_the_exact_plan_is_taken_where_no_form_holds_the_bound():
    cut = bounded(1e-9).trace(W, X).partition()
    assert not cut.plan.stored and cut.plan.seconds > 0
    assert cut.plan.gradient_error.unused.endswith("more than 1.0e-09")
    (line,) = cut.plan.remarks
    assert line.startswith("no smaller form is used: the error of the gradient would be ")
    assert relative_error(cut.compile().value_and_grad(W, X)[1], WANT) < 1e-6


def test_a_budget_that_holds_without_uses_none():
    plan = bounded(1e-2, 1.0).trace(W, X).partition().plan
    assert not plan.stored and plan.remarks == ["no smaller form is used: the budget holds without"]


def test_without_a_budget_none_is_used_and_the_plan_says_so():
    cut = aot.function(lambda x: jnp.sum(jnp.tanh(jnp.tanh(x))), error=1e-2).trace(np.ones(8, np.float32)).partition()
    assert cut.plan.remarks == ["no smaller form is used: there is no budget for which it could be"]


def test_a_budget_that_nothing_holds_says_what_became_of_forms():
    with pytest.raises(BudgetError, match="cannot be met") as error:
        bounded(1e-9, 0.05, small).trace(W, X).partition()
    (note,) = error.value.__notes__
    assert note.startswith("With error=1e-09, no smaller form is used: ")


def test_shapes_alone_are_measured_at_random_arguments():
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, X)]
    error = bounded(1e-2).trace(*shapes).partition().plan.gradient_error
    assert error.are_drawn and 0 < error.relative <= 1e-2
    assert str(error).endswith("measured at arguments drawn at random")


def test_rounding_what_the_backward_reads_gives_the_error_of_the_forms():
    def looped(w, x, rows):
        def step(h, w):
            h = jnp.tanh(h @ w) * 2
            return h + jnp.sin(jnp.cos(h @ w.T) @ w), None

        return jnp.sum(lax.scan(step, x, w)[0][rows] ** 2)

    rows = np.arange(128)
    cut = aot.function(looped, policy={"*": aot.SAVE_AS("bfloat16")}).trace(W, X, rows).partition()
    exact = cut.storing({})
    bound = aot.function(looped, budget=1.0, error=0.1).trace(W, X, rows).examples
    rounding = Rounding.of(exact.executables, bound)
    want = cut.check_forms(W, X, rows).error
    assert rounding.error(cut.plan.stored) == pytest.approx(want, rel=0.05) and rounding.error(()) == 0
    kept = inexact._kept(0.9 * want, rounding, cut.plan.saved)
    assert 0 < len(kept) < len(cut.plan.stored) and rounding.error(kept) <= 0.9 * want
    away = exact.traced.partition(policy={"*": aot.PREFER_OFFLOAD})
    floats = [s.value for s in away.plan.saved if s.is_offloaded and s.dtype == "float32"]
    assert floats and Rounding.of(away.executables, bound).error(floats) > 0


def test_inside_a_transformation_all_waits_as_it_is_with_a_warning():
    function = bounded(1e-2, 0.0, small)
    with pytest.warns(UncheckedWarning) as caught:
        found = jax.jit(jax.grad(function))(W, X)
    assert [str(w.message) for w in caught] == [
        "small is differentiated inside a transformation (jax.jit, jax.grad, jax.vmap), where the error of its "
        "gradient cannot be measured: all that it saves waits as it is.\n"
        "Call its own value_and_grad, grad or vjp outside of it, or name values in a policy, aot.SAVE_AS."
    ]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = jax.jit(lambda w: function.grad(w, X))(W)
    want = jax.grad(small)(W, X)
    assert relative_error(found, want) < 1e-6 and relative_error(again, want) < 1e-6


def test_the_cache_keeps_apart_what_was_made_under_another_bound(tmp_path):
    for error in (1e-2, None):
        found = relative_error(bounded(error, cache=tmp_path).grad(W, X), WANT)
        assert (found > 1e-5) == (error is not None)


@pytest.mark.parametrize("error", [0, 1, -1e-2, True, "1e-2"])
def test_a_bound_that_is_none_is_refused(error):
    with pytest.raises(TraceError) as raised:
        bounded(error)
    assert str(raised.value) == f"error is {error!r}.\nGive a relative error, such as 1e-2."


def test_a_bound_beside_what_else_changes_values_is_refused():
    with pytest.raises(TraceError) as raised:
        bounded(1e-2, policy={"*": aot.SAVE_AS("bfloat16")})
    assert str(raised.value) == (
        "error and policy are given together, and both change what is saved.\n"
        "Give one; Cut.check_forms measures aot.SAVE_AS."
    )
    with pytest.raises(TraceError, match="error and saved_arrays are given together"):
        bounded(1e-2, saved_arrays=aot.saved_arrays(lambda x: x, lambda x: x))
    with pytest.raises(TraceError, match="error and policy are given together"):
        bounded(1e-2).trace(W, X).partition(policy={"*": aot.SAVE_AS("bfloat16")})


def test_a_cut_does_not_hold_the_arguments():
    cut = aot.function(small, error=1e-2).trace(W, X).partition()
    assert cut.traced.examples is None and not cut.plan.stored
