"""Run claims on several devices of the host: a script holds them in its list `CLAIMS`, and a test asks for each."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path


def claims_of(script: Path) -> list[str]:
    """Return the names of the claims of a script, which is not run."""
    return [line.strip(" ,") for line in script.read_text().split("CLAIMS = [\n")[1].split("]")[0].splitlines()]


@functools.cache
def failures_of(script: Path, devices: int, *given: int) -> dict[str, str]:
    """Return how each claim of a script fails on so many devices of the host; empty where it holds.

    It is run once for all of its claims. What is `given` stands behind the script.
    """
    environment = {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": ":".join(filter(None, sys.path)),
        "HOME": str(Path.home()),
    }
    run = [sys.executable, "-W", "error", str(script), *map(str, given)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def tell(claims: Sequence[Callable[[], None]]) -> None:
    """Print how each claim fails, as JSON, for `failures_of`."""
    sys.stdout.write(json.dumps({claim.__name__: _failure(claim) for claim in claims}))


def _failure(claim: Callable[[], None]) -> str:
    try:
        claim()
    except Exception:  # noqa: BLE001 - the test that asks for this claim shows it
        return traceback.format_exc()
    return ""
