"""Layers that several programs are made of, in plain JAX; what differs stands in each program's file."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Params = dict[str, Any]


def init_linear(key: Array, fan_in: int, fan_out: int) -> Params:
    """Draw a linear map with a bias."""
    return {"w": jax.random.normal(key, (fan_in, fan_out)) * fan_in**-0.5, "b": jnp.zeros(fan_out)}


def linear(p: Params, x: Array) -> Array:
    """A linear map of the last axis."""
    return x @ p["w"] + p["b"]


def init_norm(width: int) -> Params:
    """Start a layer norm as the identity."""
    return {"scale": jnp.ones(width), "shift": jnp.zeros(width)}


def patches(images: Array, size: int) -> Array:
    """Cut each image into squares and flatten them: (rows, patches, size * size * channels)."""
    rows, side, _, channels = images.shape
    n = side // size
    cut = images.reshape(rows, n, size, n, size, channels).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(rows, n * n, size * size * channels)


def attention(p: Params, x: Array, heads: int) -> Array:
    """Self-attention of every token to every token."""
    rows, tokens, width = x.shape
    q, k, v = jnp.split(linear(p["qkv"], x).reshape(rows, tokens, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
    return linear(p["out"], mixed.reshape(rows, tokens, width))


def init_conv(key: Array, side: int, channels_in: int, channels_out: int) -> Params:
    """Draw a convolution with kernel (side, side, in, out) and a bias."""
    w = jax.random.normal(key, (side, side, channels_in, channels_out)) * (side**2 * channels_in) ** -0.5
    return {"w": w, "b": jnp.zeros(channels_out)}
