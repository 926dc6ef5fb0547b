"""A step over several devices is weighed with what its collectives make, those in loops once a trip."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from benchmarks.parallel import moves
from jointcut.aot.ratchet.weigh import weighed

mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P("d"))
def step(x):
    def body(x, _):
        return x * jax.lax.psum(x, "d"), None
    x, _ = jax.lax.scan(body, x, length=5)
    return x + jax.lax.all_gather(x, "d").sum(0)

x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
found = moves(step.lower(x).compile().as_text())
assert set(found) == {"all-reduce", "all-gather"}, found
total = sum(size for _, size in found.values())
assert weighed(step, (x,), {}).figures["collective_bytes"] == total >= 5 * 4 * 8 * 4, (found, total)
"""


def test_collectives_count_by_their_bytes_and_trips():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
