"""A Vision Transformer that classifies images: patches, a class token, pre-norm blocks written one after the other."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.layers import attention, init_linear, init_norm, linear, patches
from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]

CHANNELS = 3


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
    "tiny": Config(2, 8, 4, 16, 2, 2, 5),
    "small": Config(16, 64, 8, 192, 3, 6, 200),
    "medium": Config(32, 224, 16, 768, 12, 12, 1000),  # ViT-B/16
    "large": Config(128, 224, 16, 1024, 16, 24, 1000),  # ViT-L/16
}


def init(key: Array, config: Config) -> Params:
    """Draw the parameters; `blocks` is a list."""
    patch_key, token_key, position_key, head_key, block_key = jax.random.split(key, 5)
    tokens = 1 + (config.side // config.patch) ** 2
    return {
        "patch": init_linear(patch_key, config.patch**2 * CHANNELS, config.width),
        "class": 0.02 * jax.random.normal(token_key, (config.width,)),
        "position": 0.02 * jax.random.normal(position_key, (tokens, config.width)),
        "blocks": [init_block(k, config.width) for k in jax.random.split(block_key, config.layers)],
        "norm": init_norm(config.width),
        "head": init_linear(head_key, config.width, config.classes),
    }


def init_block(key: Array, width: int) -> Params:
    """Draw one block."""
    qkv, out, up, down = jax.random.split(key, 4)
    return {
        "attention_norm": init_norm(width),
        "qkv": init_linear(qkv, width, 3 * width),
        "out": init_linear(out, width, width),
        "mlp_norm": init_norm(width),
        "up": init_linear(up, width, 4 * width),
        "down": init_linear(down, 4 * width, width),
    }


def loss(params: Params, images: Array, labels: Array, config: Config, block: Wrap = identity) -> Array:
    """Mean cross-entropy in nats of `images` (rows, side, side, 3); `block` wraps each transformer block."""
    x = linear(params["patch"], patches(images, config.patch))
    first = jnp.broadcast_to(params["class"], (x.shape[0], 1, x.shape[-1]))
    x = jnp.concatenate([first, x], axis=1) + params["position"]
    layer = block(partial(transformer, heads=config.heads))
    for p in params["blocks"]:
        x = layer(p, x)
    logits = linear(params["head"], norm(params["norm"], x[:, 0]))
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1))


def transformer(p: Params, x: Array, heads: int) -> Array:
    """One pre-norm block on `x` (rows, tokens, width)."""
    x = x + attention(p, norm(p["attention_norm"], x), heads)
    return x + linear(p["down"], jax.nn.gelu(linear(p["up"], norm(p["mlp_norm"], x))))


def norm(p: Params, x: Array) -> Array:
    """Layer norm over the last axis."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-6) * p["scale"] + p["shift"]


def program(size: Size) -> Program:
    """One step on random images and labels."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 3)
    images = jax.random.normal(keys[1], (config.rows, config.side, config.side, CHANNELS))
    labels = jax.random.randint(keys[2], (config.rows,), 0, config.classes)
    tokens = 1 + (config.side // config.patch) ** 2
    title = f"{config.layers} blocks, width {config.width}, {tokens} tokens per image, batch {config.rows}"
    arguments = (init(keys[0], config), images, labels)
    return Program("vit", title, partial(loss, config=config), arguments, places=("block",), sizes=asdict(config))
