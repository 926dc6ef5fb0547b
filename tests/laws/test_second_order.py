"""With `derivatives="finite"` second derivatives are finite where the first are, in all orders of the two modes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.derivatives.guards import GUARDS
from benchmarks.derivatives.singular import SINGULAR
from benchmarks.eagerly import traced
from jointcut import aot
from jointcut.wrappers.built_in.programs import pushed_through
from oracle import assert_same, loss, plain, weigh
from programs import EVERY_PROGRAM, named


def direction(x):
    return jnp.arange(1.0, x.size + 1, dtype=x.dtype).reshape(x.shape)


def reverse_over_reverse(function):
    return lambda x: jax.grad(lambda x: jnp.vdot(jax.grad(function)(x), direction(x)))(x)


def forward_over_reverse(function):
    return lambda x: jax.jvp(jax.grad(function), (x,), (direction(x),))[1]


def reverse_over_forward(function):
    return lambda x: jax.grad(lambda x: jax.jvp(function, (x,), (direction(x),))[1])(x)


MODES = (reverse_over_reverse, forward_over_reverse, reverse_over_forward)


@pytest.mark.parametrize(("number", "guard"), list(enumerate(GUARDS))[::3], ids=lambda x: getattr(x, "name", ""))
def test_a_guarded_function_has_the_second_derivative_of_the_double_where(number, guard):
    mode = MODES[number // 3 % 3]
    got = jax.jit(mode(aot.function(guard.once, derivatives="finite")))(guard.at)
    np.testing.assert_allclose(got, jax.jit(mode(guard.twice))(guard.at), rtol=1e-3, atol=1e-5)


def test_so_has_its_gradient_method_in_a_jit_of_the_caller_and_the_third_derivative():
    guard = GUARDS[0]
    finite = aot.function(guard.once, derivatives="finite")
    got = jax.jit(jax.jacrev(jax.jit(finite.grad)))(guard.at)
    np.testing.assert_allclose(jnp.diag(got), [0, 0, -2, -0.25 * 2**-1.5], rtol=1e-5)
    third, want = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(reverse_over_reverse(f)(x))))(guard.at) for f in (finite, guard.twice)
    )
    np.testing.assert_allclose(third, want, rtol=1e-5)


SECOND = {
    "norm": reverse_over_reverse,
    "standard deviation": reverse_over_forward,
    "angle": forward_over_reverse,
    "xlogy": reverse_over_reverse,
    "logsumexp": reverse_over_reverse,
    "masked softmax": forward_over_reverse,
    "unit vector or zero": reverse_over_reverse,
    "GELU": forward_over_reverse,
    "sigmoid by hand": reverse_over_forward,
    "flat function": reverse_over_forward,
    "cumulative logsumexp": forward_over_reverse,
    "bounded quotient": forward_over_reverse,
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_and_tangents_at_singular_points_are_finite(name):
    point = next(point for point in SINGULAR if point.name == name)
    function, along = aot.function(point.function, derivatives="finite"), direction(point.at)
    both = jax.jit(lambda x: (SECOND[name](function)(x), jax.jvp(function, (x,), (along,))[1]))
    second, tangent = both(jnp.asarray(point.at))
    assert np.all(np.isfinite(second))
    if name != "logsumexp":
        np.testing.assert_array_equal(second, np.zeros_like(point.at))
    np.testing.assert_allclose(tangent, np.sum(point.gradient * along), rtol=1e-6)


SMOOTH = ["scan_with_constants", "layer_norm", "complex_weights", "gather_and_scatter"]


@pytest.mark.parametrize("name", SMOOTH[:: 1 if EVERY_PROGRAM else 2])
def test_tangents_that_are_finite_keep_their_bits(name):
    """Run op by op: XLA may fuse the two programs differently."""
    program = named(name)
    with program.precision():
        closed = jax.make_jaxpr(lambda *args: jax.tree.leaves(program.function(*args)))(*program.args)
        flat = jax.tree.leaves(program.args)
        mask = tuple(jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact) for x in flat)
        tangents = [jnp.cos(jnp.arange(x.size).reshape(x.shape)).astype(x.dtype) for x in map(jnp.asarray, flat)]
        tangents = [t for t, on in zip(tangents, mask, strict=True) if on]
        own, mine = (
            traced(lambda xs, ts, on=on: pushed_through(closed, mask, xs, ts, on)[1], [flat, tangents])
            for on in (False, True)
        )
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(own), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def differentiated_twice(program, function):
    """The gradient of a number made of the gradient."""
    places = (program.argnums,) if isinstance(program.argnums, int) else program.argnums
    gradient = jax.grad(loss(program, function), argnums=places)
    return jax.grad(lambda *args: weigh(gradient(*args)), argnums=places)


@pytest.mark.parametrize("name", ["scan_in_cond", "checkpoint_by_name", "linear_solve", "complex_weights"])
def test_second_derivatives_that_are_finite_in_jax_are_jax_s(name):
    program = named(name)
    options = {"argnums": program.argnums, "has_aux": program.has_aux, "derivatives": "finite"}
    with program.precision():
        got = jax.jit(differentiated_twice(program, aot.function(program.function, **options)))(*program.args)
        assert_same(got, plain(program, differentiated_twice), program, slack=10)


def test_functions_with_functions_inside_are_cut_as_one_program():
    inner = aot.function(lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0)), derivatives="finite")
    outer = aot.function(lambda x: jnp.sum(jax.grad(inner)(x) ** 2) + inner(x) ** 2, derivatives="finite")
    x = jnp.array([0.0, 1.0])
    np.testing.assert_allclose(outer.grad(x), [0.0, 2 * 0.5 * -0.25 + 2 * 1 * 0.5], rtol=1e-6)
    names = {op.name for op in outer.trace(x).graph.ops}
    assert "jointcut_half" not in names


def test_everywhere_guards_products_behind_matrix_products_too():
    def masked(x, w):
        return jnp.sum(jnp.where(x[:, :1] > 0, jnp.sqrt(x) @ w, 0.0))

    x, w = jnp.array([[0.0, 0.0], [1.0, 4.0]]), jnp.ones((2, 2))
    assert not np.all(np.isfinite(aot.function(masked, derivatives="finite").grad(x, w)))
    chosen = aot.conventions("finite", zero_cotangent="everywhere")
    np.testing.assert_allclose(aot.function(masked, derivatives=chosen).grad(x, w), [[0, 0], [1, 0.5]])


def test_singular_values_alone_of_full_matrices_are_differentiated():
    chosen = aot.conventions(equal_eigenvalues="zero")
    values = aot.function(lambda x: jnp.sum(jnp.linalg.svd(x, compute_uv=False)), derivatives=chosen)
    np.testing.assert_allclose(values.grad(jnp.eye(3)[:2]), np.eye(3)[:2], atol=1e-6)
