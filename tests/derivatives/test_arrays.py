"""Normalisation, windows and indexing keep their laws for any shape, and refuse bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jointcut.aot import derivatives as d
from jointcut.partition.errors import CallError


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def drawn(*shape):
    return np.random.RandomState(1).standard_normal(shape)


def pulled(*functions):
    """A compiled function of x: the value of each, and a cotangent pulled back."""

    def one(function, x):
        value, pull = jax.vjp(function, x)
        return value, *pull(np.cos(np.arange(value.size, dtype=float)).reshape(value.shape))

    return jax.jit(lambda x: [one(function, x) for function in functions])


def equal(x, *pairs):
    """In each pair of functions one has the value and the derivative of the other."""
    found = pulled(*(function for pair in pairs for function in pair))(x)
    for mine, other in zip(found[::2], found[1::2], strict=True):
        for a, b in zip(mine, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- normalisation


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    axis=st.integers(-1, 0),
    equal_rows=st.booleans(),
)
def test_norms_of_any_shape(shape, axis, equal_rows):
    x = np.full(shape, 1.5) if equal_rows else drawn(*shape)

    def plain(x):
        centred = x - x.mean(axis, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(axis, keepdims=True) + 1e-5)

    def by_squares(x):
        return x / jnp.sqrt((x**2).mean(axis, keepdims=True) + 1e-3)

    equal(x, (lambda x: d.layer_norm(x, axis), plain), (lambda x: d.rms_norm(x, axis, eps=1e-3), by_squares))


def test_the_backward_keeps_the_normalised_array_and_one_number_for_each_row():
    shape = jax.ShapeDtypeStruct((128, 512), jnp.float32)
    _, pull = jax.eval_shape(lambda x: jax.vjp(d.layer_norm, x), shape)
    kept = sorted(leaf.size for leaf in jax.tree.leaves(pull))
    assert sum(kept) <= 128 * 512 + 2 * 128


def test_a_short_type_is_normalised_in_single_precision():
    x = jnp.asarray(drawn(4, 64), jnp.bfloat16)
    exact = d.layer_norm(x.astype(jnp.float32))
    assert d.layer_norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(d.layer_norm(x), exact.astype(jnp.bfloat16))


def test_channels_may_lie_last():
    x = drawn(2, 4, 3)
    for function in (d.batch_norm, d.instance_norm):
        last = function(np.moveaxis(x, 1, -1), axis=-1)
        np.testing.assert_allclose(np.moveaxis(last, -1, 1), function(x), rtol=1e-12)
    last = d.group_norm(np.moveaxis(x, 1, -1), 2, axis=-1)
    np.testing.assert_allclose(np.moveaxis(last, -1, 1), d.group_norm(x, 2), rtol=1e-12)


def test_dropout_takes_what_is_dropped_as_nothing():
    x, mask = np.array([1.0, np.inf, np.nan]), np.array([True, False, False])
    ((value, grad),) = pulled(lambda x: d.dropout(x, mask, 0.5))(x)
    assert value.tolist() == [2.0, 0.0, 0.0] and grad[1:].tolist() == [0.0, 0.0]


# ---------------------------------------------------------------- windows


@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(
    length=st.integers(2, 7),
    window=st.integers(1, 2),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    ceil=st.booleans(),
)
def test_pooling_of_any_window(length, window, stride, padding, ceil):
    padding = min(padding, window // 2)
    x = np.round(drawn(2, length) * 2)  # with ties
    room = length + 2 * padding - window
    count = (-(-room // stride) if ceil else room // stride) + 1
    count -= ceil and (count - 1) * stride >= length + padding
    spans = [range(max(n * stride - padding, 0), min(n * stride - padding + window, length)) for n in range(count)]
    ((value, grad),) = pulled(lambda x: d.max_pool(x, window, stride, padding, ceil_mode=ceil))(x)
    value = np.asarray(value)
    assert value.shape == (2, count)
    expected = np.zeros_like(x)
    weights = np.cos(np.arange(value.size)).reshape(value.shape)
    for row in range(2):
        for n, span in enumerate(spans):
            first = max(span, key=lambda place: (x[row, place], -place))
            assert value[row, n] == x[row, first]
            expected[row, first] += weights[row, n]
    np.testing.assert_allclose(grad, expected, atol=1e-14)

    def inside(x):
        return jnp.stack([x[:, list(span)].mean(1) for span in spans], 1)

    equal(x, (lambda x: d.avg_pool(x, window, stride, padding, ceil, count_include_pad=False), inside))


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(length=st.integers(1, 6), size=st.integers(1, 8))
def test_resizing_to_any_size(length, size):
    x = drawn(2, length)
    spans = [range(n * length // size, -(-(n + 1) * length // size)) for n in range(size)]

    def pooled(x, how):
        return jnp.stack([how(x[:, list(span)], 1) for span in spans], 1)

    equal(
        x,
        (lambda x: d.adaptive_avg_pool(x, size), lambda x: pooled(x, jnp.mean)),
        (lambda x: d.adaptive_max_pool(x, size), lambda x: pooled(x, jnp.max)),
        (
            lambda x: d.interpolate(x, size, "linear"),
            lambda x: jax.image.resize(x, (2, size), "linear", antialias=False),
        ),
    )
    constant = d.interpolate(np.ones((2, length)), size, "cubic")
    np.testing.assert_allclose(constant, np.ones((2, size)), rtol=1e-12)


def test_pooling_is_forward_and_reverse_and_of_batches():
    x = drawn(3, 2, 5, 5)

    def function(x):
        return d.max_pool(x, (2, 2), 1) ** 2

    np.testing.assert_allclose(jax.vmap(function)(x), function(x), rtol=1e-14)
    forward, reverse = jax.jacfwd(function)(x[0]), jax.jacrev(function)(x[0])
    np.testing.assert_allclose(forward, reverse, rtol=1e-14)


# ---------------------------------------------------------------- indexing


@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(
    index=st.lists(st.integers(0, 2), min_size=0, max_size=4),
    values=st.lists(st.sampled_from([0.0, 1.0, -2.0]), min_size=7, max_size=7),
    reduce=st.sampled_from(["sum", "mean", "prod", "amax", "amin"]),
    include=st.booleans(),
)
def test_scatter_reduce_is_a_loop_over_groups(index, values, reduce, include):
    x, src, where = np.array(values[:3]), np.array(values[3 : 3 + len(index)]), np.array(index, int)
    joined = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "amax": np.max, "amin": np.min}[reduce]

    def total(x, src):
        result = d.scatter_reduce(x, 0, where, src, reduce, include)
        return (result * jnp.arange(1.0, 4)).sum(), result

    @jax.jit
    def both_orders(*given):
        first, pull, result = jax.vjp(jax.grad(total, (0, 1), has_aux=True), *given, has_aux=True)
        return result, first, pull(first)

    result, *orders = jax.tree.map(np.asarray, both_orders(x, src))
    for place in range(3):
        group = [*src[where == place]]
        group = [x[place], *group] if include or not group else group
        np.testing.assert_allclose(result[place], joined(group), rtol=1e-14)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(orders))


def test_a_product_with_zeros_has_the_second_derivative_of_a_polynomial():
    src = np.array([[2.0, 3.0, 4.0], [0.0, 3.0, 4.0], [0.0, 0.0, 4.0], [0.0, 0.0, 0.0]])

    def product(s):
        return d.scatter_reduce(np.array([5.0]), 0, np.zeros(3, int), s, "prod")[0]

    mine, exact = (jax.jit(jax.vmap(jax.hessian(f)))(src) for f in (product, lambda s: 5.0 * s[0] * s[1] * s[2]))
    np.testing.assert_allclose(mine, exact, rtol=1e-13)


def test_the_one_that_stays_gets_the_cotangent():
    x, places, values = np.zeros(3), (np.array([1, 1]),), np.array([1.0, 2.0])
    value, pull = jax.vjp(lambda v: d.index_put(x, places, v), values)
    (grad,) = pull(jnp.ones(3))
    assert grad.tolist() == [float(v == value[1]) for v in values]


X, PLACES = np.ones((2, 3)), np.zeros((2, 3), int)
M = np.ones(3, bool)
BAD = {
    "layer_norm: weight has shape (2,), but the axes (1,) have (3,).\nPass 3 numbers so shaped.": (
        lambda: d.layer_norm(X, -1, X[:, 0])
    ),
    "layer_norm: eps is -1, but it must not be negative.\nPass zero or a positive number.": (
        lambda: d.layer_norm(X, eps=-1)
    ),
    "layer_norm: axis is 2, but the array has 2 dimensions.\nPass an axis from -2 to 1.": lambda: d.layer_norm(X, 2),
    "batch_norm: mean and variance come without each other.\nPass both, or none.": lambda: d.batch_norm(X, mean=X[0]),
    "group_norm: groups is 2, which does not divide the 3 channels.\n"
    "Pass a divisor of the number of channels.": lambda: d.group_norm(X, 2),
    "dropout: mask has type float64.\nPass booleans, such as `jax.random.bernoulli` draws.": lambda: d.dropout(
        X, X, 0.5
    ),
    "dropout: rate is 2.\nPass a number from 0 to 1.": lambda: d.dropout(X, M, 2),
    "max_pool: window has 3 numbers, but the array has 2 dimensions.\nPass one number for each axis to pool.": (
        lambda: d.max_pool(X, (1, 1, 1))
    ),
    "max_pool: strides is (0,), for 1 axes.\nPass 1 whole numbers of at least 1.": lambda: d.max_pool(X, 2, 0),
    "avg_pool: padding is (2,), more than half of the window (2,).\nPad by half a window at most.": (
        lambda: d.avg_pool(X, 2, padding=2)
    ),
    "avg_pool: window is (4,), too large for the axes of lengths (3,).\nPass a smaller one, or pad.": (
        lambda: d.avg_pool(X, 4)
    ),
    "lp_pool: ord is -1.\nPass a positive number; for inf, `max_pool`.": lambda: d.lp_pool(X, -1, 2),
    "adaptive_avg_pool: size is (0,), but the array has 2 dimensions.\n"
    "Pass a positive whole number for each axis to resize, the last ones.": lambda: d.adaptive_avg_pool(X, 0),
    "adaptive_max_pool: the array has shape (2, 0), with an empty axis to resize.\n"
    "Pass at least one element along each.": lambda: d.adaptive_max_pool(X[:, :0], 2),
    "interpolate: method is 'liner'.\nKnown names: 'area', 'cubic', 'linear', 'nearest', 'nearest-exact'. "
    "Did you mean 'linear'?": lambda: d.interpolate(X, 2, "liner"),
    "interpolate: align_corners is true, but 'nearest' has no corners to align.\n"
    "Leave it out, or take another method.": lambda: d.interpolate(X, 2, align_corners=True),
    "gather: index has type float64, but it names places.\nPass integers.": lambda: d.gather(X, 0, X),
    "gather: index has shape (2, 4), but x has (2, 3).\n"
    "Pass as many axes, none longer than that of x but the one along which it counts.": (
        lambda: d.gather(X, 0, np.zeros((2, 4), int))
    ),
    "scatter_add: src has shape (1, 3), but index has (2, 3).\nPass at least one element for each index.": (
        lambda: d.scatter_add(X, 1, PLACES, X[:1])
    ),
    "scatter_reduce: reduce is 'max'.\nKnown names: 'amax', 'amin', 'mean', 'prod', 'sum'. Did you mean 'amax'?": (
        lambda: d.scatter_reduce(X, 1, PLACES, X, "max")
    ),
    "index_put: indices has 3 arrays, but x has 2 dimensions.\nPass one for each of the first axes.": (
        lambda: d.index_put(X, (PLACES, PLACES, PLACES), 1.0)
    ),
    "sparse_mask: indices has shape (2, 3), but x has 2 dimensions.\nPass one row of places for each value.": (
        lambda: d.sparse_mask(X, PLACES)
    ),
    "sampled_addmm: indices has shape (2, 3).\nPass row and column of each value.": (
        lambda: d.sampled_addmm(X[0], PLACES, X, X.T)
    ),
    "sparse_mm: b has shape (3,), which is no matrix.\nPass an array of shape (..., m, n).": (
        lambda: d.sparse_mm(X[0], PLACES[:, :2], X[0], 2)
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_refused(text):
    with pytest.raises(CallError) as caught:
        BAD[text]()
    assert str(caught.value) == f"derivatives.{text}"
