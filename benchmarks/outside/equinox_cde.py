"""A neural controlled differential equation in Equinox: a path of measurements steers a hidden state.

The path is a cubic spline through the measurements, given by its coefficients. The state follows
`dz = f(z) dx` by Heun's method in a scan, written for one path and vmapped over the batch. All paths are classified by
their last state.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.program import Program, Size, Wrap, identity


@dataclass(frozen=True)
class Config:
    """Paths in a batch, measurements of each, channels of a measurement, steps between two, and the field."""

    rows: int
    time: int
    channels: int
    substeps: int
    state: int
    width: int
    depth: int


SIZES: dict[Size, Config] = {
    "tiny": Config(2, 4, 2, 1, 3, 4, 1),
    "small": Config(64, 48, 4, 4, 24, 96, 3),
}


class Field(eqx.Module):
    """A matrix for each state, by which it answers a change of the path."""

    mlp: eqx.nn.MLP
    channels: int = eqx.field(static=True)

    def __init__(self, config: Config, key: Array) -> None:
        self.channels = config.channels + 1
        given = config.state * self.channels
        self.mlp = eqx.nn.MLP(
            config.state, given, config.width, config.depth, jax.nn.softplus, final_activation=jnp.tanh, key=key
        )

    def __call__(self, state: Array, slope: Array) -> Array:
        """The slope of the state `(state,)`, given that of the path `(channels + 1,)`."""
        return self.mlp(state).reshape(-1, self.channels) @ slope


class Classifier(eqx.Module):
    """Where the state starts, how it moves, and what its end says."""

    first: eqx.nn.MLP
    field: Field
    last: eqx.nn.Linear

    def __init__(self, config: Config, key: Array) -> None:
        first, field, last = jax.random.split(key, 3)
        self.first = eqx.nn.MLP(config.channels + 1, config.state, config.width, depth=1, key=first)
        self.field = Field(config, field)
        self.last = eqx.nn.Linear(config.state, 1, key=last)

    def __call__(self, start: Array, pieces: Array, substeps: int, wrap: Wrap) -> Array:
        """The logit of one path; `pieces` `(time - 1, 3, channels + 1)` are the slope of its spline as polynomials."""
        size = 1.0 / substeps

        def step(state: Array, piece: Array) -> tuple[Array, None]:
            for i in range(substeps):
                before = self.field(state, slope_at(piece, i * size))
                after = self.field(state + size * before, slope_at(piece, (i + 1) * size))
                state = state + size / 2 * (before + after)
            return state, None

        state, _ = lax.scan(wrap(step), self.first(start), pieces)
        return self.last(state)[0]


def slope_at(piece: Array, time: float) -> Array:
    """The slope of one piece of the spline, `time` in [0, 1] after it starts."""
    constant, linear, square = piece
    return constant + time * (linear + time * square)


def splined(points: Array) -> Array:
    """The slope of each piece of a spline through `(time, channels)`, whose slopes are differences backwards."""
    rise = jnp.diff(points, axis=0)
    before = jnp.concatenate([rise[:1], rise[:-1]])
    return jnp.stack([before, 4 * (rise - before), 3 * (before - rise)], axis=1)


def loss(
    arrays: Any, starts: Array, pieces: Array, labels: Array, static: Any, substeps: int, body: Wrap = identity
) -> Array:
    """Mean binary cross-entropy in nats; `body` wraps the step of the scan."""
    model = eqx.combine(arrays, static)
    logits = jax.vmap(partial(model, substeps=substeps, wrap=body))(starts, pieces)
    return jnp.mean(jax.nn.softplus(jnp.where(labels, -logits, logits)))


def paths(key: Array, config: Config) -> Array:
    """Random walks beside their time: `(rows, time, channels + 1)`."""
    steps = jax.random.normal(key, (config.rows, config.time, config.channels)) / config.time**0.5
    times = jnp.broadcast_to(jnp.linspace(0, 1, config.time)[:, None], (config.rows, config.time, 1))
    return jnp.concatenate([times, jnp.cumsum(steps, axis=1)], axis=-1)


def program(size: Size) -> Program:
    """One step on random walks, classified by where they end."""
    config = SIZES[size]
    model_key, path_key = jax.random.split(jax.random.key(0))
    arrays, static = eqx.partition(Classifier(config, model_key), eqx.is_inexact_array)
    points = paths(path_key, config)
    title = f"{config.time - 1} pieces of {config.substeps} Heun steps, state {config.state}, batch {config.rows}"
    arguments = (arrays, points[:, 0], jax.vmap(splined)(points), points[:, -1, 1] > 0)
    function = partial(loss, static=static, substeps=config.substeps)
    return Program("equinox-cde", title, function, arguments, places=("body",), sizes=asdict(config))
