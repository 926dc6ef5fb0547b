"""A guard by `where` needs no second `where`: a cotangent of exactly zero stays zero, whatever the slope."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut.aot import derivatives as d
from jointcut.aot.derivatives.slopes import times

# name -> (function, inputs at which it or its slope is infinite or NaN)
STEEP = {
    "sqrt": (d.sqrt, [0.0, -1.0]),
    "rsqrt": (d.rsqrt, [0.0, -1.0]),
    "cbrt": (d.cbrt, [0.0]),
    "reciprocal": (d.reciprocal, [0.0]),
    "x ** 0.5": (lambda x: d.power(x, 0.5), [0.0, -1.0]),
    "x ** -1": (lambda x: d.power(x, -1), [0.0]),
    "x ** x": (lambda x: d.power(x, x), [0.0, -1.0]),
    "log": (d.log, [0.0, -1.0]),
    "log1p": (d.log1p, [-1.0, -2.0]),
    "log2": (d.log2, [0.0, -1.0]),
    "log10": (d.log10, [0.0, -1.0]),
    "x log(x)": (lambda x: d.xlogy(x, x), [0.0, -1.0]),
    "entr": (d.entr, [0.0, -1.0]),
    "logit": (d.logit, [0.0, 1.0, 2.0, -1.0]),
    "arcsin": (d.arcsin, [1.0, -1.0, 2.0]),
    "arccos": (d.arccos, [1.0, -1.0, 2.0]),
    "arccosh": (d.arccosh, [1.0, 0.0]),
    "arctanh": (d.arctanh, [1.0, -1.0, 2.0]),
    "1 / x": (lambda x: d.divide(1.0, x), [0.0]),
    "x / x": (lambda x: d.divide(x, x), [0.0]),
    "hypot": (lambda x: d.hypot(x, x), [0.0]),
    "arctan2": (lambda x: d.arctan2(x, x), [0.0]),
    "norm": (lambda x: d.norm(x[None]), [0.0]),
    "std": (lambda x: d.std(jnp.stack([x, x])), [0.0]),
    "logsumexp": (lambda x: d.logsumexp(x[None]), [-np.inf]),
    "cosine_similarity": (lambda x: d.cosine_similarity(x[None], x[None], 0), [0.0]),
}


@pytest.mark.parametrize("name", STEEP)
def test_a_guard_by_where_is_enough(name):
    function, singular = STEEP[name]

    def guarded(x):
        bad = jnp.isin(x, jnp.asarray(singular, x.dtype))
        return jnp.where(bad, 0.0, jax.vmap(function)(x)).sum()

    with jax.enable_x64(True):
        x = np.array([*singular, 0.5, 1.5])

        @jax.jit
        def derivatives(x, zeros):
            grads, hessians = jax.jvp(jax.grad(guarded), (x,), (jnp.ones_like(x),))
            return grads, hessians, jax.jvp(guarded, (x,), (zeros,))[1], jax.vmap(jax.grad(function))(x)

        grads, hessians, tangent, unguarded = derivatives(x, np.zeros_like(x))
        assert (grads[: len(singular)] == 0).all() and (hessians[: len(singular)] == 0).all()
        assert tangent == 0
        np.testing.assert_allclose(grads[len(singular) :], unguarded[len(singular) :], rtol=1e-12)


def _itself(slope):
    return slope


def test_a_tangent_that_is_not_zero_meets_the_slope_as_it_is():
    slopes = np.array([2.0, np.inf, -np.inf, 0.0, 1e38], np.float32)

    @jax.jit
    def both(tangent):
        forward, pull = jax.vjp(lambda t: times(t, _itself, slopes), jnp.full(5, tangent))
        return forward, *pull(jnp.full(5, tangent)), times(tangent, _itself, jnp.float32(jnp.nan))

    for tangent in (1.0, -0.5, 1e-12):
        forward, back, of_nan = both(np.float32(tangent))
        for found in (forward, back):
            np.testing.assert_array_equal(found, np.float32(tangent) * slopes)
        assert np.isnan(of_nan)
    given = jnp.asarray(slopes).at[3].set(jnp.nan)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        assert (
            jax.jit(lambda zero, given: times(zero, _itself, given))(jnp.zeros((), dtype), given.astype(dtype)) == 0
        ).all()


def test_what_is_not_differentiated_is_not_computed():
    text = str(jax.make_jaxpr(jax.grad(d.power))(2.0, 3.0))
    assert "log" not in text
    assert "log" in str(jax.make_jaxpr(jax.grad(d.power, 1))(2.0, 3.0))


def test_gradients_under_jit_vmap_and_scan_are_those_of_the_plain_call():
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    x[1] = 0
    plain = np.stack([jax.grad(d.norm)(row) for row in x])
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.grad(d.norm)))(x), plain)
    _, scanned = jax.lax.scan(lambda carry, row: (carry, jax.grad(d.norm)(row)), 0, x)
    np.testing.assert_array_equal(scanned, plain)
    remat = jax.grad(lambda x: jax.checkpoint(jax.vmap(d.norm))(x).sum())(x)
    np.testing.assert_array_equal(remat, plain)
