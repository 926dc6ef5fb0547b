"""A Llama of HuggingFace's transformers 4, the last with Flax, trained from random weights.

A language model, `FlaxLlamaForCausalLM` as its authors wrote it: rotary positions, root-mean-square norms, gated MLPs,
keys and values shared by pairs of heads.
"""

import logging
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from transformers import FlaxLlamaForCausalLM, LlamaConfig

from benchmarks.programs.program import Program, Size


@dataclass(frozen=True)
class Config:
    """The batch, `rows` by `time` tokens, and the model."""

    rows: int
    time: int
    vocabulary: int
    width: int
    inner: int
    heads: int
    layers: int


SIZES: dict[Size, Config] = {
    "tiny": Config(2, 8, 16, 8, 16, 2, 1),
    "small": Config(8, 96, 4096, 192, 512, 6, 4),
}


def loss(params: Any, tokens: Array, mask: Array, model: Any) -> Array:
    """Mean cross-entropy in nats of the next token, where `mask` is one."""
    logits = model(tokens, attention_mask=mask, params=params, train=True).logits[:, :-1]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
    counts = mask[:, 1:].astype(picked.dtype)
    return -jnp.sum(picked * counts) / jnp.sum(counts)


def program(size: Size) -> Program:
    """One step on random tokens, of which the last rows have less than the first."""
    config = SIZES[size]
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns that its Flax models are the last
    shape = LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=config.inner,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads // 2,
        max_position_embeddings=config.time,
    )
    model: Any = FlaxLlamaForCausalLM(shape, input_shape=(1, config.time), seed=0)
    tokens = jax.random.randint(jax.random.key(1), (config.rows, config.time), 0, config.vocabulary)
    lengths = jnp.linspace(config.time, config.time // 2, config.rows).astype(jnp.int32)
    mask = (jnp.arange(config.time) < lengths[:, None]).astype(jnp.int32)
    title = f"{config.layers} Llama blocks, width {config.width}, batch {config.rows}x{config.time}"
    arguments = (model.params, tokens, mask)
    return Program("transformers-llama", title, partial(loss, model=model), arguments, sizes=asdict(config))
