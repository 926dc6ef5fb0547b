"""An actor-critic agent in Haiku: residual convolutions of each frame, an LSTM over time, and V-trace.

As in IMPALA: the gradient of the policy is weighted by advantages that V-trace estimates by a scan backwards in time,
beside a loss of the values and a bonus of entropy.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.program import Program, Size


@dataclass(frozen=True)
class Config:
    """Frames of a trajectory, trajectories in a batch, the side of a frame, and the network."""

    time: int
    rows: int
    side: int
    channels: tuple[int, ...]
    width: int
    actions: int
    discount: float = 0.99
    value_cost: float = 0.5
    entropy_cost: float = 0.01


SIZES: dict[Size, Config] = {
    "tiny": Config(3, 2, 8, (2,), 4, 3),
    "small": Config(12, 8, 40, (8, 16, 16), 128, 6),
}


def torso(frames: Array, config: Config) -> Array:
    """Features `(..., width)` of frames `(..., side, side, 3)`."""
    x = frames
    for channels in config.channels:
        x = hk.Conv2D(channels, 3)(x)
        x = hk.max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for _ in range(2):
            hidden = hk.Conv2D(channels, 3)(jax.nn.relu(x))
            x = x + hk.Conv2D(channels, 3)(jax.nn.relu(hidden))
    return jax.nn.relu(hk.Linear(config.width)(hk.Flatten()(jax.nn.relu(x))))


class Core(hk.RNNCore):
    """An LSTM that starts anew where an episode does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = hk.LSTM(width)

    def initial_state(self, batch_size: int | None) -> hk.LSTMState:
        """The state before the first frame."""
        return self.lstm.initial_state(batch_size)

    def __call__(self, inputs: tuple[Array, Array], prev_state: hk.LSTMState) -> tuple[Array, hk.LSTMState]:
        """One time step: `inputs` are features `(rows, width)` and whether an episode starts `(rows,)`."""
        features, starts = inputs
        fresh = self.initial_state(features.shape[0])
        state = jax.tree.map(lambda new, old: jnp.where(starts[:, None], new, old), fresh, prev_state)
        return self.lstm(features, state)


def network(config: Config) -> hk.Transformed:
    """The agent as a pair of functions; `apply` maps a trajectory to logits and values."""

    def forward(frames: Array, starts: Array) -> tuple[Array, Array]:
        core = Core(config.width)
        features = hk.BatchApply(partial(torso, config=config))(frames)
        hidden, _ = hk.dynamic_unroll(core, (features, starts), core.initial_state(frames.shape[1]))
        logits, values = hk.BatchApply(hk.Linear(config.actions))(hidden), hk.BatchApply(hk.Linear(1))(hidden)
        return logits, values[..., 0]

    return hk.without_apply_rng(hk.transform(forward))


def corrected(values: Array, rewards: Array, discounts: Array, ratios: Array) -> tuple[Array, Array]:
    """V-trace: targets of the values, and advantages, both `(time - 1, rows)`; `ratios` are of the two policies."""
    clipped = jnp.minimum(1.0, ratios)
    errors = clipped * (rewards + discounts * values[1:] - values[:-1])

    def back(sum_after: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        error, discount, trust = at
        total = error + discount * trust * sum_after
        return total, total

    _, sums = lax.scan(back, jnp.zeros_like(values[0]), (errors, discounts, clipped), reverse=True)
    targets = values[:-1] + sums
    after = jnp.concatenate([targets[1:], values[-1:]])
    advantages = clipped * (rewards + discounts * after - values[:-1])
    return lax.stop_gradient(targets), lax.stop_gradient(advantages)


def loss(params: Any, seen: dict[str, Array], apply: Any, config: Config) -> tuple[Array, dict[str, Array]]:
    """The sum of the three losses, and each of them."""
    logits, values = apply(params, seen["frames"], seen["starts"])
    chances = jax.nn.log_softmax(logits[:-1])
    chosen = jnp.take_along_axis(chances, seen["actions"][..., None], axis=-1)[..., 0]
    discounts = config.discount * (1.0 - seen["starts"][1:])
    ratios = lax.stop_gradient(jnp.exp(chosen - seen["chances"]))
    targets, advantages = corrected(values, seen["rewards"], discounts, ratios)
    parts = {
        "policy": -jnp.mean(chosen * advantages),
        "value": 0.5 * jnp.mean(jnp.square(targets - values[:-1])),
        "entropy": jnp.mean(jnp.sum(jnp.exp(chances) * chances, axis=-1)),
    }
    return parts["policy"] + config.value_cost * parts["value"] + config.entropy_cost * parts["entropy"], parts


def trajectories(key: Array, config: Config) -> dict[str, Array]:
    """Random frames, actions and rewards; each frame starts an episode with probability 0.1."""
    keys: Any = jax.random.split(key, 5)
    whole, moves = (config.time, config.rows), (config.time - 1, config.rows)
    return {
        "frames": jax.random.uniform(keys[0], (*whole, config.side, config.side, 3)),
        "starts": jax.random.bernoulli(keys[1], 0.1, whole).astype(jnp.float32),
        "actions": jax.random.randint(keys[2], moves, 0, config.actions),
        "chances": jnp.log(jax.random.uniform(keys[3], moves, minval=0.1, maxval=0.9)),
        "rewards": jax.random.normal(keys[4], moves),
    }


def program(size: Size) -> Program:
    """One step on random trajectories."""
    config = SIZES[size]
    net, seen = network(config), trajectories(jax.random.key(0), config)
    params = jax.jit(net.init)(jax.random.key(1), seen["frames"], seen["starts"])
    blocks = 2 * len(config.channels)
    title = f"{blocks} residual blocks and an LSTM of {config.width}, batch {config.rows}x{config.time} frames"
    function = partial(loss, apply=net.apply, config=config)
    return Program("haiku-agent", title, function, (params, seen), has_aux=True, sizes=asdict(config))
