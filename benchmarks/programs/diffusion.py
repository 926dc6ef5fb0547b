"""One training step of a diffusion transformer: noise images by random amounts, and predict the noise.

Time and label steer every block through adaptive layer norm: they give the scale and the shift of each norm, and the
gate on what each branch adds.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.layers import attention, init_linear, linear, patches
from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]

CHANNELS = 4  # of a latent image
STEPS = 1000  # of the noising chain
FREQUENCIES = 128  # of the embedding of time
UNLABELLED = 0.1  # share of images that hide their label, for guidance without a classifier


@dataclass(frozen=True)
class Config:
    """Images of the batch, their side and that of a patch in pixels, and the sizes of the transformer."""

    rows: int
    side: int
    patch: int
    width: int
    heads: int
    layers: int
    classes: int


SIZES: dict[Size, Config] = {
    "tiny": Config(4, 4, 2, 16, 2, 2, 3),
    "small": Config(16, 16, 2, 128, 4, 6, 100),
    "medium": Config(32, 32, 2, 768, 12, 12, 1000),  # DiT-B/2
    "large": Config(64, 32, 2, 1152, 16, 28, 1000),  # DiT-XL/2
}


def init(key: Array, config: Config) -> Params:
    """Draw the parameters; `blocks` is a list, and the last row of `label` stands for a hidden label."""
    keys: Any = jax.random.split(key, 8)
    width, pixels = config.width, config.patch**2 * CHANNELS
    return {
        "patch": init_linear(keys[0], pixels, width),
        "position": 0.5 * jax.random.normal(keys[1], ((config.side // config.patch) ** 2, width)),
        "time": [init_linear(keys[2], 2 * FREQUENCIES, width), init_linear(keys[3], width, width)],
        "label": 0.5 * jax.random.normal(keys[4], (config.classes + 1, width)),
        "blocks": [init_block(k, width) for k in jax.random.split(keys[5], config.layers)],
        "modulation": init_linear(keys[6], width, 2 * width),
        "head": init_linear(keys[7], width, pixels),
    }


def init_block(key: Array, width: int) -> Params:
    """Draw one block; `modulation` is as if trained a while, for at its usual start of zero a block does nothing."""
    qkv, out, up, down, modulation = jax.random.split(key, 5)
    return {
        "modulation": init_linear(modulation, width, 6 * width),
        "qkv": init_linear(qkv, width, 3 * width),
        "out": init_linear(out, width, width),
        "up": init_linear(up, width, 4 * width),
        "down": init_linear(down, 4 * width, width),
    }


def loss(params: Params, images: Array, labels: Array, key: Array, config: Config, block: Wrap = identity) -> Array:
    """Mean squared error of the predicted noise; `images` is (rows, side, side, 4), `block` wraps each block.

    `key` draws the time and the noise of each image, and which labels are hidden.
    """
    time_key, noise_key, label_key = jax.random.split(key, 3)
    times = jax.random.randint(time_key, labels.shape, 0, STEPS)
    noise = jax.random.normal(noise_key, images.shape, images.dtype)
    hidden = jax.random.bernoulli(label_key, UNLABELLED, labels.shape)
    kept = jnp.cumprod(1.0 - jnp.linspace(1e-4, 0.02, STEPS))[times, None, None, None]  # share of the image's variance
    noisy = jnp.sqrt(kept).astype(images.dtype) * images + jnp.sqrt(1.0 - kept).astype(images.dtype) * noise
    predicted = denoise(params, noisy, times, jnp.where(hidden, config.classes, labels), config, block)
    return jnp.mean(jnp.square(predicted - noise))


def denoise(params: Params, images: Array, times: Array, labels: Array, config: Config, block: Wrap) -> Array:
    """Predict the noise in each image."""
    x = linear(params["patch"], patches(images, config.patch)) + params["position"]
    first, second = params["time"]
    time = linear(second, jax.nn.silu(linear(first, waves(times).astype(x.dtype))))
    steer = jax.nn.silu(time + params["label"][labels])
    layer = block(partial(transformer, heads=config.heads))
    for p in params["blocks"]:
        x = layer(p, x, steer)
    shift, scale = jnp.split(linear(params["modulation"], steer)[:, None], 2, axis=-1)
    return images_of(linear(params["head"], norm(x) * (1 + scale) + shift), config.patch)


def waves(times: Array) -> Array:
    """Cosines and sines of the times at geometric frequencies: (rows, 2 * FREQUENCIES)."""
    angles = times[:, None] * jnp.exp(-jnp.log(10000.0) * jnp.arange(FREQUENCIES) / FREQUENCIES)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def images_of(flat: Array, size: int) -> Array:
    """Lay patches out as images again."""
    rows, count, _ = flat.shape
    n = round(count**0.5)
    laid = flat.reshape(rows, n, n, size, size, CHANNELS).transpose(0, 1, 3, 2, 4, 5)
    return laid.reshape(rows, n * size, n * size, CHANNELS)


def transformer(p: Params, x: Array, steer: Array, heads: int) -> Array:
    """One block on `x` (rows, tokens, width), steered by `steer` (rows, width)."""
    shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(linear(p["modulation"], steer)[:, None], 6, axis=-1)
    x = x + gate1 * attention(p, norm(x) * (1 + scale1) + shift1, heads)
    return x + gate2 * linear(p["down"], jax.nn.gelu(linear(p["up"], norm(x) * (1 + scale2) + shift2)))


def norm(x: Array) -> Array:
    """Layer norm over the last axis, without parameters."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6)


def program(size: Size) -> Program:
    """One step on random latent images and labels."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 4)
    images = jax.random.normal(keys[1], (config.rows, config.side, config.side, CHANNELS))
    labels = jax.random.randint(keys[2], (config.rows,), 0, config.classes)
    tokens = (config.side // config.patch) ** 2
    title = f"{config.layers} blocks, width {config.width}, {tokens} tokens per image, batch {config.rows}"
    arguments, bound = (init(keys[0], config), images, labels, keys[3]), partial(loss, config=config)
    return Program("diffusion", title, bound, arguments, places=("block",), sizes=asdict(config))
