"""Numerics: sorting, indexing, transforms, decompositions, and number types other than float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from corpus.program import integers, normal, program


@program(
    "Sums and products along an axis, then a sort by value.",
    lambda: (normal(300, 6), normal(301, 6)),
    argnums=(0, 1),
)
def cumulative_and_sorted(x, weight):
    return (
        jnp.sum(jnp.sort(jnp.cumsum(jnp.sin(x))) * weight)
        + jnp.sum(jnp.cumprod(1 + x**2))
        + jnp.sum(jax.lax.cumlogsumexp(x))
    )


@program("A sort of keys that carries values along.", lambda: (normal(302, 6), normal(303, 6)), argnums=(0, 1))
def sort_with_values(keys, values):
    keys, values = jax.lax.sort((keys, values), num_keys=1)
    return jnp.sum(jnp.tanh(values[:3]) * keys[3:])


@program(
    "A gather at some places and a scatter into others.",
    lambda: (normal(304, 5), normal(305, 3), integers(306, 3, below=5)),
    argnums=(0, 1),
)
def gather_and_scatter(x, y, places):
    taken = jnp.sin(x)[places] * y
    return jnp.sum(x.at[places].add(taken) ** 2) + jnp.sum(jnp.exp(x).at[places[:2]].mul(2.0, unique_indices=False))


@program("The largest entries and their places.", lambda: (normal(307, 2, 5), normal(308, 5)), argnums=(0, 1))
def largest_entries(x, weight):
    values, places = jax.lax.top_k(jnp.sin(x), 2)
    return jnp.sum(values**2 * weight[places])


@program("A filter in the frequency domain.", lambda: (normal(309, 8), normal(310, 5)), argnums=(0, 1))
def fourier_filter(signal, gains):
    return jnp.sum(jnp.fft.irfft(jnp.fft.rfft(jnp.tanh(signal)) * gains.astype(jnp.complex64), 8) ** 2)


@program(
    "The log density of a Gaussian by Cholesky factor.",
    lambda: (normal(311, 3, 3), normal(312, 3)),
    argnums=(0, 1),
)
def gaussian_by_cholesky(root, x):
    factor = jnp.linalg.cholesky(root @ root.T + jnp.eye(3))
    white = jax.scipy.linalg.solve_triangular(factor, x, lower=True)
    return -0.5 * jnp.sum(white**2) - jnp.sum(jnp.log(jnp.diag(factor)))


@program("A linear solve and a log determinant.", lambda: (normal(313, 3, 3), normal(314, 3)), argnums=(0, 1))
def linear_solve(matrix, target):
    matrix = jnp.tanh(matrix) + 3 * jnp.eye(3)
    return jnp.sum(jnp.linalg.solve(matrix, target) ** 2) + jnp.linalg.slogdet(matrix)[1]


@program(
    "A contraction of three tensors.",
    lambda: (normal(315, 2, 3), normal(316, 3, 4), normal(317, 2, 4, 2)),
    argnums=(0, 1, 2),
)
def contraction(a, b, c):
    return jnp.sum(jnp.sin(jnp.einsum("ij,jk,ikl->il", a, b, c)))


@program(
    "Products of matrices in batches, with a transpose between.",
    lambda: (normal(318, 2, 3, 4), normal(319, 2, 4, 3)),
    argnums=(0, 1),
)
def batched_products(a, b):
    product = jnp.tanh(a @ b)
    return jnp.sum(jnp.matmul(product, jnp.swapaxes(product, -1, -2)) ** 2)


@program(
    "Complex weights under a real loss.",
    lambda: (jax.lax.complex(normal(320, 3, 3), normal(321, 3, 3)), normal(322, 3)),
)
def complex_weights(matrix, x):
    phase = jnp.exp(1j * x.astype(jnp.complex64))
    return jnp.sum(jnp.abs(jnp.sin(matrix @ phase)) ** 2)


@program(
    "Float64 weights with one float32 leaf among them.",
    lambda: (
        {"wide": normal(323, 3, 3, dtype=np.float64), "narrow": normal(324, 3)},
        normal(325, 3, dtype=np.float64),
    ),
    rtol=1e-10,
    atol=1e-11,
    tags="x64",
)
def float64_weights(weights, x):
    return jnp.sum(jnp.exp(jnp.sin(weights["wide"] @ x)) * jnp.cos(weights["narrow"]).astype(jnp.float64))


@program(
    "A scan in float64 with an int64 counter.",
    lambda: (normal(326, 3, dtype=np.float64), normal(327, 4, 3, dtype=np.float64)),
    argnums=(0, 1),
    rtol=1e-10,
    atol=1e-11,
    tags="x64 scan",
)
def float64_scan(x, rows):
    def step(carry, row):
        count, h = carry
        return (count + 1, jnp.sin(h * row) + h), None

    (count, last), _ = jax.lax.scan(step, (jnp.int64(0), x), rows)
    return jnp.sum(last**2) * count.astype(jnp.float64)


@program(
    "The log of a sum of exponentials, by hand, shifted by its largest.",
    lambda: (normal(328, 3, 4, scale=3.0),),
)
def log_sum_exp(x):
    top = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    return jnp.sum(jnp.log(jnp.sum(jnp.exp(x - top), axis=-1)) + top[:, 0])


@program("Sums over segments, as in a graph network.", lambda: (normal(329, 6, 2), integers(330, 6, below=3)))
def segment_sums(edges, owner):
    nodes = jax.ops.segment_sum(jnp.tanh(edges), owner, num_segments=3)
    return jnp.sum((nodes[owner] * edges) ** 2)


@program(
    "A window cut out and written back at places known only at run time.",
    lambda: (normal(331, 6), normal(332, 2), jnp.int32(2)),
    argnums=(0, 1),
)
def dynamic_windows(x, patch, start):
    window = jax.lax.dynamic_slice(jnp.sin(x), (start,), (2,)) * patch
    return jnp.sum(jax.lax.dynamic_update_slice(x, window, (start + 1,)) ** 2)


@program("Arrays padded, rolled, tiled, reversed and laid out anew.", lambda: (normal(333, 2, 3),))
def moved_about(x):
    y = jnp.roll(jnp.pad(jnp.sin(x), ((1, 0), (0, 1))), 1, axis=1)
    z = jnp.concatenate([jnp.flip(y, 0), jnp.tile(x, (1, 2))[:, :4]], axis=0)
    return jnp.sum(z.T.reshape(-1) ** 3) + jnp.sum(jnp.broadcast_to(x[:, :1], (2, 5)) * 2)


@program("Arrays without a single element.", lambda: (jnp.zeros((0, 3)), normal(334, 3)), argnums=(0, 1))
def empty_arrays(nothing, x):
    return jnp.sum(jnp.sin(nothing) @ x) + jnp.sum(x**2)


@program(
    "Functions with awkward derivatives: erf, gamma, digamma, atan2, powers.",
    lambda: (normal(335, 4),),
    rtol=5e-4,
)
def special_functions(x):
    y = 1.5 + x**2
    return jnp.sum(jax.scipy.special.erf(x) + jax.scipy.special.gammaln(y) + jnp.arctan2(x, y) + y**x + jnp.cbrt(y))
