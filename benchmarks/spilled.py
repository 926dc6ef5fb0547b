"""Resident memory of a step that keeps what its backward needs in files, beside one that keeps it in memory.

    python -m benchmarks.spilled [--layers 48] [--rows 4096] [--width 512] [--folder /tmp]

Each step runs in a process of its own, which prints its peak resident memory (`ru_maxrss`) and the bytes on disk
between forward and backward. The gradients must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut import aot

SIZES = {"layers": 48, "rows": 4096, "width": 512}


def loss(weights: Any, x: Any) -> Any:
    """A row of dense layers with residual connections."""

    def step(h: Any, w: Any) -> tuple[Any, None]:
        return h + jnp.tanh(h @ w), None

    return jnp.mean(lax.scan(step, x, weights)[0] ** 2)


def run(layers: int, rows: int, width: int, folder: str | None) -> dict[str, Any]:
    """One step in this process, and its figures."""
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.standard_normal((layers, width, width)).astype(np.float32) / width)
    x = jnp.asarray(rng.standard_normal((rows, width)).astype(np.float32))
    function = aot.function(loss, spill=folder)
    start = time.perf_counter()
    value, pullback = function.vjp(weights, x)
    on_disk = sum(path.stat().st_size for path in Path(folder or "").rglob("*.bin")) if folder else 0
    gradients = jax.block_until_ready(pullback(jnp.ones_like(value))[0])
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    digest = hashlib.sha256(np.asarray(gradients).tobytes()).hexdigest()[:16]
    return {"peak_resident_bytes": peak, "bytes_on_disk": on_disk, "seconds": seconds, "gradients": digest}


def _alone(arguments: list[str], more: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.spilled", *arguments, *more]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def both(sizes: Mapping[str, int], folder: str) -> dict[str, dict[str, Any]]:
    """The figures of both steps, each in a process of its own."""
    options = [*(f"--{name}={size}" for name, size in sizes.items()), "--folder", folder]
    return {which: _alone(options, ["--run", which]) for which in ("plain", "spilled")}


def main() -> None:
    """Run both, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the files lie")
    parser.add_argument("--run", choices=["plain", "spilled"], help="run one of them here, and print JSON")
    options = parser.parse_args()
    if options.run is not None:
        folder = options.folder if options.run == "spilled" else None
        print(json.dumps(run(options.layers, options.rows, options.width, folder)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = both({name: getattr(options, name) for name in SIZES}, folder)
        is_empty = not [*Path(folder).iterdir()]
    for which, row in found.items():
        peak, on_disk = (f"{row[name] / 1e6:8.1f} MB" for name in ("peak_resident_bytes", "bytes_on_disk"))
        print(f"{which:8} peak resident {peak}, on disk {on_disk}, {row['seconds']:6.2f} s with compiling")
    is_same = found["plain"]["gradients"] == found["spilled"]["gradients"]
    print(f"gradients {'are' if is_same else 'ARE NOT'} equal; the folder is {'empty' if is_empty else 'NOT EMPTY'}")


if __name__ == "__main__":
    main()
