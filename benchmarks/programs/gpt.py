"""A byte-level GPT in plain JAX, looped or unrolled.

Pre-norm blocks, causal attention with heads, a gelu MLP, learned positions, and dropout with explicit keys
after attention and after the MLP. Nothing here knows jointcut: it is the model that a user would bring.

`scan=True` keeps each block parameter stacked over layers and loops with `lax.scan`; `scan=False` keeps a
list of layers and writes the blocks one after the other. The two compute the same function of the same draws.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs import text
from benchmarks.programs.layers import init_norm
from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]

VOCABULARY = 256  # one token per byte


@dataclass(frozen=True)
class Config:
    """The sizes of a model, and how its layers are written."""

    layers: int = 6
    width: int = 128
    heads: int = 4
    context: int = 128
    dropout: float = 0.1
    tied: bool = True
    scan: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")


def init(key: Array, config: Config) -> Params:
    """Draw the parameters; blocks are stacked when `config.scan`, else listed."""
    embed_key, position_key, head_key, block_key = jax.random.split(key, 4)
    std = config.width**-0.5
    blocks = [init_block(k, config) for k in jax.random.split(block_key, config.layers)]
    params: Params = {
        "embed": std * jax.random.normal(embed_key, (VOCABULARY, config.width)),
        "position": std * jax.random.normal(position_key, (config.context, config.width)),
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks) if config.scan else blocks,
        "norm": init_norm(config.width),
    }
    if not config.tied:
        params["head"] = std * jax.random.normal(head_key, (config.width, VOCABULARY))
    return params


def init_block(key: Array, config: Config) -> Params:
    """Draw one block; projections into the residual stream shrink with depth, as in GPT-2."""
    width, std = config.width, config.width**-0.5
    inward = std * (2 * config.layers) ** -0.5
    qkv, out, up, down = jax.random.split(key, 4)
    return {
        "attention_norm": init_norm(width),
        "qkv": std * jax.random.normal(qkv, (width, 3 * width)),
        "out": inward * jax.random.normal(out, (width, width)),
        "mlp_norm": init_norm(width),
        "up": std * jax.random.normal(up, (width, 4 * width)),
        "up_bias": jnp.zeros(4 * width),
        "down": inward * jax.random.normal(down, (4 * width, width)),
        "down_bias": jnp.zeros(width),
    }


def loss(params: Params, batch: Array, key: Array, config: Config, block: Wrap = identity) -> Array:
    """Mean cross-entropy in nats of the next byte; `batch` holds `context + 1` bytes per row.

    `block` wraps each transformer block, which is also the body of the scan.
    """
    tokens, targets = batch[:, :-1], batch[:, 1:]
    logits = apply(params, tokens, key, config, block)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def apply(params: Params, tokens: Array, key: Array, config: Config, wrap: Wrap = identity) -> Array:
    """The logits of the next byte at every position."""

    def step(x: Array, layer: tuple[Params, Array]) -> tuple[Array, None]:
        return block(*layer, x, config), None

    step = wrap(step)
    keys = jax.random.split(key, config.layers)
    x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
    if config.scan:
        x, _ = lax.scan(step, x, (params["blocks"], keys))
    else:
        for layer, layer_key in zip(params["blocks"], keys, strict=True):
            x, _ = step(x, (layer, layer_key))
    head = params["embed"].T if config.tied else params["head"]
    return norm(params["norm"], x) @ head


def block(p: Params, key: Array, x: Array, config: Config) -> Array:
    """One transformer block: attention, then the MLP, each added to the stream."""
    attention_key, mlp_key = jax.random.split(key)
    mixed = attention(p, norm(p["attention_norm"], x), config.heads)
    x = x + dropout(attention_key, mixed, config.dropout)
    hidden = jax.nn.gelu(norm(p["mlp_norm"], x) @ p["up"] + p["up_bias"])
    return x + dropout(mlp_key, hidden @ p["down"] + p["down_bias"], config.dropout)


def attention(p: Params, x: Array, heads: int) -> Array:
    """Causal self-attention over `heads` heads."""
    batch, time, width = x.shape
    qkv = (x @ p["qkv"]).reshape(batch, time, 3, heads, width // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    causal = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return mixed.reshape(batch, time, width) @ p["out"]


def norm(p: Params, x: Array) -> Array:
    """Layer norm over the last axis."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-5) * p["scale"] + p["shift"]


def dropout(key: Array, x: Array, rate: float) -> Array:
    """Zero a `rate` of the entries and scale the rest; rate 0 is the identity."""
    if rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0)


SIZES: dict[Size, dict[str, int]] = {
    "tiny": {"layers": 2, "width": 16, "heads": 2, "context": 16, "rows": 2},
    "small": {"layers": 6, "width": 128, "heads": 4, "context": 128, "rows": 8},
    "medium": {"layers": 12, "width": 768, "heads": 12, "context": 1024, "rows": 4},  # GPT-2 small
    "large": {"layers": 24, "width": 1024, "heads": 16, "context": 1024, "rows": 16},
}


def of(name: str, config: Config, rows: int) -> Program:
    """A training step on real text."""
    parameters = init(jax.random.key(0), config)
    batch = text.batch(text.load(megabytes=1.0), rows, config.context, seed=0)
    sizes = asdict(config) | {"rows": rows}
    depth = f"{config.layers} blocks {'in a scan' if config.scan else 'unrolled'}"
    title = f"{depth}, width {config.width}, batch {rows}x{config.context}, dropout {config.dropout}"
    arguments = (parameters, batch, jax.random.key(1))
    return Program(name, title, partial(loss, config=config), arguments, places=("block",), sizes=sizes)


def scan(size: Size) -> Program:
    """A GPT that loops over its layers."""
    sizes = dict(SIZES[size])
    rows = sizes.pop("rows")
    return of("gpt-scan", Config(**sizes), rows)


def unrolled(size: Size) -> Program:
    """The same GPT, its layers written one after the other."""
    sizes = dict(SIZES[size])
    rows = sizes.pop("rows")
    return of("gpt-unrolled", Config(**sizes, scan=False), rows)
