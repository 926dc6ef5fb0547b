"""A residual convolutional network for images: bottleneck blocks, and batch norm that keeps statistics.

In training, batch norm uses the mean and variance of the batch; its running ones are an argument, and their new values
come back beside the loss.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.program import Program, Size, Wrap, identity

Tree = dict[str, Any]

CHANNELS = 3
# The gradient is a small rest of large terms of either sign, and each batch norm spreads a rounding over the batch.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.3}
EXPANSION = 4  # a block's output is this many times wider than its 3x3 convolution
MOMENTUM = 0.9  # of the running statistics


@dataclass(frozen=True)
class Config:
    """Images of the batch and their side in pixels, width of the first stage, blocks of each stage, classes."""

    rows: int
    side: int
    width: int
    stages: tuple[int, ...]
    classes: int

    def blocks(self) -> list[tuple[int, int, int]]:
        """List (channels in, width, stride) of each block; each stage but the first halves the image."""
        result, channels = [], self.width
        for stage, depth in enumerate(self.stages):
            width = self.width * 2**stage
            for i in range(depth):
                result.append((channels, width, 2 if stage and not i else 1))
                channels = EXPANSION * width
        return result


SIZES: dict[Size, Config] = {
    "tiny": Config(4, 16, 4, (1, 1), 5),
    "small": Config(32, 64, 32, (2, 2, 2, 2), 200),
    "medium": Config(64, 224, 64, (3, 4, 6, 3), 1000),
    "large": Config(256, 224, 64, (3, 4, 6, 3), 1000),  # ResNet-50
}


def init(key: Array, config: Config) -> tuple[Tree, Tree]:
    """Draw the parameters, and start the running statistics; both hold a list of `blocks`."""
    stem_key, head_key, block_key = jax.random.split(key, 3)
    plan = config.blocks()
    keys = jax.random.split(block_key, len(plan))
    blocks = [init_block(k, *sizes) for k, sizes in zip(keys, plan, strict=True)]
    features = EXPANSION * plan[-1][1]
    params = {
        "stem": init_conv(stem_key, 7, CHANNELS, config.width),
        "norm": init_norm(config.width),
        "blocks": blocks,
        "head": {"w": jax.random.normal(head_key, (features, config.classes)) * features**-0.5},
    }
    params["head"]["b"] = jnp.zeros(config.classes)
    stats = {
        "norm": init_stats(params["norm"]),
        "blocks": [{name: init_stats(p[name]) for name in p if name.startswith("norm")} for p in blocks],
    }
    return params, stats


def init_block(key: Array, channels: int, width: int, stride: int) -> Tree:
    """Draw one block; it has a `short` convolution where its shortcut changes shape.

    The last norm starts small, and not at the usual zero, which would hide the gradient of all before it.
    """
    keys: Any = jax.random.split(key, 4)
    wide = EXPANSION * width
    p = {
        "conv1": init_conv(keys[0], 1, channels, width),
        "norm1": init_norm(width),
        "conv2": init_conv(keys[1], 3, width, width),
        "norm2": init_norm(width),
        "conv3": init_conv(keys[2], 1, width, wide),
        "norm3": init_norm(wide, 0.2),
    }
    if channels != wide or stride != 1:
        p |= {"short": init_conv(keys[3], 1, channels, wide), "norm_short": init_norm(wide)}
    return p


def init_conv(key: Array, side: int, channels_in: int, channels_out: int) -> Array:
    """Draw a convolution kernel (side, side, in, out), scaled for relu."""
    return jax.random.normal(key, (side, side, channels_in, channels_out)) * (2 / (side**2 * channels_in)) ** 0.5


def init_norm(channels: int, scale: float = 1.0) -> Tree:
    """Start a batch norm as a normalisation to a standard deviation."""
    return {"scale": jnp.full(channels, scale), "shift": jnp.zeros(channels)}


def init_stats(norm: Tree) -> Tree:
    """Start the running statistics of a batch norm."""
    return {"mean": jnp.zeros_like(norm["shift"]), "variance": jnp.ones_like(norm["shift"])}


def loss(params: Tree, stats: Tree, images: Array, labels: Array, config: Config, block: Wrap = identity) -> Any:
    """Mean cross-entropy in nats of `images` (rows, side, side, 3), and new statistics; `block` wraps each block."""
    x, stem = batch_norm(params["norm"], stats["norm"], conv(params["stem"], images, stride=2))
    x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    new = []
    for p, s, (_, _, stride) in zip(params["blocks"], stats["blocks"], config.blocks(), strict=True):
        x, block_stats = block(partial(bottleneck, stride=stride))(p, s, x)
        new.append(block_stats)
    logits = jnp.mean(x, axis=(1, 2)) @ params["head"]["w"] + params["head"]["b"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return -jnp.mean(picked), {"norm": stem, "blocks": new}


def bottleneck(p: Tree, s: Tree, x: Array, stride: int) -> tuple[Array, Tree]:
    """One block: 1x1, 3x3 and 1x1 convolutions beside a shortcut; also the new statistics of its norms."""
    new = {}
    y, new["norm1"] = batch_norm(p["norm1"], s["norm1"], conv(p["conv1"], x))
    y, new["norm2"] = batch_norm(p["norm2"], s["norm2"], conv(p["conv2"], jax.nn.relu(y), stride))
    y, new["norm3"] = batch_norm(p["norm3"], s["norm3"], conv(p["conv3"], jax.nn.relu(y)))
    if "short" in p:
        x, new["norm_short"] = batch_norm(p["norm_short"], s["norm_short"], conv(p["short"], x, stride))
    return jax.nn.relu(x + y), new


def conv(kernel: Array, x: Array, stride: int = 1) -> Array:
    """Convolve images (rows, height, width, channels), padded to keep the side at stride 1."""
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=layout)


def batch_norm(p: Tree, s: Tree, x: Array) -> tuple[Array, Tree]:
    """Normalise each channel over the batch and its pixels, and move the running statistics towards them."""
    mean = jnp.mean(x, axis=(0, 1, 2))
    variance = jnp.var(x, axis=(0, 1, 2))
    new = {
        "mean": MOMENTUM * s["mean"] + (1 - MOMENTUM) * mean,
        "variance": MOMENTUM * s["variance"] + (1 - MOMENTUM) * variance,
    }
    return (x - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["shift"], new


def program(size: Size) -> Program:
    """One step on random images and labels."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 3)
    params, stats = init(keys[0], config)
    images = jax.random.normal(keys[1], (config.rows, config.side, config.side, CHANNELS))
    labels = jax.random.randint(keys[2], (config.rows,), 0, config.classes)
    title = (
        f"{sum(config.stages)} blocks, width {config.width}, images {config.side}x{config.side}, batch {config.rows}"
    )
    return Program(
        name="resnet",
        title=title,
        loss=partial(loss, config=config),
        arguments=(params, stats, images, labels),
        has_aux=True,
        places=("block",),
        sizes=asdict(config),
        tolerance=TOLERANCE,
    )
