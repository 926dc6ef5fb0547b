"""Any shape, axis and `keepdims`, with no elements or one along an axis, and with zeros and ties everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jointcut.aot import derivatives as d

NEEDS_ELEMENTS = ("amax", "amin", "median", "nanmedian", "norm of order inf", "norm of order -1")
REDUCTIONS = {
    "amax": (d.amax, jnp.amax),
    "amin": (d.amin, jnp.amin),
    "median": (d.median, jnp.median),
    "nanmedian": (d.nanmedian, jnp.nanmedian),
    "norm": (d.vector_norm, jnp.linalg.vector_norm),
    "norm of order 0": (lambda *a, **k: d.vector_norm(*a, ord=0, **k), None),
    "norm of order 1": (lambda *a, **k: d.vector_norm(*a, ord=1, **k), None),
    "norm of order 1.5": (lambda *a, **k: d.vector_norm(*a, ord=1.5, **k), None),
    "norm of order 3": (lambda *a, **k: d.vector_norm(*a, ord=3, **k), None),
    "norm of order inf": (lambda *a, **k: d.vector_norm(*a, ord=np.inf, **k), None),
    "norm of order -1": (lambda *a, **k: d.vector_norm(*a, ord=-1, **k), None),
    "prod": (d.prod, jnp.prod),
    "std": (d.std, jnp.std),
    "var": (d.var, jnp.var),
    "mean": (d.mean, jnp.mean),
    "logsumexp": (d.logsumexp, jax.scipy.special.logsumexp),
}
ALONG = {
    "cumsum": (d.cumsum, jnp.cumsum),
    "cumprod": (d.cumprod, jnp.cumprod),
    "logcumsumexp": (d.logcumsumexp, jax.lax.cumlogsumexp),
    "cummax": (d.cummax, jax.lax.cummax),
    "cummin": (d.cummin, jax.lax.cummin),
    "softmax": (d.softmax, jax.nn.softmax),
    "log_softmax": (d.log_softmax, jax.nn.log_softmax),
}


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


@st.composite
def arrays(draw, least=0):
    """An array of few small numbers, so that zeros and ties are everywhere."""
    shape = draw(st.lists(st.integers(least, 3), min_size=1, max_size=3))
    numbers = st.lists(
        st.sampled_from([-1.0, 0.0, 0.0, 1.0, 2.5]), min_size=(size := int(np.prod(shape))), max_size=size
    )
    return np.array(draw(numbers)).reshape(shape)


def some_axes(draw, ndim):
    """None, one axis, or some, from the front or from the back."""
    axes = draw(st.lists(st.integers(0, ndim - 1), unique=True, min_size=1, max_size=ndim))
    signed = tuple(axis - ndim if draw(st.booleans()) else axis for axis in axes)
    return draw(st.sampled_from([None, signed[0], signed]))


def keeps_the_laws(function, x, other=None):
    """Finite in both orders, zero for zero, and forward is the transpose of reverse; and the values of another."""
    shape = jax.eval_shape(function, x).shape
    weights = np.cos(np.arange(int(np.prod(shape)), dtype=float)).reshape(shape)
    tangent = np.sin(1.0 + np.arange(x.size)).reshape(x.shape)
    orders = jax.jit(lambda *given: (*_orders(function, *given), (other or function)(x)))
    value, grad, zero, forward, second, crossed, others = map(np.asarray, orders(x, weights, tangent))
    np.testing.assert_array_equal(value, others, strict=True)
    assert (zero == 0).all()
    if np.isfinite(value).all():
        assert np.isfinite(grad).all() and np.isfinite(second).all()
        np.testing.assert_allclose((forward * weights).sum(), (grad * tangent).sum(), atol=1e-10)
        np.testing.assert_allclose(crossed, second, atol=1e-10)


def _orders(function, x, weights, tangent):
    _, push = jax.linearize(function, x)
    pull = jax.linear_transpose(push, x)
    _, push_twice = jax.linearize(lambda x: jax.vjp(function, x)[1](weights)[0], x)
    pull_twice = jax.linear_transpose(push_twice, x)
    first = *pull(weights), *pull(0 * weights), push(tangent)
    return function(x), *first, *pull_twice(tangent), push_twice(tangent)


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_reductions_over_any_axes(name, data):
    ours, theirs = REDUCTIONS[name]
    x = data.draw(arrays(least=1 if name in NEEDS_ELEMENTS else 0))
    options = {"axis": some_axes(data.draw, x.ndim), "keepdims": data.draw(st.booleans())}
    compared = theirs is not None and not (name in ("std", "var", "mean") and x.size == 0)
    keeps_the_laws(lambda x: ours(x, **options), x, (lambda x: theirs(x, **options)) if compared else None)


@pytest.mark.parametrize("name", ALONG)
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_functions_along_any_axis(name, data):
    ours, theirs = ALONG[name]
    x = data.draw(arrays(least=1 if name.endswith("softmax") else 0))
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    lax = name in ("logcumsumexp", "cummax", "cummin")
    # In one program XLA would round the two softmaxes differently.
    np.testing.assert_array_equal(ours(x, axis=axis), theirs(x, axis=axis % x.ndim if lax else axis), strict=True)
    keeps_the_laws(lambda x: ours(x, axis=axis), x)


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(data=st.data(), p=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, np.inf]))
def test_distances_between_any_rows(data, p):
    batch = data.draw(st.lists(st.integers(1, 2), max_size=1))
    n, m, width = (data.draw(st.integers(0, 3)) for _ in range(3))
    rows, columns = (np.round(np.sin(np.arange(np.prod(s))) * 2).reshape(s) for s in ((*batch, n, width), (m, width)))
    found = d.cdist(rows, columns, p)
    assert found.shape == (*batch, n, m)
    keeps_the_laws(lambda x: d.cdist(x, columns, p), rows)
    keeps_the_laws(lambda y: d.cdist(rows, y, p), columns)


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(data=st.data(), name=st.sampled_from(["hypot", "arctan2", "maximum", "fmin", "logaddexp", "xlogy", "power"]))
def test_two_arguments_broadcast(data, name):
    x, y = (np.abs(data.draw(arrays(least=1))) for _ in range(2))
    x, y = x[(0,) * (x.ndim - 1)], y.reshape(-1, 1)
    function = getattr(d, name)
    assert function(x, y).shape == (y.shape[0], x.shape[0])
    keeps_the_laws(lambda x: function(x, y), x + 0.5)
    keeps_the_laws(lambda y: function(x + 0.5, y), y)
