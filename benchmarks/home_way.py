"""Train one model of `home_models` in one way, plain and cut, and print what it took as JSON.

    python -m benchmarks.home_way ROUNDS MODEL WAY

The model is a place in `HOMES`, the way a key of its `ways`.
"""

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from benchmarks.home_models import HOMES
from benchmarks.measure import memory_of, time_together
from jointcut import aot

STEPS = 20


def main(rounds: int, model: int, way: str) -> None:
    """Compare losses of the first steps, memory of the step as one program, and the time of three steps."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    home = HOMES[model]()
    cut = aot.function(home.loss)
    plain, ours = (memory_of(jax.jit(home.pure(f)).lower(*home.arguments).compile()) for f in (home.loss, cut))
    starts = {"plain": home.ways[way](home.loss), "cut": home.ways[way](cut)}
    losses = [np.array([step() for _ in range(STEPS)]) for step in (start() for start in starts.values())]
    steps = {name: start() for name, start in starts.items()}
    for step in steps.values():
        step()  # a fresh NNX optimiser is another program
    timing = time_together({name: partial(several, step, 3) for name, step in steps.items()}, "plain", rounds)
    row = {
        "model": home.name,
        "way": way,
        "losses differ by": float(np.max(np.abs(losses[0] - losses[1]) / np.abs(losses[0]))),
        "activations ÷": ours.temp / plain.temp,
        "peak ÷": ours.peak / plain.peak,
        "time ÷": timing["cut"].ratio.median,
    }
    print(json.dumps(row))


def several(step: Callable[[], float], count: int) -> None:
    """Train a few steps."""
    for _ in range(count):
        step()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
