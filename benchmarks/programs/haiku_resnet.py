"""Haiku's own pre-activation ResNet with batch norm, on a batch of small images.

The network is `hk.nets.ResNet` as its authors wrote it; only the stem is the 3x3 one that small images get, and the
head starts random instead of zero, so that every parameter has a gradient in the first step.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.programs.program import Program, Size


@dataclass(frozen=True)
class Config:
    """Images per batch, their side, classes, and the four groups of residual blocks."""

    rows: int
    side: int
    classes: int
    blocks: tuple[int, ...]
    channels: tuple[int, ...]
    bottleneck: bool


SIZES: dict[Size, Config] = {
    "tiny": Config(16, 16, 4, (1, 1, 1, 1), (16, 16, 32, 32), False),
    "small": Config(32, 32, 100, (2, 2, 2, 2), (32, 64, 128, 256), False),  # ResNet-18 of half the width
    "medium": Config(256, 64, 200, (3, 4, 6, 3), (256, 512, 1024, 2048), True),
    "large": Config(1024, 64, 200, (3, 4, 6, 3), (256, 512, 1024, 2048), True),  # ResNet-50
}

#: A random ResNet is ill-conditioned. Measured at "small": noise of 1e-6 in the arguments moves the gradient by 5e-6,
#: or by up to 1% (it seems that then a relu flips); rounding them to bfloat16, with float32 inside, by a fifth.
TOLERANCE = {"float32": 2e-2, "bfloat16": 0.4}


def network(config: Config) -> hk.TransformedWithState:
    """The ResNet as a pair of functions; `apply` maps images to logits and the next state."""
    stem = config.channels[0] // 4 if config.bottleneck else config.channels[0]

    def forward(images: Array) -> Array:
        resnet = hk.nets.ResNet(
            config.blocks,
            config.classes,
            resnet_v2=True,
            bottleneck=config.bottleneck,
            channels_per_group=config.channels,
            use_projection=(config.bottleneck, True, True, True),
            logits_config={"w_init": hk.initializers.VarianceScaling()},
            initial_conv_config={"output_channels": stem, "kernel_shape": 3, "stride": 1},
        )
        return resnet(images, is_training=True)

    return hk.transform_with_state(forward)


def loss(params: Any, state: Any, images: Array, labels: Array, apply: Any) -> tuple[Array, Any]:
    """Mean cross-entropy in nats, and the moving averages of batch norm after the step."""
    logits, state = apply(params, state, None, images)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)), state


def program(size: Size) -> Program:
    """One step on random images and labels."""
    config = SIZES[size]
    net = network(config)
    init_key, image_key, label_key = jax.random.split(jax.random.key(0), 3)
    images = jax.random.normal(image_key, (config.rows, config.side, config.side, 3))
    labels = jax.random.randint(label_key, (config.rows,), 0, config.classes)
    params, state = jax.jit(net.init)(init_key, images)
    kind = "bottleneck" if config.bottleneck else "basic"
    title = f"{sum(config.blocks)} {kind} residual blocks, batch {config.rows} of side {config.side}"
    arguments = (params, state, images, labels)
    loss_of = partial(loss, apply=net.apply)
    sizes = asdict(config)
    return Program("haiku-resnet", title, loss_of, arguments, has_aux=True, sizes=sizes, tolerance=TOLERANCE)
