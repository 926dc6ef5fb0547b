"""A byte-level language model of stacked LSTM layers, trained by truncated backpropagation through time.

Each layer is its own scan over time. The state is carried from one window of text to the next: it comes in as an
argument, and the new one goes out beside the loss.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs import text
from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]
State = tuple[Array, Array]  # output and memory, each (rows, width)

VOCABULARY = 256  # one token per byte


@dataclass(frozen=True)
class Config:
    """Windows in a batch, their length, size of the byte vectors, width and number of layers, dropout between them."""

    rows: int
    context: int
    embedding: int
    width: int
    layers: int
    dropout: float = 0.2


SIZES: dict[Size, Config] = {
    "tiny": Config(rows=2, context=12, embedding=6, width=8, layers=2),
    "small": Config(rows=32, context=100, embedding=64, width=256, layers=2),
    "medium": Config(rows=64, context=256, embedding=256, width=1024, layers=2),
    "large": Config(rows=256, context=512, embedding=256, width=2048, layers=2),
}


def init(key: Array, config: Config) -> Params:
    """Draw the parameters; forget gates start open."""
    embed_key, head_key, *keys = jax.random.split(key, config.layers + 2)
    inputs = [config.embedding, *[config.width] * (config.layers - 1)]
    return {
        "embed": 0.1 * jax.random.normal(embed_key, (VOCABULARY, config.embedding)),
        "layers": [init_layer(k, size, config.width) for k, size in zip(keys, inputs, strict=True)],
        "head": config.width**-0.5 * jax.random.normal(head_key, (config.width, VOCABULARY)),
        "head_bias": jnp.zeros(VOCABULARY),
    }


def init_layer(key: Array, inputs: int, width: int) -> Params:
    """Draw one layer; the four gates lie side by side: input, forget, candidate, output."""
    input_key, recurrent_key = jax.random.split(key)
    return {
        "input": inputs**-0.5 * jax.random.normal(input_key, (inputs, 4 * width)),
        "recurrent": width**-0.5 * jax.random.normal(recurrent_key, (width, 4 * width)),
        "bias": jnp.zeros(4 * width).at[width : 2 * width].set(1.0),
    }


def cell(layer: Params, state: State, x: Array) -> tuple[State, Array]:
    """One step of one layer: `x` is (rows, inputs), the output (rows, width)."""
    h, c = state
    gates = x @ layer["input"] + h @ layer["recurrent"] + layer["bias"]
    enter, forget, candidate, leave = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
    h = jax.nn.sigmoid(leave) * jnp.tanh(c)
    return (h, c), h


def dropout(key: Array, x: Array, rate: float) -> Array:
    """Zero a `rate` of the entries and scale the rest."""
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0)


def loss(
    params: Params, batch: Array, states: list[State], key: Array, rate: float, body: Wrap = identity
) -> tuple[Array, list[State]]:
    """Mean cross-entropy in nats of the next byte, and the states after the window.

    `batch` holds `context + 1` bytes per row. `body` wraps each layer's step in time.
    """
    tokens, targets = batch[:, :-1].T, batch[:, 1:].T  # time comes first, for the scans
    x, ends = params["embed"][tokens], []
    keys = jax.random.split(key, len(states))
    for layer, state, layer_key in zip(params["layers"], states, keys, strict=True):
        end, x = lax.scan(body(partial(cell, layer)), state, x)
        x = dropout(layer_key, x, rate)
        ends.append(end)
    logits = x @ params["head"] + params["head_bias"]
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked), ends


def program(size: Size) -> Program:
    """One step on real text, from an empty state."""
    config = SIZES[size]
    batch = text.batch(text.load(megabytes=1.0), config.rows, config.context, seed=0)
    empty = jnp.zeros((config.rows, config.width))
    states = [(empty, empty) for _ in range(config.layers)]
    title = f"{config.layers} LSTM layers of {config.width}, batch {config.rows}x{config.context}"
    arguments = (init(jax.random.key(0), config), batch, states, jax.random.key(1))
    function = partial(loss, rate=config.dropout)
    return Program("lstm", title, function, arguments, has_aux=True, places=("body",), sizes=asdict(config))
