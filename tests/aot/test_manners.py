"""Small things that people meet daily: what a print shows, tracebacks, and functions whose call runs nothing."""

from __future__ import annotations

import re
import traceback
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.stages import tracing
from jointcut.partition.errors import CallError, TraceError
from jointcut.wrappers.boundary import NOTE

W, X = jnp.ones((3, 3)), jnp.ones((2, 3))


def test_the_memory_of_a_step_is_a_table():
    run = aot.function(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)).trace(W, X).partition().compile()
    head, names, step, *halves, last = str(run.memory).splitlines()
    assert (head, names.split()) == ("Memory", ["arguments", "results", "in", "both", "temporaries", "peak"])
    assert step.startswith("  step      60 B       56 B     0 B")
    assert [line.split()[0] for line in halves] == ["forward", "backward"]
    assert re.fullmatch(r"  saved between forward and backward: \d+ B", last)


def test_a_measured_step_stands_beside_what_was_predicted_of_it():
    function = aot.function(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), donate_argnums=0)
    run = function.trace(W, X).partition().compile()
    found = run.measure(W, X, rounds=3)
    assert not W.is_deleted() and len(found.run_seconds) == 3
    assert found.peak_bytes == run.peak_bytes and found.predicted_bytes == run.cut.pareto().chosen.peak_bytes
    assert found.predicted_seconds > 0 and min(found.run_seconds) <= found.seconds <= max(found.run_seconds)
    assert aot.Measured.from_json(found.to_json()) == found
    head, names, memory, seconds, note = str(found).splitlines()
    assert (head, names.split()) == ("<lambda>, on cpu", ["predicted", "measured", "ratio"])
    assert re.fullmatch(r"  peak of a step +\d+ B +\d+ B +\d+\.\d\d", memory)
    assert re.fullmatch(r"  time of a step +\S+ \S+ +\S+ \S+ +\d+\.\d\d", seconds)
    assert re.fullmatch(r"  bytes by XLA's account; seconds in the middle of 3 runs, \S+ \S+ to \S+ \S+", note)


def test_plans_are_measured_a_row_each_beside_what_was_predicted_of_them():
    traced = aot.function(lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2)).trace(W, X)
    found, front = traced.measure(W, X, plans=1, rounds=2), traced.pareto()
    assert found.plans == ("chosen", "as plain JAX", f"front, 1 of {len(front)}")
    for step, saved, plan in zip(
        found.steps,
        found.saved_bytes,
        (traced.partition().plan, traced.partition("save_all").plan, front.points[0].plan),
        strict=True,
    ):
        assert saved == plan.bytes_saved and step.peak_bytes == traced.partition(plan=plan).compile().peak_bytes
        assert step.predicted_seconds > 0 and step.predicted_bytes > 0 and len(step.run_seconds) == 2
    assert aot.MeasuredPlans.from_json(found.to_json()) == found
    _, names, *rows, note = str(found).splitlines()
    assert " ".join(names.split()) == "plan saves peak predicted measured ratio time predicted measured ratio"
    figures = r" +\d+ B +\d+ B +\d+ B +\d+\.\d\d +\S+ \S+ +\S+ \S+ +\d+\.\d\d"
    assert all(re.fullmatch(re.escape(f"  {plan}") + figures, row) for plan, row in zip(found.plans, rows, strict=True))
    assert note == "  bytes by XLA's account; seconds in the middle of 2 runs"


@pytest.mark.parametrize("plans", [0, True, "2"])
def test_a_number_of_plans_that_is_none_is_refused(plans):
    with pytest.raises(CallError) as caught:
        aot.function(lambda w: jnp.sum(w**2)).trace(W).measure(W, plans=plans)
    assert str(caught.value) == f"plans is {plans!r}.\nGive a whole number from 1 on, such as 3."


@pytest.mark.parametrize("rounds", [0, -1, 2.0, True, "5"])
def test_rounds_that_are_no_number_are_refused(rounds):
    run = aot.function(lambda w: jnp.sum(w**2)).trace(W).partition().compile()
    with pytest.raises(CallError) as caught:
        run.measure(W, rounds=rounds)
    assert str(caught.value) == f"rounds is {rounds!r}.\nGive a whole number from 1 on, such as 5."


def test_an_array_that_is_passed_twice_is_measured_as_one():
    run = aot.function(lambda ws: jnp.sum(ws[0] @ ws[1])).trace([W, W]).partition().compile()
    assert len(run.measure([W, W], rounds=1).run_seconds) == 1


def test_a_step_for_other_arguments_is_not_measured():
    run = aot.function(lambda w: jnp.sum(w**2)).trace(W).partition().compile()
    with pytest.raises(CallError, match=r"args\[0\]"):
        run.measure(X)


async def awaited(w):
    return jnp.sum(w)


def parts(w):
    yield jnp.sum(w)


async def stream(w):
    yield jnp.sum(w)


IS_ASYNC = "is async, so that its call runs nothing.\nTake `async` away, and await around the call."
IS_GENERATOR = "is a generator, whose call runs nothing.\nReturn the values: in a list, or by jax.lax.scan."


@pytest.mark.parametrize(("function", "text"), [(awaited, IS_ASYNC), (parts, IS_GENERATOR), (stream, IS_ASYNC)])
@pytest.mark.parametrize(
    "decorator", [aot.function, aot.tape, lambda f: aot.explain(f, W)], ids=["f", "tape", "explain"]
)
def test_a_function_whose_call_runs_nothing_is_refused_by_name(decorator, function, text):
    for given in (function, partial(function)):
        with pytest.raises(TraceError) as caught:
            decorator(given)
        line = function.__code__.co_firstlineno
        assert str(caught.value) == f"{function.__name__} at {__file__}:{line} {text}"


# ---------------------------------------------------------------------------------------- as jitted functions have them


def test_lower_has_the_text_and_the_executables_of_the_step_and_compiles_nothing_before():
    function = aot.function(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2))
    lowered = function.lower(W, X)
    assert repr(lowered) == "<Lowered <lambda>: 1 program>" and not lowered.cut.jits.compile_ms
    assert lowered.as_text().count("stablehlo.dot_general") == 2 and "module @jit_" in lowered.as_text()
    assert lowered.as_text("hlo").startswith("HloModule jit_")
    np.testing.assert_array_equal(lowered.compile().value_and_grad(W, X)[1], function.grad(W, X))
    two = lowered.cut.lower(executables=2)
    assert [text.count("module @jit_") for text in (two.as_text(), lowered.as_text())] == [2, 1]
    assert two.compile().executables == 2 and two.programs[0].as_text() in two.as_text()


def gradient(gradients, state, params):
    return gradients, state


def test_programs_are_made_again_after_clear_cache():
    scale = [1.0]
    function = aot.function(lambda w: scale[0] * jnp.sum(w**2))
    ways = [
        function,
        function.grad,
        lambda w: jax.grad(function)(w),
        lambda w: function.value_and_update(w, (), update=gradient)[1],
    ]
    ones, doubled = ([np.asarray(way(jnp.ones(3))).sum() for way in ways] for _ in range(2))
    assert ones == doubled == [3.0, 6.0, 6.0, 6.0]
    scale[0] = 2.0
    assert [np.asarray(way(jnp.ones(3))).sum() for way in ways] == ones
    function.clear_cache()
    assert [np.asarray(way(jnp.ones(3))).sum() for way in ways] == [6.0, 12.0, 12.0, 12.0]


class Model:
    @aot.function(argnums=1)
    def loss(self, w):
        return jnp.sum(w**2)


jax.tree_util.register_static(Model)


def test_a_method_is_lowered_and_cleared_like_a_function():
    assert Model().loss.lower(W).as_text() == Model.loss.lower(Model(), W).as_text()
    Model().loss.clear_cache()


# ---------------------------------------------------------------------------------------- tracebacks


def fails(w):
    return inner(w) * missing_factor(w)


def inner(w):
    return jnp.sum(w)


def missing_factor(w):
    return jnp.ones(w.shape[0] + 1) * w


CALLS = {
    "call": lambda f: f(W),
    "value_and_grad": lambda f: f.value_and_grad(W),
    "grad": lambda f: f.grad(W),
    "vjp": lambda f: f.vjp(W),
    "update": lambda f: f.value_and_update(W, (), update=lambda g, s, p: (p, s)),
    "trace": lambda f: f.trace(W),
    "lower": lambda f: f.lower(W),
    "in jit": lambda f: jax.jit(f)(W),
    "in grad": lambda f: jax.grad(f)(W),
    "explain": lambda f: aot.explain(fails, W),
    "tape": lambda f: aot.tape(fails)(W),
    "loop": lambda f: aot.fori_loop(0, 3, lambda i, w: fails(w), W),
}


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_traceback_leads_from_the_users_call_to_the_users_line(call, monkeypatch):
    with pytest.raises(ValueError, match="Incompatible shapes") as caught:
        call(aot.function(fails))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert {frame.filename for frame in frames} == {__file__} and caught.value.__notes__.count(NOTE) == 1
    assert [frame.name for frame in frames][-2:] == ["fails", "missing_factor"] and len(frames) <= 5
    monkeypatch.setenv("JOINTCUT_TRACEBACK", "full")
    with pytest.raises(ValueError, match="Incompatible shapes") as caught:
        call(aot.function(fails))
    assert set(files(caught.value)) - {__file__} and NOTE not in caught.value.__notes__


def test_all_frames_are_kept_where_jax_keeps_its_own():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(ValueError, match="Incompatible shapes") as caught:
            aot.function(fails).grad(W)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert len(files(caught.value)) > 20


def test_errors_of_ours_end_at_the_users_line_and_have_no_note():
    with pytest.raises(TraceError) as caught:
        aot.function(lambda n: n * 2).grad(3)
    assert files(caught.value) == [__file__] and not hasattr(caught.value, "__notes__")


def test_a_fault_of_ours_keeps_all_frames(monkeypatch):
    monkeypatch.setattr(tracing, "wrapped_for", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable") as caught:
        aot.function(fails).trace(W)
    assert files(caught.value)[-1] == tracing.__file__


def test_clear_cache_forgets_the_steps_whose_hooks_see_sums():
    made = []

    def net(w, x):
        made.append(1)
        return jnp.sum(jnp.tanh(x * aot.post_accumulate(w, print)))

    function, sums = aot.function(net), jax.new_ref(jnp.zeros(()))
    step = function.accumulate_into(sums)
    step(2.0, jnp.ones(3))
    first = len(made)
    step(2.0, jnp.ones(3))
    assert len(made) == first
    function.clear_cache()
    function.accumulate_into(sums)(2.0, jnp.ones(3))
    assert len(made) == 2 * first
