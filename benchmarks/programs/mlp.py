"""A multilayer perceptron with layer norm, on a batch of features: the smallest program worth measuring."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.program import Program, Size, Wrap, identity


@dataclass(frozen=True)
class Config:
    """Rows of the batch, features in, width and number of hidden layers, classes out."""

    rows: int
    features: int
    width: int
    layers: int
    classes: int


SIZES: dict[Size, Config] = {
    "tiny": Config(8, 6, 16, 2, 4),
    "small": Config(2048, 256, 512, 6, 64),
    "medium": Config(16384, 1024, 4096, 8, 1000),
    "large": Config(65536, 1024, 4096, 12, 1000),
}


def init(key: Array, config: Config) -> list[dict[str, Array]]:
    """Draw the layers; the last one gives the logits."""
    widths = [config.features, *[config.width] * config.layers, config.classes]
    keys = jax.random.split(key, len(widths) - 1)
    layers = [
        {"w": jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b), "scale": jnp.ones(b)}
        for k, a, b in zip(keys, widths[:-1], widths[1:], strict=True)
    ]
    del layers[-1]["scale"]
    return layers


def hidden(layer: dict[str, Array], x: Array) -> Array:
    """One layer: linear, normalised over features, gelu."""
    x = x @ layer["w"] + layer["b"]
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return jax.nn.gelu(centred * lax.rsqrt(variance + 1e-5) * layer["scale"])


def loss(layers: list[dict[str, Array]], features: Array, labels: Array, block: Wrap = identity) -> Array:
    """Mean cross-entropy in nats; `block` wraps each hidden layer."""
    x, last = features, layers[-1]
    for layer in layers[:-1]:
        x = block(hidden)(layer, x)
    logits = x @ last["w"] + last["b"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1))


def program(size: Size) -> Program:
    """One step on random features and labels."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 3)
    features = jax.random.normal(keys[1], (config.rows, config.features))
    labels = jax.random.randint(keys[2], (config.rows,), 0, config.classes)
    title = f"{config.layers} hidden layers of {config.width}, batch {config.rows}"
    arguments = (init(keys[0], config), features, labels)
    return Program("mlp", title, loss, arguments, places=("block",), sizes=asdict(config))
