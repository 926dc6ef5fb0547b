"""Factors of matrices have right derivatives where values are equal or zero, and for every shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import derived
from jointcut.aot.derivatives import linalg
from jointcut.partition.errors import CallError


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def drawn(*shape, seed=0):
    return np.random.RandomState(seed).standard_normal(shape)


def slope(function, x, direction):
    """The derivative along a direction, and a difference of fourth order for it, scaled so that 1e-3 is small."""
    step = 1e-3
    moved = np.stack([x + k * step * direction for k in (1, -1, 2, -2)])
    both = jax.jit(lambda x, moved: (jax.jvp(function, (x,), (direction,))[1], jax.vmap(function)(moved)))
    exact, (up, down, far_up, far_down) = jax.tree.map(np.asarray, both(x, moved))
    return exact, (8 * (up - down) - (far_up - far_down)) / (12 * step)


def polar(x):
    u, _, vh = linalg.svd(x, full_matrices=False)
    return u @ vh


def projector(columns):
    return lambda q: q[:, columns] @ q[:, columns].conj().T


SMOOTH = {
    "polar factor at the identity": (polar, np.eye(3)),
    "polar factor of equal values": (polar, np.eye(4)[:, :2] * 3.0),
    "projector on equal eigenvalues": (
        lambda x: projector(slice(2))(linalg.eigh(x)[1]),
        np.diag(np.array([1.0, 1, 2])),
    ),
    "sum of equal eigenvalues": (lambda x: linalg.eigvalsh(x)[:2].sum(), np.diag(np.array([1.0, 1, 2]))),
    "sum of singular values": (lambda x: linalg.svdvals(x).sum(), np.eye(3)),
    "added columns of svd": (lambda x: projector(slice(2, 4))(linalg.svd(x)[0]), drawn(4, 2)),
    "added columns of svd, wide": (lambda x: projector(slice(2, 4))(linalg.svd(x)[2].T), drawn(2, 4)),
    "added columns of qr": (lambda x: projector(slice(2, 4))(linalg.qr(x, "complete")[0]), drawn(4, 2)),
    "complete r": (lambda x: linalg.qr(x, "complete")[1] ** 2, drawn(4, 2)),
    "r alone": (lambda x: linalg.qr(x, "r") ** 2, drawn(2, 4)),
    "lu with a zero last pivot": (
        lambda x: jnp.stack(linalg.lu(x)[1:]),
        np.array([[4.0, 1, 2], [2, 2.5, 2], [1, 1.25, 1]]),
    ),
    "det of rank 2": (linalg.det, np.diag(np.array([2.0, 3, 0]))),
    "det of rank 1": (linalg.det, np.ones((3, 3))),
    "cofactors of rank 2": (jax.grad(linalg.det), np.diag(np.array([2.0, 3, 0]))),
    "cofactors of rank 1": (jax.grad(linalg.det), np.ones((3, 3))),
    "cofactors of nothing": (jax.grad(linalg.det), np.zeros((3, 3))),
    "cofactors of four zeros": (jax.grad(linalg.det), np.diag(np.array([2.0, 3, 0, 0]))),
    "eigenvectors": (lambda x: jnp.abs(linalg.eig(x)[1]), drawn(3, 3, seed=1)),
    "eigenvalues": (lambda x: linalg.eigvals(x).real, drawn(3, 3, seed=1)),
    "least squares left": (lambda x: linalg.lstsq(x, drawn(4, 2, seed=3))[1], drawn(4, 2)),
    "norm by the largest value": (lambda x: linalg.matrix_norm(x, ord=2), drawn(3, 2)),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_are_differences_where_functions_are_smooth(name):
    function, x = SMOOTH[name]
    direction = drawn(*x.shape, seed=7)
    if "eigenvalues" in name and "equal" in name:
        direction = direction + direction.T
    exact, difference = slope(function, x, direction)
    np.testing.assert_allclose(exact, difference, rtol=1e-6, atol=1e-7)


FACTORS = {
    "eigh": lambda x: linalg.eigh(x @ x.mT),
    "svd": lambda x: linalg.svd(x),
    "svd reduced": lambda x: linalg.svd(x, full_matrices=False),
    "qr": lambda x: linalg.qr(x),
    "qr complete": lambda x: linalg.qr(x, "complete"),
    "lu": linalg.lu,
    "pinv": linalg.pinv,
    "det": lambda x: linalg.det(x @ x.mT),
    "nuclear norm": lambda x: linalg.matrix_norm(x, ord="nuc"),
    "norm": linalg.matrix_norm,
}


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 3)), values=st.sampled_from(["zeros", "ones", "drawn"]))
@pytest.mark.parametrize("name", FACTORS)
def test_any_shape_and_rank_is_finite_and_a_batch_is_its_matrices(name, shape, values):
    function = FACTORS[name]
    x = {"zeros": np.zeros(shape), "ones": np.ones(shape), "drawn": drawn(*shape)}[values]

    def total(x):
        return sum(
            (leaf * np.cos(np.arange(leaf[0].size).reshape(leaf[0].shape) + 1.0)).sum()
            for leaf in jax.tree.leaves(function(x))
        )

    @jax.jit
    def both(x):
        first, pull = jax.vjp(jax.grad(total), x)
        return first, *pull(first)

    first, second = both(np.stack([x, x]))
    assert np.isfinite(first).all() and np.isfinite(second).all()
    np.testing.assert_allclose(first[0], first[1], rtol=1e-9, atol=1e-9)


def test_the_factors_multiply_to_the_matrix_and_their_tangents_to_the_tangent():
    for shape in ((3, 3), (4, 2), (2, 4)):
        x, dx = drawn(*shape), drawn(*shape, seed=4)
        for rebuilt in (
            lambda x: (lambda u, s, vh: (u[:, : s.size] * s) @ vh[: s.size])(*linalg.svd(x)),
            lambda x: (lambda q, r: q @ r)(*linalg.qr(x, "complete")),
            lambda x: (lambda p, lower, upper: p @ lower @ upper)(*linalg.lu(x)),
        ):
            value, tangent = jax.jit(functools.partial(jax.jvp, rebuilt))((x,), (dx,))
            np.testing.assert_allclose(value, x, atol=1e-12)
            np.testing.assert_allclose(tangent, dx, atol=1e-12)


def test_a_logarithm_of_nothing_has_no_slope_but_a_guard_has_one():
    def guarded(x):
        sign, logarithm = linalg.slogdet(x)
        return jnp.where(sign == 0, x.sum(), logarithm)

    np.testing.assert_array_equal(jax.grad(guarded)(jnp.ones((2, 2))), jnp.ones((2, 2)))


def test_a_square_root_has_derivatives_of_every_order_and_none_for_a_cotangent_of_zero():
    a = np.stack([drawn(3, 3) + 4 * np.eye(3), drawn(3, 3, seed=1) + 5 * np.eye(3)])
    np.testing.assert_allclose(linalg.sqrtm(a) @ linalg.sqrtm(a), a, atol=1e-12)
    derived.equals_differences(lambda a: [linalg.sqrtm(a).real], a)
    _, pullback = jax.vjp(linalg.sqrtm, jnp.zeros((2, 2)))
    np.testing.assert_array_equal(pullback(jnp.zeros((2, 2), complex))[0], np.zeros((2, 2)))


@pytest.mark.parametrize("upper", [False, True])
def test_an_inverse_from_a_factor_is_that_of_the_product(upper):
    factor = drawn(2, 3, 3) + 1j * drawn(2, 3, 3, seed=1) + 3 * np.eye(3)

    def plainly(factor):
        half = jnp.triu(factor).conj().swapaxes(-1, -2) if upper else jnp.tril(factor)
        return jnp.linalg.inv(half @ half.conj().swapaxes(-1, -2))

    mine = functools.partial(linalg.cholesky_inverse, upper=upper)
    np.testing.assert_allclose(mine(factor), plainly(factor), rtol=1e-9)
    weights = drawn(2, 3, 3, seed=2) + 1j * drawn(2, 3, 3, seed=3)
    grads = jax.jit(
        lambda f: [jax.grad(lambda f, which=which: jnp.sum(weights * which(f)).real)(f) for which in (mine, plainly)]
    )
    np.testing.assert_allclose(*grads(factor), rtol=1e-9, atol=1e-12)
    derived.equals_differences(lambda factor: [mine(factor)], factor[0].real)


X, LONG = np.ones((2, 3)), np.arange(4).reshape(2, 2)
BAD = {
    **{
        f"{name}: a has shape (2, 3), which is no square matrix.\nPass an array of shape (..., n, n).": (
            lambda name=name: getattr(linalg, name)(X)
        )
        for name in (
            "inv",
            "cholesky",
            "cholesky_inverse",
            "eigh",
            "eigvalsh",
            "eig",
            "det",
            "slogdet",
            "expm",
            "sqrtm",
        )
    },
    **{
        f"{name}: a has type int64, which has no derivative.\n"
        "Convert it first, for example with `.astype(jnp.float32)`.": (lambda name=name: getattr(linalg, name)(LONG))
        for name in ("inv", "pinv", "qr", "lu", "svd", "det", "eig")
    },
    "solve: a has shape (2, 3), which is no square matrix.\nPass an array of shape (..., n, n).": (
        lambda: linalg.solve(X, X)
    ),
    "svdvals: x has shape (3,), which is no matrix.\nPass an array of shape (..., m, n).": (
        lambda: linalg.svdvals(X[0])
    ),
    "qr: mode is 'full'.\nKnown names: 'complete', 'r', 'reduced'.": lambda: linalg.qr(X, "full"),
    "matrix_norm: ord is 3.\nPass 'fro', 'nuc', 1, -1, 2, -2, jnp.inf or -jnp.inf.": (
        lambda: linalg.matrix_norm(X, ord=3)
    ),
    "matrix_power: n is 0.5, which is no whole number.\nPass an int.": lambda: linalg.matrix_power(X[:, :2], 0.5),
    "lstsq: a and b have the shapes (2, 3) and (3,).\nPass a[m, n], and b[m] or b[m, k].": (
        lambda: linalg.lstsq(X, X[0])
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_refused(text):
    with pytest.raises(CallError) as caught:
        BAD[text]()
    assert str(caught.value) == f"derivatives.linalg.{text}"
