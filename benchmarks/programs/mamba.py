"""A byte-level language model of selective state-space blocks, as in Mamba, its recurrence an associative scan."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs import text
from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]

VOCABULARY = 256  # one token per byte


@dataclass(frozen=True)
class Config:
    """Rows of text, their length, width of the stream, blocks, numbers of state per channel, taps of the convolution.

    Blocks work at twice the width (`inner`); the step sizes pass through `rank` numbers.
    """

    rows: int
    context: int
    width: int
    layers: int
    state: int
    taps: int = 4

    @property
    def inner(self) -> int:
        """Channels inside a block."""
        return 2 * self.width

    @property
    def rank(self) -> int:
        """Numbers that the step sizes of a block are made from."""
        return -(-self.width // 16)


SIZES: dict[Size, Config] = {
    "tiny": Config(rows=2, context=12, width=8, layers=2, state=4),
    "small": Config(rows=4, context=128, width=128, layers=4, state=8),
    "medium": Config(rows=1, context=1024, width=1024, layers=8, state=16),
    "large": Config(rows=2, context=1024, width=1024, layers=12, state=16),
}


def init(key: Array, config: Config) -> Params:
    """Draw the parameters; the embedding is the head as well."""
    embed_key, *keys = jax.random.split(key, config.layers + 1)
    return {
        "embed": config.width**-0.5 * jax.random.normal(embed_key, (VOCABULARY, config.width)),
        "blocks": [init_block(k, config) for k in keys],
        "norm": jnp.ones(config.width),
    }


def init_block(key: Array, config: Config) -> Params:
    """Draw one block: decay rates 1, 2, ... in every channel, step sizes log-uniform from 0.001 to 0.1."""
    width, inner, rank, state = config.width, config.inner, config.rank, config.state
    keys: Any = jax.random.split(key, 6)
    delta = jnp.exp(jax.random.uniform(keys[4], (inner,), minval=jnp.log(0.001), maxval=jnp.log(0.1)))
    return {
        "norm": jnp.ones(width),
        "inward": width**-0.5 * jax.random.normal(keys[0], (width, 2 * inner)),
        "taps": config.taps**-0.5 * jax.random.normal(keys[1], (config.taps, inner)),
        "taps_bias": jnp.zeros(inner),
        "select": inner**-0.5 * jax.random.normal(keys[2], (inner, rank + 2 * state)),
        "delta": rank**-0.5 * jax.random.normal(keys[3], (rank, inner)),
        "delta_bias": delta + jnp.log(-jnp.expm1(-delta)),  # softplus of this is delta
        "log_decay": jnp.tile(jnp.log(jnp.arange(1.0, state + 1.0)), (inner, 1)),
        "skip": jnp.ones(inner),
        "outward": (2 * config.layers * inner) ** -0.5 * jax.random.normal(keys[5], (inner, width)),
    }


def norm(scale: Array, x: Array) -> Array:
    """Root-mean-square norm over the last axis."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def convolve(taps: Array, x: Array) -> Array:
    """Causal convolution in time, each channel by itself: `taps` is (taps, inner), `x` (rows, time, inner)."""
    return lax.conv_general_dilated(
        x,
        taps[:, None, :],
        window_strides=(1,),
        padding=[(len(taps) - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=taps.shape[1],
    )


def recur(decay: Array, drive: Array) -> Array:
    """All states of `h[t] = decay[t] * h[t - 1] + drive[t]`, with time on axis 1."""

    def join(early: tuple[Array, Array], late: tuple[Array, Array]) -> tuple[Array, Array]:
        return early[0] * late[0], late[0] * early[1] + late[1]

    return lax.associative_scan(join, (decay, drive), axis=1)[1]


def select(p: Params, x: Array) -> Array:
    """The state-space model on `x` (rows, time, inner): step, input and output weights depend on the input."""
    rank, state = p["delta"].shape[0], p["log_decay"].shape[1]
    low, write, read = jnp.split(x @ p["select"], [rank, rank + state], axis=-1)
    delta = jax.nn.softplus(low @ p["delta"] + p["delta_bias"])
    decay = jnp.exp(-delta[..., None] * jnp.exp(p["log_decay"]))  # (rows, time, inner, state)
    drive = (delta * x)[..., None] * write[..., None, :]
    return jnp.einsum("btcn,btn->btc", recur(decay, drive), read) + p["skip"] * x


def mix(p: Params, x: Array) -> Array:
    """One block: norm, convolution, selective recurrence, gate; added to the stream (rows, time, width)."""
    inside, gate = jnp.split(norm(p["norm"], x) @ p["inward"], 2, axis=-1)
    inside = jax.nn.silu(convolve(p["taps"], inside) + p["taps_bias"])
    return x + (select(p, inside) * jax.nn.silu(gate)) @ p["outward"]


def loss(params: Params, batch: Array, block: Wrap = identity) -> Array:
    """Mean cross-entropy in nats of the next byte; `batch` holds `context + 1` bytes per row, `block` wraps blocks."""
    tokens, targets = batch[:, :-1], batch[:, 1:]
    x = params["embed"][tokens]
    for p in params["blocks"]:
        x = block(mix)(p, x)
    logits = norm(params["norm"], x) @ params["embed"].T
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def program(size: Size) -> Program:
    """One step on real text."""
    config = SIZES[size]
    batch = text.batch(text.load(megabytes=1.0), config.rows, config.context, seed=0)
    width = f"width {config.width}, state {config.state}"
    title = f"{config.layers} selective state-space blocks, {width}, batch {config.rows}x{config.context}"
    arguments = (init(jax.random.key(0), config), batch)
    return Program("mamba", title, loss, arguments, places=("block",), sizes=asdict(config))
