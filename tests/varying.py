"""Functions of arguments whose sizes vary, and calls of each; and functions that need a size as a number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH = 4
W = jnp.asarray(np.random.default_rng(0).standard_normal((WIDTH, WIDTH)), jnp.float32) / 2


def drawn(shape, seed=0, high=0):
    rng = np.random.default_rng([seed, *shape])
    if high:
        return jnp.asarray(rng.integers(0, high, shape), jnp.int32)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def perceptron(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return jnp.mean(x**2)


def entropy(w, x, labels):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(jax.nn.relu(x @ w)), labels[:, None], axis=1)
    return -jnp.mean(chosen)


def recurrent(w, x, lengths):
    """A recurrent network over padded sequences, as users mask them."""

    def step(h, given):
        y, t = given
        new = jnp.tanh(h @ w + y)
        h = jnp.where((t < lengths)[:, None], new, h)
        return h, h

    start = jnp.zeros((x.shape[0], WIDTH))
    last, every = lax.scan(step, start, (jnp.swapaxes(x, 0, 1), jnp.arange(x.shape[1])))
    return jnp.mean(last**2) + jnp.mean(jnp.sin(every))


def attention(w, x):
    scores = jnp.einsum("bti,bsi->bts", x @ w, x) / WIDTH**0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ x
    return jnp.mean(mixed.reshape(-1, WIDTH)[:, 1] ** 2)


def embedding(params, tokens, groups):
    rows = params["table"][tokens] @ params["w"]
    return jnp.sum(jax.ops.segment_sum(rows, groups, num_segments=3) ** 2) / tokens.shape[0]


def normalised(w, x):
    h = x @ w
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-2)
    keep = jax.random.bernoulli(jax.random.key(3), 0.7, h.shape)
    return jnp.mean(jnp.where(keep, jax.nn.gelu(h), 0) ** 2)


def next_value(w, x, y):
    return jnp.mean((jnp.cumsum(x @ w, axis=1)[:, :-1] - y) ** 2) + jnp.max(x @ w)


def sequences(w, given):
    def states(x):
        return lax.scan(lambda h, y: (jnp.tanh(h @ w + y),) * 2, jnp.zeros(WIDTH), x)[1]

    return sum(jnp.mean(jax.jit(states)(x) ** 2) for x in given) / len(given)


def branching(w, x):
    h = x @ w
    for _ in range(5):
        if float(jnp.max(jnp.abs(h))) < 0.5:
            break
        h = jnp.sin(h @ w)
    return jnp.sum(h**2)


PERCEPTRON = [(W, W[0]), (W.T, W[1])]
TABLE = {"table": drawn((5, WIDTH)), "w": W}
SHIFTED = ((2, 5), (3, 8), (4, 2), (2, 20))


def of(*shapes, **more):
    return tuple(drawn(shape, **more) for shape in shapes)


LAWS = {
    "perceptron": (perceptron, PERCEPTRON, [of((n, WIDTH)) for n in (3, 5, 1, 17)]),
    "entropy": (entropy, W, [(drawn((n, WIDTH)), drawn((n,), high=WIDTH)) for n in (3, 5, 1, 17)]),
    "recurrent": (
        recurrent,
        W,
        [(drawn((b, t, WIDTH)), drawn((b,), high=t + 1)) for b, t in ((2, 5), (3, 8), (4, 2), (1, 20))],
    ),
    "attention": (attention, W, [of((b, t, WIDTH)) for b, t in ((2, 5), (3, 9), (4, 2), (1, 20))]),
    "embedding": (embedding, TABLE, [(drawn((n,), high=5), drawn((n,), 1, 3)) for n in (3, 5, 1, 17)]),
    "normalised": (normalised, W, [of((n, WIDTH)) for n in (3, 5, 2, 17)]),
    "next value": (next_value, W, [of((b, t, WIDTH), (b, t - 1, WIDTH)) for b, t in SHIFTED]),
    "branching": (branching, W, [of((n, WIDTH)) for n in (3, 5, 2, 17)]),
    "sequences": (sequences, W, [([drawn((n, WIDTH), n) for n in ns],) for ns in ((3, 7), (5, 2), (1, 11), (20, 4))]),
}


#: For each function that needs a size as a number: the function, and what it is told.
NEEDING = {
    "a Python loop": (
        lambda w, x: sum(jnp.sum(jnp.tanh(x[i] @ w)) for i in range(x.shape[0])),
        "'_DimExpr' object cannot be interpreted as an integer",
    ),
    "a comparison": (
        lambda w, x: jnp.mean(x @ w) if x.shape[0] > 4 else jnp.sum(x @ w),
        "Symbolic dimension comparison 's0' > '4' is inconclusive.",
    ),
    "a product": (
        lambda w, x: jnp.sum(jnp.sin(x.reshape(3, -1, WIDTH)) @ w),
        "Cannot divide evenly the sizes of shapes (s0, 4) and (3, -1, 4). The remainder mod(4*s0, - 12) should be 0.",
    ),
    "a transform": (
        lambda w, x: jnp.mean(jnp.abs(jnp.fft.fft((x @ w)[:, 0]))),
        "fft of [s0] needs the size as a number: it has no rule for padded arrays.",
    ),
}


def assert_close(got, want, rtol=2e-6):
    """Whether two trees have equal types, and numbers equal up to a part of the largest of each array."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype == jax.dtypes.float0:
            continue
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.max(jnp.abs(b), initial=0)))
