"""A capture says which op, parameter, argument or hook made it needed, with old and new value and line."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jointcut import aot

W = jnp.ones((3, 4))


def power(w, n):
    return jnp.sum(w**n)


def total(w, axis):
    return jnp.sum(jnp.sin(jnp.sum(w, axis=axis)))


def part(w, start):
    return jnp.sum(w[:, start : start + 2])


def scaled(w, scale):
    return jnp.sum(jnp.maximum(w, scale))


@partial(jax.jit, static_argnames="n")
def jitted(w, n):
    return jnp.sin(w) ** n


def with_static(w, n):
    return jnp.sum(jitted(w, n))


def with_branch(w, v, is_first):
    a, b = jnp.sin(w), jnp.cos(v)
    return jnp.sum((a if is_first else b) * jnp.tanh(a))


def crossed(w, _, is_first):
    a, b = jnp.sin(w), jnp.cos(w)
    return jnp.sum((a if is_first else b) - jnp.tanh(a) * jnp.tanh(b))


def with_rule(w, scale):
    @jax.custom_vjp
    def rule(x):
        return jnp.sin(x)

    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (scale * ct,))
    return jnp.sum(rule(w))


def with_hook(w, most):
    clip = aot.Hook(lambda ct: jnp.clip(ct, -most, most), traced=True)
    return jnp.sum(aot.on_cotangent(jnp.sin(w), clip) ** 2)


def with_default(w, most):
    clip = aot.Hook(lambda ct, most=most: jnp.clip(ct, -most, most), traced=True)
    return jnp.sum(aot.on_cotangent(jnp.sin(w), clip) ** 2)


REASONS = {
    "exponent": (power, (2,), (3,), "integer_pow in test_reasons.py:N: y is 3 instead of 2"),
    "axis": (total, (0,), (1,), "reduce_sum in test_reasons.py:N: axes is (1,) instead of (0,)"),
    "slice": (part, (0,), (1,), "slice in test_reasons.py:N: start_indices is (0, 1) instead of (0, 0)"),
    "static": (with_static, (2,), (3,), "integer_pow in test_reasons.py:N: y is 3 instead of 2"),
    "operand": (
        with_branch, (W, True), (W, False),
        "multiply in test_reasons.py:N has a gradient for operand 1 instead of operand 0 and operand 1",
    ),
    "edge": (
        crossed, (W, True), (W, False),
        "the gradient of subtract in test_reasons.py:N goes to cos in test_reasons.py:N and multiply in "
        "test_reasons.py:N instead of sin in test_reasons.py:N and multiply in test_reasons.py:N",
    ),
    "rule": (
        with_rule, (1.0,), (2.0,),
        "custom_vjp_call in test_reasons.py:N has a derivative rule that was made anew, or that reads other values",
    ),
    "hook": (
        with_hook, (1,), (2,),
        "in the hook on_cotangent with_hook.<locals>.<lambda> at test_reasons.py:N most is 2 instead of 1",
    ),
    "default": (
        with_default, (1,), (2,),
        "in the hook on_cotangent with_default.<locals>.<lambda> at test_reasons.py:N most is 2 instead of 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_a_capture_names_what_differs(name):
    function, first, second, reason = REASONS[name]
    taped = aot.tape(function)
    for args in (first, second, first):
        taped.grad(W, *args)
    why = [re.sub(r"py:\d+", "py:N", re.sub(r"/\S*/", "", capture.why)) for capture in taped.captures]
    assert why[:2] == ["the first call", reason]
    assert len(why) == (3 if name == "rule" else 2)


def test_a_capture_is_compared_with_the_nearest():
    taped = aot.tape(power)
    for n in (2, 3, 4):
        taped.grad(W, n)
    assert "y is 4 instead of" in taped.captures[2].why


def test_another_configuration_is_told():
    taped = aot.tape(power)
    taped.grad(W, 2)
    with jax.default_matmul_precision("highest"):
        taped.grad(W, 2)
    assert [c.why for c in taped.captures][1:] == ["JAX's configuration, or the update's function, is another"]


def test_cleared_captures_are_made_anew():
    taped = aot.tape(power)
    taped.grad(W, 2)
    taped.captures.clear()
    assert (len(taped.captures), taped.captures.made) == (0, 1)
    taped.grad(W, 2)
    assert [(capture.why, capture.hits) for capture in taped.captures] == [("the first call", 0)]
    assert taped.captures.made == 2
