"""Kill a process while the first one plans, of three that ask for one plan.

python tests/processes/one_killed.py VICTIM NUMBER PLACE PORT
"""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.processes import join
from jointcut import aot
from jointcut.aot.planning.request import Request
from jointcut.partition.program.jax import processes

VICTIM, NUMBER, PLACE, PORT = map(int, sys.argv[1:])
processes.SILENCE_S = 2.0
join(NUMBER, PLACE, PORT, heartbeat_timeout_s=5)
processes.send(f"numbers/{PLACE}", str(os.getpid()))
answered = Request.answered


def killing(self, *given):
    """Kill the victim in the middle of planning."""
    os.kill(int(processes.receive(f"numbers/{VICTIM}", "numbers/beat")), signal.SIGKILL)
    time.sleep(1)
    return answered(self, *given)


if PLACE == 0:
    Request.answered = killing


@aot.function
def loss(x):
    return jnp.mean(jnp.sin(jnp.tanh(x)))


mesh = jax.make_mesh((NUMBER,), ("data",), axis_types=(AxisType.Auto,))
rows = np.ones((12, 4), np.float32)
x = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P("data")), rows.__getitem__)
jax.jit(jax.grad(loss))(x)
