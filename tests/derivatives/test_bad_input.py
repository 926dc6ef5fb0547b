"""Bad input is refused early, with the place, the cause and the cure."""

import math

import jax
import jax.numpy as jnp
import pytest

from jointcut.aot import derivatives
from jointcut.partition.errors import CallError

X = jnp.ones((2, 3))
WHOLE = jnp.arange(3)
_CONVERT = "Convert it first, for example with `.astype(jnp.float32)`."
_NOT_NEGATIVE = "Pass zero or a positive number."


def refused(call) -> str:
    """The text of the error, which JAX's own TypeError and ValueError would have been caught as."""
    with pytest.raises(CallError) as caught:
        call()
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)
    return str(caught.value)


def test_integers_have_no_derivative():
    cause = f"has type int32, which has no derivative.\n{_CONVERT}"
    assert refused(lambda: derivatives.vector_norm(WHOLE)) == f"derivatives.vector_norm: x {cause}"
    assert refused(lambda: derivatives.sqrt(WHOLE)) == f"derivatives.sqrt: x {cause}"
    assert refused(lambda: derivatives.hypot(X, WHOLE)) == f"derivatives.hypot: x2 {cause}"
    text = refused(lambda: derivatives.relu(jnp.array([True])))
    assert text == f"derivatives.relu: x has type bool, which has no derivative.\n{_CONVERT}"


def test_a_function_of_real_numbers_refuses_complex_ones():
    assert refused(lambda: derivatives.amax(X.astype(complex))) == (
        "derivatives.amax: a has type complex64, but the function is defined for real numbers only.\n"
        "Pass its real part, or its absolute value."
    )


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"])
def test_an_axis_that_is_not_there(name):
    function = getattr(derivatives, name)
    assert refused(lambda: function(X, 2)) == (
        f"derivatives.{name}: axis is 2, but the array has 2 dimensions.\nPass an axis from -2 to 1."
    )
    assert refused(lambda: function(X[0], -2)) == (
        f"derivatives.{name}: axis is -2, but the array has 1 dimension.\nPass an axis from -1 to 0."
    )
    assert refused(lambda: function(jnp.float32(1), 0)) == (
        f"derivatives.{name}: axis is 0, but the array has 0 dimensions.\nA scalar has no axis to go along."
    )


@pytest.mark.parametrize("name", ["vector_norm", "amax", "median", "std", "logsumexp", "mean", "prod", "softmax"])
def test_axes_that_are_no_axes(name):
    function = getattr(derivatives, name)
    assert refused(lambda: function(X, axis=1.5)) == (
        f"derivatives.{name}: axis is 1.5, which is no whole number.\nPass an int."
    )
    assert refused(lambda: function(X, axis=(0, -2))) == (
        f"derivatives.{name}: axis is (0, -2), which names one axis twice.\nName each axis once."
    )


def test_orders_of_norms():
    assert refused(lambda: derivatives.vector_norm(X, ord="fro")) == (
        "derivatives.vector_norm: ord is 'fro', which is no order of a vector norm.\n"
        "Pass a number, which may be inf or -inf."
    )
    assert refused(lambda: derivatives.vector_norm(X, ord=math.nan)) == (
        "derivatives.vector_norm: ord is nan, which is no order of a vector norm.\n"
        "Pass a number, which may be inf or -inf."
    )
    assert refused(lambda: derivatives.norm(X, "nuc")) == (
        "derivatives.norm: ord is 'nuc', which is no norm over the axes (0, 1) here.\n"
        "Vectors take any number; matrices 'fro', 1, -1, inf and -inf, and others in `derivatives.linalg`."
    )
    assert refused(lambda: derivatives.renorm(X, 0, 0, 1.0)) == (
        "derivatives.renorm: p is 0, but it must be positive.\nPass for example 2."
    )
    assert refused(lambda: derivatives.renorm(X, 2, 0, -1.0)) == (
        f"derivatives.renorm: maxnorm is -1.0, but it must not be negative.\n{_NOT_NEGATIVE}"
    )


@pytest.mark.parametrize("name", ["cdist", "dist", "pairwise_distance"])
def test_orders_of_distances_are_not_negative(name):
    function = getattr(derivatives, name)
    cause = "but it must not be negative."
    assert refused(lambda: function(X, X, p=-1.0)) == f"derivatives.{name}: p is -1.0, {cause}\n{_NOT_NEGATIVE}"
    assert refused(lambda: function(X, X, p=math.nan)) == f"derivatives.{name}: p is nan, {cause}\n{_NOT_NEGATIVE}"


def test_shapes_of_distances():
    assert refused(lambda: derivatives.cdist(X[0], X)) == (
        "derivatives.cdist: x1 has 1 dimension, but rows and columns are needed.\nPass an array of shape (..., n, d)."
    )
    assert refused(lambda: derivatives.cdist(X, X[:, :2])) == (
        "derivatives.cdist: x1 and x2 have rows of 3 and 2 elements.\nPass rows of one length."
    )
    assert refused(lambda: derivatives.pdist(X[0])) == (
        "derivatives.pdist: x has shape (3,), which is no matrix of rows.\n"
        "Pass an array of shape (n, d), a batch by `jax.vmap`."
    )


@pytest.mark.parametrize("name", ["amax", "amin", "aminmax", "median", "nanmedian"])
def test_nothing_has_no_largest_element(name):
    assert refused(lambda: getattr(derivatives, name)(X[:0], axis=0)).endswith(
        ": the array has shape (0, 3), with no elements along the axes (0,), and has no value without any.\n"
        "Pass at least one element."
    )


def test_bounds_and_halves():
    assert refused(lambda: derivatives.clip(X)) == (
        "derivatives.clip: min and max are both None, and nothing bounds the array.\nPass at least one bound."
    )
    assert refused(lambda: derivatives.glu(X)) == (
        "derivatives.glu: x has 3 elements along the axis 1, which cannot be halved.\nPass an even number of elements."
    )
    assert refused(lambda: derivatives.hardshrink(X, -1.0)) == (
        f"derivatives.hardshrink: lambd is -1.0, but it must not be negative.\n{_NOT_NEGATIVE}"
    )


def test_refusals_come_while_tracing():
    with pytest.raises(CallError):
        jax.jit(lambda x: derivatives.cumsum(x, 7)).trace(X)
