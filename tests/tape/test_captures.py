"""One capture for each structure, and the reason for it in words."""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jointcut import aot
from jointcut.aot.tape.nodes import Node

WEIGHTS = jnp.linspace(0.1, 0.9, 9).reshape(3, 3)
INPUT = jnp.ones((2, 3))


def unrolled(w, x, steps, scale=1.0):
    h = x
    for _ in range(steps):
        h = jnp.tanh(h @ w) * scale
    return jnp.sum(h**2)


def reasons(taped):
    return [re.sub(r"py:\d+", "py:N", capture.why) for capture in taped.captures]


def test_lengths_are_structures_and_values_are_not():
    taped = aot.tape(unrolled)
    for steps, scale in ((3, 1.0), (3, 0.5), (4, 2.0), (3, 7.0), (4, 1.5)):
        value, grad = taped.value_and_grad(WEIGHTS, INPUT * scale, steps, scale)
        want = jax.value_and_grad(unrolled)(WEIGHTS, INPUT * scale, steps, scale)
        np.testing.assert_allclose(value, want[0], rtol=1e-6)
        np.testing.assert_allclose(grad, want[1], rtol=1e-5)
    assert reasons(taped) == ["the first call", "4 steps instead of 3 in test_captures.py:N"]
    assert [capture.hits for capture in taped.captures] == [2, 1]
    assert taped.captures.made == 2
    assert str(taped.captures[0]).startswith("11 ops, 2 hits, ")


def test_an_early_exit_sees_numbers(capsys):
    @aot.tape
    def loss(w, x):
        h = x
        for i in range(10):
            h = jnp.tanh(h @ w)
            sys.stdout.write(f"{i} {float(h[0, 0]):.2f} {h[0, 0] > 0.5}\n")
            if np.asarray(h)[0, 0] < 0.5 or h.sum() > 4:
                break
        return h.sum()

    def twice(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w).sum()

    np.testing.assert_allclose(loss.grad(WEIGHTS / 2, INPUT), jax.grad(twice)(WEIGHTS / 2, INPUT), rtol=1e-5)
    assert capsys.readouterr().out == "0 0.54 True\n1 0.38 False\n"


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["sin", "mul", "relu", "dot", "branch", "where"]), min_size=1, max_size=5))
def test_random_programs_of_branches_and_loops(ops):
    def loss(w, is_large):
        h, seen = jnp.ones(3), w
        for op in ops:
            if op == "sin":
                h = jnp.sin(h + w[0])
            elif op == "mul":
                h, seen = h * seen[1], seen * 0.9
            elif op == "relu":
                h = jax.nn.relu(h - 0.2)
            elif op == "dot":
                h = h @ w
            elif op == "where":
                h = jnp.where(h > 0.5, h, h * w[2])
            elif is_large(h.sum()):
                h = h / (1 + jnp.sum(h**2))
        return jnp.sum(h)

    decisions = []

    def decide(x):
        decisions.append(float(x) > 1)
        return decisions[-1]

    got = aot.tape(loss).grad(WEIGHTS, decide)
    known = iter(decisions)
    want = jax.grad(lambda w: loss(w, lambda x: next(known)))(WEIGHTS)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_jitted_and_cut_calls_keep_their_backward_halves():
    @jax.jit
    def layer(w, h):
        return jnp.tanh(h @ w)

    @aot.function
    def block(w, h):
        return jax.nn.softmax(h @ w) * h

    @aot.tape
    def loss(w, x, steps):
        for _ in range(steps):
            x = block(w, layer(w, x))
        return x.sum()

    def plain(w, x):
        for _ in range(2):
            x = jnp.tanh(x @ w)
            x = jax.nn.softmax(x @ w) * x
        return x.sum()

    np.testing.assert_allclose(loss.grad(WEIGHTS, INPUT, 2), jax.grad(plain)(WEIGHTS, INPUT), rtol=1e-4, atol=1e-6)
    assert loss.captures[0].ops == 5
    assert "cotangent" in loss.captures[0].text
    assert loss.captures[0].graph.ops


def test_a_pullback_runs_again_until_it_is_released():
    taped = aot.tape(unrolled)
    out, pullback = taped.vjp(WEIGHTS, INPUT, 2)
    want_out, want = jax.vjp(lambda w, x: unrolled(w, x, 2), WEIGHTS, INPUT)
    np.testing.assert_allclose(out, want_out, rtol=1e-6)
    for scale in (1.0, 2.0):
        gradients = pullback(jnp.float32(scale))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), gradients[:2], want(jnp.float32(scale)))
        assert gradients[2].dtype == jax.dtypes.float0
    pullback.release()
    with pytest.raises(ValueError) as raised:
        pullback(1.0)
    assert str(raised.value) == (
        "The pullback of unrolled was released, and its residuals are gone.\nCall release() after the last backward."
    )


def with_refs(pull):
    refs = {"a": jax.new_ref(jnp.ones(3)), "b": jax.ad.GradValue()}
    result = pull.with_refs(refs, jax.ad.DontWant())(2.0)
    return refs["a"][...], result[0]["b"], type(result[0]["a"]), type(result[1])


def test_references_and_marks_mean_what_they_mean_in_jax():
    def loss(p, x):
        return jnp.sum(p["a"] * x) * jnp.sum(p["b"])

    args = {"a": jnp.arange(3.0), "b": jnp.ones(2)}, jnp.full(3, 2.0)
    got, want = with_refs(aot.tape(loss).vjp(*args)[1]), with_refs(jax.vjp(loss, *args)[1])
    assert jax.tree.map(np.ndarray.tolist, jax.device_get(got[:2])) == jax.tree.map(
        np.ndarray.tolist, jax.device_get(want[:2])
    )
    assert got[2:] == want[2:] == (jax.ad.GradRef, jax.ad.DidntWant)


def test_a_rule_whose_gradient_does_not_depend_on_its_cotangent_has_it():
    @jax.custom_vjp
    def rule(x, y):
        return x * y

    rule.defvjp(lambda x, y: (x * y, x), lambda x, ct: (jnp.cos(x), jnp.zeros_like(ct)))

    def loss(x):
        return jnp.sum(rule(jnp.sin(x), x))

    for function in (loss, jax.jit(loss)):
        taped = aot.tape(function)
        np.testing.assert_allclose(taped.grad(INPUT), jax.grad(loss)(INPUT), rtol=1e-6)


@pytest.mark.parametrize("name", ["defvjp_with_logs", "defvjp_with_accums"])
def test_rules_that_log_or_add_have_the_gradients_that_they_have_in_jax(name):
    sine = jax.custom_vjp(lambda x: jnp.sin(x))
    if not hasattr(sine, name):
        pytest.skip("this JAX has no such rules")

    def logged(x, ct):
        return (ct * jnp.cos(x),), {"norm": jnp.sum(ct)}

    def added(x, ct, gradient):
        gradient.accum(ct * jnp.cos(x))

    getattr(sine, name)(lambda x: (jnp.sin(x), x), logged if name == "defvjp_with_logs" else added)
    for made in (aot.tape, aot.function):
        np.testing.assert_allclose(made(lambda x: jnp.sum(sine(x) * 2)).grad(INPUT), 2 * jnp.cos(INPUT), rtol=1e-6)


def test_what_a_rule_logs_in_jax_is_what_a_hook_there_sees():
    sine = jax.custom_vjp(lambda x: jnp.sin(x))
    if not hasattr(sine, "defvjp_with_logs"):
        pytest.skip("this JAX has no such rules")
    sine.defvjp_with_logs(lambda x: (jnp.sin(x), x), lambda x, ct: ((ct * jnp.cos(x),), {"cotangent": ct}))
    _, pull = jax.vjp(lambda x: jnp.sum(sine(x) ** 2), INPUT)
    (want,), logs = pull.with_logs(1.0)
    for made in (aot.tape, aot.function):
        seen = []
        loss = made(
            lambda x, seen=seen: jnp.sum(aot.on_cotangent(jnp.sin(x), lambda g: seen.append(np.asarray(g))) ** 2)
        )
        np.testing.assert_allclose(loss.grad(INPUT), want, rtol=1e-6)
        jax.effects_barrier()
        np.testing.assert_allclose(seen, logs["cotangent"][None], rtol=1e-6)


def test_second_derivatives():
    taped = aot.tape(lambda w: jnp.sum(jnp.sin(w) ** 2 * w))
    second = aot.tape(lambda w: jnp.sum(taped.grad(w) ** 2))
    want = jax.grad(lambda w: jnp.sum(jax.grad(lambda w: jnp.sum(jnp.sin(w) ** 2 * w))(w) ** 2))
    np.testing.assert_allclose(second.grad(WEIGHTS[0]), want(WEIGHTS[0]), rtol=1e-5)
    with aot.tape.disabled():
        np.testing.assert_allclose(second.grad(WEIGHTS[0]), want(WEIGHTS[0]), rtol=1e-5)


def test_inside_transformations_it_is_traced():
    taped = aot.tape(lambda w: jnp.sum(jnp.sin(w)))
    np.testing.assert_allclose(jax.jit(taped.grad)(WEIGHTS), jnp.cos(WEIGHTS), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(taped.grad)(WEIGHTS), jnp.cos(WEIGHTS), rtol=1e-6)
    assert len(taped.captures) == 0


def test_unused_arguments_and_zero_gradients():
    taped = aot.tape(lambda p: jnp.sum(jax.lax.stop_gradient(p["a"])) + 0 * jnp.sum(p["b"]))
    gradients = taped.grad({"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones((), jnp.bfloat16)})
    assert {k: (v.tolist(), v.dtype.name) for k, v in gradients.items()} == {
        "a": ([0.0, 0.0], "float32"),
        "b": ([0.0, 0.0, 0.0], "float32"),
        "c": (0.0, "bfloat16"),
    }


def test_threads_record_apart():
    taped, found = aot.tape(unrolled), {}

    def run(steps):
        found[steps] = taped.grad(WEIGHTS, INPUT, steps)

    threads = [threading.Thread(target=run, args=(steps,)) for steps in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for steps, gradient in found.items():
        np.testing.assert_allclose(gradient, jax.grad(unrolled)(WEIGHTS, INPUT, steps), rtol=1e-5)
    assert len(taped.captures) == 4


def test_nothing_of_a_call_stays_alive():
    kept = []

    @aot.tape
    def loss(w):
        h = aot.on_cotangent(jnp.sin(w), kept_by_nobody)
        kept.append(weakref.ref(h))
        return jnp.sum(h * w)

    def kept_by_nobody(g):
        return 2 * g

    for _ in range(3):
        loss.grad(WEIGHTS)
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_hooks_that_differ_in_a_default_alone_have_backwards_of_their_own():
    def scaled_by(number):
        return [lambda ct, by=number: ct * by, lambda ct, *, by=number: ct * by]

    taped = aot.tape(lambda x, hook: jnp.sum(aot.on_cotangent(x * x, hook, traced=True)))
    for first, second in zip(scaled_by(2.0), scaled_by(3.0), strict=True):
        assert [taped.grad(jnp.float32(1), hook) for hook in (first, second)] == [4.0, 6.0]


def test_the_captures_are_bounded(monkeypatch):
    taped = aot.tape(unrolled)
    monkeypatch.setattr(taped.captures._table, "_most", 2)
    for steps in (1, 2, 3, 1):
        taped.grad(WEIGHTS, INPUT, steps)
    assert len(taped.captures) == 2
    assert taped.captures.made == 4


def test_a_method_has_its_instance_as_argument_0():
    class Model:
        @aot.tape(argnums=1)
        def loss(self, w):
            return jnp.sum(w**2)

    assert Model().loss.grad(jnp.ones(2)).tolist() == [2.0, 2.0]
    assert len(Model.loss.captures) == 1


def test_a_thousand_steps_of_changing_structure_leave_nothing_behind(monkeypatch):
    taped = aot.tape(unrolled)
    monkeypatch.setattr(taped.captures._table, "_most", 3)
    gc.collect()
    gc.freeze()  # what other tests left is neither searched nor counted
    counts = []
    for turn in range(5):
        for step in range(200):
            taped.grad(WEIGHTS, INPUT, turn, step * 0.01)
        gc.collect()
        nodes = sum(type(x) is Node for x in gc.get_objects())
        counts.append((len(taped.captures), nodes, len(jax.live_arrays())))
    assert [captures for captures, _, _ in counts] == [1, 2, 3, 3, 3]
    assert taped.captures.made == 5
    assert [nodes for _, nodes, _ in counts] == [counts[0][1]] * 5
    assert counts[-1][2] <= counts[2][2] + 4, "arrays of a scalar's type may be cached once"
