"""Traced hooks and derivative rules on a tape follow all variables that they read: no program holds an old one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot

W = jnp.arange(1.0, 5.0)
LIMIT = 1.0
MASK = jnp.ones(4)
SETTINGS = {"limits": [1.0, 2.0]}


class Clip:
    """Clips by an attribute, as a method and when it is called."""

    def __init__(self):
        self.limit = 1.0

    def clip(self, ct):
        return jnp.clip(ct, -self.limit, self.limit)

    __call__ = clip


CLIP = Clip()


def clipped(ct):
    return jnp.clip(ct, -LIMIT, LIMIT) if ct.ndim < 9 else again(ct)


def again(ct):
    return clipped(ct[0])


def through_another(ct):
    return clipped(ct)


def taped(hook):
    return aot.tape(lambda w: jnp.sum(aot.on_cotangent(jnp.sin(w), hook, traced=True) ** 2))


def gradient(limit):
    return jnp.cos(W) * jnp.clip(2 * jnp.sin(W), -limit, limit)


def in_a_global(monkeypatch, limit):
    monkeypatch.setitem(globals(), "LIMIT", limit)


def in_a_dict(monkeypatch, limit):
    monkeypatch.setitem(SETTINGS, "limits", [limit, 2.0])


def in_an_attribute(monkeypatch, limit):
    monkeypatch.setattr(CLIP, "limit", limit)


FIRST = "the first call"
HOOKS = {
    "global": (in_a_global, lambda ct: jnp.clip(ct, -LIMIT, LIMIT), [FIRST]),
    "global of an inner function": (in_a_global, lambda ct: (lambda: jnp.clip(ct, -LIMIT, LIMIT))(), [FIRST]),
    "global of a function that it calls": (in_a_global, through_another, [FIRST, "LIMIT is 0.25 instead of 0.5"]),
    "dict": (
        in_a_dict,
        lambda ct: jnp.clip(ct, -SETTINGS["limits"][0], SETTINGS["limits"][0]),
        [FIRST, "SETTINGS is {'limits': [0.25, 2.0]} instead of {'limits': [0.5, 2.0]}"],
    ),
    "method": (in_an_attribute, CLIP.clip, [FIRST, "limit is 0.25 instead of 0.5"]),
    "object": (in_an_attribute, CLIP, [FIRST, "limit is 0.25 instead of 0.5"]),
}


@pytest.mark.parametrize("change, hook, reasons", HOOKS.values(), ids=HOOKS)
def test_a_variable_that_changes_is_seen_and_equal_ones_share_a_program(monkeypatch, change, hook, reasons):
    loss = taped(hook)
    for limit in (0.5, 0.25, 0.5, 0.25):
        change(monkeypatch, limit)
        np.testing.assert_allclose(loss.grad(W), gradient(limit), rtol=1e-6)
    assert loss.captures.made == len(reasons)
    assert all(capture.why.endswith(reason) for capture, reason in zip(loss.captures, reasons, strict=True))


def test_a_method_that_is_taken_anew_at_each_call_shares_a_program():
    loss = aot.tape(lambda w: jnp.sum(aot.on_cotangent(jnp.sin(w), Clip.clip.__get__(CLIP), traced=True) ** 2))
    for _ in range(3):
        loss.grad(W)
    assert (loss.captures.made, loss.captures[0].hits) == (1, 2)


def test_a_global_array_is_an_input(monkeypatch):
    loss = taped(lambda ct: ct * MASK)
    for scale in (1.0, 3.0):
        monkeypatch.setitem(globals(), "MASK", jnp.full(4, scale))
        np.testing.assert_allclose(loss.grad(W), scale * jnp.cos(W) * 2 * jnp.sin(W), rtol=1e-6)
    assert loss.captures.made == 1


def test_an_object_at_the_address_of_one_that_is_gone_is_another():
    settings = {}
    loss = taped(lambda ct: ct * float(settings["limit"]))
    for i in range(1, 20):
        settings["limit"] = jnp.float32(i)  # the one before is freed, and its address used again
        np.testing.assert_allclose(loss.grad(W), i * jnp.cos(W) * 2 * jnp.sin(W), rtol=1e-6)


def test_a_long_list_counts_as_one_object():
    numbers = [1.0] * 1000
    loss = taped(lambda ct: ct * numbers[0])
    for _ in range(2):
        loss.grad(W)
    assert (loss.captures.made, loss.captures[0].hits) == (1, 1)


def test_a_global_that_is_a_tracer_is_refused(monkeypatch):
    def loss(w):
        monkeypatch.setitem(globals(), "MASK", jnp.sin(w))
        return jnp.sum(aot.on_cotangent(jnp.cos(w), lambda ct: ct * MASK, traced=True))

    with pytest.raises(ValueError, match=r"reads MASK, float32\[4\], whose time is over when the hook is called"):
        jax.grad(loss)(W)


@jax.custom_vjp
def scaled(x):
    return LIMIT * x


scaled.defvjp(lambda x: (scaled(x), None), lambda _, ct: (clipped(3 * ct),))


@jax.custom_jvp
def pushed(x):
    return x + SETTINGS["limits"][0]


pushed.defjvp(lambda primals, tangents: (pushed(*primals), SETTINGS["limits"][0] * tangents[0]))


@pytest.mark.parametrize("ruled", [scaled, pushed])
def test_rules_and_their_functions_follow_globals_as_under_eager_grad(monkeypatch, ruled):
    def loss(w):
        return jnp.sum(ruled(w) ** 2)

    taped = aot.tape(loss)
    for limit in (0.5, 0.25, 0.5, 0.25):
        in_a_global(monkeypatch, limit)
        in_a_dict(monkeypatch, limit)
        got, want = taped.value_and_grad(W), jax.value_and_grad(loss)(W)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    assert (taped.captures.made, [capture.hits for capture in taped.captures]) == (2, [1, 1])


class Descent:
    """An update as a method, which reads an attribute."""

    def __init__(self):
        self.limit = 1.0

    def step(self, gradients, state, params):
        return params - self.limit * gradients, state


DESCENT = Descent()
UPDATES = {
    "global": lambda: lambda g, s, p: (p - LIMIT * g, s),
    "default": lambda: lambda g, s, p, scale=LIMIT: (p - scale * g, s),
    "partial": lambda: functools.partial(lambda g, s, p, scale: (p - scale * g, s), scale=LIMIT),
    "method": lambda: DESCENT.step,
}


@pytest.mark.parametrize("of", [aot.tape, aot.function])
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_an_update_that_is_made_anew_shares_a_program_and_follows_what_it_reads(monkeypatch, of, update):
    loss = of(lambda w: jnp.sum(w**2))
    for limit in (0.5, 0.25, 0.5, 0.25):
        in_a_global(monkeypatch, limit)
        monkeypatch.setattr(DESCENT, "limit", limit)
        _, params, _ = loss.value_and_update(jnp.copy(W), (), update=update())
        np.testing.assert_allclose(params, W - 2 * limit * W, rtol=1e-6)
    kept = loss.captures if of is aot.tape else loss._updating
    assert len(kept) == 2
