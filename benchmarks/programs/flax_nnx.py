"""A ConvNeXt from Flax NNX's own layers, with drop path, on a batch of images.

The model is split into its graph, its parameters and the rest; the rest is the state of the random streams that
drop path reads and advances, so the loss takes it and hands it back as aux.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from benchmarks.programs.program import Program, Size


@dataclass(frozen=True)
class Config:
    """Images per batch, their side, classes, and the width and number of blocks of each stage."""

    rows: int
    side: int
    patch: int
    classes: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    drop_path: float


SIZES: dict[Size, Config] = {
    "tiny": Config(4, 16, 4, 4, (4, 8), (1, 1), 0.2),
    "small": Config(16, 64, 4, 100, (40, 80, 160, 320), (2, 2, 6, 2), 0.1),
    "medium": Config(64, 224, 4, 1000, (96, 192, 384, 768), (3, 3, 9, 3), 0.1),
    "large": Config(256, 224, 4, 1000, (96, 192, 384, 768), (3, 3, 9, 3), 0.1),
}


class Block(nnx.Module):
    """Depthwise 7x7 convolution, layer norm, gelu MLP, layer scale, drop path; added to the stream."""

    def __init__(self, width: int, drop: float, rngs: nnx.Rngs) -> None:
        self.depthwise = nnx.Conv(width, width, (7, 7), feature_group_count=width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.scale = nnx.Param(jnp.full(width, 0.1))
        self.drop = nnx.Dropout(drop, broadcast_dims=(1, 2, 3), rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Map `(rows, side, side, width)` to the same."""
        hidden = self.down(nnx.gelu(self.up(self.norm(self.depthwise(x)))))
        return x + self.drop(self.scale[...] * hidden)


class Stage(nnx.Module):
    """Shrink the image by `stride` into `width` channels, then apply the blocks."""

    def __init__(self, channels: int, width: int, stride: int, drops: list[float], rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(channels, rngs=rngs)
        window = (stride, stride)
        self.shrink = nnx.Conv(channels, width, window, strides=window, padding="VALID", rngs=rngs)
        self.blocks = nnx.List([Block(width, drop, rngs) for drop in drops])

    def __call__(self, x: Array) -> Array:
        """Map `(rows, side, side, channels)` to `(rows, side / stride, side / stride, width)`."""
        x = self.shrink(self.norm(x))
        for block in self.blocks:
            x = block(x)
        return x


class ConvNeXt(nnx.Module):
    """Stages, a global mean, and a linear head; drop path grows linearly with depth."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        total = sum(config.depths)
        drops = [config.drop_path * i / (total - 1) for i in range(total)]
        stages, channels, stride = [], 3, config.patch
        for width, depth in zip(config.widths, config.depths, strict=True):
            stages.append(Stage(channels, width, stride, drops[:depth], rngs))
            drops, channels, stride = drops[depth:], width, 2
        self.stages = nnx.List(stages)
        self.norm = nnx.LayerNorm(channels, rngs=rngs)
        self.head = nnx.Linear(channels, config.classes, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        """Map `(rows, side, side, 3)` to logits `(rows, classes)`."""
        x = images
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(jnp.mean(x, axis=(1, 2))))


def loss(params: Any, rest: Any, images: Array, labels: Array, graph: Any) -> tuple[Array, Any]:
    """Mean cross-entropy in nats, and the random streams after the draw."""
    model = nnx.merge(graph, params, rest, copy=True)  # its own streams, to advance
    logits = model(images)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return -jnp.mean(picked), nnx.split(model, nnx.Param, ...)[2]


def program(size: Size) -> Program:
    """One step on random images and labels."""
    config = SIZES[size]
    graph, params, rest = nnx.split(ConvNeXt(config, nnx.Rngs(0)), nnx.Param, ...)
    image_key, label_key = jax.random.split(jax.random.key(1))
    images = jax.random.normal(image_key, (config.rows, config.side, config.side, 3))
    labels = jax.random.randint(label_key, (config.rows,), 0, config.classes)
    title = f"ConvNeXt of depths {config.depths}, widths {config.widths}, batch {config.rows} of side {config.side}"
    arguments = (params, rest, images, labels)
    return Program("flax-nnx", title, partial(loss, graph=graph), arguments, has_aux=True, sizes=asdict(config))
