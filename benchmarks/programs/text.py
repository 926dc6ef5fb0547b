"""Read real text: the sources of Python's standard library.

They are on every machine that runs the demo, so nothing is downloaded. Files are read in sorted order, so one
Python version gives one corpus.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def load(megabytes: float = 4.0) -> np.ndarray:
    """The first bytes of the standard library's sources, as one array of uint8."""
    wanted = int(megabytes * 1e6)
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sources(root):
        text += path.read_bytes()
        if len(text) >= wanted:
            break
    if not text:
        raise FileNotFoundError(
            f"no Python sources under {root}: this Python comes without its standard library in text form "
            "(embedded or zipped). Run with a python.org, distribution or conda build."
        )
    return np.frombuffer(bytes(text[:wanted]), np.uint8)


def sources(root: Path) -> Iterator[Path]:
    """The library's own `.py` files under `root`, without tests and installed packages, in a fixed order."""
    for path in sorted(root.rglob("*.py")):
        if path.is_file() and SKIPPED.isdisjoint(path.relative_to(root).parts):
            yield path


def batch(text: np.ndarray, rows: int, context: int, seed: int) -> np.ndarray:
    """Cut `rows` windows of `context + 1` bytes at places drawn from `seed`."""
    if len(text) <= context + 1:
        raise ValueError(f"the text has {len(text)} bytes, a window needs {context + 1}")
    starts = np.random.default_rng(seed).integers(0, len(text) - context - 1, rows)
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
