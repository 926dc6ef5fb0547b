"""A denoiser in Flax NNX: a U-Net of convolutions that is told how noisy its images are.

Residual blocks with group norm, shifted by an embedding of the noise level, and attention at the bottom; strided
convolutions on the way down, nearest-neighbour resizing on the way up, and concatenation across.
"""

from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from benchmarks.programs.program import Program, Size


@dataclass(frozen=True)
class Config:
    """Images in a batch, their side, channels of each stage, groups of channels that are normalised together."""

    rows: int
    side: int
    widths: tuple[int, ...]
    blocks: int
    groups: int
    heads: int
    dropout: float = 0.1


SIZES: dict[Size, Config] = {
    "tiny": Config(2, 8, (4, 8), 1, 2, 2),
    "small": Config(8, 32, (32, 64, 96), 1, 8, 4),
}


class Residual(nnx.Module):
    """Two normalised convolutions with dropout between them, shifted by the noise level."""

    def __init__(self, taken: int, given: int, level: int, config: Config, rngs: nnx.Rngs) -> None:
        self.first_norm = nnx.GroupNorm(taken, num_groups=config.groups, rngs=rngs)
        self.first = nnx.Conv(taken, given, (3, 3), rngs=rngs)
        self.shift = nnx.Linear(level, given, rngs=rngs)
        self.second_norm = nnx.GroupNorm(given, num_groups=config.groups, rngs=rngs)
        self.drop = nnx.Dropout(config.dropout, rngs=rngs)
        self.second = nnx.Conv(given, given, (3, 3), rngs=rngs)
        self.across = nnx.Conv(taken, given, (1, 1), rngs=rngs)

    def __call__(self, x: Array, level: Array) -> Array:
        """Map `(rows, side, side, taken)` to `(rows, side, side, given)`."""
        hidden = self.first(nnx.swish(self.first_norm(x))) + self.shift(nnx.swish(level))[:, None, None]
        hidden = self.second(self.drop(nnx.swish(self.second_norm(hidden))))
        return self.across(x) + hidden


class Mixing(nnx.Module):
    """Attention of all pixels to all pixels, added to the stream."""

    def __init__(self, width: int, config: Config, rngs: nnx.Rngs) -> None:
        self.norm = nnx.GroupNorm(width, num_groups=config.groups, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(config.heads, width, decode=False, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Map `(rows, side, side, width)` to the same."""
        rows, side, _, width = x.shape
        return x + self.attention(self.norm(x).reshape(rows, side * side, width)).reshape(x.shape)


class Denoiser(nnx.Module):
    """Predict the noise in images of three channels."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        first, level = config.widths[0], 4 * config.widths[0]
        residual = partial(Residual, level=level, config=config, rngs=rngs)
        self.level = nnx.Sequential(nnx.Linear(first, level, rngs=rngs), nnx.swish, nnx.Linear(level, level, rngs=rngs))
        self.enter = nnx.Conv(3, first, (3, 3), rngs=rngs)
        self.down, self.shrink, passed, width = nnx.List(), nnx.List(), [], first
        for given in config.widths:
            widths = [width, *[given] * config.blocks]
            self.down.append(nnx.List([residual(a, b) for a, b in pairwise(widths)]))
            self.shrink.append(nnx.Conv(given, given, (3, 3), strides=(2, 2), rngs=rngs))
            passed.append(given)
            width = given
        self.bottom = nnx.List([residual(width, width), residual(width, width)])
        self.mixing = Mixing(width, config, rngs)
        self.up = nnx.List()
        for given in reversed(passed):
            widths = [width + given, *[given] * config.blocks]
            self.up.append(nnx.List([residual(a, b) for a, b in pairwise(widths)]))
            width = given
        self.norm = nnx.GroupNorm(first, num_groups=config.groups, rngs=rngs)
        self.leave = nnx.Conv(first, 3, (3, 3), rngs=rngs)

    def __call__(self, images: Array, times: Array) -> Array:
        """The noise in `(rows, side, side, 3)`; `times` `(rows,)` in [0, 1] say how much there is."""
        level = self.level(waves(times, self.enter.out_features))
        x, passed = self.enter(images), []
        for blocks, shrink in zip(self.down, self.shrink, strict=True):
            for block in blocks:
                x = block(x, level)
            passed.append(x)
            x = shrink(x)
        first, second = self.bottom
        x = second(self.mixing(first(x, level)), level)
        for blocks, across in zip(self.up, reversed(passed), strict=True):
            x = jax.image.resize(x, (*across.shape[:3], x.shape[3]), "nearest")
            x = jnp.concatenate([x, across], axis=-1)
            for block in blocks:
                x = block(x, level)
        return self.leave(nnx.swish(self.norm(x)))


def waves(times: Array, width: int) -> Array:
    """Sines and cosines of `(rows,)` times at `width / 2` rates: `(rows, width)`."""
    angles = times[:, None] * jnp.geomspace(1.0, 1000.0, width // 2)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def loss(params: Any, rest: Any, images: Array, key: Array, graph: Any) -> tuple[Array, Any]:
    """Mean squared error of the predicted noise, and the random streams after the draw."""
    model = nnx.merge(graph, params, rest, copy=True)  # its own streams, to advance
    time_key, noise_key = jax.random.split(key)
    times, noise = jax.random.uniform(time_key, images.shape[:1]), jax.random.normal(noise_key, images.shape)
    angle = jnp.pi / 2 * times[:, None, None, None]
    predicted = model(jnp.cos(angle) * images + jnp.sin(angle) * noise, times)
    return jnp.mean(jnp.square(predicted - noise)), nnx.split(model, nnx.Param, ...)[2]


def program(size: Size) -> Program:
    """One step on random images."""
    config = SIZES[size]
    graph, params, rest = nnx.split(Denoiser(config, nnx.Rngs(0)), nnx.Param, ...)
    image_key, key = jax.random.split(jax.random.key(1))
    images = jax.random.normal(image_key, (config.rows, config.side, config.side, 3))
    title = f"U-Net of widths {config.widths}, batch {config.rows} of side {config.side}"
    arguments = (params, rest, images, key)
    return Program("nnx-denoiser", title, partial(loss, graph=graph), arguments, has_aux=True, sizes=asdict(config))
