"""A mapped function of ours is another program of ours: equal to plain JAX's, and cut as what it is."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.search.mincut import STRATEGIES

W = jnp.cos(jnp.arange(9.0)).reshape(3, 3)
X = jnp.sin(jnp.arange(12.0)).reshape(4, 3)
WS = jnp.stack([W, -W, 0.5 * W, W + 0.1])
XX = jnp.stack([X, 0.5 * X])


@jax.custom_jvp
def steep(x):
    """A function whose derivative is not that of its value."""
    return jnp.tanh(x)


steep.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), 2.0 * tangents[0] * jnp.exp(-primals[0])))


def loss(w, x):
    """A derivative of one's own, a path without one, and something to compute again."""
    h = steep(x @ w) * lax.stop_gradient(jnp.cos(x))
    return jnp.sum(jnp.sin(h @ w) * jnp.exp(h) + jax.nn.relu(h))


def branched(w, x):
    """The same in a loop and in a branch."""

    def step(h, _):
        return lax.cond(jnp.sum(h) > 0.0, steep, lambda h: lax.stop_gradient(h) * jnp.exp(h), h @ w), None

    return jnp.sum(lax.scan(step, x, None, length=2)[0] ** 2)


def over(f, in_axes=(None, 0), **options):
    return jax.vmap(f, in_axes=in_axes, **options)


def total(f):
    """The sum of a mapped loss."""
    return lambda *args: jnp.sum(f(*args))


def pushed(f):
    """Along the arguments themselves."""
    return lambda w, x: jax.jvp(f, (w, x), (0.3 * w, 0.5 * x))


def pulled_later(f):
    """Each row's pullback, handed out of one map and called in another."""

    def run(w, x):
        pulls = jax.vmap(lambda x: jax.vjp(partial(f, w), x)[1])(x)
        return jax.vmap(lambda pull, ct: pull(ct))(pulls, jnp.arange(1.0, 5.0))

    return run


def shared(f):
    """Each row as a part of the sum over all of them."""

    def part(w, x):
        value = f(w, x)
        return value / (1.0 + lax.psum(value, "rows") ** 2)

    return total(over(part, axis_name="rows"))


def looped(f):
    """A sum over a loop of what `f` gives."""
    return lambda w, xs: lax.scan(lambda sofar, x: (sofar + f(w, x), None), jnp.float32(0), xs)[0]


def many(f):
    """Compositions of one mapped gradient, as one program."""
    both = (0, 1)
    return {
        "per example": over(jax.grad(f, both))(W, X),
        "of both": jax.vmap(jax.grad(f, both))(WS, X),
        "along the last axis": jax.grad(total(over(f, (None, -1))), both)(W, X.T),
        "to the last axis": over(jax.grad(f), (-1, None), out_axes=-1)(WS.T, X[0]),
        "of the sum": jax.grad(total(over(f)), both)(W, X),
        "of one for all": jax.grad(total(over(f, (0, None))), both)(WS, X[0]),
        "over two axes": jax.grad(total(over(over(f))), both)(W, XX),
        "inside and outside": over(jax.grad(total(over(f)), both))(W, XX),
        "of a gradient": jax.grad(lambda w, x: jnp.sum(over(jax.grad(f, 1))(w, x) ** 2))(W, X),
        "over none": over(jax.grad(f, both))(W, X[:0]),
    }


def forward(f):
    """Compositions with forward mode, as one program."""
    return {
        "of the map": pushed(over(f))(W, X),
        "in the map": over(pushed(f))(W, X),
        "of its gradient": pushed(jax.grad(total(over(f))))(W, X),
        "of a row's gradient": over(pushed(jax.grad(f, 1)))(W, X),
        "linear": jax.linearize(over(f), W, X)[1](0.3 * W, X),
        "linear in rows": over(lambda w, x: jax.linearize(f, w, x)[1](0.3 * w, x))(W, X),
        "hessians": over(jax.hessian(f, 1))(W, X),
        "hessian": jax.hessian(total(over(f)), 1)(W, X[:2]),
    }


def programs(f):
    """Compositions with other programs around and inside, as one program."""
    jitted, checkpointed = jax.jit(f), jax.checkpoint(f)
    return {
        "of a program": jax.grad(total(over(jitted)))(W, X),
        "of a program's gradient": over(jax.jit(jax.grad(f)))(W, X),
        "over a loop": over(jax.grad(looped(f)))(W, XX),
        "in a loop": jax.grad(looped(total(over(f))))(W, XX),
        "of a loop": jax.grad(total(over(looped(f))))(W, XX),
        "of a checkpoint": jax.grad(total(over(checkpointed)))(W, X),
        "under a checkpoint": jax.grad(jax.checkpoint(total(over(f))))(W, X),
        "in a branch": over(lambda w, x: lax.cond(x[0] > 0.0, jax.grad(f), lambda w, x: w, w, x))(W, X),
        "with a sum of rows": jax.grad(shared(f), (0, 1))(W, X),
        "later": pulled_later(f)(W, X),
    }


def assert_near(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("compositions", [many, forward, programs], ids=["gradients", "forward mode", "programs"])
def test_compositions_with_vmap(compositions):
    assert_near(jax.jit(lambda: compositions(aot.function(loss)))(), jax.jit(lambda: compositions(loss))())


def both_ways(f):
    """Per example, and of the sum."""
    return over(jax.grad(f, (0, 1)))(W, X), jax.value_and_grad(total(over(f)), (0, 1))(W, X)


def test_compositions_without_jit():
    assert_near(both_ways(aot.function(loss)), both_ways(loss))


def test_a_derivative_of_ones_own_in_a_mapped_branch():
    """Mapped, a branch is a selection of both; what stops gradients on one side has no transpose."""
    assert_near(jax.jit(lambda: both_ways(aot.function(branched)))(), jax.jit(lambda: both_ways(branched))())


def test_its_own_gradients_are_mapped_too():
    function = aot.function(loss)
    value, gradient = jax.jit(over(function.value_and_grad))(W, X)
    np.testing.assert_allclose(value, over(loss)(W, X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, over(jax.grad(loss))(W, X), rtol=1e-4, atol=1e-5)
    rows = over(lambda w, x: function.vjp(w, x)[1](jnp.float32(1)))(W, X)
    np.testing.assert_allclose(rows[1], over(jax.grad(loss, 1))(W, X), rtol=1e-4, atol=1e-5)


def deep(w, x):
    """Layers whose recomputation is worth its while."""
    for _ in range(4):
        x = x + jnp.tanh(jax.nn.gelu(x @ w["up"]) @ w["down"])
    return jnp.mean(x**2)


DEEP = {"up": jnp.ones((16, 64)) / 16, "down": jnp.ones((64, 16)) / 64}
ROWS = jnp.ones((8, 32, 16))


def temporary_bytes(f, *args):
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_gradients_of_each_example_take_no_more_memory_than_plain_jax():
    plain = temporary_bytes(over(jax.grad(deep)), DEEP, ROWS)
    assert temporary_bytes(over(jax.grad(aot.function(deep))), DEEP, ROWS) < 0.9 * plain


def test_the_gradient_of_a_mapped_function_takes_the_memory_of_the_cut_around_the_map():
    def mean(f):
        return lambda w, x: jnp.mean(over(f)(w, x))

    around = temporary_bytes(jax.grad(aot.function(mean(deep))), DEEP, ROWS)
    assert temporary_bytes(jax.grad(mean(aot.function(deep))), DEEP, ROWS) <= 1.05 * around
    assert around < 0.8 * temporary_bytes(jax.grad(mean(deep)), DEEP, ROWS)


def test_each_mapped_program_is_cut_once_and_for_what_it_is():
    """The plan is made with the batch where the map is inside, and for one example where it is outside."""
    seen = []

    def strategy(graph):
        seen.append(max(len(value.shape) for value in graph.values))
        return STRATEGIES["min_cut"](graph)

    function = aot.function(deep, strategy=strategy)
    for _ in range(2):
        jax.eval_shape(jax.grad(total(over(function))), DEEP, ROWS)
    assert seen == [3]
    jax.eval_shape(over(jax.grad(function)), DEEP, ROWS)
    assert seen == [3, 2]


def test_a_rule_of_the_users_own_for_the_map_may_bring_constants():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)

    @jax.custom_batching.custom_vmap
    def shifted(x):
        return jnp.sin(x)

    @shifted.def_vmap
    def _(size, batched, xs):
        return jnp.sin(xs) * table, batched[0]

    def f(w, x):
        return jnp.sum(jnp.exp(shifted(x @ w)) ** 2)

    assert_near(jax.grad(total(over(aot.function(f))), (0, 1))(W, X), jax.grad(total(over(f)), (0, 1))(W, X))
