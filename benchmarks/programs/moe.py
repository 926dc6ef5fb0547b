"""A language model whose blocks send each token to two of many experts, each with room for so many tokens.

Routing is that of GShard: a softmax over experts, the best two with their gates, places in each expert's buffer given
in the order of tokens (first choices before second ones), and one-hot products that fill the buffers and read them
back. A token that finds a buffer full passes by on the residual stream. A balancing loss keeps the experts evenly busy.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]

CHOICES = 2  # experts per token
BALANCE = 0.01  # weight of the balancing loss
# A token whose second and third best experts are close goes to another one after a rounding.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.2}


@dataclass(frozen=True)
class Config:
    """Sequences of the batch and their length, sizes of the model, and `slack`: buffer room over an even share."""

    rows: int
    context: int
    vocabulary: int
    width: int
    heads: int
    layers: int
    experts: int
    hidden: int
    slack: float = 1.25

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that one expert takes."""
        return int(self.slack * CHOICES * self.context / self.experts)


SIZES: dict[Size, Config] = {
    "tiny": Config(2, 16, 32, 16, 2, 2, 4, 16),
    "small": Config(8, 128, 2048, 128, 4, 4, 8, 256),
    "medium": Config(2, 1024, 32000, 768, 12, 8, 8, 2048),
    "large": Config(8, 1024, 32000, 1024, 16, 16, 16, 2816),
}


def init(key: Array, config: Config) -> Params:
    """Draw the parameters; `blocks` is a list."""
    embed_key, position_key, head_key, block_key = jax.random.split(key, 4)
    return {
        "embed": jax.random.normal(embed_key, (config.vocabulary, config.width)),
        "position": 0.1 * jax.random.normal(position_key, (config.context, config.width)),
        "blocks": [init_block(k, config) for k in jax.random.split(block_key, config.layers)],
        "norm": jnp.ones(config.width),
        "head": init_matrix(head_key, config.width, config.vocabulary),
    }


def init_block(key: Array, config: Config) -> Params:
    """Draw one block, its experts stacked on the first axis; what adds to the residual stream shrinks with depth."""
    qkv, out, router, gate, up, down = jax.random.split(key, 6)
    width, hidden, experts, inward = config.width, config.hidden, config.experts, (2 * config.layers) ** -0.5
    return {
        "attention_norm": jnp.ones(width),
        "qkv": init_matrix(qkv, width, 3 * width),
        "out": inward * init_matrix(out, width, width),
        "mlp_norm": jnp.ones(width),
        "router": init_matrix(router, width, experts),
        "gate": init_matrix(gate, experts, width, hidden),
        "up": init_matrix(up, experts, width, hidden),
        "down": inward * init_matrix(down, experts, hidden, width),
    }


def init_matrix(key: Array, *shape: int) -> Array:
    """Draw a matrix, or a stack of them, that keeps the size of what it maps."""
    return jax.random.normal(key, shape) * shape[-2] ** -0.5


def loss(params: Params, tokens: Array, config: Config, block: Wrap = identity) -> Array:
    """Mean cross-entropy in nats of the next token, plus the balancing loss.

    `tokens` is (rows, context + 1), and `block` wraps each block.
    """
    step = block(partial(transformer, config=config))
    x, balance = params["embed"][tokens[:, :-1]] + params["position"], 0.0
    for p in params["blocks"]:
        x, more = step(p, x)
        balance += more
    logits = norm(params["norm"], x) @ params["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return BALANCE * balance - jnp.mean(picked)


def transformer(p: Params, x: Array, config: Config) -> tuple[Array, Array]:
    """One block on `x` (rows, context, width): attention, then the experts; also its balancing loss."""
    x = x + attention(p, norm(p["attention_norm"], x), config.heads)
    mixed, balance = experts(p, norm(p["mlp_norm"], x), config.capacity)
    return x + mixed, balance


def attention(p: Params, x: Array, heads: int) -> Array:
    """Causal self-attention."""
    rows, time, width = x.shape
    q, k, v = jnp.split((x @ p["qkv"]).reshape(rows, time, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    causal = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, time, width) @ p["out"]


def experts(p: Params, x: Array, capacity: int) -> tuple[Array, Array]:
    """Send each token to its experts, run these on their buffers (experts, rows, capacity, width), mix the results."""
    combine, balance = route(x @ p["router"], capacity)
    dispatch = (combine > 0).astype(x.dtype)
    buffers = jnp.einsum("btec,btd->ebcd", dispatch, x)
    hidden = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", buffers, p["gate"]))
    hidden = hidden * jnp.einsum("ebcd,edf->ebcf", buffers, p["up"])
    answers = jnp.einsum("ebcf,efd->ebcd", hidden, p["down"])
    return jnp.einsum("btec,ebcd->btd", combine, answers), balance


def route(logits: Array, capacity: int) -> tuple[Array, Array]:
    """Gates of each token (rows, tokens, experts, capacity), nonzero at its places; and the balancing loss."""
    rows, time, count = logits.shape
    probabilities = jax.nn.softmax(logits, axis=-1)
    gates, chosen = lax.top_k(probabilities, CHOICES)
    gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    picks = jax.nn.one_hot(chosen, count, dtype=jnp.int32)  # (rows, tokens, choices, experts)
    queue = picks.transpose(0, 2, 1, 3).reshape(rows, CHOICES * time, count)  # first choices before second ones
    place = (jnp.cumsum(queue, axis=1) - 1).reshape(rows, CHOICES, time, count).transpose(0, 2, 1, 3)
    place = jnp.sum(place * picks, axis=-1)  # (rows, tokens, choices); what is `capacity` or more finds no room
    slots = jax.nn.one_hot(place, capacity, dtype=logits.dtype)
    combine = jnp.einsum("btk,btke,btkc->btec", gates, picks.astype(logits.dtype), slots)
    share = jnp.mean(picks[:, :, 0].astype(logits.dtype), axis=1)  # of first choices, by expert
    return combine, count * jnp.mean(jnp.sum(share * jnp.mean(probabilities, axis=1), axis=-1))


def norm(scale: Array, x: Array) -> Array:
    """Root-mean-square norm over the last axis."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def program(size: Size) -> Program:
    """One step on random tokens."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 2)
    tokens = jax.random.randint(keys[1], (config.rows, config.context + 1), 0, config.vocabulary)
    title = (
        f"{config.layers} blocks, width {config.width}, {config.experts} experts of {config.hidden}, "
        f"batch {config.rows}x{config.context}"
    )
    return Program(
        name="moe",
        title=title,
        loss=partial(loss, config=config),
        arguments=(init(keys[0], config), tokens),
        places=("block",),
        sizes=asdict(config),
        tolerance=TOLERANCE,
    )
