"""Train with FSDP on several processes of this machine, and compare with one process.

    python -m benchmarks.processes [NUMBER]

Each process has one CPU device; together they hold the weights of an MLP of six layers, in a scan, and the batch, in
parts. All take 100 steps in a `jax.jit` of the user's. The table has for each process the hash of the plan that it
took, the largest relative difference of its losses from those of one process, and the seconds of all steps. A process
is started by `python -m benchmarks.processes NUMBER PROCESS PORT`.
"""

import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jointcut import aot

NUMBER, STEPS = 4, 100
LAYERS, ROWS, WIDTH = 6, 64, 64
LIMIT_S = 300


@dataclass(frozen=True)
class Done:
    """A process that has ended: its exit code, and what it printed."""

    code: int
    out: str
    err: str


def together(number: int, command: Sequence[str], limit_s: float, environment: dict[str, str]) -> list[Done]:
    """Run a command in processes that `jax.distributed` may join, with their number, its place and a port at the end.

    Raises `subprocess.TimeoutExpired` if they do not end in time; then all are ended.
    """
    port = free_port()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    runs = [
        subprocess.Popen(
            [*command, str(number), str(place), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in range(number)
    ]
    end = time.monotonic() + limit_s
    try:
        texts = [run.communicate(timeout=max(0.0, end - time.monotonic())) for run in runs]
    finally:
        for run in runs:
            run.kill()
    return [Done(run.returncode, *text) for run, text in zip(runs, texts, strict=True)]


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def join(number: int, place: int, port: int, heartbeat_timeout_s: int = 100) -> None:
    """Join the other processes, with one device each; a single process has none to join."""
    jax.config.update("jax_num_cpu_devices", 1)
    if number > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", number, place, heartbeat_timeout_seconds=heartbeat_timeout_s)


def train(number: int, place: int, port: int) -> None:
    """Take all steps, and print the plan, the losses and the seconds as JSON."""
    join(number, place, port)
    mesh = jax.make_mesh((number,), ("data",), axis_types=(AxisType.Auto,))
    draws = np.random.default_rng(0)

    def laid(shape: tuple[int, ...], spec: P, size: float) -> jax.Array:
        whole = size * draws.standard_normal(shape, np.float32)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), whole.__getitem__)

    weights = {name: laid((LAYERS, WIDTH, WIDTH), P(None, "data"), WIDTH**-0.5) for name in ("up", "down")}
    x, y = (laid((ROWS, WIDTH), P("data"), 1.0) for _ in range(2))

    @aot.function
    def loss(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            return h + jnp.sin(jnp.tanh(h @ w["up"])) @ w["down"], None

        return jnp.mean(jnp.square(lax.scan(layer, x, weights)[0] - y))

    @jax.jit
    def step(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, slopes = jax.value_and_grad(loss)(weights, x, y)
        return value, jax.tree.map(lambda w, g: w - 0.03 * g, weights, slopes)

    plans = Plans()
    start, losses = time.perf_counter(), []
    for _ in range(STEPS):
        value, weights = step(weights, x, y)
        losses.append(float(value))
    print(json.dumps({"plans": plans.found, "losses": losses, "seconds": time.perf_counter() - start}))


class Plans(logging.Handler):
    """Listens to the log of jointcut for the hashes of plans that processes agree on."""

    def __init__(self) -> None:
        """Begin to listen."""
        super().__init__(logging.INFO)
        self.found: list[str] = []
        log = logging.getLogger("jointcut")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the hash that a line ends with."""
        self.found += re.findall(r"processes agreed in .* on the plan (\w+)$", record.getMessage())


def measured(number: int) -> list[dict[str, Any]]:
    """What each of some processes tells of its training; raises `RuntimeError` where one fails."""
    done = together(number, [sys.executable, "-m", "benchmarks.processes"], LIMIT_S, {})
    if failed := [(place, run) for place, run in enumerate(done) if run.code]:
        raise RuntimeError(f"process {failed[0][0]} failed:\n{failed[0][1].err}")
    return [json.loads(run.out.splitlines()[-1]) for run in done]


def differences(one: Sequence[float], others: Sequence[Sequence[float]]) -> list[float]:
    """For each process the largest difference of its losses from those of one process, relative to these."""
    return [max(abs(a - b) / abs(a) for a, b in zip(one, losses, strict=True)) for losses in others]


def main() -> None:
    """Train on one process and on several, and print a line for each."""
    number = int(sys.argv[1]) if sys.argv[1:] else NUMBER
    (alone,), runs = measured(1), measured(number)
    errors = differences(alone["losses"], [run["losses"] for run in runs])
    print(f"{'process':>8} {'plan':>16} {'difference':>10} {'seconds':>8}")
    print(f"{'alone':>8} {'':>16} {'':>10} {alone['seconds']:8.1f}")
    for place, (run, error) in enumerate(zip(runs, errors, strict=True)):
        print(f"{place:8} {' '.join(run['plans']):>16} {error:10.1e} {run['seconds']:8.1f}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        train(*map(int, sys.argv[1:]))
    else:
        main()
