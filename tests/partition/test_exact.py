"""What stays exact beside smaller forms: masks, indices, and what a pooling has chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jointcut import aot
from jointcut.aot.report.gradient_error import relative_error
from jointcut.partition.search.forms import chosen, exact

POLICY = {"*": aot.SAVE_AS("bfloat16")}
DRAWN = np.random.default_rng(0)
X = DRAWN.standard_normal((2, 12, 12, 3)).astype(np.float32)
W = DRAWN.standard_normal((3, 3, 3, 8)).astype(np.float32) / 3


def cut_of(function, *args):
    return aot.function(function, policy=POLICY).trace(*args).partition()


def pooled(window, strides, padding, least=False):
    init, choose = (np.inf, lax.min) if least else (-np.inf, lax.max)

    def function(x):
        return lax.reduce_window(x, np.float32(init), choose, window, strides, padding)

    return function


@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [
        ((3, 3), (2, 2), ((1, 1), (1, 1))),
        ((2, 2), (2, 2), ((0, 0), (0, 0))),
        ((3, 2), (1, 3), ((2, 0), (0, 1))),
        ((2, 2), (5, 4), ((0, 0), (1, 1))),
    ],
)
def test_what_a_pooling_chose_gives_the_gradient_of_jax(window, strides, padding, least):
    function = pooled(window, strides, padding, least)
    x = np.round(DRAWN.standard_normal((11, 10)) * 2).astype(np.float32)  # many are equal
    x[4, 4], x[8, 2], x[:3, :3] = np.nan, np.inf, -np.inf
    out, pullback = jax.vjp(function, x)
    source = np.round(DRAWN.standard_normal(out.shape) * 8).astype(np.float32)
    places = jax.jit(chosen._choosing("le" if least else "ge", window, strides, padding))(x)
    assert places.dtype == np.uint8 and places.shape == out.shape
    found = jax.jit(chosen._spreading(x.shape, window, strides, padding))(source, places)
    np.testing.assert_array_equal(found, pullback(source)[0])


def network(w, x, side=3):
    h = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = jax.nn.relu((h - h.mean((0, 1, 2))) / jnp.sqrt(h.var((0, 1, 2)) + 1e-5))
    window = (1, side, side, 1)
    return jnp.sum(lax.reduce_window(h, -jnp.inf, lax.max, window, (1, 2, 2, 1), "SAME") ** 3)


def test_a_pooling_reads_the_element_that_it_chose():
    cut = cut_of(network, W, X)
    (place,) = (s for s in cut.plan.saved if s.dtype == "uint8" and s.shape == (2, 6, 6, 8))
    assert exact.EXACT in place.reason and f"{chosen.KIND}: 1 value" in cut.plan.remarks
    checked = cut.check_forms(W, X)
    assert checked.error < 1e-2 and checked.bytes_saved < 0.65 * checked.plain_bytes_saved
    np.testing.assert_allclose(
        cut.storing({}).compile(2).value_and_grad(W, X)[1], jax.grad(network)(W, X), rtol=2e-4, atol=1e-3
    )


def test_a_pooling_of_large_windows_reads_the_array_as_it_was():
    cut = cut_of(lambda w, x: network(w, x, 9), W, X)
    (array,) = (s for s in cut.plan.saved if exact.EXACT in s.reason and s.dtype == "float32")
    assert array.shape == (2, 12, 12, 8) and not array.form
    assert cut.check_forms(W, X).error < 1e-2


def test_poolings_in_the_steps_of_a_loop():
    def looped(w, xs):
        def step(h, x):
            return h + 0 * network(w, x) + jnp.sin(network(w, x) * 1e-3), None

        return lax.scan(step, 0.0, xs)[0]

    cut = cut_of(looped, W, np.stack([X, X[::-1]]))
    assert any(s.dtype == "uint8" and s.copies == 2 and s.shape == (2, 6, 6, 8) for s in cut.plan.saved)
    assert cut.check_forms(W, np.stack([X, X[::-1]])).error < 1e-2


def test_indices_and_signs_of_floats_are_not_chosen_again():
    def function(x):
        h = jnp.tanh(x @ x.T) * 100
        h = h - h.mean(0)
        rows = jnp.sin(h)[jnp.argmax(h, 0)] + jnp.sort(h * 3, 0) + jnp.sign(h)
        return jnp.sum(rows * lax.top_k(h, h.shape[1])[0] * (h * 2).astype(jnp.int32).astype(jnp.float32))

    x = DRAWN.standard_normal((64, 64)).astype(np.float32)
    cut = cut_of(function, x)
    graph, again = cut.split.graph, (*cut.plan.recomputed, *cut.plan.deferred)
    assert not {"argmax", "sort", "top_k", "sign"} & {graph.ops[i].name for i in again}
    kept = [graph.ops[c.value and graph.values[c.value].maker].name for c in cut.split.problem.constraints]
    assert kept == ["argmax", "sort", "sign", "top_k", "convert_element_type"]
    want, found = (each.compile(2).value_and_grad(x)[1] for each in (cut.storing({}), cut))
    assert relative_error(found, want) < 3e-2  # of numbers up to a hundred, as sines


def test_forms_and_exact_masks_reach_the_branches_of_conditionals():
    w, x = W[0, 0] @ W[0, 1].T, DRAWN.standard_normal((128, 3)).astype(np.float32)

    def function(w, x):
        def first(h):
            h = h @ w
            return jax.nn.relu((h - h.mean(0)) * 3) @ w

        return jnp.sum(lax.cond(x[0, 0] > 0, first, lambda h: jnp.tanh(h @ w) @ w, jnp.sin(x)) ** 2)

    def looped(w, x):
        return lax.scan(lambda h, x: (h + function(w, x), None), 0.0, jnp.stack([x, -x]))[0]

    for f, copies in ((function, 1), (looped, 2)):
        cut = cut_of(f, w, x)
        graph = cut.split.graph
        of_branches = [s for s in cut.plan.saved if graph.rivals[graph.values[s.value].loop] > 1]
        assert "bfloat16" in {s.form for s in of_branches if s.copies == copies}
        for sign in (1, -1):
            found = aot.function(f, policy=POLICY).grad(w, sign * x)
            assert 0 < relative_error(found, jax.grad(f)(w, sign * x)) < 1e-2


def test_a_remark_tells_of_steps_that_are_cut_on_their_own():
    def function(w, x):
        step = lambda c: (c[0] + 1, checkpoint_name(jnp.tanh(c[1] @ w), "inner") + c[1])  # noqa: E731
        return jnp.sum(aot.while_loop(lambda c: c[0] < 3, step, (0, jnp.sin(x)))[1] ** 2)

    w, x = np.eye(8, dtype=np.float32), DRAWN.standard_normal((128, 8)).astype(np.float32)
    policy = {"inner": aot.SAVE_AS("int8"), "sin": aot.SAVE_AS("bfloat16")}
    (line,) = (r for r in aot.function(function, policy=policy).trace(w, x).partition().plan.remarks if "effect" in r)
    assert line == (
        "SAVE_AS('int8') by 'inner' has no effect on 1 value in steps of a loop, "
        "which keep them for their own backward alone: name 'while_loop_with_checkpoints' for what the loop keeps"
    )
