"""A traced hook on a tape follows all variables that it reads: a program never holds an old one."""

from __future__ import annotations

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
