"""With `derivatives="finite"` roots of squares, angles and powers have finite slopes at singular points."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.special import logsumexp

from benchmarks.derivatives.singular import SINGULAR as FOUND
from benchmarks.eagerly import evaluate
from jointcut import aot
from programs import EVERY_PROGRAM


def apart(x):
    return x[:, None] - x[None]


def with_square(x):
    return jnp.sum(jnp.sqrt(jnp.sum(jnp.stack([x, 2 * x]) ** 2, axis=0)))


# Functions of four numbers, with the slope 0 at zero in PyTorch.
SINGULAR = {
    "norm": jnp.linalg.norm,
    "norm of rows": lambda x: jnp.sum(jnp.linalg.norm(x.reshape(2, 2), axis=1)),
    "norm of order 3": lambda x: jnp.linalg.norm(x, ord=3),
    "norm of complex numbers": lambda x: jnp.linalg.norm(lax.complex(x, 2 * x)),
    "Frobenius norm": lambda x: jnp.linalg.norm(x.reshape(2, 2)),
    "standard deviation": jnp.std,
    "standard deviation of a sample": lambda x: jnp.std(x, ddof=1),
    "root mean square": lambda x: jnp.sqrt(jnp.mean(x**2)),
    "distances": lambda x: jnp.sum(jnp.sqrt(jnp.sum(apart(x.reshape(2, 2)) ** 2, axis=-1))),
    "distances in one dimension": lambda x: jnp.sum(jnp.sqrt(jnp.square(apart(x)))),
    "power of a half": lambda x: jnp.sum(x * x) ** 0.5,
    "angle": lambda x: jnp.sum(jnp.arctan2(x, -x)),
    "in a scan": lambda x: jax.lax.scan(lambda c, y: (c + jnp.sqrt(y * y), None), 0.0, x)[0],
    "in a branch": lambda x: jax.lax.cond(x[0] > 5, jnp.sum, jnp.linalg.norm, x),
    "under checkpoint": lambda x: jax.checkpoint(jnp.linalg.norm)(x),
    "of stacked numbers": with_square,
    "product with itself": lambda x: jnp.sqrt(x @ x),
    "product of the same, computed twice": lambda x: jnp.sqrt(jnp.vdot(x[1:], x[1:]) + jnp.inner(2 * x, 2 * x)),
    "sum by einsum": lambda x: jnp.sum(jnp.sqrt(jnp.einsum("ij,ij->i", x.reshape(2, 2), x.reshape(2, 2)))),
    "masked sum": lambda x: jnp.sqrt(jnp.sum(jnp.where(jnp.arange(4) < 3, x * x, 0))),
    "mask first": lambda x: jnp.sqrt(jnp.sum((jnp.arange(4) < 3).astype(x.dtype) * x * x)),
    "distance written out": lambda x: jnp.sqrt(x @ x + jnp.sum(x**2) - 2 * (x @ -x)),
    "hypotenuse": lambda x: jnp.sum(jnp.hypot(x, x[::-1])),
    "sum in a scan": lambda x: jnp.sqrt(jax.lax.scan(lambda c, y: (c + y * y, None), 0.0, x)[0]),
    "root of a root": lambda x: jnp.sqrt(jnp.linalg.norm(x)),
    "cube root of squares": lambda x: jnp.cbrt(x @ x),
    "product of the halves of vmap": lambda x: jnp.sum(jax.vmap(lambda y: jnp.sqrt(y @ y))(x.reshape(2, 2))),
    "weights that are seen to be positive": lambda x: jnp.sqrt(jnp.sum(jnp.exp(x) * x * x)),
}
singular = pytest.mark.parametrize("name", SINGULAR)


@singular
def test_slopes_at_zero_are_zero(name):
    function = SINGULAR[name]
    zeros = jnp.zeros(4)
    if EVERY_PROGRAM or name == "norm":
        own = jax.jit(jax.grad(function))(zeros)
        assert not np.all(np.isfinite(own)) or name == "hypotenuse", "JAX's own would do"
    finite = aot.function(function, derivatives="finite")
    np.testing.assert_array_equal(finite.grad(zeros), np.zeros(4))
    both = jax.jit(lambda x, along: (jax.grad(finite)(x), jax.jvp(finite, (x,), (along,))[1]))
    grad, tangent = both(zeros, np.ones(4, np.float32))
    np.testing.assert_array_equal(grad, np.zeros(4))
    np.testing.assert_array_equal(tangent, 0)


@singular
def test_elsewhere_values_and_slopes_are_those_of_jax(name):
    function = SINGULAR[name]
    x = jnp.array([0.3, -1.2, 2.0, 0.7])
    value, grad = aot.function(function, derivatives="finite").value_and_grad(x)
    plain, own = jax.jit(jax.value_and_grad(function))(x)
    want = np.nan_to_num(own) if "distances" not in name else difference(function, x)
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    np.testing.assert_allclose(grad, want, rtol=2e-5 if "distances" not in name else 1e-2, atol=1e-6)


def difference(function, x):
    """Central differences, for functions whose gradient in JAX is NaN: every number is at distance zero from itself."""
    return [(function(x + step) - function(x - step)) / 2e-2 for step in 1e-2 * np.eye(4, dtype=np.float32)]


# Functions of one number, and points at which they do not move on one side at least.
BOUNDED = {
    "root of a maximum": (lambda x: jnp.sqrt(jnp.maximum(x, 0)), (-1, 0)),
    "root of a ramp": (lambda x: jnp.sqrt(jax.nn.relu(x)), (-1, 0)),
    "root of a clipped number": (lambda x: jnp.sqrt(jnp.clip(x, 0, 1)), (-1, 0)),
    "root of what is left": (lambda x: jnp.sqrt(1 - jnp.clip(x, -1, 1) ** 2), (-2, -1, 1, 2)),
    "power of a hinge": (lambda x: jnp.maximum(1 - x, 0) ** 0.5, (1, 2)),
    "arc of a clipped cosine": (lambda x: jnp.arccos(jnp.clip(x, -1, 1)), (-2, -1, 1, 2)),
    "arc of one bound": (lambda x: jnp.arcsin(jnp.minimum(x, 1)), (1, 2)),
    "area cosine": (lambda x: jnp.arccosh(jnp.maximum(x, 1)), (0, 1)),
    "logarithm, beyond": (lambda x: jnp.log(jnp.maximum(x, 0)), (-1,)),
    "root of the largest": (lambda x: jnp.sqrt(jnp.max(jnp.stack([x, 0 * x]))), (-1,)),
    "root of a mask": (lambda x: jnp.sqrt(x * (x > 0).astype(x.dtype)), (-1,)),
    "root in a step": (lambda x: lax.scan(lambda c, y: (c + jnp.sqrt(jnp.maximum(y * x, 0)), None), 0.0, UP)[0], (-1,)),
    "root in a branch": (lambda x: lax.cond(x > 9, jnp.sin, lambda x: jnp.sqrt(jnp.maximum(x, 0)), x), (-1,)),
}
UP = np.array([1.0, 2.0], np.float32)


def test_a_clipped_number_has_the_slope_zero_on_and_beyond_its_bound_whatever_follows():
    def slopes(function, points):
        finite, at = aot.function(function, derivatives="finite"), jnp.array(points, jnp.float32)
        tangents = jax.vmap(lambda x: jax.jvp(finite, (x,), (jnp.ones_like(x),))[1])(at)
        return jax.vmap(jax.grad(function))(at), jax.vmap(jax.grad(finite))(at), tangents

    found = jax.jit(lambda: {name: slopes(*case) for name, case in BOUNDED.items()})()
    for name, (own, grads, tangents) in found.items():
        assert not np.isfinite(own).all() or name == "root of a ramp", name
        np.testing.assert_array_equal(grads, np.zeros_like(grads), name)
        np.testing.assert_array_equal(tangents, np.zeros_like(grads), name)


def test_a_slope_that_is_zero_by_its_value_is_no_choice():
    """The logarithm of a square has no derivative at zero, and that of 1 - tanh(x) is -2 where it was rounded."""
    for function, at in ((lambda x: jnp.log(x * x), 0.0), (lambda x: jnp.log(1 - jnp.tanh(x)), 20.0)):
        assert np.isnan(aot.function(function, derivatives="finite").grad(jnp.float32(at)))


def test_all_pairs_of_rows_have_the_gradient_of_their_distances_written_out_or_not():
    def written_out(x):
        sizes = jnp.sum(x * x, axis=1)
        return jnp.sum(jnp.sqrt(sizes[:, None] + sizes - 2 * x @ x.T))

    def one_by_one(x):
        return jnp.sum(jax.vmap(lambda a: jax.vmap(lambda b: jnp.sqrt(a @ a + b @ b - 2 * a @ b))(x))(x))

    x = jnp.array([[0.0, 1.0], [2.0, 3.0], [2.0, 3.0]])
    want = aot.function(distances, derivatives="finite").grad(x)
    assert np.isfinite(want).all()
    for function in (written_out, one_by_one):
        assert np.isnan(jax.grad(function)(x)).any()
        np.testing.assert_allclose(aot.function(function, derivatives="finite").grad(x), want, rtol=1e-5)


def distances(x):
    return jnp.sum(jnp.sqrt(jnp.sum(apart(x) ** 2, axis=-1)))


def test_what_is_no_sum_of_squares_keeps_its_slope():
    """The root of x is infinitely steep at 0, and so is the root of a square less another, or times a number."""
    for function in (
        jnp.sqrt,
        lambda x: jnp.sqrt(x * x - 4 * x),
        lambda x: jnp.sqrt(x * (x + 1) ** 2),
        lambda x: jnp.sqrt(x * x + (x + 1) ** 2 - 3 * x * (x + 1) - 1),
        lambda x: jnp.sqrt(jnp.maximum(x, -1)),
        lambda x: jnp.arccos(jnp.minimum(1 - x, 2)),
    ):
        assert not np.isfinite(aot.function(function, derivatives="finite").grad(jnp.float32(0)))


@pytest.mark.parametrize(("least", "count"), [(0.0, 1), (1e-40, 1), (1e-12, 0)])
def test_a_root_that_is_zero_nowhere_has_no_formula(least, count):
    """A number that XLA may flush to zero does not count."""

    def root(x):
        return jnp.sqrt(jnp.sum(x * x) + jnp.float32(least))

    changes = aot.function(root, derivatives="finite").trace(jnp.zeros(2)).program.changes
    assert [change.rule for change in changes if change.rule == "norm_at_zero"] == ["norm_at_zero"] * count


def test_softplus_has_no_formula_and_is_finite_far_below_zero():
    finite = aot.function(lambda x: jnp.sum(jax.nn.softplus(x)), derivatives="finite")
    x = jnp.array([-jnp.inf, -1e30, 0.0])
    assert {change.rule for change in finite.trace(x).program.changes} == {"zero_cotangent"}
    np.testing.assert_array_equal(finite.grad(x), [0.0, 0.0, 0.5])
    np.testing.assert_array_equal(jax.jit(jax.hessian(finite))(x), np.diag([0.0, 0.0, 0.25]))


def test_a_derivative_rule_of_the_user_stays():
    @jax.custom_jvp
    def root(x):
        return jnp.sqrt(x * x)

    root.defjvp(lambda primals, tangents: (root(*primals), 7 * tangents[0]))
    assert aot.function(root, derivatives="finite").grad(jnp.float32(0)) == 7


def test_powers_and_absolute_values_of_complex_numbers_are_finite_at_zero():
    finite = aot.function(
        lambda x, y: jnp.sum(x**y) + jnp.sum(jnp.abs(lax.complex(x, y))), argnums=(0, 1), derivatives="finite"
    )
    assert np.all(np.isfinite(finite.grad(jnp.array([0.0, 0.0, 2.0]), jnp.array([2.0, 1.0, 0.5]))))


# ---------------------------------------------------------------- what probing JAX found


UNKNOWN_TO_JAX = ("singular values",)  # of a matrix that is not square, by a full svd


def evaluated(function, x, derivatives):
    """Value and gradient, one operation at a time: XLA may fuse two programs differently."""
    traced = aot.function(function, derivatives=derivatives).trace(x)
    return evaluate(traced.joint, [*traced.consts, x, *traced.call.ones()])


@pytest.mark.parametrize("point", FOUND, ids=lambda s: s.name)
def test_the_gradient_at_a_singular_point_is_right(point):
    value, grad = evaluated(point.function, point.at, "finite")
    with jax.disable_jit():
        np.testing.assert_array_equal(value, point.function(jnp.asarray(point.at)))
    np.testing.assert_allclose(grad, point.gradient, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("point", [s for s in FOUND[::3] if s.name not in UNKNOWN_TO_JAX], ids=lambda s: s.name)
def test_elsewhere_every_bit_is_that_of_jax(point):
    x = np.asarray(np.random.default_rng(0).uniform(0.1, 0.9, point.at.shape), np.float32)
    for got, want in zip(evaluated(point.function, x, "finite"), evaluated(point.function, x, "jax"), strict=True):
        assert np.all(np.isfinite(want))
        np.testing.assert_array_equal(got, want)


def test_second_derivatives_of_a_norm_are_finite_in_reverse_mode_too():
    finite = aot.function(jnp.linalg.norm, derivatives="finite")
    for second in (jax.hessian(finite), jax.jacrev(jax.jacrev(finite))):
        np.testing.assert_array_equal(jax.jit(second)(jnp.zeros(2)), np.zeros((2, 2)))


def test_logarithms_of_exponentials_and_powers_are_finite_in_second_order():
    for function, at in ((lambda x: jnp.sum(jnp.exp(logsumexp(x, axis=1)) @ jnp.ones((2, 2))), ROWS), (masked, [0.0])):
        hessian = jax.jit(jax.hessian(aot.function(function, derivatives="finite")))(jnp.array(at))
        assert np.all(np.isfinite(hessian))


ROWS = [[-np.inf, -np.inf], [0.0, 1.0]]


def masked(x):
    return jnp.sqrt(jnp.sum((jnp.arange(1) < 0).astype(x.dtype) * x**2))


def test_what_may_be_zero_between_others_is_no_sum_of_squares():
    """On the light cone, and where a choice may take anything."""
    for function in (
        lambda x: jnp.sqrt(x**2 + -1.0 * x**2 + x),
        lambda x: jnp.sqrt(jnp.where(x < 1, x, x**2)),
        lambda x: jnp.sqrt((x + 1) ** 2 + -1.0 * (x - 1) ** 2),
    ):
        assert not np.isfinite(aot.function(function, derivatives="finite").grad(jnp.float32(0)))


def test_a_function_of_the_user_with_a_name_of_jax_keeps_its_rule():
    @jax.custom_jvp
    def xlogy(x, y):
        return x * y

    xlogy.defjvp(lambda primals, tangents: (xlogy(*primals), 7 * tangents[0]))
    assert aot.function(lambda x: xlogy(x, 0.0), derivatives="finite").grad(jnp.float32(0)) == 7
