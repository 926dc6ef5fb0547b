"""What is donated is given up, and only that."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.partition.errors import CallError
from jointcut.wrappers.arguments import given_up


def params():
    return {"w": jnp.linspace(0.1, 0.9, 12).reshape(4, 3), "b": jnp.ones(3)}


BATCH = jnp.linspace(-1, 1, 20).reshape(5, 4)


def loss(p, x, *, scale=1.0):
    return scale * jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2)


def deleted(tree):
    return {leaf.is_deleted() for leaf in jax.tree.leaves(tree)}


WAYS = {
    "value_and_grad": lambda f, *args, **kwargs: f.value_and_grad(*args, **kwargs),
    "compiled": lambda f, *args, **kwargs: (
        f.trace(*args, **kwargs).partition().compile().value_and_grad(*args, **kwargs)
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "options", [{"donate_argnums": 0}, {"donate_argnums": (0,)}, {"donate_argnames": "p"}], ids=str
)
def test_a_donated_argument_becomes_the_gradient(way, options):
    function, given = aot.function(loss, **options), params()
    want = jax.value_and_grad(loss)(params(), BATCH)
    value, gradients = way(function, given, BATCH)
    np.testing.assert_allclose(value, want[0], rtol=1e-5, atol=1e-6)
    for got, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
    assert deleted(given) == {True}
    assert not BATCH.is_deleted()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_donated_keyword_is_given_up(way):
    function = aot.function(lambda w, *, x: jnp.sum(w * jnp.sin(x)), donate_argnames="x")
    w, x = jnp.ones(6), jnp.arange(6.0)
    value, _ = way(function, w, x=x)
    np.testing.assert_allclose(value, jnp.sum(jnp.sin(jnp.arange(6.0))), rtol=1e-5, atol=1e-6)
    assert not w.is_deleted()


def test_the_step_with_donation_needs_less_memory():
    big = {"w": jnp.ones((256, 256)), "b": jnp.ones(256)}
    x = jnp.ones((8, 256))
    plain = aot.function(loss).trace(big, x).partition().compile().memory.step
    given = aot.function(loss, donate_argnums=0).trace(big, x).partition().compile().memory.step
    assert given.alias_bytes >= 4 * 256 * 256
    assert given.peak_bytes <= plain.peak_bytes - 4 * 256 * 256


def test_vjp_keeps_what_its_backward_may_read():
    function, given = aot.function(loss, donate_argnums=0), params()
    out, pullback = function.vjp(given, BATCH)
    first, second = pullback(jnp.ones_like(out)), pullback(jnp.ones_like(out))
    assert deleted(given) == {False}
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_output_that_is_a_donated_input_is_a_new_array():
    function = aot.function(lambda x: (x, jnp.sum(x)), donate_argnums=0)
    x = jnp.arange(4.0)
    same, total = function(x)
    assert same is not x
    np.testing.assert_array_equal(same, np.arange(4.0))
    assert total == 6


def test_what_was_computed_twice_can_be_given_up_twice():
    """XLA computes it once, but the caller gets two arrays, as from jax.jit."""

    def state(p):
        return jnp.sum(p**2), {"mu": jnp.zeros_like(p), "nu": jnp.zeros_like(p), "e": jnp.exp(p), "f": jnp.exp(p)}

    function, p = aot.function(state, has_aux=True), jnp.arange(4.0)
    compiled = function.trace(p).partition().compile()
    for way in (function.value_and_grad, compiled.value_and_grad):
        (_, made), _ = way(p)
        step = jax.jit(lambda a, b: (a + 1, b + 1), donate_argnums=(0, 1))
        step(made["e"], made["f"])
        step(made["mu"], made["nu"])


def test_a_donated_array_passed_twice_is_not_given_up():
    function = aot.function(lambda a, b: jnp.sum(a * b), donate_argnums=1)
    q = jnp.arange(4.0)
    assert function.value_and_grad(q, q + 1)[0] == jnp.sum(q * (q + 1))
    assert function.value_and_grad(q, q)[0] == jnp.sum(q * q)
    assert not q.is_deleted()


def test_a_pullback_does_not_see_later_changes_of_numpys_arrays():
    given = np.arange(8, dtype=np.float32)
    out, pullback = aot.function(lambda x, w: jnp.sum(jnp.sin(x * w))).vjp(given, 2.0)
    want = 2 * np.cos(2 * given)
    given[:] = 100
    np.testing.assert_allclose(pullback(jnp.ones_like(out))[0], want, rtol=1e-5, atol=1e-6)


def test_metadata_says_what_is_donated():
    infos = aot.function(loss, donate_argnums=0).trace(params(), BATCH).metadata.input_info
    assert [info.is_donated for info in infos] == [True, True, False]


def test_residuals_that_the_backward_may_overwrite_are_told_and_never_ones_that_the_user_sees():
    cut = aot.function(lambda x, w: (h := jnp.exp(x @ w), jnp.sum(jnp.tanh(h))), argnums=(0, 1)).trace(
        jnp.ones((4, 4)), jnp.ones((4, 4))
    )
    cut = cut.partition()
    kinds = [cut.residuals[i].kind for i in cut.metadata.bw_donated_idxs]
    assert set(kinds) <= {"saved"}
    assert cut.traced.metadata.bw_donated_idxs is None


def test_a_second_call_of_a_compiled_pullback_tells_how_to_keep_the_residuals():
    run = aot.function(loss).trace(params(), BATCH).partition().compile()
    out, pullback = run.vjp(params(), BATCH)
    one = jnp.ones_like(out)
    first = pullback(one, keep_residuals=True)
    last = pullback(one)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(CallError) as caught:
        pullback(one)
    assert str(caught.value) == (
        "The pullback of loss was called before, and its residuals' memory has become the gradients.\n"
        "Say pullback(cotangent, keep_residuals=True) at every call but the last."
    )


def test_an_unknown_name_to_donate_is_refused():
    with pytest.raises(CallError) as caught:
        aot.function(loss, donate_argnames="params")
    assert str(caught.value) == "donate_argnames holds 'params'.\nKnown names: 'p', 'scale', 'x'."


# ---------------------------------------------------------------------------------------- what was given up is refused


def step(gradients, state, params):
    return jax.tree.map(lambda p, g: p - g, params, gradients), state


def given_up_by_update():
    given = params()
    aot.function(loss).value_and_update(given, params(), BATCH, update=step)
    return given


LINE = f"{__file__}:{inspect.getsourcelines(given_up_by_update)[1] + 2}"


LATER = {
    "call": lambda f, p: f(p, BATCH),
    "value_and_grad": lambda f, p: f.value_and_grad(p, BATCH),
    "vjp": lambda f, p: f.vjp(p, BATCH),
    "value_and_update": lambda f, p: f.value_and_update(p, params(), BATCH, update=step),
    "compiled": lambda f, p: f.trace(p, BATCH).partition().compile().value_and_grad(p, BATCH),
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
def test_an_array_that_was_given_up_is_named_with_what_happened_and_the_cure(later):
    function = aot.function(loss)
    for _ in range(3):  # the first call is compiled, the third takes the quick way
        with pytest.raises(CallError) as error:
            later(function, given_up_by_update())
        assert str(error.value) == (
            f"args[0]['b'] holds nothing any more: its memory was given up to the call of loss at {LINE}, which "
            "donates that argument.\nPass what that call returned in its place, as value_and_update returns new params "
            "and state, or give it a copy: jax.tree.map(jnp.copy, ...)."
        )
        later(function, params())


def test_lines_that_give_up_arrays_are_named_where_the_call_keeps_no_account():
    function, before = aot.function(loss), params()
    for _ in range(3):  # the third takes the quick way
        after = function.value_and_update(before, params(), BATCH, update=step)[1]
        before, last = after, before
    with pytest.raises(CallError) as error:
        function(last, BATCH)
    line = inspect.getsourcelines(test_lines_that_give_up_arrays_are_named_where_the_call_keeps_no_account)[1] + 3
    said, cure = str(error.value).split("\n")
    assert said.startswith(
        "args[0]['b'] holds nothing any more: its memory was given up to an earlier call, which donates that argument. "
        "Such calls here: "
    )
    assert f"loss at {__file__}:{line}" in said and cure.startswith("Pass what that call returned in its place")


def test_an_array_that_others_gave_up_is_not_laid_to_a_call_of_ours(monkeypatch):
    monkeypatch.setattr(given_up, "_PLACES", {})
    w = jnp.ones(3)
    jax.jit(lambda w: w + 1, donate_argnums=0)(w)
    with pytest.raises(CallError) as error:
        aot.function(lambda w: jnp.sum(w)).grad(w)
    what = "args[0] holds nothing any more: its memory was given up to an earlier call, which donates that argument."
    assert str(error.value).split("\n")[0] == what


def test_an_update_says_once_that_it_gives_up_its_arrays(caplog):
    caplog.set_level("INFO", "jointcut")
    function = aot.function(loss)
    for _ in range(3):
        function.value_and_update(params(), params(), BATCH, update=step)
    told = [record.getMessage() for record in caplog.records if "gives up" in record.getMessage()]
    assert told == ["loss: value_and_update gives up the arrays of params and state: use those that it returns"]


def test_a_pullback_says_that_an_argument_of_its_call_was_given_up():
    given = params()
    _, pullback = aot.function(loss).vjp(given, BATCH)
    aot.function(loss).value_and_update(given, params(), BATCH, update=step)
    with pytest.raises(CallError) as error:
        pullback(jnp.float32(1))
    assert str(error.value) == (
        f"{pullback!r} reads an argument or a result of its call whose memory was given up to another call since.\n"
        "Call the pullback first, or give the other call a copy: jax.tree.map(jnp.copy, ...)."
    )
