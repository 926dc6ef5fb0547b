"""One program for all sizes of an axis, with the gradients of plain JAX at the true size."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.stages.padding.named import NamedSizes
from jointcut.partition.errors import TraceError
from varying import LAWS, NEEDING, PERCEPTRON, WIDTH, W, assert_close, branching, drawn, normalised, of, perceptron


def assert_as_jax(taped, function, params, given, rtol=2e-6):
    known = aot.tape(function).value_and_grad if function is branching else jax.value_and_grad(function)
    assert_close(taped.value_and_grad(params, *given), known(params, *given), rtol)


@pytest.mark.parametrize("name", LAWS)
def test_gradients_at_all_sizes_are_those_of_jax_and_two_captures_serve_them(name):
    function, params, calls = LAWS[name]
    taped = aot.tape(function, sizes="dynamic")
    for given in calls:
        assert_as_jax(taped, function, params, given)
    runs = {1} if name != "branching" else {1, 2, 3}
    assert taped.captures.made - 1 in runs, taped.captures
    assert not taped.captures[0].hits and "up to" in taped.captures[1].why


def test_float64_agrees_to_twelve_digits():
    with jax.enable_x64(True):
        w = jnp.asarray(W, jnp.float64)
        taped = aot.tape(normalised, sizes="dynamic")
        for n in (3, 5, 17):
            assert_as_jax(taped, normalised, w, (jnp.asarray(drawn((n, WIDTH)), jnp.float64),), rtol=1e-12)
        assert taped.captures.made == 2


@pytest.mark.parametrize("name", ["a Python loop", "a comparison", "a product", "a transform"])
def test_a_size_that_is_needed_as_a_number_has_a_program_each_and_the_line_is_told(name):
    function, said = NEEDING[name]
    taped = aot.tape(function, sizes="dynamic")
    for n in (3, 6, 9, 6):
        assert_as_jax(taped, function, W, of((n, WIDTH)))
    told = re.sub(r"py:\d+", "py:N", str(taped.captures).splitlines()[1])
    assert told == f"  axis 0 of args[1] has a program for each size: {said} (varying.py:N)"
    assert not any("up to" in capture.why for capture in taped.captures)


def test_only_the_size_that_is_needed_as_a_number_has_a_program_each():
    def loss(w, x, steps):
        return jnp.mean(x @ w) + sum(jnp.sum(step * w) for step in steps)

    taped = aot.tape(loss, sizes="dynamic")
    for n, m in ((3, 2), (5, 3), (9, 3), (7, 3), (8, 2)):
        assert_as_jax(taped, loss, W, of((n, WIDTH), (m, WIDTH)))
    assert "axis 0 of args[2] has a program for each size" in str(taped.captures)
    assert [capture.hits for capture in taped.captures] == [0, 0, 1, 0]


def test_sizes_that_were_equal_by_chance_get_names_of_their_own():
    def loss(w, x, y):
        return jnp.mean(jnp.sin(x @ w)) + jnp.sum(jnp.cos(y @ w))

    taped = aot.tape(loss, sizes="dynamic")
    for n, m in ((3, 3), (5, 5), (9, 3), (7, 2), (4, 4)):
        assert_as_jax(taped, loss, W, of((n, WIDTH), (m, WIDTH)))
    assert [capture.hits for capture in taped.captures] == [0, 0, 2]


def test_a_bucket_grows_by_powers_of_two_and_serves_smaller_sizes():
    taped = aot.tape(perceptron, sizes="dynamic")
    for n in (3, 70, 5, 129, 100, 40, 256):
        assert_as_jax(taped, perceptron, PERCEPTRON, of((n, WIDTH)))
    assert [re.findall(r"up to (\d+)", capture.why) for capture in taped.captures] == [[], ["128"], ["64"], ["256"]]


def test_a_size_of_zero_is_a_number():
    taped = aot.tape(lambda w, x: jnp.sum(jnp.sin(x @ w)), sizes="dynamic")
    for n in (3, 5, 0, 0, 7):
        assert_as_jax(taped, lambda w, x: jnp.sum(jnp.sin(x @ w)), W, of((n, WIDTH)))
    assert [capture.hits for capture in taped.captures] == [0, 1, 1]


def test_lists_of_any_length_share_what_is_known_of_their_items():
    def loss(w, given, x):
        for y in given:
            x = jnp.tanh(x @ w + y)
        return jnp.mean(x**2)

    taped = aot.tape(loss, roll=True, sizes="dynamic")
    for n, count in ((3, 4), (5, 4), (6, 5), (7, 6), (4, 7)):
        assert_as_jax(taped, loss, W, ([drawn((n, WIDTH), i) for i in range(count)], drawn((n, WIDTH))))
    assert taped.captures.made == 2


def test_results_gradients_and_aux_have_the_true_sizes():
    def loss(w, x, *, scale):
        h = jnp.sin(x @ w) * scale
        return {"rows": h, "sum": jnp.sum(x)}, (h, x.shape[0], scale)

    taped = aot.tape(loss, has_aux=True, sizes="dynamic")
    for n in (3, 5, 6):
        x, scale = drawn((n, WIDTH)), drawn((n, 1), 1)
        out, pull, aux = taped.vjp(W, x, scale=scale)
        want, known, known_aux = jax.vjp(lambda w, x: loss(w, x, scale=scale), W, x, has_aux=True)  # noqa: B023
        ones = jax.tree.map(jnp.ones_like, want)
        pairs = zip(
            *(jax.tree.leaves(tree) for tree in ((out, aux, pull(ones)), (want, known_aux, known(ones)))), strict=True
        )
        for a, b in pairs:
            assert np.shape(a) == np.shape(b)
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    assert taped.captures.made == 2


def test_gradients_are_added_and_updates_made_at_all_sizes():
    def descend(gradients, state, params):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), state

    adding, updating = (aot.tape(perceptron, sizes="dynamic") for _ in range(2))
    refs = jax.tree.map(lambda leaf: jax.new_ref(jnp.zeros_like(leaf)), PERCEPTRON)
    ours, theirs, sums = jax.tree.map(jnp.copy, PERCEPTRON), PERCEPTRON, jax.tree.map(jnp.zeros_like, PERCEPTRON)
    for n in (3, 5, 6):
        x = drawn((n, WIDTH))
        adding.accumulate_into(refs)(PERCEPTRON, x)
        sums = jax.tree.map(jnp.add, sums, jax.grad(perceptron)(PERCEPTRON, x))
        _, ours, _ = updating.value_and_update(ours, (), x, update=descend)
        theirs = descend(jax.grad(perceptron)(theirs, x), (), theirs)[0]
    held = jax.tree.map(lambda ref: ref[...], refs)
    for a, b in zip(jax.tree.leaves((held, ours)), jax.tree.leaves((sums, theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert adding.captures.made == updating.captures.made == 2


def test_a_hook_on_a_parameter_stays_and_one_on_rows_gets_arrays_of_the_true_size():
    seen = []

    def rows(w, x):
        return jnp.mean(aot.on_cotangent(x @ w, lambda g: seen.append(g.shape)) ** 2)

    def parameter(w, x):
        return jnp.mean((x @ aot.on_cotangent(w, lambda g: 2 * g)) ** 2)

    hooked, doubled = aot.tape(rows, sizes="dynamic"), aot.tape(parameter, sizes="dynamic")
    for n in (3, 5, 6):
        x = drawn((n, WIDTH))
        want = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(W)  # noqa: B023
        np.testing.assert_allclose(hooked.grad(W, x), want, rtol=2e-6)
        np.testing.assert_allclose(doubled.grad(W, x), 2 * want, rtol=2e-6)
    assert seen == [(n, WIDTH) for n in (3, 5, 6)]
    assert (hooked.captures.made, doubled.captures.made) == (3, 2)
    told = re.sub(r"at \S+:\d+ \(\S+\)", "at FILE", str(hooked.captures).splitlines()[1])
    assert "on_cotangent at FILE reads an array whose size varies" in told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": "any"}, "sizes 'any' is unknown.\nKnown names: 'dynamic'."),
        *(
            (
                {"sizes": "dynamic", name: value},
                f"{name} is given beside sizes, with which ops run on padded arrays, without {name}.\n"
                "Give one of them.",
            )
            for name, value in (("check", "nonfinite"), ("budget", 0.5), ("policy", {"*": aot.MUST_SAVE}))
        ),
    ],
)
def test_other_choices_are_refused(options, said):
    with pytest.raises(TraceError) as caught:
        aot.tape(perceptron, **options)
    assert str(caught.value) == said


def test_a_fault_of_ours_is_not_taken_for_a_size_that_must_be_a_number(monkeypatch):
    taped = aot.tape(lambda w, x: jnp.sum(jnp.tanh(x @ w)), sizes="dynamic")
    taped.grad(jnp.ones((4, 2)), jnp.ones((3, 4)))
    monkeypatch.delattr(NamedSizes, "padded")
    with pytest.raises(AttributeError, match="padded"):
        taped.grad(jnp.ones((4, 2)), jnp.ones((5, 4)))
