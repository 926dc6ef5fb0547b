"""Policy search through a differentiable simulator: soft robots of masses and springs learn to run.

A policy reads the robot and a clock and draws how long each spring wants to be; the return is differentiated through
the draws, the dynamics and the contact with the ground, over the whole episode.
"""

from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]
State = tuple[Array, Array]  # positions and velocities, each (robots, masses, 2)

# Units: one mass weighs 1 and neighbours are 1 apart. Damping is strong enough that no episode is chaotic.
GRAVITY, DRAG = 1.0, 0.1
STIFFNESS, DAMPING = 40.0, 4.0
GROUND, SOFTNESS, FRICTION, SLIP = 40.0, 0.1, 1.0, 0.2
DT, SUBSTEPS, PERIOD = 0.04, 2, 16  # a policy step is `SUBSTEPS` physics steps, the clock turns in `PERIOD` of them
STROKE, EFFORT = 0.25, 0.01


@dataclass(frozen=True)
class Config:
    """Robots in parallel, masses along and across each, policy steps in an episode, width of the policy's layers."""

    robots: int
    columns: int
    rows: int
    steps: int
    width: int


SIZES: dict[Size, Config] = {
    "tiny": Config(robots=3, columns=3, rows=2, steps=6, width=8),
    "small": Config(robots=256, columns=4, rows=3, steps=64, width=128),
    "medium": Config(robots=1024, columns=6, rows=4, steps=256, width=512),
    "large": Config(robots=8192, columns=6, rows=4, steps=256, width=512),
}


def lattice(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Masses at rest (masses, 2), and one row per spring: +1 at its one end and -1 at the other (springs, masses).

    Springs join neighbours along, across and on both diagonals.
    """
    places = np.array(list(product(range(config.columns), range(config.rows))), np.float32)
    apart = np.linalg.norm(places[:, None] - places, axis=-1)
    starts, ends = np.nonzero(np.triu((apart > 0) & (apart < 1.5)))
    eye = np.eye(len(places), dtype=np.float32)
    return places, eye[ends] - eye[starts]


def init(key: Array, observations: int, actions: int, width: int) -> Params:
    """Draw the policy: two hidden layers, small first actions, noise of standard deviation 0.3."""
    keys, widths = jax.random.split(key, 3), [observations, width, width, actions]
    scales = [1.0, 1.0, 0.1]
    layers = [
        {"w": scale * a**-0.5 * jax.random.normal(k, (a, b)), "b": jnp.zeros(b)}
        for k, scale, a, b in zip(keys, scales, widths[:-1], widths[1:], strict=True)
    ]
    return {"layers": layers, "log_std": jnp.full(actions, jnp.log(0.3))}


def act(policy: Params, key: Array, state: State, command: Array, clock: Array) -> Array:
    """Draw an action in -1 to 1 for each spring (robots, springs), as a differentiable function of the policy."""
    positions, velocities = state
    robots = len(positions)
    shape = positions - jnp.mean(positions, axis=1, keepdims=True)
    clocks = jnp.broadcast_to(clock, (robots, 2))
    flat = [shape.reshape(robots, -1), velocities.reshape(robots, -1), positions[..., 1], command[:, None], clocks]
    *hidden, last = policy["layers"]
    x = jnp.concatenate(flat, axis=-1)
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    mean = x @ last["w"] + last["b"]
    return jnp.tanh(mean + jnp.exp(policy["log_std"]) * jax.random.normal(key, mean.shape, mean.dtype))


def physics(springs: Array, lengths: Array, state: State) -> State:
    """One semi-implicit Euler step with springs that want to be `lengths` (robots, springs) long."""
    positions, velocities = state
    along = jnp.einsum("sm,rmd->rsd", springs, positions)
    distance = jnp.sqrt(jnp.sum(along * along, axis=-1) + 1e-3)
    along = along / distance[..., None]
    closing = jnp.sum(along * jnp.einsum("sm,rmd->rsd", springs, velocities), axis=-1)
    tension = STIFFNESS * (distance - lengths) + DAMPING * closing
    force = -jnp.einsum("sm,rsd->rmd", springs, tension[..., None] * along) - DRAG * velocities
    pressure = GROUND * SOFTNESS * jax.nn.softplus(-positions[..., 1] / SOFTNESS)
    friction = -FRICTION * pressure * jnp.tanh(velocities[..., 0] / SLIP)
    lift = pressure * (1.0 - jnp.tanh(velocities[..., 1])) - GRAVITY
    velocities = velocities + DT * (force + jnp.stack([friction, lift], axis=-1))
    return positions + DT * velocities, velocities


def loss(
    policy: Params, key: Array, start: State, command: Array, springs: Array, steps: int, body: Wrap = identity
) -> Array:
    """Mean cost of an episode: squared error of the running speed against `command` (robots), and effort.

    `springs` is (springs, masses). `body` wraps the policy step.
    """
    rest = jnp.linalg.norm(jnp.einsum("sm,rmd->rsd", springs, start[0]), axis=-1)

    def step(state: State, now: tuple[Array, Array]) -> tuple[State, Array]:
        step_key, clock = now
        action = act(policy, step_key, state, command, clock)
        lengths = rest * (1.0 + STROKE * action)
        state = lax.fori_loop(0, SUBSTEPS, lambda _, s: physics(springs, lengths, s), state)
        speed = jnp.mean(state[1][..., 0], axis=1)
        return state, jnp.mean((speed - command) ** 2) + EFFORT * jnp.mean(action * action)

    angle = 2 * jnp.pi / PERIOD * jnp.arange(steps)
    clocks = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).astype(command.dtype)
    _, costs = lax.scan(body(step), start, (jax.random.split(key, steps), clocks))
    return jnp.mean(costs)


def program(size: Size) -> Program:
    """One step of policy search from random starts, with random commands."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 4)
    places, springs = lattice(config)
    shape = (config.robots, *places.shape)
    start = (places + 0.05 * jax.random.normal(keys[1], shape), 0.1 * jax.random.normal(keys[2], shape))
    command = jax.random.uniform(keys[3], (config.robots,), minval=0.2, maxval=1.0)
    policy = init(keys[0], 5 * len(places) + 3, len(springs), config.width)
    title = f"{config.robots} robots of {len(places)} masses and {len(springs)} springs, {config.steps} policy steps"
    arguments = (policy, jax.random.key(1), start, command, jnp.asarray(springs))
    function = partial(loss, steps=config.steps)
    # In bfloat16 short time steps round away digits of the positions: the gradient is 4 % from float32's (tiny: 18 %).
    tolerance = {"float32": 1e-5, "bfloat16": 6e-2}
    return Program("rollout", title, function, arguments, places=("body",), sizes=asdict(config), tolerance=tolerance)
