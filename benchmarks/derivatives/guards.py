"""Functions that guard a singular point with `where`, as users of JAX, Diffrax, Optax and NumPyro write them.

Each has the condition under which the inner function is used, and a number that is safe for it. JAX's gradient of
`where(condition, inner, other)` is not finite at some of the points; that of the double `where`, in which the inner
function never sees a bad number, is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.scipy import special, stats


@dataclass(frozen=True)
class Guard:
    """`where(condition(x), inner(x), other(x))` at some points; `safe` is a number that the inner function takes."""

    name: str
    condition: Callable[[Any], Any]
    inner: Callable[[Any], Any]
    points: tuple[float, ...]
    safe: float = 0.5
    other: Callable[[Any], Any] = jnp.zeros_like

    @property
    def at(self) -> Any:
        """The points as an array."""
        return jnp.asarray(self.points, jnp.float32)

    def once(self, x: Any) -> Any:
        """The function as it is written first."""
        return jnp.sum(jnp.where(self.condition(x), self.inner(x), self.other(x)))

    def twice(self, x: Any) -> Any:
        """The function with the double `where`."""
        inside = self.condition(x)
        return jnp.sum(jnp.where(inside, self.inner(jnp.where(inside, x, self.safe)), self.other(x)))


def _positive(x: Any) -> Any:
    return x > 0


def _not_zero(x: Any) -> Any:
    return x != 0


def _within(x: Any) -> Any:
    return jnp.abs(x) < 1


def _open(x: Any) -> Any:
    return (x > 0) & (x < 1)


def _ones(x: Any) -> Any:
    return jnp.ones_like(x)


POSITIVE, AROUND, UNIT, EDGES = (-1.0, 0.0, 0.25, 2.0), (-2.0, 0.0, 0.5), (0.0, 0.3, 1.0), (-1.0, 0.2, 1.0, 1.5)

GUARDS = (
    Guard("square root", _positive, jnp.sqrt, POSITIVE),
    Guard("logarithm", _positive, jnp.log, POSITIVE),
    Guard("reciprocal", _not_zero, lambda x: 1 / x, AROUND),
    Guard("fractional power", _positive, lambda x: x**0.3, POSITIVE),
    Guard("negative power", _positive, lambda x: x**-1.5, POSITIVE),
    Guard("power of itself", _positive, lambda x: x**x, POSITIVE, other=_ones),
    Guard("arc cosine", _within, jnp.arccos, EDGES),
    Guard("arc sine", _within, jnp.arcsin, EDGES),
    Guard("area tangent", _within, jnp.arctanh, EDGES),
    Guard("inverse error function", _within, special.erfinv, EDGES),
    Guard("area cosine", lambda x: x > 1, jnp.arccosh, (0.5, 1.0, 2.0), 2.0),
    Guard("sinc", _not_zero, lambda x: jnp.sin(x) / x, AROUND, other=_ones),
    Guard("versine", _not_zero, lambda x: (1 - jnp.cos(x)) / x**2, AROUND),
    Guard("entropy", _positive, lambda p: -p * jnp.log(p), POSITIVE),
    Guard("binary entropy", _open, lambda p: -p * jnp.log(p) - (1 - p) * jnp.log(1 - p), UNIT),
    Guard("logit", _open, lambda p: jnp.log(p / (1 - p)), UNIT),
    Guard("Gumbel", _open, lambda u: -jnp.log(-jnp.log(u)), UNIT),
    Guard("inverse softplus", _positive, lambda x: jnp.log(jnp.expm1(x)), POSITIVE),
    Guard("exponential integrator", _not_zero, lambda x: jnp.expm1(x) / x, AROUND, other=_ones),
    Guard("Ornstein-Uhlenbeck variance", _not_zero, lambda x: (1 - jnp.exp(-2 * x)) / (2 * x), AROUND, other=_ones),
    Guard("slope of an interval", lambda x: x != 1, lambda x: (jnp.exp(x) - 2) / (x - 1), (0.0, 1.0, 3.0)),
    Guard("log-normal density", _positive, lambda x: -jnp.log(x) - jnp.log(x) ** 2 / 2, POSITIVE),
    Guard("gamma density", _positive, lambda x: 1.5 * jnp.log(x) - 2 * x - lax.lgamma(x), POSITIVE),
    Guard("beta density", _open, lambda x: 0.5 * jnp.log(x) + 1.5 * jnp.log1p(-x), UNIT),
    Guard("Pareto density", lambda x: x > 1, lambda x: -2 * jnp.log(x - 1), (0.5, 1.0, 3.0), 2.0),
    Guard("Weibull density", _positive, lambda x: -0.5 * jnp.log(x) - x**0.5, POSITIVE),
    Guard("exponential density", _positive, lambda x: stats.expon.logpdf(x) - jnp.sqrt(x), POSITIVE),
    Guard("Bose-Einstein", _positive, lambda x: 1 / jnp.expm1(x), POSITIVE),
    Guard("Lennard-Jones", _positive, lambda r: 4 * ((1 / r) ** 12 - (1 / r) ** 6), (0.0, 0.9, 1.5)),
    Guard("overflow", lambda x: x < 40, lambda x: jnp.exp(x) ** 2, (1.0, 50.0, 100.0)),
    Guard("quotient of logarithms", lambda x: x > 1, lambda x: jnp.log(x - 1) / jnp.log(x), (0.5, 1.0, 3.0), 3.0),
    Guard("Langevin function", _not_zero, lambda x: 1 / jnp.tanh(x) - 1 / x, AROUND),
    Guard("root of a quotient", _positive, lambda x: jnp.sqrt(x / (1 + x)), POSITIVE),
    Guard("unit vector", _not_zero, lambda x: x / jnp.sqrt(x * x), AROUND),
)
