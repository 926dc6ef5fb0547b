"""A convolutional variational autoencoder of images, deep and residual, trained on the evidence lower bound.

A stage is a few bottleneck units at one resolution. Average pooling leads from stage to stage in the encoder, nearest
neighbours in the decoder; between them stands a latent vector, drawn from the Gaussian that the encoder gives.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.layers import init_conv, init_linear
from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]

CHANNELS = 3
# Biases sum what comes back from every pixel, and bfloat16 rounds these long sums.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}


@dataclass(frozen=True)
class Config:
    """Images of the batch and their side in pixels, channels of each stage (finest first), units per stage, latents."""

    rows: int
    side: int
    widths: tuple[int, ...]
    units: int
    latents: int

    @property
    def coarse(self) -> tuple[int, int, int]:
        """Shape of the features in the coarsest stage."""
        side = self.side // 2 ** (len(self.widths) - 1)
        return side, side, self.widths[-1]


SIZES: dict[Size, Config] = {
    "tiny": Config(2, 8, (8, 8), 1, 3),
    "small": Config(8, 64, (32, 64, 128, 128), 2, 128),
    "medium": Config(4, 256, (128, 256, 256, 512, 512, 512), 4, 1024),
    "large": Config(64, 256, (128, 256, 256, 512, 512, 512), 4, 1024),
}


def init(key: Array, config: Config) -> Params:
    """Draw the parameters; `encoder` and `decoder` are lists of stages in the order of use."""
    keys: Any = jax.random.split(key, 6)
    widths, stages = config.widths, len(config.widths)
    features = config.coarse[0] * config.coarse[1] * config.coarse[2]
    down = zip(jax.random.split(keys[0], stages), [widths[0], *widths], widths, strict=False)
    up = zip(jax.random.split(keys[1], stages), [widths[-1], *widths[::-1]], widths[::-1], strict=False)
    return {
        "inward": init_conv(keys[2], 3, CHANNELS, widths[0]),
        "encoder": [init_stage(k, a, b, config.units) for k, a, b in down],
        "posterior": init_linear(keys[3], features, 2 * config.latents),
        "prior": init_linear(keys[4], config.latents, features),
        "decoder": [init_stage(k, a, b, config.units) for k, a, b in up],
        "outward": init_conv(keys[5], 3, widths[0], CHANNELS),
    }


def init_stage(key: Array, channels_in: int, channels_out: int, units: int) -> Params:
    """Draw the convolution that changes the number of channels, and the units; a unit adds little at first."""
    key, *keys = jax.random.split(key, units + 1)
    return {"mix": init_conv(key, 1, channels_in, channels_out), "units": [init_unit(k, channels_out) for k in keys]}


def init_unit(key: Array, channels: int) -> list[Params]:
    """Draw four convolutions, the inner two on half of the channels."""
    half = channels // 2
    shapes = [(1, channels, half), (3, half, half), (3, half, half), (1, half, channels)]
    return [init_conv(k, *shape) for k, shape in zip(jax.random.split(key, 4), shapes, strict=True)]


def loss(params: Params, images: Array, key: Array, config: Config, block: Wrap = identity) -> Array:
    """Mean negative evidence bound in nats per image of `images` (rows, side, side, 3) in 0..1.

    `key` draws the latents, and `block` wraps each stage of the encoder and of the decoder.
    """
    step = block(stage)
    mean, log_variance = encode(params, images, step)
    noise = jax.random.normal(key, mean.shape, mean.dtype)
    logits = decode(params, mean + jnp.exp(0.5 * log_variance) * noise, config.coarse, step)
    wrong = jnp.sum(jax.nn.softplus(logits) - images * logits, axis=(1, 2, 3))
    divergence = 0.5 * jnp.sum(jnp.exp(log_variance) + mean * mean - 1.0 - log_variance, axis=-1)
    return jnp.mean(wrong + divergence)


def encode(params: Params, images: Array, step: Wrap) -> tuple[Array, Array]:
    """Mean and log variance of the latents of each image, both (rows, latents)."""
    x = conv(params["inward"], 2.0 * images - 1.0)
    for i, p in enumerate(params["encoder"]):
        x = step(p, x if i == 0 else halve(x))
    flat = jax.nn.gelu(x).reshape(x.shape[0], -1)
    mean, log_variance = jnp.split(flat @ params["posterior"]["w"] + params["posterior"]["b"], 2, axis=-1)
    return mean, log_variance


def decode(params: Params, latents: Array, shape: tuple[int, ...], step: Wrap) -> Array:
    """Logits of each colour of each pixel; `shape` is that of the coarsest features."""
    x = (latents @ params["prior"]["w"] + params["prior"]["b"]).reshape(-1, *shape)
    for i, p in enumerate(params["decoder"]):
        x = step(p, x if i == 0 else double(x))
    return conv(params["outward"], jax.nn.gelu(x))


def stage(p: Params, x: Array) -> Array:
    """Change the number of channels, then add what each unit says."""
    x = conv(p["mix"], x)
    for unit in p["units"]:
        y = x
        for layer in unit:
            y = conv(layer, jax.nn.gelu(y))
        x = x + y
    return x


def conv(p: Params, x: Array) -> Array:
    """Convolve images (rows, height, width, channels) and keep their side."""
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=layout) + p["b"]


def halve(x: Array) -> Array:
    """Average each square of 2x2 pixels."""
    rows, height, width, channels = x.shape
    return jnp.mean(x.reshape(rows, height // 2, 2, width // 2, 2, channels), axis=(2, 4))


def double(x: Array) -> Array:
    """Repeat each pixel in a square of 2x2."""
    rows, height, width, channels = x.shape
    return jax.image.resize(x, (rows, 2 * height, 2 * width, channels), "nearest")


def program(size: Size) -> Program:
    """One step on random images."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 3)
    images = jax.random.uniform(keys[1], (config.rows, config.side, config.side, CHANNELS))
    title = (
        f"{len(config.widths)} stages of {config.units} units each way, {config.latents} latents, "
        f"images {config.side}x{config.side}, batch {config.rows}"
    )
    return Program(
        name="vae",
        title=title,
        loss=partial(loss, config=config),
        arguments=(init(keys[0], config), images, keys[2]),
        places=("block",),
        sizes=asdict(config),
        tolerance=TOLERANCE,
    )
