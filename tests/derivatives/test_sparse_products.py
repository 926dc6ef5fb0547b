"""`a @ b` of two sparse matrices has the gradient of the dense product, at their places. In plain JAX it has none."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.sparse import BCOO, bcoo_dot_general

from jointcut import aot


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def sparse(seed, shape, n_batch=0, nse=None):
    """A matrix with about half of its elements; some of its values are padding."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal(shape) * (rng.random(shape) < 0.5)
    most = int((dense != 0).sum(tuple(range(n_batch, len(shape)))).max()) + 2
    return BCOO.fromdense(jnp.asarray(dense), n_batch=n_batch, nse=nse or most)


def whole(data, like):
    """The dense matrix of other values at the places of a sparse one."""
    return BCOO((data, like.indices), shape=like.shape).todense()


def twins(seed):
    """A loss of two sparse matrices, the same of dense ones, and both matrices."""
    a, b = sparse(seed, (4, 6)), sparse(seed + 10, (6, 3))
    return (lambda a, b: jnp.sum(jnp.sin((a @ b).todense()))), (lambda a, b: jnp.sum(jnp.sin(a @ b))), a, b


def wanted(dense, a, b):
    """Value and gradients of a loss of dense matrices, for the values of two sparse ones."""
    return jax.value_and_grad(lambda x, y: dense(whole(x, a), whole(y, b)), (0, 1))(a.data, b.data)


def near(got, want):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), got, want)


WAYS = {
    "function": lambda f, a, b: aot.function(f, argnums=(0, 1)).value_and_grad(a, b),
    "budget": lambda f, a, b: aot.function(f, argnums=(0, 1), budget=0.0).value_and_grad(a, b),
    "tape": lambda f, a, b: aot.tape(f, argnums=(0, 1)).value_and_grad(a, b),
    "tape with a budget": lambda f, a, b: aot.tape(f, argnums=(0, 1), budget=0.0).value_and_grad(a, b),
    "formulas": lambda f, a, b: aot.function(f, argnums=(0, 1), derivatives="finite").value_and_grad(a, b),
    "pullback": lambda f, a, b: (lambda out, pull: (out, pull(jnp.ones(()))))(*aot.function(f).vjp(a, b)),
    "two programs": lambda f, a, b: (
        aot.function(f, argnums=(0, 1)).trace(a, b).partition().compile(executables=2).value_and_grad(a, b)
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_gradient_is_that_of_the_dense_product(way, seed):
    loss, dense, a, b = twins(seed)
    value, (of_a, of_b) = way(loss, a, b)
    near((value, (of_a.data, of_b.data)), wanted(dense, a, b))


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_inside_transformations_of_jax(outer):
    loss, dense, a, b = twins(5)
    cut = aot.function(loss)

    def of_values(x, y):
        return cut(BCOO((x, a.indices), shape=a.shape), BCOO((y, b.indices), shape=b.shape))

    near(jax.value_and_grad(outer(of_values), (0, 1))(a.data, b.data), wanted(dense, a, b))
    second = jax.hessian(outer(of_values))(a.data, b.data)
    near(second, jax.hessian(lambda x: dense(whole(x, a), b.todense()))(a.data))
    rows = jnp.stack([a.data, 2 * a.data])
    each = jax.vmap(jax.grad(lambda x: of_values(x, b.data)))(rows)
    near(each, jnp.stack([jax.grad(lambda x: dense(whole(x, a), b.todense()))(row) for row in rows]))


def test_batches_of_matrices():
    a, b = sparse(1, (2, 4, 5), n_batch=1), sparse(2, (2, 5, 3), n_batch=1)
    numbers = (((2,), (1,)), ((0,), (0,)))

    def loss(a, b):
        return jnp.sum(jnp.sin(bcoo_dot_general(a, b, dimension_numbers=numbers).todense()))

    value, (of_a, of_b) = aot.function(loss, argnums=(0, 1)).value_and_grad(a, b)
    near((value, (of_a.data, of_b.data)), wanted(lambda x, y: jnp.sum(jnp.sin(x @ y)), a, b))


def scanned(step, x):
    return lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0]


def while_loop(loop, step, x):
    return loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x))[1]


LOOPS = {
    "scan": scanned,
    "cond": lambda step, x: lax.cond(x > 0, step, lambda x: x, x),
    "jit": lambda step, x: jax.jit(step)(x),
    "lax.while_loop": partial(while_loop, lax.while_loop),
    "aot.while_loop": partial(while_loop, aot.while_loop),
}


@pytest.mark.parametrize("inside", LOOPS.values(), ids=LOOPS)
def test_in_bodies(inside):
    _, _, a, b = twins(7)

    def loss(a, b):
        return inside(
            lambda c: c * 0.5 + (BCOO((a.data * jnp.sin(c), a.indices), shape=a.shape) @ b).todense().sum(), 1.0
        )

    def dense(a, b):
        return scanned(lambda c: c * 0.5 + jnp.sum((a * jnp.sin(c)) @ b), 1.0)

    def once(a, b):
        return 0.5 + jnp.sum((a * jnp.sin(1.0)) @ b)

    value, (of_a, of_b) = aot.function(loss, argnums=(0, 1)).value_and_grad(a, b)
    many = inside not in (LOOPS["cond"], LOOPS["jit"])
    near((value, (of_a.data, of_b.data)), wanted(dense if many else once, a, b))


def test_our_own_loop_outside_of_a_function():
    _, _, a, b = twins(7)

    def loss(x):
        step = lambda c: c * 0.5 + (BCOO((x * jnp.sin(c), a.indices), shape=a.shape) @ b).todense().sum()  # noqa: E731
        return while_loop(aot.while_loop, step, 1.0)

    dense = jax.grad(lambda x: scanned(lambda c: c * 0.5 + jnp.sum((whole(x, a) * jnp.sin(c)) @ b.todense()), 1.0))
    near(jax.grad(loss)(a.data), dense(a.data))


def test_a_report_says_that_plain_jax_has_no_gradient():
    loss, _, a, b = twins(0)
    line = f"{__file__}:{twins.__code__.co_firstlineno + 3} (twins.<locals>.<lambda>)"
    report = aot.function(loss, argnums=(0, 1)).trace(a, b).partition().explain(measure=False)
    remark = f"plain JAX has no gradient through the product of two BCOO at {line}"
    assert report.bounds[0] == f"{remark}: all saved is this step with nothing cut"
    assert str(report).count("lain JAX") == 1
    assert aot.is_differentiable(loss, a, b)
    with pytest.raises(NotImplementedError, match="bcoo_spdot_general"):
        jax.grad(lambda x: loss(BCOO((x, a.indices), shape=a.shape), b))(a.data)


def test_a_product_of_constants_leaves_plain_jax_its_name():
    loss, _, a, b = twins(0)
    report = aot.function(lambda x: jnp.sum(jnp.sin(x)) * loss(a, b)).trace(a.data).partition().explain(measure=False)
    assert report.plan.baseline == "plain JAX"
