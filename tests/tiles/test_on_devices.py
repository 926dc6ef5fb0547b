"""Rows that lie on several devices run in blocks on each of them; the sum over devices happens once for each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("on_eight_devices.py")
CLAIMS = [line.strip(" ,") for line in SCRIPT.read_text().split("CLAIMS = [\n")[1].split("]")[0].splitlines()]


@pytest.fixture(scope="module")
def failures():
    """How each claim fails on eight devices of the host; empty where it holds."""
    environment = {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": ":".join(filter(None, sys.path)),
        "HOME": str(Path.home()),
    }
    run = [sys.executable, "-W", "error", str(SCRIPT)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("claim", CLAIMS)
def test_on_eight_devices(claim, failures):
    assert not failures[claim], failures[claim]
