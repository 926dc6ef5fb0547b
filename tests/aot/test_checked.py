"""In debug mode every half is looked at, and what is wrong is told by the user's path and source line."""

from __future__ import annotations

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.errors import CallError, NonFiniteError

W, X = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])
NO_CURE = (
    "No option and no function of aot.derivatives is known to make this call finite.\n"
    "Look at that line with these numbers; jax.numpy.where on an operand, not on the result, keeps a gradient finite."
)
CURED = (
    'aot.function(derivatives="finite") makes this call finite (checked by a run).\n'
    "aot.derivatives.norm(x) in place of the root of a sum of squares at that line makes this call finite "
    "(checked by a run)."
)


@aot.function
def loss(w, x):
    h = jnp.sqrt(w * x)
    return jnp.sum(jnp.log(h))


@aot.function
def norm(x):
    return jnp.sqrt(jnp.sum(x**2))


@aot.function
def stepped(x):
    return lax.scan(lambda h, i: (jnp.sqrt(h - i), h), x, jnp.arange(3.0))[0]


@aot.function(has_aux=True)
def with_aux(x):
    return jnp.sum(jnp.sin(x)), {"mean": jnp.mean(x)}


@aot.function
def masked(scores, mask):
    return jnp.sum(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))[0])


def line_of(function, text):
    """`file:line` of the first line of a function that holds a text."""
    lines, start = inspect.getsourcelines(inspect.unwrap(function))
    return f"{Path(__file__)}:{start + next(i for i, line in enumerate(lines) if text in line)}"


WAYS = {
    "value_and_grad": lambda f, *args: f.value_and_grad(*args),
    "grad": lambda f, *args: f.grad(*args),
    "vjp": lambda f, *args: f.vjp(*args)[1](jnp.float32(1)),
    "compiled": lambda f, *args: f.trace(*args).partition().compile().value_and_grad(*args),
    "compiled in two": lambda f, *args: f.trace(*args).partition().compile(executables=2).value_and_grad(*args),
    "compiled vjp": lambda f, *args: f.trace(*args).partition().compile().vjp(*args)[1](jnp.float32(1)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_is_right_runs_as_without_checks(way):
    for function, args in ((loss, (W, X)), (norm, (X,)), (stepped, (jnp.float32(100),))):
        want = way(function, *args)
        with aot.debug():
            got = way(function, *args)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_call_and_aux_run_as_without_checks():
    with aot.debug():
        value, aux = with_aux(X)
        (again, more), gradient = with_aux.value_and_grad(X)
        out, pullback, last = with_aux.vjp(X)
    assert value == again == out
    assert aux["mean"] == more["mean"] == last["mean"]
    np.testing.assert_allclose(gradient, jnp.cos(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pullback(jnp.float32(1))[0], jnp.cos(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_op_that_makes_a_nan_is_named_by_its_line(way):
    with aot.debug(), pytest.raises(NonFiniteError) as caught:
        way(loss, -W, X)
    place = line_of(loss._function, "jnp.sqrt")
    made = "sqrt made a NaN out of float32[2] in [-8, -3]"
    assert str(caught.value) == (
        f"The forward of loss is not finite: {made} at {place} (loss), scope jvp().\n{NO_CURE}"
    )


def test_a_call_without_gradient_is_checked():
    with aot.debug(), pytest.raises(NonFiniteError) as caught:
        loss(-W, X)
    made = "sqrt made a NaN out of float32[2] in [-8, -3]"
    place = line_of(loss._function, "jnp.sqrt")
    assert str(caught.value) == f"The forward of loss is not finite: {made} at {place} (loss).\n{NO_CURE}"


def test_a_gradient_that_is_not_finite_is_the_backwards():
    with aot.debug(), pytest.raises(NonFiniteError) as caught:
        norm.value_and_grad(jnp.zeros(3))
    made = "div made an infinity out of float32[] = 0.5 and float32[] = 0"
    place = line_of(norm._function, "jnp.sqrt")
    assert str(caught.value) == (f"The backward of norm is not finite: {made} at {place} (norm), scope jvp().\n{CURED}")


def test_the_step_of_a_loop_is_told():
    with aot.debug(), pytest.raises(NonFiniteError, match=r"in step 2 of the loop around it \(counted from 0\)\.\n"):
        stepped.value_and_grad(jnp.float32(1))


def test_a_nan_that_came_in_is_told_by_its_path():
    with aot.debug():
        with pytest.raises(NonFiniteError) as caught:
            loss(W * jnp.nan, X)
        assert str(caught.value) == (
            "The forward of loss returns a NaN that came in with args[0].\nLook at what made that one."
        )
        _, pullback = loss.vjp(W, X)
        with pytest.raises(NonFiniteError) as caught:
            pullback(jnp.float32(jnp.nan))
    assert str(caught.value) == (
        "The backward of loss returns a NaN that came in with cotangent 0.\nLook at what made that one."
    )


def test_an_infinity_that_is_meant_is_no_fault():
    with aot.debug():
        value, gradient = masked.value_and_grad(jnp.ones(3), jnp.array([True, True, False]))
    assert value == 0.5
    np.testing.assert_allclose(gradient, [0.25, -0.25, 0.0])


def test_outside_nothing_is_checked():
    with aot.debug():
        pass
    value, _ = loss.value_and_grad(-W, X)
    assert np.isnan(value)


def test_inside_a_jit_nothing_is_checked():
    with aot.debug():
        value, _ = jax.jit(loss.value_and_grad)(-W, X)
    assert np.isnan(value)


def test_debug_mode_ends_with_an_error():
    with pytest.raises(NonFiniteError), aot.debug():
        loss(-W, X)
    assert np.isnan(loss(-W, X))


def test_references_are_written_once_while_the_culprit_is_sought():
    count = jax.new_ref(jnp.int32(0))

    @aot.function
    def counted(x, count):
        count[...] += 1
        return jnp.sum(jnp.log(x))

    with aot.debug():
        counted.value_and_grad(X, count)
        with pytest.raises(NonFiniteError):
            counted.value_and_grad(-X, count)
    assert count[...] == 2


def test_a_donated_array_must_not_stand_twice():
    @aot.function(donate_argnums=0)
    def added(x, y):
        return jnp.sum(x * y)

    run = added.trace(X, W).partition().compile()
    with aot.debug(), pytest.raises(CallError) as caught:
        run.value_and_grad(X, X)
    assert str(caught.value) == (
        "args[1] is the same array as args[0], and one of them is donated: the other would lose it.\n"
        "Pass a copy (jax.numpy.copy), or do not donate it."
    )
