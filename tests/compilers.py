"""Install XLA's compilers for GPUs and TPUs beside an environment: `python tests/compilers.py`.

The plugin for NVIDIA's GPUs writes to standard error in each process of JAX that finds it and no GPU. So it is not
installed in the environment, but in a folder of it, where only the tests of targets look.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path

FOLDER = Path(sys.prefix) / "compilers"


def wanted() -> Iterator[str]:
    """The plugins of this version of JAX, without what only a device needs."""
    ours = version("jaxlib")
    yield from (f"jax-cuda12-{part}=={ours}" for part in ("plugin", "pjrt"))
    yield from (text.partition(";")[0].strip() for text in requires("jax") or () if text.startswith("libtpu"))


def main() -> int:
    """Install them; return pip's exit status."""
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    command = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(FOLDER), *wanted()]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
