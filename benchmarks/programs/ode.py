"""A neural ordinary differential equation that classifies: a learned flow in classical Runge-Kutta steps.

Beside the state it integrates the flow's kinetic energy, and the loss asks for little of it: such flows are straight
and easy to integrate.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.layers import init_linear
from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]
State = tuple[Array, Array]  # points (rows, dimensions) and the energy that each has spent (rows)


@dataclass(frozen=True)
class Config:
    """Rows of the batch, features in, dimensions of the flow, width of its field, Runge-Kutta steps, classes out."""

    rows: int
    features: int
    dimensions: int
    width: int
    steps: int
    classes: int
    energy: float = 0.01


SIZES: dict[Size, Config] = {
    "tiny": Config(rows=4, features=6, dimensions=5, width=8, steps=6, classes=3),
    "small": Config(rows=128, features=784, dimensions=64, width=192, steps=64, classes=10),
    "medium": Config(rows=1024, features=3072, dimensions=512, width=2048, steps=64, classes=100),
    "large": Config(rows=1024, features=3072, dimensions=512, width=2048, steps=128, classes=100),
}


def init(key: Array, config: Config) -> Params:
    """Draw the encoder, the field's three layers and the classifier."""
    encoder_key, classifier_key, *keys = jax.random.split(key, 5)
    widths = [config.dimensions, config.width, config.width, config.dimensions]
    return {
        "encoder": init_linear(encoder_key, config.features, config.dimensions),
        "field": [init_timed(k, a, b) for k, a, b in zip(keys, widths[:-1], widths[1:], strict=True)],
        "classifier": init_linear(classifier_key, config.dimensions, config.classes),
    }


def init_timed(key: Array, inputs: int, outputs: int) -> Params:
    """Draw one linear layer with a gate and a shift that depend on time."""
    linear_key, gate_key, shift_key = jax.random.split(key, 3)
    gate = {"slope": jax.random.normal(gate_key, (outputs,)), "offset": jnp.ones(outputs)}
    return init_linear(linear_key, inputs, outputs) | gate | {"shift": jax.random.normal(shift_key, (outputs,))}


def timed(layer: Params, t: Array, x: Array) -> Array:
    """A linear layer, its outputs gated and shifted by time."""
    gate = jax.nn.sigmoid(layer["slope"] * t + layer["offset"])
    return (x @ layer["w"] + layer["b"]) * gate + layer["shift"] * t


def flow(field: list[Params], t: Array, state: State) -> State:
    """The velocity of the points at time `t`, and the energy that they spend per time."""
    *hidden, last = field
    x, _ = state
    for layer in hidden:
        x = jnp.tanh(timed(layer, t, x))
    velocity = timed(last, t, x)
    return velocity, jnp.mean(velocity * velocity, axis=-1)


def advance(f: Callable[[Array, State], State], dt: float, state: State, t: Array) -> tuple[State, None]:
    """One classical Runge-Kutta step of length `dt` from time `t`."""

    def along(slope: State, time: float) -> State:
        return jax.tree.map(lambda s, ds: s + time * ds, state, slope)

    k1 = f(t, state)
    k2 = f(t + dt / 2, along(k1, dt / 2))
    k3 = f(t + dt / 2, along(k2, dt / 2))
    k4 = f(t + dt, along(k3, dt))
    slope = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, k1, k2, k3, k4)
    return along(slope, dt), None


def loss(params: Params, features: Array, labels: Array, config: Config, body: Wrap = identity) -> tuple[Array, Array]:
    """Mean cross-entropy in nats plus the energy spent, and the accuracy; `body` wraps each Runge-Kutta step."""
    points = features @ params["encoder"]["w"] + params["encoder"]["b"]
    times = (jnp.arange(config.steps) / config.steps).astype(points.dtype)
    step = partial(advance, partial(flow, params["field"]), 1 / config.steps)
    (points, energy), _ = lax.scan(body(step), (points, jnp.zeros_like(points[:, 0])), times)
    logits = points @ params["classifier"]["w"] + params["classifier"]["b"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
    return config.energy * jnp.mean(energy) - jnp.mean(picked), accuracy


def program(size: Size) -> Program:
    """One step on random features and labels."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 3)
    features = jax.random.normal(keys[1], (config.rows, config.features))
    labels = jax.random.randint(keys[2], (config.rows,), 0, config.classes)
    title = f"{config.steps} Runge-Kutta steps in {config.dimensions} dimensions, batch {config.rows}"
    arguments = (init(keys[0], config), features, labels)
    function = partial(loss, config=config)
    # In bfloat16 adding a slope times 1/64 rounds away most of its digits: the gradient is 12 % from float32's, and two
    # compilations that round the sum at different places are 2 % apart.
    tolerance = {"float32": 1e-5, "bfloat16": 6e-2}
    return Program(
        "ode", title, function, arguments, has_aux=True, places=("body",), sizes=asdict(config), tolerance=tolerance
    )
