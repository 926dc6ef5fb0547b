"""List functions at singular points, where the function is finite and JAX's derivative may not be.

They were found by probing JAX: of about 120 functions of `jax.numpy`, `jax.scipy` and `jax.nn`, and of forms that users
write out, these have a gradient that is NaN or infinite in JAX, or none. Each has the gradient that is right: a limit,
the middle of the subgradients, or zero for what takes no part. At those of `UNKNOWN` a derivative is not finite with
`derivatives="finite"` either; each has the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special, stats


@dataclass(frozen=True)
class Singular:
    """A function at a point, with its right gradient there."""

    name: str
    function: Callable[[Any], Any]
    at: Any
    gradient: Any
    reason: str = ""


def _logsumexp_by_hand(x: Any) -> Any:
    largest = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return jnp.log(jnp.sum(jnp.exp(x - largest), axis=-1)) + largest[..., 0]


def _weighed(logsumexp: Callable[..., Any]) -> Callable[[Any], Any]:
    """Sums of rows that are multiplied by a matrix, so that no `where` stands behind the logarithm."""
    return lambda x: jnp.sum(jnp.exp(logsumexp(x)) @ jnp.ones((2, 2)))


def _root(x: Any) -> Any:
    values, vectors = jnp.linalg.eigh(x)
    return jnp.sum(_WEIGHTS * ((vectors * jnp.sqrt(values)) @ vectors.T))


def _rotation(x: Any) -> Any:
    u, _, vh = jnp.linalg.svd(x, full_matrices=False)
    return jnp.sum(_WEIGHTS * (u @ vh))


def _soft_threshold(x: Any) -> Any:
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    return jnp.sum(_WEIGHTS * ((u * jnp.maximum(s - 0.3, 0)) @ vh))


def _of_values(x: Any, f: Callable[[Any], Any], from_one_side: bool) -> Any:
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    return (u * f(s)) @ (u.T if from_one_side else vh)


def _solved(x: Any) -> Any:
    return jnp.linalg.lstsq(x, jnp.array([1.0, 2.0, 3.0]))[0][0]


def _or_one(x: Any) -> Any:
    return jnp.where(x == 0, 1, x)


_MINUS, _WEIGHTS = -np.inf, np.arange(9.0).reshape(3, 3)
_HALF, _SKEW = (_WEIGHTS + _WEIGHTS.T) / 4, (_WEIGHTS - _WEIGHTS.T) / 2
_ROWS, _SOFT = [[_MINUS, _MINUS], [0.0, 0.0]], [[0.0, 0.0], [2.0, 2.0]]
_ONE, _TWO, _EYE = [0.0], [0.0, 0.0], np.eye(3)

SINGULAR = tuple(
    Singular(name, function, np.array(at, np.float32), np.array(gradient, np.float32))
    for name, function, at, gradient in (
        ("norm", jnp.linalg.norm, _TWO, _TWO),
        ("norm of order 1.5", lambda x: jnp.linalg.norm(x, 1.5), _TWO, _TWO),
        ("norm of a triangle", lambda x: jnp.linalg.norm(jnp.triu(x)), 0 * _EYE, 0 * _EYE),
        ("masked distance", lambda x: jnp.sqrt(jnp.sum((jnp.arange(2) < 1).astype(x.dtype) * x**2)), _TWO, _TWO),
        ("cosine", lambda x: jnp.sum(x * jnp.array([1.0, 2.0])) / (jnp.linalg.norm(x) + 1e-3), _TWO, [1e3, 2e3]),
        ("standard deviation", jnp.std, [1.0, 1.0], _TWO),
        ("angle", lambda x: jnp.angle(lax.complex(x[0], x[1])), _TWO, _TWO),
        ("half a power", lambda x: (x[0] ** 2) ** 0.5, _ONE, _ONE),
        ("power", lambda x: x[0] ** x[1], _TWO, _TWO),
        ("float power", lambda x: jnp.float_power(x[0], 0.0), _ONE, _ONE),
        ("xlogy", lambda x: special.xlogy(x[0], x[1]), _TWO, _TWO),
        ("xlogy of a constant", lambda x: special.xlogy(0.0, x[0]), _ONE, _ONE),
        ("xlog1py", lambda x: special.xlog1py(x[0], x[1]), [0.0, -1.0], _TWO),
        ("Bernoulli, never", lambda p: stats.bernoulli.logpmf(0, p[0]), [0.0], [-1.0]),
        ("Bernoulli, always", lambda p: stats.bernoulli.logpmf(1, p[0]), [1.0], [1.0]),
        ("geometric", lambda p: stats.geom.logpmf(1, p[0]), [1.0], [1.0]),
        ("Poisson", lambda mu: stats.poisson.logpmf(0, mu[0]), [0.0], [-1.0]),
        ("multinomial", lambda p: stats.multinomial.logpmf(jnp.array([2, 0]), 2, p), [1.0, 0.0], [2.0, 0.0]),
        ("gamma", lambda x: stats.gamma.logpdf(x[0], 1.0), [0.0], [-1.0]),
        ("beta", lambda x: stats.beta.logpdf(x[0], 1.0, 1.0), [0.0], [0.0]),
        ("incomplete gamma", lambda x: special.gammainc(1.0, x[0]), [0.0], [1.0]),
        ("its complement", lambda x: special.gammaincc(1.0, x[0]), [0.0], [-1.0]),
        ("logsumexp", _weighed(lambda x: special.logsumexp(x, axis=1)), _ROWS, _SOFT),
        ("logsumexp by hand", _weighed(_logsumexp_by_hand), _ROWS, _SOFT),
        ("logaddexp", _weighed(lambda x: jnp.logaddexp(x[:, 0], x[:, 1])), _ROWS, _SOFT),
        ("masked softmax", lambda x: jnp.nan_to_num(jax.nn.softmax(x))[1, 0], _ROWS, [[0, 0], [0.25, -0.25]]),
        (
            "masked log-softmax",
            lambda x: jnp.where(jnp.isinf(x), 0, jax.nn.log_softmax(x))[1, 0],
            _ROWS,
            [[0, 0], [0.5, -0.5]],
        ),
        ("cumulative logsumexp", lambda x: lax.cumlogsumexp(x)[2], [_MINUS, _MINUS, 1.0], [0.0, 0.0, 1.0]),
        ("root of a matrix", _root, _EYE, _HALF),
        ("nearest rotation", _rotation, _EYE, _SKEW),
        ("singular values", lambda x: jnp.sum(jnp.linalg.svd(x)[1]), np.eye(3)[:2], np.eye(3)[:2]),
        ("least squares", _solved, _EYE, [[-1, -2, -3], [0] * 3, [0] * 3]),
        ("GELU", lambda x: jax.nn.gelu(x[0]), [1e30], [1.0]),
        ("sigmoid by hand", lambda x: 1 / (1 + jnp.exp(-x[0])), [-100.0], [0.0]),
        ("tanh by hand", lambda x: 1 - 2 / (jnp.exp(2 * x[0]) + 1), [100.0], [0.0]),
        ("flat function", lambda x: jnp.exp(-1 / x[0]), [0.0], [0.0]),
        ("clipped logit", lambda x: jnp.clip(jnp.log(x[0] / (1 - x[0])), -9, 9), [0.0], [0.0]),
        ("bounded quotient", lambda x: jnp.minimum(1 / x[0], 5.0), [0.0], [0.0]),
        ("bounded logarithm", lambda x: jnp.maximum(jnp.log(x[0]), -5.0), [0.0], [0.0]),
        ("unit vector or zero", lambda x: jnp.sum(x / _or_one(jnp.linalg.norm(x))), _TWO, [1.0, 1.0]),
        ("arc cosine of a cosine", lambda x: jnp.arccos(jnp.cos(x[0])), _ONE, _ONE),
        ("arc sine of a cosine", lambda x: jnp.arcsin(jnp.cos(x[0])), _ONE, _ONE),
        ("incomplete beta", lambda x: special.betainc(1.0, 3.0, x[0]), [0.0], [3.0]),
        ("its other end", lambda x: special.betainc(2.0, 1.0, x[0]), [1.0], [2.0]),
        ("soft threshold", _soft_threshold, _EYE, _WEIGHTS - 0.3 * _SKEW),
        ("cube root of a cube", lambda x: jnp.cbrt(x[0] ** 3), [0.0], [1.0]),
    )
)

_ACROSS = "it needs a basis of all that stands across the matrix, as large as its longer side squared"

UNKNOWN = (
    Singular(
        "odd function of a tall matrix, at zero, in second order",
        lambda x: jnp.sum(_of_values(x, jnp.sin, from_one_side=False)),
        np.zeros((3, 2), np.float32),
        np.ones((3, 2), np.float32),
        _ACROSS,
    ),
    Singular(
        "even function of a tall matrix from its longer side, at zero",
        lambda x: jnp.sum(_of_values(x, jnp.square, from_one_side=True)),
        np.zeros((3, 2), np.float32),
        np.zeros((3, 2), np.float32),
        _ACROSS,
    ),
)
