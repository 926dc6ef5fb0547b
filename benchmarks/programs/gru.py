"""An acoustic model: a deep GRU over frames of sound, its layers looped by a scan inside the scan over time."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Utterances in a batch, frames in each, filter bank channels, width and number of layers, phones to tell apart."""

    rows: int
    frames: int
    channels: int
    width: int
    layers: int
    phones: int


SIZES: dict[Size, Config] = {
    "tiny": Config(rows=2, frames=8, channels=5, width=8, layers=3, phones=4),
    "small": Config(rows=32, frames=80, channels=80, width=192, layers=4, phones=48),
    "medium": Config(rows=32, frames=400, channels=80, width=1024, layers=4, phones=9000),
    "large": Config(rows=128, frames=800, channels=80, width=1024, layers=8, phones=9000),
}


def init(key: Array, config: Config) -> Params:
    """Draw the parameters; those of the layers are stacked along their first axis."""
    encoder_key, layers_key, head_key = jax.random.split(key, 3)
    width = config.width
    return {
        "encoder": config.channels**-0.5 * jax.random.normal(encoder_key, (config.channels, width)),
        "layers": jax.vmap(lambda k: init_layer(k, width))(jax.random.split(layers_key, config.layers)),
        "norm": jnp.ones(width),
        "head": width**-0.5 * jax.random.normal(head_key, (width, config.phones)),
        "head_bias": jnp.zeros(config.phones),
    }


def init_layer(key: Array, width: int) -> Params:
    """Draw one layer; the three gates lie side by side: reset, update, candidate."""
    input_key, recurrent_key = jax.random.split(key)
    return {
        "norm": jnp.ones(width),
        "input": width**-0.5 * jax.random.normal(input_key, (width, 3 * width)),
        "recurrent": width**-0.5 * jax.random.normal(recurrent_key, (width, 3 * width)),
        "input_bias": jnp.zeros(3 * width),
        "recurrent_bias": jnp.zeros(3 * width),
    }


def norm(scale: Array, x: Array) -> Array:
    """Layer norm over the last axis, without a shift."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-5) * scale


def cell(layer: Params, x: Array, h: Array) -> Array:
    """One layer at one time: the new state from the input and the old state, all (rows, width)."""
    from_input = norm(layer["norm"], x) @ layer["input"] + layer["input_bias"]
    from_state = h @ layer["recurrent"] + layer["recurrent_bias"]
    reset_x, update_x, candidate_x = jnp.split(from_input, 3, axis=-1)
    reset_h, update_h, candidate_h = jnp.split(from_state, 3, axis=-1)
    reset, update = jax.nn.sigmoid(reset_x + reset_h), jax.nn.sigmoid(update_x + update_h)
    candidate = jnp.tanh(candidate_x + reset * candidate_h)
    return update * h + (1.0 - update) * candidate


def loss(params: Params, sound: Array, labels: Array, states: Array, body: Wrap = identity) -> Array:
    """Mean cross-entropy in nats of the phone in each frame.

    `sound` is (frames, rows, channels), `labels` (frames, rows), `states` (layers, rows, width). `body` wraps
    the step in time, which loops over all layers; each layer adds its state to the stream that passes upward.
    """

    def up(x: Array, layer_and_state: tuple[Params, Array]) -> tuple[Array, Array]:
        layer, h = layer_and_state
        h = cell(layer, x, h)
        return x + h, h

    def step(states: Array, frame: Array) -> tuple[Array, Array]:
        top, states = lax.scan(up, frame @ params["encoder"], (params["layers"], states))
        return states, top

    _, tops = lax.scan(body(step), states, sound)
    logits = norm(params["norm"], tops) @ params["head"] + params["head_bias"]
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def program(size: Size) -> Program:
    """One step on random frames and labels."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 3)
    sound = jax.random.normal(keys[1], (config.frames, config.rows, config.channels))
    labels = jax.random.randint(keys[2], (config.frames, config.rows), 0, config.phones)
    states = jnp.zeros((config.layers, config.rows, config.width))
    title = f"{config.layers} GRU layers of {config.width} in a scan, batch {config.rows}x{config.frames}"
    arguments = (init(keys[0], config), sound, labels, states)
    return Program("gru", title, loss, arguments, places=("body",), sizes=asdict(config))
