"""A vision transformer from Equinox's own layers, written for one image and vmapped over the batch.

Pre-norm blocks of attention and an MLP with dropout, a class token, learned positions. The model is partitioned
into its arrays, which are the parameters, and the static rest.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.programs.program import Program, Size, Wrap, identity


@dataclass(frozen=True)
class Config:
    """Images per batch, their side and that of a patch, classes, and the model."""

    rows: int
    side: int
    patch: int
    classes: int
    width: int
    heads: int
    layers: int
    dropout: float = 0.1


SIZES: dict[Size, Config] = {
    "tiny": Config(3, 8, 4, 4, 16, 2, 2),
    "small": Config(24, 32, 4, 100, 192, 3, 4),
    "medium": Config(32, 224, 16, 1000, 768, 12, 12),
    "large": Config(128, 224, 16, 1000, 1024, 16, 24),
}


class Block(eqx.Module):
    """Self-attention, then a gelu MLP, each on the normalised stream and added to it."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, config: Config, key: Array) -> None:
        attention, mlp = jax.random.split(key)
        width = config.width
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(config.heads, width, key=attention)
        self.mlp_norm = eqx.nn.LayerNorm(width)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, depth=1, activation=jax.nn.gelu, key=mlp)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(self, x: Array, key: Array) -> Array:
        """Map `(tokens, width)` to the same; `key` draws the dropout."""
        mixed, hidden = jax.random.split(key)
        y = jax.vmap(self.attention_norm)(x)
        x = x + self.dropout(self.attention(y, y, y), key=mixed)
        y = jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))
        return x + self.dropout(y, key=hidden)


class VisionTransformer(eqx.Module):
    """Patches to tokens, blocks, and a linear head on the class token."""

    embed: eqx.nn.Conv2d
    token: Array
    position: Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, config: Config, key: Array) -> None:
        embed, token, position, head, *blocks = jax.random.split(key, 4 + config.layers)
        patches = (config.side // config.patch) ** 2
        self.embed = eqx.nn.Conv2d(3, config.width, config.patch, stride=config.patch, key=embed)
        self.token = 0.02 * jax.random.normal(token, (1, config.width))
        self.position = 0.02 * jax.random.normal(position, (patches + 1, config.width))
        self.blocks = [Block(config, k) for k in blocks]
        self.norm = eqx.nn.LayerNorm(config.width)
        self.head = eqx.nn.Linear(config.width, config.classes, key=head)

    def __call__(self, image: Array, key: Array, wrap: Wrap) -> Array:
        """Logits `(classes,)` of one image `(3, side, side)`; `wrap` goes around each block."""
        patches = self.embed(image)
        x = jnp.concatenate([self.token, patches.reshape(patches.shape[0], -1).T]) + self.position
        for block, block_key in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            arrays, static = eqx.partition(block, eqx.is_array)
            x = wrap(partial(run, static))(arrays, x, block_key)
        return self.head(self.norm(x[0]))


def run(static: Block, arrays: Block, x: Array, key: Array) -> Array:
    """Put a block together again and apply it."""
    return eqx.combine(arrays, static)(x, key)


def loss(arrays: Any, images: Array, labels: Array, key: Array, static: Any, block: Wrap = identity) -> Array:
    """Mean cross-entropy in nats; each image draws its own dropout, and `block` wraps each block."""
    model = eqx.combine(arrays, static)
    keys = jax.random.split(key, images.shape[0])
    logits = jax.vmap(partial(model, wrap=block))(images, keys)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1))


def program(size: Size) -> Program:
    """One step on random images and labels."""
    config = SIZES[size]
    model_key, image_key, label_key, dropout_key = jax.random.split(jax.random.key(0), 4)
    arrays, static = eqx.partition(VisionTransformer(config, model_key), eqx.is_array)
    images = jax.random.normal(image_key, (config.rows, 3, config.side, config.side))
    labels = jax.random.randint(label_key, (config.rows,), 0, config.classes)
    title = f"{config.layers} Equinox blocks, width {config.width}, batch {config.rows} of side {config.side}"
    arguments = (arrays, images, labels, dropout_key)
    places = ("block",)
    return Program("equinox", title, partial(loss, static=static), arguments, places=places, sizes=asdict(config))
