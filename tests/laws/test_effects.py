"""What a function does to the world outside happens once per call, in order, on the side where it stood."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from oracle import STRATEGIES

X = jnp.linspace(0.1, 0.7, 4)

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)
both_orders = pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])


class Diary:
    """A list that callbacks write to, read after all of them have run."""

    def __init__(self):
        self.pages = []

    def note(self, word, ordered=True, **values):
        """Write one word, and the values if there are any, when the program comes by."""

        def write(**arrived):
            self.pages.append((word, *[np.asarray(value).item() for value in arrived.values()]) if arrived else word)

        jax.debug.callback(write, ordered=ordered, **values)

    def read(self):
        """All pages since the last reading."""
        jax.effects_barrier()
        pages, self.pages = self.pages, []
        return pages


def noted_loss(diary, ordered=True):
    """Notes between values so cheap that every plan would recompute them."""

    def loss(x):
        diary.note("start", ordered)
        h = jnp.exp(jnp.sin(x))
        diary.note("middle", ordered, total=jnp.round(jnp.sum(h) * 100))
        g = jnp.tanh(h) * h
        diary.note("end", ordered)
        return jnp.sum(g**2)

    return loss


def check_once(pages, ordered):
    """Each word once; in the order of the program where that was asked for."""
    words = [page if isinstance(page, str) else page[0] for page in pages]
    expected = ["start", "middle", "end"]
    assert words == expected if ordered else sorted(words) == sorted(expected)


@both_orders
def test_a_callback_runs_once_per_call(strategy, ordered):
    diary = Diary()
    function = aot.function(noted_loss(diary, ordered), strategy=strategy)
    for _ in range(2):
        function(X)
        check_once(diary.read(), ordered)


@both_orders
def test_a_callback_runs_once_per_value_and_grad(strategy, ordered):
    diary = Diary()
    function = aot.function(noted_loss(diary, ordered), strategy=strategy)
    for _ in range(2):
        function.value_and_grad(X)
        check_once(diary.read(), ordered)


@both_orders
def test_a_callback_of_the_forward_runs_in_the_forward(strategy, ordered):
    diary = Diary()
    out, pullback = aot.function(noted_loss(diary, ordered), strategy=strategy).vjp(X)
    check_once(diary.read(), ordered)
    pullback(jnp.ones_like(out))
    pullback(jnp.ones_like(out))
    assert diary.read() == []


@both_orders
@pytest.mark.parametrize(
    "outer",
    [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.jit(f.grad)],
    ids=["grad", "jit of grad", "jit of its grad"],
)
def test_a_callback_runs_once_under_jax_transforms(strategy, ordered, outer):
    diary = Diary()
    step = outer(aot.function(noted_loss(diary, ordered), strategy=strategy))
    for _ in range(2):
        step(X)
        check_once(diary.read(), ordered)


def test_a_callback_sees_the_value_of_its_place(strategy):
    diary = Diary()
    aot.function(noted_loss(diary), strategy=strategy).value_and_grad(X)
    want = float(jnp.round(jnp.sum(jnp.exp(jnp.sin(X))) * 100))
    assert diary.read()[1] == ("middle", want)


def test_callbacks_in_a_scan_run_once_per_step_in_order(strategy):
    diary = Diary()

    def loss(x):
        def step(h, i):
            diary.note("step", index=i)
            return jnp.sin(jnp.exp(h)) * h, None

        return jnp.sum(lax.scan(step, x, jnp.arange(3))[0])

    function = aot.function(loss, strategy=strategy)
    function.value_and_grad(X)
    assert diary.read() == [("step", 0), ("step", 1), ("step", 2)]
    out, pullback = function.vjp(X)
    pullback(jnp.ones_like(out))
    assert diary.read() == [("step", 0), ("step", 1), ("step", 2)]


def test_debug_print_prints_once(strategy, capsys):
    def loss(x):
        h = jnp.exp(jnp.sin(x))
        jax.debug.print("the first is {first:.3f}", first=h[0])
        return jnp.sum(jnp.tanh(h) * h)

    aot.function(loss, strategy=strategy).value_and_grad(X)
    jax.effects_barrier()
    assert capsys.readouterr().out == f"the first is {float(jnp.exp(jnp.sin(X[0]))):.3f}\n"


def two_sided(diary):
    """A custom_vjp that makes a note in its forward and one in its backward."""

    @jax.custom_vjp
    def noted(x):
        return jnp.sin(x)

    def forward(x):
        diary.note("forward")
        return jnp.sin(x), x

    def backward(x, g):
        diary.note("backward")
        return (g * jnp.cos(x),)

    noted.defvjp(forward, backward)
    return lambda x: jnp.sum(jnp.exp(noted(jnp.exp(x))) ** 2)


def test_notes_of_a_custom_vjp_stay_on_their_sides(strategy):
    diary = Diary()
    function = aot.function(two_sided(diary), strategy=strategy)
    function.value_and_grad(X)
    assert diary.read() == ["forward", "backward"]
    out, pullback = function.vjp(X)
    assert diary.read() == ["forward"]
    for _ in range(2):
        pullback(jnp.ones_like(out))
        assert diary.read() == ["backward"]


def test_a_write_to_a_reference_happens_once(strategy):
    calls, mean = jax.new_ref(jnp.int32(0)), jax.new_ref(jnp.float32(0))

    def loss(x):
        h = jnp.exp(jnp.sin(x))
        calls[...] += 1
        mean[...] = 0.5 * mean[...] + lax.stop_gradient(jnp.mean(h))
        return jnp.sum(jnp.tanh(h) * h)

    function = aot.function(loss, strategy=strategy)
    once = float(jnp.mean(jnp.exp(jnp.sin(X))))
    function.value_and_grad(X)
    assert int(calls[...]) == 1
    np.testing.assert_allclose(mean[...], once, rtol=1e-5, atol=1e-6)
    function.value_and_grad(X)
    assert int(calls[...]) == 2
    np.testing.assert_allclose(mean[...], 1.5 * once, rtol=1e-5, atol=1e-6)
    function(X)
    assert int(calls[...]) == 3
    out, pullback = function.vjp(X)
    assert int(calls[...]) == 4
    pullback(jnp.ones_like(out))
    pullback(jnp.ones_like(out))
    assert int(calls[...]) == 4


def test_writes_in_a_scan_happen_once_per_step(strategy):
    calls, seen = jax.new_ref(jnp.int32(0)), jax.new_ref(jnp.zeros(3))

    def loss(x):
        def step(h, i):
            h = jnp.exp(jnp.sin(h))
            seen[i] = lax.stop_gradient(h[0])
            calls[...] += 1
            return jnp.tanh(h) * h, None

        return jnp.sum(lax.scan(step, x, jnp.arange(3))[0])

    _, gradients = aot.function(loss, strategy=strategy).value_and_grad(X)
    assert int(calls[...]) == 3
    assert np.all(np.asarray(seen[...]) > 0)
    want = jax.grad(loss)(X)
    np.testing.assert_allclose(gradients, want, rtol=1e-5, atol=1e-6)


def test_the_backward_uses_what_was_read_before_the_write(strategy):
    """Reading the reference again in the backward would find the new value."""
    scale = jax.new_ref(jnp.float32(2))

    def loss(x):
        before = scale[...]
        scale[...] = before * 3
        return jnp.sum(jnp.sin(x * before) * jnp.exp(before))

    def slope(before):
        return jnp.cos(X * before) * jnp.exp(before) * before

    function = aot.function(loss, strategy=strategy)
    _, gradients = function.value_and_grad(X)
    np.testing.assert_allclose(gradients, slope(2.0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scale[...], 6.0)
    scale[...] = jnp.float32(1)
    out, pullback = function.vjp(X)
    scale[...] = jnp.float32(50)
    (gradients,) = pullback(jnp.ones_like(out))
    np.testing.assert_allclose(gradients, slope(1.0), rtol=1e-5, atol=1e-6)


def test_a_write_in_the_backward_happens_once_per_pullback(strategy):
    """The hook pattern: a custom_vjp whose backward adds the cotangent of an intermediate to a reference."""
    seen = jax.new_ref(jnp.zeros_like(X))

    @jax.custom_vjp
    def tap(ref, x):
        return x

    def backward(ref, g):
        ref[...] += g
        return None, g

    tap.defvjp(lambda ref, x: (x, ref), backward)

    def loss(x):
        return jnp.sum(tap(seen, jnp.exp(jnp.sin(x))) ** 2)

    cotangent = 2 * jnp.exp(jnp.sin(X))
    function = aot.function(loss, strategy=strategy)
    function.value_and_grad(X)
    np.testing.assert_allclose(seen[...], cotangent, rtol=1e-5, atol=1e-6)
    out, pullback = function.vjp(X)
    np.testing.assert_allclose(seen[...], cotangent, rtol=1e-5, atol=1e-6)
    pullback(jnp.ones_like(out))
    np.testing.assert_allclose(seen[...], 2 * cotangent, rtol=1e-5, atol=1e-6)


COMPILED = {
    "one program": lambda f, *args: f.trace(*args).partition().compile(1).value_and_grad(*args)[1],
    "two programs": lambda f, *args: f.trace(*args).partition().compile(2).value_and_grad(*args)[1],
    "halves": lambda f, *args: f.trace(*args).partition().compile().vjp(*args)[1](jnp.float32(1)),
    "vjp": lambda f, *args: f.vjp(*args)[1](jnp.float32(1))[0],
}


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["a typed key", "a raw key"])
@pytest.mark.parametrize("way", COMPILED.values(), ids=COMPILED)
def test_compiled_halves_keep_the_order_of_notes_and_draw_the_same_numbers(strategy, way, key):
    diary = Diary()
    noted = two_sided(diary)

    def loss(x, key):
        diary.note("start")
        return noted(x) + jnp.sum(jnp.tanh(x * jax.random.normal(key, x.shape)) * x)

    want = jax.grad(loss)(X, key)
    diary.read()
    got = way(aot.function(loss, strategy=strategy), X, key)
    assert diary.read() == ["start", "forward", "backward"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
