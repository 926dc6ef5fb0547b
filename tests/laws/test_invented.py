"""With `derivatives="finite"` a derivative at a singular point is JAX's, a limit, zero, or not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special

from jointcut import aot
from jointcut.aot.derivatives import logsumexp

POINTS = (-np.inf, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, np.inf)


def with_both(function):
    return lambda x, y: function(x)


FUNCTIONS = {
    "power": jnp.power,
    "power of itself": with_both(lambda x: x**x),
    "power of a square": with_both(lambda x: (x * x) ** 0.5),
    "hypot": jnp.hypot,
    "arctan2": jnp.arctan2,
    "norm": lambda x, y: jnp.linalg.norm(jnp.stack([x, y])),
    "distance written out": lambda x, y: jnp.sqrt(x * x + y * y - 2 * x * y),
    "length of a complex number": lambda x, y: jnp.abs(lax.complex(x, y)),
    "xlogy": special.xlogy,
    "xlog1py": special.xlog1py,
    "logaddexp": jnp.logaddexp,
    "logsumexp": lambda x, y: special.logsumexp(jnp.stack([x, y])),
    "root": with_both(jnp.sqrt),
    "root of a maximum": lambda x, y: jnp.sqrt(jnp.maximum(x, 0)) * y,
    "arc of a clip": lambda x, y: jnp.arccos(jnp.clip(x, -1, 1)) * y,
    "arc of a cosine": with_both(lambda x: jnp.arccos(jnp.cos(x))),
    "area cosine of a maximum": with_both(lambda x: jnp.arccosh(jnp.maximum(x, 1))),
    "logarithm": with_both(jnp.log),
    "cube root": with_both(jnp.cbrt),
    "cube root of a square": with_both(lambda x: jnp.cbrt(x * x)),
    "cube root of a cube": with_both(lambda x: jnp.cbrt(x**3)),
    "quotient": jnp.divide,
    "guarded root": lambda x, y: jnp.where(x > 0, jnp.sqrt(x), y),
    "guarded quotient": lambda x, y: jnp.where(y != 0, x / y, 0.0),
}

#: Where a finite derivative of JAX's is another: it is wrong there, or a convention is told in `aot.Conventions`.
OTHERS = {
    "hypot": "JAX has 1/2 at the origin, and bends nothing where both are equal",
    "length of a complex number": "JAX bends at the origin, where the slope is none",
    "xlogy": "both slopes are 0 where x is 0 and the logarithm has no value",
    "xlog1py": "both slopes are 0 where x is 0 and the logarithm has no value",
}


def derivatives_of(function, at):
    """For each function, argument and point: the slopes, and the slopes of these along a line."""
    slopes = jax.grad(function)
    line = jnp.ones_like(at).at[:, 1].set(0.7)
    return jnp.stack(jax.jvp(slopes, (at,), (line,)))


@pytest.fixture(scope="module")
def found():
    """Of orders, functions, arguments and points: the derivatives, JAX's, and JAX's at four points beside."""

    def total(at):
        return sum(jnp.sum(jax.vmap(f)(at[i, 0], at[i, 1])) for i, f in enumerate(FUNCTIONS.values()))

    with jax.enable_x64(True):
        places = np.stack(np.meshgrid(POINTS, POINTS, indexing="ij")).reshape(2, -1)
        moves = np.array([(x, y) for x in (1e-7, -1e-7) for y in (7e-8, -7e-8)] + [(0.0, 0.0)]).T
        spread = np.concatenate([places + move[:, None] for move in moves.T], axis=1)
        finite = aot.function(total, derivatives="finite")

        @jax.jit
        def both(at, moved):
            return derivatives_of(finite, at), derivatives_of(total, moved)

        ours, own = both(*(np.broadcast_to(a, (len(FUNCTIONS), *a.shape)) for a in (places, spread)))
        *beside, own = np.split(np.asarray(own), len(moves.T), axis=-1)
        yield places, np.asarray(ours), own, np.stack(beside)


def names_where(is_wrong, places):
    """The functions, points and orders at which something is wrong."""
    return [(list(FUNCTIONS)[i], *places[:, k], order, place) for order, i, place, k in np.argwhere(is_wrong)]


def test_a_finite_derivative_of_jax_stays(found):
    places, ours, own, _ = found
    names = list(FUNCTIONS)
    same = np.isclose(ours, own, rtol=1e-9, atol=1e-12) | ~np.isfinite(own)
    same[:, [names.index(name) for name in OTHERS]] = True
    first = [wrong for wrong in names_where(~same, places) if np.isfinite(wrong[1:3]).all()]
    assert first == []


def test_what_is_finite_is_zero_or_a_limit(found):
    places, ours, own, beside = found
    near = np.isclose(ours, beside, rtol=1e-4, atol=1e-5).any(axis=0)
    is_known = ~np.isfinite(ours) | (ours == 0) | near | np.isclose(ours, own, rtol=1e-9)
    is_power_of_zero = (places == [[0.0], [1.0]]).all(axis=0)  # the slope for its exponent is 0 by convention
    is_known[:, list(FUNCTIONS).index("power")] |= is_power_of_zero
    is_known |= np.isinf(places).any(axis=0) & (np.abs(ours) < 10)
    assert names_where(~is_known, places) == []


def test_the_logsumexp_of_the_table_goes_with_what_is_infinite():
    rows = np.array([[np.inf, 0.0], [np.inf, np.inf], [-np.inf, -np.inf], [np.nan, 0.0]], np.float32)
    slopes = jax.jit(jax.vmap(jax.grad(logsumexp)))(rows)
    np.testing.assert_array_equal(slopes, [[1.0, 0.0], [0.5, 0.5], [0.0, 0.0], [np.nan, np.nan]])


def test_no_number_is_put_for_a_second_derivative_that_is_none():
    """It was 4.15e34: a large number stood for an infinite slope."""
    finite = aot.function(lambda v: v[0] ** v[1], derivatives="finite")
    hessian = jax.jit(jax.hessian(finite))(jnp.array([-2.0, 3.0]))
    np.testing.assert_array_equal(hessian, [[-12.0, np.nan], [np.nan, np.nan]])
