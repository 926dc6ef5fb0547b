"""A BERT-like encoder from Flax Linen's own layers, trained on masked tokens.

Post-norm blocks with padding masks and dropout; the head predicts only the masked positions and shares the
embedding, as in BERT. The layers are Linen's: the loss is `model.apply` and a cross-entropy.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.programs.program import Program, Size

MASK = 0  # the token that hides another one


@dataclass(frozen=True)
class Config:
    """The batch, `rows` by `time` tokens with `masked` hidden per row, and the model."""

    rows: int
    time: int
    masked: int
    vocabulary: int
    width: int
    heads: int
    layers: int
    dropout: float = 0.1


SIZES: dict[Size, Config] = {
    "tiny": Config(4, 32, 4, 64, 32, 4, 2),
    "small": Config(8, 128, 20, 8192, 256, 4, 4),
    "medium": Config(16, 512, 80, 30522, 768, 12, 12),  # BERT-base
    "large": Config(32, 512, 80, 30522, 1024, 16, 24),
}


class Block(nn.Module):
    """Self-attention, then a gelu MLP, each added to the stream and normalised."""

    config: Config

    @nn.compact
    def __call__(self, x: Array, mask: Array) -> Array:
        """Map `(rows, time, width)` to the same; `mask` is `(rows, 1, time, time)`."""
        rate, width = self.config.dropout, self.config.width
        mixed = nn.MultiHeadDotProductAttention(
            num_heads=self.config.heads, use_bias=False, dropout_rate=rate, deterministic=False
        )(x, mask=mask)
        x = nn.LayerNorm()(x + nn.Dropout(rate, deterministic=False)(mixed))
        hidden = nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(x)))
        return nn.LayerNorm()(x + nn.Dropout(rate, deterministic=False)(hidden))


class Bert(nn.Module):
    """Embeddings, blocks, and the head of the masked-language model."""

    config: Config

    @nn.compact
    def __call__(self, tokens: Array, valid: Array, positions: Array) -> Array:
        """Logits `(rows, masked, vocabulary)` at `positions`; `valid` is false on padding."""
        config = self.config
        token = nn.Embed(config.vocabulary, config.width, name="token")
        position = nn.Embed(config.time, config.width, name="position")
        x = nn.LayerNorm()(token(tokens) + position(jnp.arange(tokens.shape[1])))
        x = nn.Dropout(config.dropout, deterministic=False)(x)
        mask = nn.make_attention_mask(valid, valid, dtype=bool)
        for layer in range(config.layers):
            x = Block(config, name=f"block_{layer}")(x, mask)
        hidden = jnp.take_along_axis(x, positions[..., None], axis=1)
        hidden = nn.LayerNorm()(nn.gelu(nn.Dense(config.width)(hidden)))
        return token.attend(hidden) + self.param("bias", nn.initializers.zeros, (config.vocabulary,))


def loss(params: Any, batch: dict[str, Array], key: Array, model: Bert) -> Array:
    """Mean cross-entropy in nats of the hidden tokens; `key` draws the dropout."""
    inputs = (batch["tokens"], batch["valid"], batch["positions"])
    logits = model.apply({"params": params}, *inputs, rngs={"dropout": key})
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], axis=-1))


def draw(key: Array, config: Config) -> dict[str, Array]:
    """Random sentences of half to full length, with distinct positions of their first half hidden."""
    token_key, length_key, position_key = jax.random.split(key, 3)
    tokens = jax.random.randint(token_key, (config.rows, config.time), 1, config.vocabulary)
    lengths = jax.random.randint(length_key, (config.rows, 1), config.time // 2, config.time + 1)
    order = jnp.argsort(jax.random.uniform(position_key, (config.rows, config.time // 2)), axis=-1)
    positions = jnp.sort(order[:, : config.masked], axis=-1)
    return {
        "tokens": tokens.at[jnp.arange(config.rows)[:, None], positions].set(MASK),
        "valid": jnp.arange(config.time) < lengths,
        "positions": positions,
        "labels": jnp.take_along_axis(tokens, positions, axis=1),
    }


def program(size: Size) -> Program:
    """One step on random sentences."""
    config = SIZES[size]
    model, batch = Bert(config), draw(jax.random.key(0), config)
    init_keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    params = jax.jit(model.init)(init_keys, batch["tokens"], batch["valid"], batch["positions"])["params"]
    title = f"{config.layers} Linen blocks, width {config.width}, batch {config.rows}x{config.time}"
    arguments = (params, batch, jax.random.key(3))
    return Program("flax-linen", title, partial(loss, model=model), arguments, sizes=asdict(config))
