"""Random Python programs of branches, loops, calls, references, modules, hooks and rules: gradients as in eager JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jointcut import aot

W = jnp.array([0.7, -0.4, 0.9])
ROWS = (3, 5, 3, 6)
LIMIT = 0.05


@jax.custom_vjp
def doubled(x):
    return jnp.sin(2 * x)


doubled.defvjp(lambda x: (doubled(x), x), lambda x, ct: (ct * (2 * np.cos(2 * np.asarray(x))),))


@aot.function
def block(h, w):
    return jnp.tanh(h * w) + h


def by_reference(h, w):
    ref = jax.new_ref(jnp.zeros_like(h))
    for scale in (0.5, 1.5):
        ref[...] += jnp.sin(h * scale) * w
    return ref[...]


def by_while(h, w):
    return aot.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1] * w)), (0, h))[1]


def by_rows(h, w):
    return aot.scan(lambda c, row: (jnp.tanh(c + row * w), c * row), jnp.zeros(3), h)[1] + h


PIECES = {
    "sin": lambda h, w, *_: jnp.sin(h + w[0]),
    "dot": lambda h, w, *_: h @ jnp.outer(w, w),
    "mean": lambda h, w, *_: h - jnp.mean(h, axis=0) * w,
    "branch": lambda h, w, decide, _: h / (1 + jnp.sum(h**2)) if decide(h) else h * w[1],
    "loop": lambda h, w, *_: jnp.tanh(jnp.tanh(h * w) * w),
    "fori": lambda h, w, *_: aot.fori_loop(0, 3, lambda i, c: jnp.sin(c * w), h),
    "while": lambda h, w, *_: by_while(h, w),
    "rows": lambda h, w, *_: by_rows(h, w),
    "jit": lambda h, w, *_: jax.jit(lambda h, w: jnp.cos(h) * w)(h, w),
    "function": lambda h, w, *_: block(h, w),
    "reference": lambda h, w, *_: by_reference(h, w),
    "module": lambda h, w, _, norm: norm(h * w),
    "traced hook": lambda h, *_: aot.on_cotangent(h, lambda ct: jnp.clip(ct, -LIMIT, LIMIT), traced=True),
    "hook": lambda h, *_: aot.on_cotangent(h, lambda ct: 0.5 * ct),
    "rule": lambda h, *_: doubled(h),
}


def drawn(seed):
    """Return a function of weights, rows, a module and a choice, made of pieces in a random order."""
    names = np.random.default_rng(seed).choice(list(PIECES), size=6)

    def loss(w, x, norm, decide):
        h = x * w
        for name in names:
            h = PIECES[name](h, w, decide, norm)
        return jnp.sum(jnp.sin(h) * h)

    return loss


def near(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)


class Choices:
    """Decides by numbers, and decides the same again when it is played."""

    def __init__(self, known=None):
        self.made, self._known = [], known if known is None else iter(known)

    def __call__(self, h):
        self.made.append(float(jnp.sum(h)) > 0.1 if self._known is None else next(self._known))
        return self.made[-1]


@pytest.mark.parametrize("sizes", [None, "dynamic"])
@pytest.mark.parametrize("seed", range(8))
def test_gradients_values_and_state_are_those_of_eager_jax(seed, sizes):
    loss = drawn(seed)
    choices = Choices()
    taped = aot.tape(lambda w, x, norm: loss(w, x, norm, choices), sizes=sizes)
    norms = [nnx.BatchNorm(3, rngs=nnx.Rngs(0)) for _ in range(2)]
    for step, rows in enumerate(ROWS):
        choices.made.clear()
        x = jax.random.normal(jax.random.key(step), (rows, 3))
        got = taped.value_and_grad(W, x, norms[0])
        played = Choices(choices.made)
        want = nnx.value_and_grad(lambda w, x, norm, played=played: loss(w, x, norm, played))(W, x, norms[1])
        near(got, want)
        near(*(nnx.state(norm, nnx.BatchStat) for norm in norms))
