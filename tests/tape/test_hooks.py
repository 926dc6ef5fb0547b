"""Hooks are called in the order of eager PyTorch, once, with real arrays, or are part of the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.partition.lower.steps import Run
from jointcut.partition.plans.backend import CPU, GPU, PORTABLE

W = jnp.array([[0.2, 0.5], [0.3, -0.4]])
B = jnp.array([0.1, -0.2])
X = jnp.array([[1.0, 2.0], [0.5, -1.0]])

# As PyTorch 2.13 (`python -m benchmarks.tape_hooks`): the latest node first, a leaf as soon as its last part is there;
# before a node the hooks on its outputs, then those of the call that starts there; after it those of one that ends.
ORDER = ["y", "pre", "post", "h", "h again", "b", "b is complete", "w", "w is complete"]


def noting(log):
    def note(name):
        def hook(*given):
            assert all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given))
            log.append(name)

        return hook

    return note


def model(note):
    def loss(w, b, x):
        w = aot.post_accumulate(aot.on_cotangent(w, note("w")), note("w is complete"))
        b = aot.post_accumulate(aot.on_cotangent(b, note("b")), note("b is complete"))
        h = aot.on_cotangent(jnp.tanh(x @ w + b), note("h"))
        h = aot.on_cotangent(h, note("h again"))
        layer = aot.hooked(lambda h, w: jnp.sin(h @ w), pre_hook=note("pre"), post_hook=note("post"))
        y = aot.on_cotangent(layer(h, w), note("y"))
        return jnp.sum(aot.on_cotangent(y, lambda g: 2 * g) ** 2)

    return loss


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_the_order_of_all_kinds_is_that_of_eager_pytorch():
    log = []
    taped = aot.tape(model(noting(log)), argnums=(0, 1))
    for _ in range(2):
        log.clear()
        gradients = taped.grad(W, B, X)
        assert log == ORDER
    with aot.tape.disabled():
        log.clear()
        same(taped.grad(W, B, X), gradients)
        assert log == ORDER
    assert len(taped.captures) == 1
    same(gradients, jax.grad(doubled, argnums=(0, 1))(W, B, X))


def doubled(w, b, x):
    return 2 * jnp.sum(jnp.sin(jnp.tanh(x @ w + b) @ w) ** 2)


def pulled_back(cut):
    return lambda *args: cut.vjp(*args)[1](1.0)[:2]


WAYS = {
    "grad": lambda cut: cut.grad,
    "value_and_grad": lambda cut: lambda *args: cut.value_and_grad(*args)[1],
    "vjp": pulled_back,
    "jax.grad": lambda cut: jax.grad(cut, argnums=(0, 1)),
    "jax.jit of jax.grad": lambda cut: jax.jit(jax.grad(cut, argnums=(0, 1))),
    "on a tape": lambda cut: aot.tape(cut, argnums=(0, 1)).grad,
}


@pytest.mark.parametrize("way", WAYS)
def test_in_a_function_the_order_is_the_same(way):
    log = []
    run = WAYS[way](aot.function(model(noting(log)), argnums=(0, 1)))
    for _ in range(2):
        log.clear()
        same(run(W, B, X), jax.grad(doubled, argnums=(0, 1))(W, B, X))
        jax.effects_barrier()
        assert log == ORDER


@pytest.mark.parametrize("decorator", [aot.function, aot.tape])
def test_a_parameter_has_its_hooks_called_as_soon_as_its_gradient_is_complete(decorator):
    log = []
    note = noting(log)

    @decorator(argnums=(0, 1))
    def loss(first, second, x):
        first = aot.on_cotangent(first, note("first"))
        second = aot.post_accumulate(aot.on_cotangent(second, note("second")), note("second is complete"))
        return jnp.sum(jnp.cos(aot.on_cotangent(jnp.sin(x @ first), note("h")) @ second))

    loss.grad(W, W, X)
    jax.effects_barrier()
    assert log == ["second", "second is complete", "h", "first"]


@pytest.mark.parametrize("strategy", ["save_all", "min_cut", "best"])
def test_every_plan_s_schedule_calls_them_so_and_its_graph_keeps_the_order_of_jax(strategy):
    log = []
    note = noting(log)

    @aot.function(argnums=(0, 1), strategy=strategy)
    def loss(first, second, x):
        first = aot.on_cotangent(first, note("first"))
        second = aot.on_cotangent(second, note("second"))
        return jnp.sum(jnp.cos(jnp.sin(x @ first) @ second))

    loss.grad(W, W, X)
    jax.effects_barrier()
    assert log == ["second", "first"]
    split = loss.trace(W, W, X).partition(strategy).split
    for backend in (CPU, GPU, PORTABLE):
        steps = split.on(backend).schedule.backward
        names = [split.graph.ops[step.op].name for step in steps if isinstance(step, Run)]
        assert "dot_general" in names[names.index("io_callback") :]
    first, second = (n for n, op in enumerate(split.graph.ops) if op.name == "io_callback")
    assert not any(op.name == "dot_general" for op in split.graph.ops[first:])
    assert split.graph.ops[second].inputs != split.graph.ops[first].inputs


def test_in_the_steps_of_a_loop_a_hook_is_called_once_for_each():
    log = []

    def step(h, w):
        return aot.on_cotangent(jnp.tanh(h * w), lambda g: log.append(float(g))), None

    cut = aot.function(lambda w: jax.lax.scan(step, jnp.float32(0.5), w)[0])
    cut.grad(B)
    jax.effects_barrier()
    second = float(jnp.tanh(jnp.tanh(0.5 * B[0]) * B[1]))
    np.testing.assert_allclose(log, [1.0, B[1] * (1 - second**2)], rtol=1e-5)


def test_a_hook_of_a_value_that_has_one_also_sees_what_was_read_before():
    log = []

    def loss(w):
        h = aot.on_cotangent(jnp.sin(w), lambda g: 2 * g)
        early = h * 3
        h = aot.on_cotangent(h, lambda g: log.append(g.tolist()))
        return jnp.sum(early + h)

    for made in (aot.function(loss), aot.tape(loss)):
        made.grad(B)
    jax.effects_barrier()
    assert log == [[8.0, 8.0]] * 2


def test_a_hook_that_raises_ends_the_call():
    def loss(w):
        return jnp.sum(aot.on_cotangent(jnp.sin(w), lambda g: 1 // (g.tolist()[0] - 1)))

    with pytest.raises(ZeroDivisionError):
        aot.tape(loss).grad(B)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError"):
        jax.block_until_ready(aot.function(loss).grad(B))


def test_a_traced_hook_is_part_of_the_program():
    taped = aot.tape(lambda w: jnp.sum(aot.on_cotangent(jnp.sin(w), lambda g: jnp.clip(g, -0.5, 0.5), traced=True)))
    np.testing.assert_allclose(taped.grad(W), 0.5 * jnp.cos(W), rtol=1e-6)
    assert "jointcut_hook" not in taped.captures[0].text


@pytest.mark.parametrize(
    ("hook", "told", "is_traced"),
    [
        (lambda g: jnp.where(g > 0, g, 0), True, True),
        (lambda g: None, True, True),
        (jax.jit(lambda g: g), False, True),
        (aot.Hook(lambda g: 2 * g, traced=True), False, True),
        (lambda g: 2 * g, False, False),
        (lambda g: g if float(g.sum()) > 0 else -g, False, False),
        (lambda g: SEEN.append(g), False, False),
    ],
)
def test_a_hook_is_traced_where_it_is_told_and_called_back_elsewhere(hook, told, is_traced):
    SEEN.clear()
    taped = aot.tape(lambda w: jnp.sum(aot.on_cotangent(jnp.sin(w), hook, traced=told)))
    taped.grad(W)
    assert ("jointcut_hook" not in taped.captures[0].text) is is_traced
    assert all(not isinstance(x, jax.core.Tracer) for x in SEEN)


SEEN: list[jax.Array] = []


@pytest.mark.parametrize("way", [aot.tape, aot.function, jax.grad])
def test_a_hook_that_is_told_to_be_traced_and_cannot_be_says_so(way):
    def loss(w):
        return jnp.sum(aot.on_cotangent(jnp.sin(w), lambda g: g if g.sum() > 0 else -g, traced=True))

    made = way(loss)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(made)(W) if way is jax.grad else made.grad(W)


def test_a_hook_is_the_same_when_it_is_written_anew():
    @aot.tape
    def loss(w, x):
        limit = 0.5
        return jnp.sum(aot.on_cotangent(jnp.sin(w * x), lambda g: g * limit, traced=True))

    for x in (1.0, 2.0):
        loss.grad(W, x)
    assert len(loss.captures) == 1


def test_arrays_that_a_hook_closes_over_are_inputs():
    @aot.tape
    def loss(w, x):
        largest = jnp.max(x)
        w = aot.post_accumulate(w, lambda g: g + largest, traced=True)
        with aot.saved_arrays(lambda x: x - largest, lambda x: x + largest):
            h = jnp.sin(w)
        return jnp.sum(aot.on_cotangent(h, lambda g: g * largest, traced=True))

    for x in (1.0, 2.0, 3.0):
        np.testing.assert_allclose(loss.grad(W, jnp.full(2, x)), x * jnp.cos(W) + x, rtol=1e-5)
    assert len(loss.captures) == 1


def clipped(w, most):
    limit = most * 1.0  # a float that is made anew at each call
    clip = aot.Hook(lambda ct: jnp.clip(ct, -limit, limit), traced=True)
    return jnp.sum(aot.on_cotangent(jnp.sin(w), clip) ** 2)


def decided(w, most):
    limit = most * 1.0
    clip = aot.Hook(lambda ct: ct if limit > 1 else jnp.clip(ct, -limit, limit), traced=True)
    return jnp.sum(aot.on_cotangent(jnp.sin(w), clip) ** 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_float_that_a_hook_closes_over_is_an_input(dtype):
    taped, w = aot.tape(clipped), jnp.arange(1.0, 5.0).astype(dtype)
    for most in (0.5, 0.25, 0.75, 2.0):
        same(taped.grad(w, most), jax.grad(clipped)(w, most))
    assert (taped.captures.made, taped.captures[0].hits) == (1, 3)


def test_a_float_that_decides_in_a_hook_is_a_constant_and_equal_ones_share_a_program():
    taped, w = aot.tape(decided), jnp.arange(1.0, 5.0)
    for most in (0.5, 2.0, 0.5, 2.0):
        same(taped.grad(w, most), jax.grad(decided)(w, most))
    assert [capture.hits for capture in taped.captures] == [1, 1]


def test_a_hook_that_decides_by_an_array_is_called_back():
    def loss(w, x):
        largest = jnp.max(x)
        return jnp.sum(aot.on_cotangent(jnp.sin(w), lambda g: g if largest > 1 else -g))

    taped = aot.tape(loss)
    for x, sign in ((0.5, -1), (2.0, 1), (0.1, -1)):
        np.testing.assert_allclose(taped.grad(W, jnp.full(2, x)), sign * jnp.cos(W), rtol=1e-6)
    assert len(taped.captures) == 1


def test_a_removed_hook_is_not_called():
    hook = aot.Hook(lambda g: 3 * g)
    taped = aot.tape(lambda w: jnp.sum(aot.on_cotangent(w, hook)))
    cut = aot.function(lambda w: jnp.sum(aot.on_cotangent(w, hook)))
    assert taped.grad(B).tolist() == cut.grad(B).tolist() == [3.0, 3.0]
    hook.remove()
    assert taped.grad(B).tolist() == cut.grad(B).tolist() == [1.0, 1.0]
    assert "is gone" in taped.captures[1].why
    assert repr(hook).endswith(", removed>")


def test_a_post_accumulate_hook_sees_the_sum():
    seen = []

    @aot.tape
    def loss(w):
        return jnp.sum(aot.post_accumulate(w, lambda g: seen.append(g.tolist())) * 2)

    ref = jax.new_ref(jnp.zeros(2))
    for _ in range(2):
        loss.accumulate_into(ref)(B)
    assert seen == [[2.0, 2.0], [4.0, 4.0]]


def test_two_hooks_of_a_call_may_replace_what_they_see():
    def loss(w, hook):
        layer = aot.hooked(lambda w: {"out": jnp.sin(w)}, pre_hook=lambda ct: {"out": 3 * ct["out"]}, post_hook=hook)
        return jnp.sum(layer(w)["out"])

    def scaled(gradients, cotangents):
        return (gradients[0] + cotangents["out"],)

    for made in (aot.tape(loss).grad(B, scaled), aot.function(loss, static_argnums=1).grad(B, scaled)):
        np.testing.assert_allclose(made, 3 * jnp.cos(B) + 3, rtol=1e-6)
