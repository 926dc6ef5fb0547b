"""An update that is used again has its new values, whatever it reads, and one that did not change is found at once."""

from __future__ import annotations

import functools
import gc
import types
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.hooks.closures import Still, values_now

RATE = 0.5
SETTINGS = {"rate": 0.5}


def rate():
    return 0.5


def another_rate():
    return 0.25


def by_global(gradient, state, w):
    return w - RATE * gradient, state


def by_dict(gradient, state, w):
    return w - SETTINGS["rate"] * gradient, state


def by_function(gradient, state, w):
    return w - rate() * gradient, state


def by_absent(gradient, state, w):
    return w - max(0.5, 0.25) * gradient, state  # a builtin, until the file has one of its own


def by_default(gradient, state, w, rate=0.5):
    return w - rate * gradient, state


def by_keyword(gradient, state, w, *, rate=0.5):
    return w - rate * gradient, state


def in_a_cell(value):
    def by_cell(gradient, state, w):
        return w - value * gradient, state

    def change():
        nonlocal value
        value = value * 0.5

    return by_cell, change


class Descent:
    """An update with an attribute."""

    def __init__(self):
        self.rate = 0.5

    def __call__(self, gradient, state, w):
        return w - self.rate * gradient, state

    def method(self, gradient, state, w):
        return w - self.rate * gradient, state


def of_global(monkeypatch):
    return by_global, lambda: monkeypatch.setitem(globals(), "RATE", 0.25)


def of_dict(monkeypatch):
    return by_dict, lambda: monkeypatch.setitem(SETTINGS, "rate", 0.25)


def of_function(monkeypatch):
    return by_function, lambda: monkeypatch.setitem(globals(), "rate", another_rate)


def of_code(monkeypatch):
    return by_function, lambda: monkeypatch.setattr(rate, "__code__", another_rate.__code__)


def of_absent(monkeypatch):
    return by_absent, lambda: monkeypatch.setitem(globals(), "max", min)


def of_default(monkeypatch):
    return by_default, lambda: monkeypatch.setattr(by_default, "__defaults__", (0.25,))


def of_keyword(monkeypatch):
    return by_keyword, lambda: monkeypatch.setattr(by_keyword, "__kwdefaults__", {"rate": 0.25})


def of_cell(_):
    return in_a_cell(0.5)


def of_array(_):
    return in_a_cell(jnp.float32(0.5))


def of_object(_):
    descent = Descent()
    return descent, lambda: setattr(descent, "rate", 0.25)


def of_method(_):
    descent = Descent()
    return descent.method, lambda: setattr(descent, "rate", 0.25)


def of_partial(_):
    given = functools.partial(by_default, rate=0.5)
    return given, lambda: given.keywords.update(rate=0.25)


CHANGES = (
    of_global, of_dict, of_function, of_code, of_absent, of_default, of_keyword, of_cell, of_array, of_object,
    of_method, of_partial,
)  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen(kind, monkeypatch):
    update, change = kind(monkeypatch)
    function = aot.function(lambda w: jnp.sum(w**2))

    def step():
        return function.value_and_update(jnp.ones(3), (), update=update)[1]

    for _ in range(4):  # from the third call on the update is known at once, if it can be
        np.testing.assert_allclose(step(), 0.0)
    change()
    for _ in range(3):
        np.testing.assert_allclose(step(), 0.5)


def test_what_cannot_change_unseen_is_known_at_once():
    cell, change = in_a_cell(0.5)
    for update in (by_global, by_function, by_absent, by_default, cell):
        still, before = Still(update), values_now(update)
        assert still.holds()
        assert values_now(update) == before
    still = Still(cell)
    change()
    assert not still.holds()


def test_nothing_is_known_of_what_may_change_inside():
    array, _ = in_a_cell(jnp.ones(3))
    assert not any(Still(x).holds() for x in (by_dict, by_keyword, array, Descent(), Descent().method, None))
    assert not Still(functools.partial(by_default, rate=0.5)).holds()
    cell = types.CellType()
    assert not Still(types.FunctionType(in_a_cell(0.5)[0].__code__, globals(), closure=(cell,))).holds()


def test_no_array_lives_on_in_the_test():
    array = jnp.ones(3)
    update = in_a_cell(array)[0]
    still, gone = Still(update), weakref.ref(array)
    del array, update
    gc.collect()
    assert gone() is None
    assert not still.holds()


def test_an_optimiser_without_attributes_is_known_at_once():
    optax = pytest.importorskip("optax")
    optimiser = optax.sgd(0.1)
    function, params = aot.function(lambda w: jnp.sum(w**2)), jnp.ones(3)
    assert Still(optimiser).holds()
    state = optimiser.init(params)
    for step in range(4):
        _, params, state = function.value_and_update(params, state, update=optimiser)
        np.testing.assert_allclose(params, 0.8 ** (step + 1), rtol=1e-6)


def test_two_updates_in_turn_and_both_numbers_of_sweeps():
    function, quarter = aot.function(lambda w: jnp.sum(w**2)), in_a_cell(0.25)[0]
    for sweeps in (1, 2, 1, 1, 2):
        for update, want in ((by_global, 0.0), (by_global, 0.0), (quarter, 0.5)):
            got = function.value_and_update(jnp.ones(3), (), update=update, sweeps=sweeps)[1]
            np.testing.assert_allclose(got, want)
