"""Derivative rules that need numbers are called back with real arrays, and give the gradient of eager `jax.grad`."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.partition.errors import CallError, TraceError
from jointcut.partition.program.text import parse

W = jnp.array([0.3, 0.2, 0.5])


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, want)


def with_rules(function, forward, backward, **options):
    made = jax.custom_vjp(function, **options)
    made.defvjp(forward, backward)
    return made


def sine_forward(x, y):
    return jnp.sin(x) * y, (x, y)


def sine_backward(residuals, g):
    x, y = (np.asarray(r) for r in residuals)  # fails on tracers
    return g * np.cos(x) * y, np.sum(np.asarray(g) * np.sin(x))


sine = with_rules(lambda x, y: jnp.sin(x) * y, sine_forward, sine_backward)

whole = with_rules(
    lambda x: jnp.asarray(np.exp(x)), lambda x: (np.exp(x), np.asarray(x)), lambda x, g: (g * np.exp(x),)
)

scaled = with_rules(
    lambda k, tree: {"y": k * tree["a"] * tree["b"], "n": jnp.arange(3)},
    lambda k, tree: ({"y": k * tree["a"] * tree["b"], "n": jnp.arange(3)}, tree),
    lambda k, tree, g: ({"a": np.array(k * g["y"] * tree["b"]), "b": k * g["y"] * np.asarray(tree["a"])},),
    nondiff_argnums=(0,),
)

chosen = with_rules(
    lambda x: x[np.asarray(x) > 0.25],
    lambda x: (x[np.asarray(x) > 0.25], np.asarray(x) > 0.25),
    lambda kept, g: (jnp.zeros(kept.shape).at[kept].set(g),),
)


@jax.custom_jvp
def root(x):
    return jnp.sqrt(x)


@root.defjvp
def root_rule(primals, tangents):
    y = np.sqrt(np.asarray(primals[0]))
    return jnp.asarray(y), tangents[0] / (2 * y)


LOSSES = {
    "a backward rule": lambda w: jnp.sum(sine(jnp.tanh(w), w[0]) ** 2),
    "all rules": lambda w: jnp.sum(whole(w * w) * w),
    "a tree, an argument without a derivative, a result of integers": lambda w: jnp.sum(
        scaled(3.0, {"a": jnp.sin(w), "b": w})["y"] ** 2
    ),
    "a result whose shape depends on values": lambda w: jnp.sum(jnp.sin(chosen(w * 1.0)) ** 2),
    "a forward derivative": lambda w: jnp.sum(root(w + 1.0) * w),
    "one argument is a constant": lambda w: jnp.sum(sine(w, 2.0)) + jnp.sum(sine(jnp.ones(3), w[1])),
    "a result that is used twice, and one that is not used": lambda w: (
        lambda y: jnp.sum(y * y) + 0.0 * sine(y, w[2])[0]
    )(sine(w, w[1])),
}
each = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@each
def test_the_gradient_is_that_of_eager_jax_grad_and_a_second_call_uses_the_capture(loss):
    taped = aot.tape(loss)
    for w in (W, 1.5 * W):
        same(taped.value_and_grad(w), jax.value_and_grad(loss)(w))
    assert len(taped.captures) == (2 if loss is LOSSES["a result whose shape depends on values"] else 1)


@each
def test_op_by_op_and_in_a_check_it_works_as_well(loss):
    with aot.tape.disabled():
        taped = aot.tape(loss)
        same(taped.grad(W), jax.grad(loss)(W))
        assert not taped.captures
    same(aot.tape(loss, check="nonfinite").grad(W), jax.grad(loss)(W))


@each
def test_a_pullback_may_be_called_again(loss):
    value, pullback = aot.tape(loss).vjp(W)
    pulled = jax.vjp(loss, W)[1]
    for ct in (1.0, 2.0):
        same(pullback(ct * value / value), pulled(ct * value / value))


def test_the_rule_is_called_once_in_its_place_among_the_hooks():
    log = []

    def backward(x, g):
        log.append(("rule", type(g).__name__, float(np.sum(g))))
        return (2 * g,)

    double = with_rules(lambda x: 2 * x, lambda x: (2 * x, x), backward)

    def loss(w):
        h = aot.on_cotangent(double(w), lambda g: log.append("after double"))
        h = aot.on_cotangent(double(h), lambda g: log.append("result"))
        return jnp.sum(h)

    taped = aot.tape(loss)
    for _ in range(2):
        log.clear()
        same(taped.grad(W), jnp.full(3, 4.0))
        assert log == ["result", ("rule", "ArrayImpl", 3.0), "after double", ("rule", "ArrayImpl", 6.0)]


def test_a_capture_names_its_islands_with_their_lines():
    taped = aot.tape(LOSSES["a backward rule"])
    taped.grad(W)
    (capture,) = taped.captures
    rule, line = (f.__code__.co_firstlineno for f in (sine_backward, LOSSES["a backward rule"]))
    told = f"// called back: the island sine_backward at {__file__}:{rule}, of <lambda> at {__file__}:{line} "
    assert capture.text.startswith(told), capture.text
    assert str(capture) == "6 ops, 1 island, 0 hits, 28 B kept: the first call"
    assert parse(capture.text) == parse("\n".join(capture.text.splitlines()[1:]))


def test_blocks_with_an_island_share_a_program_for_all_lengths():
    def loss(w, count):
        h = w
        for _ in range(count):
            h = sine(jnp.tanh(h), w[0])
        return jnp.sum(h**2)

    taped = aot.tape(loss, roll=True)
    for count in (3, 5, 8):
        same(taped.grad(W, count), jax.grad(loss)(W, count))
    assert len(taped.captures) == 1


def test_an_update_in_the_backward_and_references_take_islands():
    def loss(w):
        return jnp.sum(sine(jnp.tanh(w), w[0]) ** 2)

    gradient = jax.grad(loss)(W)
    _, after, _ = aot.tape(loss).value_and_update(W + 0, (), update=lambda g, s, p: (p - 0.1 * g, s))
    same(after, W - 0.1 * gradient)
    ref = jax.new_ref(jnp.ones(3))
    aot.tape(loss).accumulate_into(ref)(W)
    same(ref[...], 1 + gradient)


def test_residuals_of_an_island_are_packed():
    packed, unpacked = [], []

    def unpack(x):
        unpacked.append(x)
        return jnp.asarray(x)

    def loss(w):
        v = jnp.tanh(w)
        with aot.saved_arrays(lambda x: packed.append(x) or np.asarray(x), unpack):
            return jnp.sum(sine(v, w[0]))

    same(aot.tape(loss).grad(W), jax.grad(lambda w: jnp.sum(sine(jnp.tanh(w), w[0])))(W))
    assert len(packed) == len(unpacked) == 2


def test_residuals_of_an_island_are_freed_without_the_garbage_collector():
    held = []

    def forward(x):
        residual = jnp.cos(np.asarray(x))
        held.append(weakref.ref(residual))
        return x, residual

    noting = with_rules(lambda x: x, forward, lambda r, g: (g * np.asarray(r),))
    taped = aot.tape(lambda w: jnp.sum(noting(w)))
    gc.disable()
    try:
        taped.grad(W)
        assert held[-1]() is None
    finally:
        gc.enable()


def misfit(backward):
    return with_rules(lambda x: 2 * x, lambda x: (2 * x, np.asarray(x)), backward)


def refused(call, *args, error=CallError):
    with pytest.raises(error) as caught:
        call(*args)
    return str(caught.value)


def of_another_shape(x, g):
    return (np.asarray(g)[:2],)


def of_another_dtype(x, g):
    return (np.asarray(g, np.float16),)


def of_another_tree(x, g):
    return np.asarray(g), 1.0


@pytest.mark.parametrize("way", ["captured", "op by op"])
@pytest.mark.parametrize("rule", [of_another_shape, of_another_dtype, of_another_tree], ids=lambda rule: rule.__name__)
def test_a_result_that_does_not_fit_is_an_error_that_names_the_rule_and_the_line(rule, way):
    double = misfit(rule)

    def loss(w):
        return jnp.sum(double(w))

    def call():
        with aot.tape.disabled() if way == "op by op" else contextlib.nullcontext():
            return aot.tape(loss).grad(W)

    text = refused(call)
    line = f"{__file__}:{loss.__code__.co_firstlineno + 1} ({loss.__qualname__})"
    told = f"The rule {rule.__name__} at {__file__}:{rule.__code__.co_firstlineno}, of <lambda> at {line}, "
    assert text.startswith(told), text
    if rule is of_another_dtype:
        assert text == f"{told}returned float16[3] for differentiated operand 0.\nReturn float32[3]."
    else:
        start, cure = (
            "does not fit the function: Custom VJP bwd rule",
            "Return a gradient of its type for each argument.",
        )
        assert text.startswith(told + start) and text.endswith(cure), text


def test_a_users_own_error_in_a_rule_stays_as_it_is():
    def backward(x, g):
        np.asarray(x)
        float(np.asarray(g)[0])
        raise ValueError("mine")

    double = misfit(backward)
    assert refused(aot.tape(lambda w: jnp.sum(double(w))).grad, W, error=ValueError) == "mine"


def test_with_a_budget_a_rule_that_needs_numbers_is_refused():
    def loss(w):
        return jnp.sum(sine(w, w[0]))

    line = f"{__file__}:{loss.__code__.co_firstlineno + 1} ({loss.__qualname__})"
    assert refused(aot.tape(loss, budget=0.5).grad, W) == (
        f"loss at {line} calls <lambda>, whose derivative rule needs numbers: by a budget, policy or another option "
        "all ops are one program.\n"
        "Compute with jax.numpy in the rule, call numpy through jax.pure_callback, or leave the option out."
    )


def test_two_sweeps_refuse_an_island_which_would_be_called_twice():
    def clipped(gradients, state, params):
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
        return [p - g / jnp.maximum(norm, 1.0) for p, g in zip(params, gradients, strict=True)], state

    taped = aot.tape(lambda params: jnp.sum(sine(params[0], params[1][0])))
    update = functools.partial(taped.value_and_update, update=clipped, sweeps=2)
    text = refused(update, [W + 0, W + 1], (), error=TraceError)
    assert text == (
        "value_and_update with two sweeps goes back twice, but the rule sine_backward at "
        f"{__file__}:{sine_backward.__code__.co_firstlineno} is called back, and would see each cotangent twice.\n"
        "Remove it, or let JAX trace it: compute with jax.numpy in the rule."
    )
