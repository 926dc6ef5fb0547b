"""Logarithms, and products and sums of logarithms, which may have a limit where a logarithm has none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.special as special
from jax.typing import ArrayLike

from jointcut.aot.derivatives.arguments import inexact, promoted
from jointcut.aot.derivatives.elementwise.powers import reciprocal
from jointcut.aot.derivatives.slopes import steep, times, unary, with_slopes


def log(x: ArrayLike) -> jax.Array:
    """The natural logarithm. Slope: 1/x (PyTorch's `log`), infinite at zero, as the function is.

    A cotangent that is zero gives zero at zero too, where PyTorch and JAX give NaN.
    """
    return _log(inexact("log", "x", x))


_log = steep(jnp.log, reciprocal)


def log1p(x: ArrayLike) -> jax.Array:
    """log(1 + x). Slope: 1/(1+x) (PyTorch's `log1p`), infinite at -1; a zero cotangent gives zero there."""
    return _log1p(inexact("log1p", "x", x))


_log1p = steep(jnp.log1p, lambda x: reciprocal(1 + x))


def log2(x: ArrayLike) -> jax.Array:
    """The logarithm to the base 2. Slope: 1/(x·log(2)) (PyTorch's `log2`); see `log`."""
    return _log2(inexact("log2", "x", x))


_log2 = steep(jnp.log2, lambda x: reciprocal(x) / jnp.log(2.0).astype(x.dtype))


def log10(x: ArrayLike) -> jax.Array:
    """The logarithm to the base 10. Slope: 1/(x·log(10)) (PyTorch's `log10`); see `log`."""
    return _log10(inexact("log10", "x", x))


_log10 = steep(jnp.log10, lambda x: reciprocal(x) / jnp.log(10.0).astype(x.dtype))


def xlogy(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """x·log(y), and 0 where x is 0. Slopes: log(y) and x/y (PyTorch's `xlogy`).

    At x = 0, y = 0 both are 0: for x it is PyTorch's choice, for y the limit along x = 0. JAX gives -inf and NaN,
    PyTorch 0 and NaN.
    """
    return _xlogy(*promoted("xlogy", x=x, y=y))


def _xlogy_for_x(x: jax.Array, y: jax.Array) -> jax.Array:
    return _log(jnp.where((x == 0) & (y <= 0), 1, y))


def _xlogy_for_y(x: jax.Array, y: jax.Array) -> jax.Array:
    flat = (x == 0) & (y <= 0)
    return jnp.where(flat, 0, x * reciprocal(jnp.where(flat, 1, y)))


_xlogy = with_slopes(
    special.xlogy, lambda t, _, x, y: times(t, _xlogy_for_x, x, y), lambda t, _, x, y: times(t, _xlogy_for_y, x, y)
)


def xlog1py(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """x·log(1 + y), and 0 where x is 0. Slopes: log(1+y) and x/(1+y) (PyTorch's `special_xlog1py`).

    At x = 0, y = -1 both are 0, as for `xlogy`. JAX gives -inf and NaN, PyTorch 0 and NaN.
    """
    return _xlog1py(*promoted("xlog1py", x=x, y=y))


def _xlog1py_for_x(x: jax.Array, y: jax.Array) -> jax.Array:
    return _log1p(jnp.where((x == 0) & (y <= -1), 0, y))


def _xlog1py_for_y(x: jax.Array, y: jax.Array) -> jax.Array:
    return _xlogy_for_y(x, 1 + y)


_xlog1py = with_slopes(
    special.xlog1py,
    lambda t, _, x, y: times(t, _xlog1py_for_x, x, y),
    lambda t, _, x, y: times(t, _xlog1py_for_y, x, y),
)


def entr(x: ArrayLike) -> jax.Array:
    """-x·log(x), 0 at zero and -inf below. Slope: -log(x) - 1 (PyTorch's `special_entr`), infinite at zero.

    A cotangent that is zero gives zero there, where PyTorch and JAX give NaN.
    """
    return _entr(inexact("entr", "x", x, real=True))


_entr = steep(special.entr, lambda x: -_log(x) - 1)


def logit(x: ArrayLike, eps: float | None = None) -> jax.Array:
    """log(x / (1-x)). Slope: 1/(x·(1-x)) (PyTorch's `infinitely_differentiable_logit_backward`).

    At 0 and 1 function and slope are infinite, and beyond both are NaN; a cotangent that is zero gives zero there. With
    `eps` x is clipped to [eps, 1-eps] first, as in PyTorch; the slope is 0 outside, and not on the bounds.
    """
    array = inexact("logit", "x", x, real=True)
    return _logit(array) if eps is None else _clipped_logit(array, float(eps))


_logit = steep(special.logit, lambda x: jnp.where((x < 0) | (x > 1), jnp.nan, reciprocal(x * (1 - x))))


def _inside(x: jax.Array, eps: float) -> jax.Array:
    return (x >= eps) & (x <= 1 - eps)


_clipped_logit = unary(
    lambda x, eps: special.logit(jnp.clip(x, eps, 1 - eps)),
    lambda x, eps: jnp.where(_inside(x, eps), 1 / jnp.where(_inside(x, eps), x * (1 - x), 1), 0),
)


def logaddexp(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """log(exp(x1) + exp(x2)). Slopes: the logistic function of x1-x2 and of x2-x1 (PyTorch's `logaddexp`).

    Equal arguments share the slope evenly, also infinite ones, where JAX and PyTorch give NaN. Where one argument is
    far below the other, or -inf, PyTorch gives NaN in second order.
    """
    return _logaddexp(*promoted("logaddexp", x1=x1, x2=x2))


def _share(x1: jax.Array, x2: jax.Array) -> jax.Array:
    """Return the share of exp(x1) in exp(x1) + exp(x2)."""
    equal = jnp.isinf(x1) & (x1 == x2)
    return jax.nn.sigmoid(jnp.where(equal, 0, x1) - jnp.where(equal, 0, x2))


_logaddexp = with_slopes(
    jnp.logaddexp, lambda t, _, x1, x2: t * _share(x1, x2), lambda t, _, x1, x2: t * _share(x2, x1)
)


def logaddexp2(x1: ArrayLike, x2: ArrayLike) -> jax.Array:
    """log2(2^x1 + 2^x2). Slopes: the logistic function of (x1-x2)·log(2) and of its negative; see `logaddexp`."""
    return _logaddexp2(*promoted("logaddexp2", x1=x1, x2=x2))


def _share2(x1: jax.Array, x2: jax.Array) -> jax.Array:
    scale = jnp.log(2.0).astype(x1.dtype)
    return _share(x1 * scale, x2 * scale)


_logaddexp2 = with_slopes(
    jnp.logaddexp2, lambda t, _, x1, x2: t * _share2(x1, x2), lambda t, _, x1, x2: t * _share2(x2, x1)
)
