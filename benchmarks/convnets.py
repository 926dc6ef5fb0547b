"""Write three published convolutional networks so that each op bears the name of its layer.

VGG16 (Simonyan and Zisserman, 2014), U-Net (Ronneberger, Fischer and Brox, 2015, padded so that sides stay) and
ResNet-50 (He, Zhang, Ren and Sun, 2015), in float32 and at the sizes of the Checkmate paper. A layer runs in a
`jax.named_scope` of its name, and keeps for the backward what libraries keep: a ReLU its result, a batch norm its input
and two rows of statistics. Nothing here is meant to run: the parameters are shapes, taken down as layers ask for them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

LAYOUT = ("NHWC", "HWIO", "NHWC")
CLASSES = 1000
PIXEL_CLASSES = 21


@dataclass
class Layers:
    """Parameters by name; with `shapes` to fill in, each parameter is zeros, and its shape is taken down."""

    parameters: Mapping[str, Array] = field(default_factory=dict)
    shapes: dict[str, jax.ShapeDtypeStruct] | None = None

    def parameter(self, name: str, *shape: int) -> Array:
        """The parameter of a name."""
        if self.shapes is None:
            return self.parameters[name]
        self.shapes[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jnp.zeros(shape)

    def conv(self, name: str, x: Array, channels: int, side: int = 3, stride: int = 1) -> Array:
        """A convolution with a bias, padded so that only the stride makes the image smaller."""
        with jax.named_scope(name):
            return self._conv(name, x, channels, side, stride)

    def conv_relu(self, name: str, x: Array, channels: int) -> Array:
        """A convolution of 3 by 3, a bias and a ReLU, as one layer."""
        with jax.named_scope(name):
            return relu(self._conv(name, x, channels, 3, 1))

    def _conv(self, name: str, x: Array, channels: int, side: int, stride: int) -> Array:
        w = self.parameter(f"{name}.w", side, side, x.shape[-1], channels)
        y = lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=LAYOUT)
        return y + self.parameter(f"{name}.b", channels)

    def rise(self, name: str, x: Array, channels: int) -> Array:
        """A transposed convolution of 2 by 2 that doubles the sides."""
        with jax.named_scope(name):
            w = self.parameter(f"{name}.w", 2, 2, x.shape[-1], channels)
            return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=LAYOUT)

    def norm(self, name: str, x: Array, shortcut: Array | None = None, bend: bool = True) -> Array:
        """Batch norm, then what a residual block adds and a ReLU, where they follow."""
        with jax.named_scope(name):
            y = batch_norm(
                x, self.parameter(f"{name}.scale", x.shape[-1]), self.parameter(f"{name}.shift", x.shape[-1])
            )
            y = y if shortcut is None else y + shortcut
            return relu(y) if bend else y

    def dense(self, name: str, x: Array, width: int, bend: bool = False) -> Array:
        """A linear map of each image's numbers, and a ReLU where one follows."""
        with jax.named_scope(name):
            flat = x.reshape(x.shape[0], -1)
            y = flat @ self.parameter(f"{name}.w", flat.shape[-1], width) + self.parameter(f"{name}.b", width)
            return relu(y) if bend else y

    def pool(self, name: str, x: Array, side: int = 2) -> Array:
        """The largest of each window, at every second place."""
        with jax.named_scope(name):
            return lax.reduce_window(x, -jnp.inf, lax.max, (1, side, side, 1), (1, 2, 2, 1), "SAME")

    def cross_entropy(self, name: str, logits: Array, labels: Array) -> Array:
        """Mean cross-entropy in nats."""
        with jax.named_scope(name):
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))


@jax.custom_vjp
def relu(x: Array) -> Array:
    """The positive part; the backward reads the result."""
    return jnp.maximum(x, 0)


relu.defvjp(lambda x: (y := jnp.maximum(x, 0), y), lambda y, g: (jnp.where(y > 0, g, 0),))


@jax.custom_vjp
def batch_norm(x: Array, scale: Array, shift: Array) -> Array:
    """Normalise each channel over all pixels of the batch; the backward reads the input and the statistics."""
    return _normalise(x, scale, shift)[0]


def _normalise(x: Array, scale: Array, shift: Array) -> tuple[Array, tuple[Array, ...]]:
    mean = jnp.mean(x, axis=(0, 1, 2))
    rate = lax.rsqrt(jnp.mean(jnp.square(x), axis=(0, 1, 2)) - jnp.square(mean) + 1e-5)
    return (x - mean) * (rate * scale) + shift, (x, scale, mean, rate)


def _normalise_back(kept: tuple[Array, ...], g: Array) -> tuple[Array, Array, Array]:
    x, scale, mean, rate = kept
    normal = (x - mean) * rate
    d_shift, d_scale = jnp.sum(g, axis=(0, 1, 2)), jnp.sum(g * normal, axis=(0, 1, 2))
    pixels = x.size // x.shape[-1]
    return (g - (d_shift + normal * d_scale) / pixels) * (rate * scale), d_scale, d_shift


batch_norm.defvjp(_normalise, _normalise_back)


def vgg16(layers: Layers, images: Array, labels: Array) -> Array:
    """The loss of VGG16."""
    x = images
    for block, (convs, width) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], 1):
        for i in range(1, convs + 1):
            x = layers.conv_relu(f"block{block}_conv{i}", x, width)
        x = layers.pool(f"block{block}_pool", x)
    x = layers.dense("fc1", x, 4096, bend=True)
    x = layers.dense("fc2", x, 4096, bend=True)
    return layers.cross_entropy("loss", layers.dense("fc3", x, CLASSES), labels)


def unet(layers: Layers, images: Array, labels: Array) -> Array:
    """The loss of U-Net, of width 64 at full resolution and four halvings of the sides."""
    x, skips = images, []
    for level in range(4):
        x = layers.conv_relu(f"down{level}_conv1", x, 64 << level)
        x = layers.conv_relu(f"down{level}_conv2", x, 64 << level)
        skips.append(x)
        x = layers.pool(f"down{level}_pool", x)
    x = layers.conv_relu("middle_conv1", x, 1024)
    x = layers.conv_relu("middle_conv2", x, 1024)
    for level in reversed(range(4)):
        x = layers.rise(f"up{level}_rise", x, 64 << level)
        with jax.named_scope(f"up{level}_join"):
            x = jnp.concatenate([skips[level], x], axis=-1)
        x = layers.conv_relu(f"up{level}_conv1", x, 64 << level)
        x = layers.conv_relu(f"up{level}_conv2", x, 64 << level)
    return layers.cross_entropy("loss", layers.conv("head", x, PIXEL_CLASSES, side=1), labels)


def resnet50(layers: Layers, images: Array, labels: Array) -> Array:
    """The loss of ResNet-50; a norm, the sum and the ReLU behind it are one layer."""
    x = layers.norm("stem_norm", layers.conv("stem_conv", images, 64, side=7, stride=2))
    x = layers.pool("stem_pool", x, side=3)
    for stage, blocks in enumerate([3, 4, 6, 3], 1):
        for block in range(1, blocks + 1):
            x = _bottleneck(layers, f"stage{stage}_block{block}", x, 32 << stage, 2 if stage > 1 and block == 1 else 1)
    with jax.named_scope("mean"):
        x = jnp.mean(x, axis=(1, 2))
    return layers.cross_entropy("loss", layers.dense("fc", x, CLASSES), labels)


def _bottleneck(layers: Layers, name: str, x: Array, width: int, stride: int) -> Array:
    shortcut = x
    if x.shape[-1] != 4 * width:
        shortcut = layers.conv(f"{name}_conv0", x, 4 * width, side=1, stride=stride)
        shortcut = layers.norm(f"{name}_norm0", shortcut, bend=False)
    x = layers.norm(f"{name}_norm1", layers.conv(f"{name}_conv1", x, width, side=1, stride=stride))
    x = layers.norm(f"{name}_norm2", layers.conv(f"{name}_conv2", x, width))
    return layers.norm(f"{name}_norm3", layers.conv(f"{name}_conv3", x, 4 * width, side=1), shortcut)


@dataclass(frozen=True)
class Network:
    """A network, the images of its batch (rows, height, width), and whether it labels each pixel."""

    title: str
    loss: Callable[[Layers, Array, Array], Array]
    images: tuple[int, int, int]
    by_pixel: bool = False

    def arguments(self) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The shapes of parameters, images and labels."""
        images = jax.ShapeDtypeStruct((*self.images, 3), jnp.float32)
        labels = jax.ShapeDtypeStruct(self.images if self.by_pixel else self.images[:1], jnp.int32)
        shapes: dict[str, jax.ShapeDtypeStruct] = {}
        jax.eval_shape(lambda x, y: self.loss(Layers(shapes=shapes), x, y), images, labels)
        return shapes, images, labels

    def loss_of(self, parameters: Mapping[str, Array], images: Array, labels: Array) -> Any:
        """The loss as a function of arrays."""
        return self.loss(Layers(parameters), images, labels)


NETWORKS = {
    "vgg16": Network("VGG16, batch 256, 224x224", vgg16, (256, 224, 224)),
    "unet": Network("U-Net, batch 32, 416x608", unet, (32, 416, 608), by_pixel=True),
    "resnet50": Network("ResNet-50, batch 256, 224x224", resnet50, (256, 224, 224)),
}
