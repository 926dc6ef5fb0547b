"""A U-Net that labels each pixel of an image: stages on the way down, and on the way up beside what they left.

Every stage is two convolutions, each with group norm and silu. Max pooling leads down, a transposed convolution up.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.layers import init_conv
from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]

CHANNELS = 3
LAYOUT = ("NHWC", "HWIO", "NHWC")
# Biases and norms sum what comes back from every pixel, and bfloat16 rounds these long sums.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}


@dataclass(frozen=True)
class Config:
    """Images of the batch and their side in pixels, width at full resolution, halvings of the side, classes, groups."""

    rows: int
    side: int
    width: int
    levels: int
    classes: int
    groups: int = 8


SIZES: dict[Size, Config] = {
    "tiny": Config(2, 8, 4, 1, 3, groups=2),
    "small": Config(4, 64, 32, 3, 21),
    "medium": Config(2, 512, 64, 4, 150),
    "large": Config(16, 512, 64, 4, 150),
}


def init(key: Array, config: Config) -> Params:
    """Draw the parameters: lists `down` and `up` of stages, finest first, and `middle` below them."""
    widths = [config.width * 2**level for level in range(config.levels + 1)]
    down_key, middle_key, up_key, rise_key, head_key = jax.random.split(key, 5)
    down_keys, up_keys, rise_keys = (jax.random.split(k, config.levels) for k in (down_key, up_key, rise_key))
    return {
        "down": [init_stage(k, a, b) for k, a, b in zip(down_keys, [CHANNELS, *widths], widths[:-1], strict=False)],
        "middle": init_stage(middle_key, widths[-2], widths[-1]),
        "rise": [init_conv(k, 2, b, a) for k, a, b in zip(rise_keys, widths[:-1], widths[1:], strict=True)],
        "up": [init_stage(k, 2 * a, a) for k, a in zip(up_keys, widths[:-1], strict=True)],
        "head": init_conv(head_key, 1, config.width, config.classes),
    }


def init_stage(key: Array, channels_in: int, channels_out: int) -> Params:
    """Draw the two convolutions of a stage and their norms."""
    first, second = jax.random.split(key)
    return {
        "conv1": init_conv(first, 3, channels_in, channels_out),
        "norm1": {"scale": jnp.ones(channels_out), "shift": jnp.zeros(channels_out)},
        "conv2": init_conv(second, 3, channels_out, channels_out),
        "norm2": {"scale": jnp.ones(channels_out), "shift": jnp.zeros(channels_out)},
    }


def loss(params: Params, images: Array, labels: Array, config: Config, block: Wrap = identity) -> Array:
    """Mean cross-entropy in nats per pixel; `labels` is (rows, side, side), and `block` wraps each stage."""
    step = block(partial(stage, groups=config.groups))
    x, skips = images, []
    for p in params["down"]:
        x = step(p, x)
        skips.append(x)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = step(params["middle"], x)
    for p, rise, skip in zip(params["up"][::-1], params["rise"][::-1], skips[::-1], strict=True):
        x = lax.conv_transpose(x, rise["w"], (2, 2), "SAME", dimension_numbers=LAYOUT) + rise["b"]
        x = step(p, jnp.concatenate([skip, x], axis=-1))
    logits = conv(params["head"], x)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))


def stage(p: Params, x: Array, groups: int) -> Array:
    """Convolve, normalise and bend, twice."""
    x = jax.nn.silu(group_norm(p["norm1"], conv(p["conv1"], x), groups))
    return jax.nn.silu(group_norm(p["norm2"], conv(p["conv2"], x), groups))


def conv(p: Params, x: Array) -> Array:
    """Convolve images (rows, height, width, channels) and keep their side."""
    return lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=LAYOUT) + p["b"]


def group_norm(p: Params, x: Array, groups: int) -> Array:
    """Normalise each image over its pixels and each group of its channels."""
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    mean = jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
    variance = jnp.var(grouped, axis=(1, 2, 4), keepdims=True)
    normal = (grouped - mean) * lax.rsqrt(variance + 1e-5)
    return normal.reshape(x.shape) * p["scale"] + p["shift"]


def program(size: Size) -> Program:
    """One step on random squares of 4x4 pixels, each of one label, painted in the colour of the label, with noise."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 4)
    squares = jax.random.randint(keys[1], (config.rows, config.side // 4, config.side // 4), 0, config.classes)
    labels = jnp.repeat(jnp.repeat(squares, 4, axis=1), 4, axis=2)
    colours = jax.random.normal(keys[2], (config.classes, CHANNELS))
    images = colours[labels] + 0.5 * jax.random.normal(keys[3], (*labels.shape, CHANNELS))
    title = f"{config.levels} levels, width {config.width}, images {config.side}x{config.side}, batch {config.rows}"
    return Program(
        name="unet",
        title=title,
        loss=partial(loss, config=config),
        arguments=(init(keys[0], config), images, labels),
        places=("block",),
        sizes=asdict(config),
        tolerance=TOLERANCE,
    )
