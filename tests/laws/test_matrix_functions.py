"""Where eigenvalues or singular values are equal, functions of a matrix have their derivative, and nothing else has.

Each function is asked at one of its points, and second derivatives are those of each third function; with
JOINTCUT_EVERY_PROGRAM all are asked at all, and whether JAX's own derivative would do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.eagerly import evaluate
from jointcut import aot
from programs import EVERY_PROGRAM

WEIGHTS = np.random.default_rng(0).standard_normal((4, 4))
EQUAL = np.diag([2.0, 2.0, 1.0, 1.0])
ZEROS = np.diag([2.0, 2.0, 0.0, 0.0])
TALL, WIDE = np.eye(4)[:, :2], np.eye(4)[:2]


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def weighed(m):
    rows, columns = m.shape[-2:]
    return jnp.sum(WEIGHTS[:rows, :columns] * m).real


def of_values(how):
    """A function of a symmetric matrix, from its eigenvalues w and eigenvectors v."""
    return lambda x: weighed(how(*jnp.linalg.eigh(x)))


def of_singular(how):
    """A function of a matrix, from its singular values and vectors."""
    return lambda x: weighed(how(*jnp.linalg.svd(x, full_matrices=False)))


def in_a_loop(x):
    return jax.lax.scan(lambda c, _: (c + SYMMETRIC["root"](x), None), 0.0, None, length=2)[0]


SYMMETRIC = {
    "root": of_values(lambda w, v: (v * jnp.sqrt(w)) @ v.T),
    "logarithm, scaled from the right": of_values(lambda w, v: v @ (jnp.log(w)[:, None] * v.T)),
    "exponential, by einsum": of_values(lambda w, v: jnp.einsum("ij,j,kj->ik", v, jnp.exp(-w / w.sum()), v)),
    "root, by a diagonal matrix": of_values(lambda w, v: v @ jnp.diag(jnp.sqrt(w)) @ v.T),
    "cut inverse": of_values(lambda w, v: (v * jnp.where(w > 1e-9, 1 / w, 0)) @ jnp.conj(v.swapaxes(-1, -2))),
    "scaled twice": of_values(lambda w, v: (v * jnp.sin(w)) @ (v * w**2).T),
    "mapped": lambda x: jnp.sum(jax.vmap(SYMMETRIC["root"])(jnp.stack([x, 2 * x]))),
    "in a loop": in_a_loop,
}
ANY = {
    "nearest rotation": (of_singular(lambda u, s, vh: u @ vh), (EQUAL, WIDE)),
    "soft threshold": (of_singular(lambda u, s, vh: (u * jnp.maximum(s - 0.3, 0)) @ vh), (TALL, ZEROS)),
    "inverse": (of_singular(lambda u, s, vh: (vh.T * (1 / s)) @ u.T), (WIDE, TALL)),
    "odd function at zero": (of_singular(lambda u, s, vh: (u * jnp.sin(s)) @ vh), (0 * EQUAL, 0 * TALL)),
    "stretch of a polar factor": (of_singular(lambda u, s, vh: (vh.T * s) @ vh), (TALL,)),
    "stretch from the left": (of_singular(lambda u, s, vh: (u * s**3) @ u.T), (TALL,)),
    "least squares": (lambda x: weighed(jnp.linalg.lstsq(x, WEIGHTS[: len(x)])[0]), (EQUAL, TALL)),
    "least squares of one": (lambda x: jnp.linalg.lstsq(x, WEIGHTS[: len(x), 0], 1e-9)[0][0], (TALL,)),
    "what is left over": (lambda x: jnp.sum(jnp.linalg.lstsq(x, WEIGHTS[: len(x)])[1]), (TALL,)),
}


def differences(function, x):
    """Central differences of a real function; of a complex matrix, in JAX's convention."""
    moves = 1e-6 * np.eye(x.size).reshape(-1, *x.shape)
    steps = [1, 1j] if np.iscomplexobj(x) else [1]
    moved = np.stack([sign * step * moves + x for step in steps for sign in (1, -1)])
    values = np.asarray(jax.jit(jax.vmap(jax.vmap(function)))(moved)).reshape(-1, 2, *x.shape)
    return np.tensordot(np.conj(steps), values[:, 0] - values[:, 1], 1) / 2e-6


def symmetric(x):
    return (x + x.conj().T) / 2


def needs_ours(function, x, is_asked):
    """JAX's own derivative would not do."""
    if is_asked or EVERY_PROGRAM:
        assert not np.isfinite(jax.jit(jax.grad(function))(x)).all()


@pytest.mark.parametrize("name", SYMMETRIC)
def test_functions_of_a_symmetric_matrix_have_their_derivative_at_equal_eigenvalues(name):
    function = SYMMETRIC[name]
    needs_ours(function, EQUAL, name == "root")
    got = aot.function(function, derivatives="finite").grad(EQUAL)
    np.testing.assert_allclose(symmetric(got), symmetric(differences(function, EQUAL)), atol=1e-7)


@pytest.mark.parametrize(("number", "name"), list(enumerate(ANY)))
def test_functions_of_any_matrix_have_theirs_at_equal_singular_values(number, name):
    function, points = ANY[name]
    for x in points if EVERY_PROGRAM else [points[number % len(points)]]:
        needs_ours(function, x, name == "nearest rotation")
        got = aot.function(function, derivatives="finite").grad(x)
        np.testing.assert_allclose(got, differences(function, x), atol=1e-7)


COMPLEX = {
    "root": (lambda x: symmetric(x), of_values(lambda w, v: (v * jnp.sqrt(w)) @ v.conj().T)),
    "function": (lambda x: x, of_singular(lambda u, s, vh: (1 + 2j) * (u * s**2) @ vh)),
    "adjoint": (lambda x: x, of_singular(lambda u, s, vh: (1 + 2j) * (vh.conj().T * s**2) @ u.conj().T)),
    "transpose": (lambda x: x, of_singular(lambda u, s, vh: (1 + 2j) * (vh.T * s**2) @ u.T)),
    "from the right": (lambda x: x, of_singular(lambda u, s, vh: (1 + 2j) * (vh.conj().T * s**2) @ vh)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_so_have_functions_of_complex_matrices(name):
    part, function = COMPLEX[name]
    x = EQUAL + 0j if name == "root" else np.diag([2.0, 2.0j, 1.0, -1.0])
    got = aot.function(function, derivatives="finite").grad(x)
    np.testing.assert_allclose(part(np.asarray(got)), part(differences(lambda x: function(part(x)), x)), atol=1e-7)


OTHER = {
    "a vector": lambda x: jnp.sum(WEIGHTS * jnp.linalg.eigh(x)[1]),
    "squares of vectors": of_values(lambda w, v: v**2),
    "vectors in another order": of_values(lambda w, v: (v * w) @ v[:, ::-1].T),
    "scaled along the wrong axis": of_values(lambda w, v: (v * w[:, None]) @ v.T),
    "a transpose missing": of_values(lambda w, v: (v * w) @ v),
    "left vectors of one with right ones of another": lambda x: weighed(
        jnp.linalg.svd(x)[0] @ jnp.linalg.svd(x + EQUAL)[2]
    ),
    "a root, and its vectors": lambda x: SYMMETRIC["root"](x) + weighed(jnp.linalg.eigh(x)[1]),
    "vectors returned by a branch": lambda x: weighed(
        jax.lax.cond(x[0, 0] > 0, lambda x: jnp.linalg.eigh(x)[1], lambda x: x, x)
    ),
    "a rotation from zero": of_singular(lambda u, s, vh: (u * jnp.cos(s)) @ vh),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_is_no_function_of_the_matrix_keeps_its_nan(name):
    x = ZEROS if "zero" in name else EQUAL
    assert not np.isfinite(aot.function(OTHER[name], derivatives="finite").grad(x)).all()


ALONG, ACROSS = WEIGHTS + WEIGHTS.T, WEIGHTS @ WEIGHTS.T


def forward_over_reverse(f, x):
    return jax.jvp(lambda x: jnp.vdot(ALONG, jax.grad(f)(x)), (x,), (ACROSS,))[1]


def reverse_over_reverse(f, x):
    return jnp.vdot(ACROSS, jax.grad(lambda x: jnp.vdot(ALONG, jax.grad(f)(x)))(x))


def reverse_over_forward(f, x):
    return jnp.vdot(ACROSS, jax.grad(lambda x: jax.jvp(f, (x,), (ALONG,))[1])(x))


MODES = (forward_over_reverse, reverse_over_reverse, reverse_over_forward)
PARTS = {**SYMMETRIC, "a power that depends on the matrix": of_values(lambda w, v: (v * w ** (w.sum() / 6)) @ v.T)}


def some(names):
    return list(enumerate(list(names)[:: 1 if EVERY_PROGRAM else 3]))


def test_elsewhere_second_derivatives_are_jaxs():
    function = PARTS["root"]
    mine = aot.function(function, derivatives="finite")
    for mode in MODES if EVERY_PROGRAM else MODES[:1]:
        got = jax.jit(mode, static_argnums=0)(mine, ACROSS)
        np.testing.assert_allclose(got, jax.jit(mode, static_argnums=0)(function, ACROSS), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "function",
    [PARTS["root"], of_singular(lambda u, s, vh: (u * s**2) @ vh), of_singular(lambda u, s, vh: (u * s) @ u.T)],
)
def test_second_derivatives_are_nan_where_values_are_equal(function):
    mine = aot.function(function, derivatives="finite")
    assert np.isnan(jax.jit(lambda x: jax.jvp(jax.grad(mine), (x,), (ALONG,))[1])(np.eye(4))).any()
    assert np.isnan(jax.jit(reverse_over_forward, static_argnums=0)(mine, np.eye(4)))


@pytest.mark.parametrize("function", [SYMMETRIC["root"], ANY["nearest rotation"][0], ANY["least squares"][0]])
def test_where_no_values_are_equal_gradients_keep_their_bits(function):
    x = WEIGHTS @ WEIGHTS.T

    def values_of(derivatives):
        """Value and gradient, one operation at a time."""
        traced = aot.function(function, derivatives=derivatives).trace(x)
        return evaluate(traced.joint, [*traced.consts, x, *traced.call.ones()])

    for got, want in zip(values_of("finite"), values_of("jax"), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_report_tells_them_by_the_line_of_the_user():
    def root(x):
        values, vectors = jnp.linalg.eigh(x)
        return weighed((vectors * values) @ vectors.T)

    rows = aot.function(root, derivatives="finite").trace(EQUAL).partition().explain(measure=False).derived
    first = root.__code__.co_firstlineno
    told = [int(row.line.split(":")[1].split()[0]) - first for row in rows if row.rule == "equal_eigenvalues"]
    assert told == [1, 2]


def test_values_of_full_matrices_have_a_derivative_and_vectors_have_none():
    mine = aot.function(lambda x: jnp.sum(jnp.linalg.svd(x)[1] ** 2), derivatives="finite")
    np.testing.assert_allclose(mine.grad(WEIGHTS[:2]), 2 * WEIGHTS[:2], rtol=1e-12)
    with pytest.raises(NotImplementedError, match="full matrices"):
        aot.function(lambda x: jnp.sum(jnp.linalg.svd(x)[0]), derivatives="finite").grad(WEIGHTS[:2])
