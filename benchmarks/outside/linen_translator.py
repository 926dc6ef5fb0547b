"""A translator in Flax Linen: an encoder, a decoder that attends to it, and smoothed labels.

Pre-norm blocks, fixed sinusoidal positions, one embedding for both languages and for the logits. Sentences are padded,
and padding is neither attended to nor counted.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.programs.program import Program, Size

PADDING = 0
SMOOTHING = 0.1  # probability that is spread over all other tokens


@dataclass(frozen=True)
class Config:
    """Pairs of sentences in a batch, tokens in each sentence, and the model."""

    rows: int
    time: int
    vocabulary: int
    width: int
    heads: int
    layers: int
    dropout: float = 0.1


SIZES: dict[Size, Config] = {
    "tiny": Config(2, 8, 16, 8, 2, 1),
    "small": Config(8, 64, 2048, 192, 6, 3),
}


class Feed(nn.Module):
    """A relu MLP with dropout, on the normalised stream."""

    config: Config

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Map `(rows, time, width)` to what is added to it."""
        hidden = nn.relu(nn.Dense(4 * self.config.width)(nn.LayerNorm()(x)))
        hidden = nn.Dropout(self.config.dropout, deterministic=False)(hidden)
        return nn.Dense(self.config.width)(hidden)


class Attend(nn.Module):
    """Attention of the normalised stream to itself, or to a memory."""

    config: Config

    @nn.compact
    def __call__(self, x: Array, memory: Array | None, mask: Array) -> Array:
        """Map `(rows, time, width)` to what is added to it; `mask` is `(rows, 1, queries, keys)`."""
        queries, rate = nn.LayerNorm()(x), self.config.dropout
        attention = nn.MultiHeadDotProductAttention(
            num_heads=self.config.heads, use_bias=False, dropout_rate=rate, deterministic=False
        )
        mixed = attention(queries, queries if memory is None else memory, mask=mask)
        return nn.Dropout(rate, deterministic=False)(mixed)


class Translator(nn.Module):
    """Encode one sentence, and predict each token of another from those before it."""

    config: Config

    @nn.compact
    def __call__(self, source: Array, target: Array) -> Array:
        """Logits `(rows, time, vocabulary)` of the target's tokens."""
        config = self.config
        embed = nn.Embed(config.vocabulary, config.width, embedding_init=nn.initializers.normal(config.width**-0.5))
        places = sinusoids(config.time, config.width)
        seen = nn.make_attention_mask(source != PADDING, source != PADDING)
        memory = config.width**0.5 * embed(source) + places
        for _ in range(config.layers):
            memory = memory + Attend(config)(memory, None, seen)
            memory = memory + Feed(config)(memory)
        memory = nn.LayerNorm()(memory)
        before = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
        earlier = nn.make_attention_mask(target != PADDING, target != PADDING) * nn.make_causal_mask(target)
        across = nn.make_attention_mask(target != PADDING, source != PADDING)
        x = config.width**0.5 * embed(before) + places
        for _ in range(config.layers):
            x = x + Attend(config)(x, None, earlier)
            x = x + Attend(config)(x, memory, across)
            x = x + Feed(config)(x)
        return embed.attend(nn.LayerNorm()(x))


def sinusoids(time: int, width: int) -> np.ndarray:
    """Sines and cosines of each position at wavelengths from 2 pi to 20,000 pi."""
    rates = 1e4 ** -np.linspace(0, 1, width // 2)
    angles = np.arange(time)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def loss(params: Any, source: Array, target: Array, key: Array, model: Translator) -> Array:
    """Mean cross-entropy in nats with smoothed labels, over the tokens that are no padding."""
    logits: Any = model.apply({"params": params}, source, target, rngs={"dropout": key})
    classes = model.config.vocabulary
    low = SMOOTHING / (classes - 1)
    wanted = nn.one_hot(target, classes) * (1 - SMOOTHING - low) + low
    counts = (target != PADDING).astype(jnp.float32)
    return -jnp.sum(counts * jnp.sum(wanted * nn.log_softmax(logits), axis=-1)) / jnp.sum(counts)


def sentences(key: Array, config: Config) -> Array:
    """Random tokens, half a row or more, then padding."""
    token_key, length_key = jax.random.split(key)
    tokens = jax.random.randint(token_key, (config.rows, config.time), 1, config.vocabulary)
    lengths = jax.random.randint(length_key, (config.rows, 1), config.time // 2, config.time + 1)
    return jnp.where(jnp.arange(config.time) < lengths, tokens, PADDING)


def program(size: Size) -> Program:
    """One step on random pairs of sentences."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 5)
    model, source, target = Translator(config), sentences(keys[0], config), sentences(keys[1], config)
    params = jax.jit(model.init)({"params": keys[2], "dropout": keys[3]}, source, target)["params"]
    title = f"{config.layers} + {config.layers} Linen blocks, width {config.width}, batch {config.rows}x{config.time}"
    arguments = (params, source, target, keys[4])
    return Program("linen-translator", title, partial(loss, model=model), arguments, sizes=asdict(config))
