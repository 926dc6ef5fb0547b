"""Be the package `jointcut`: its version, and its three folders, each imported when it is first asked for.

It is installed as `jointcut`. `import jointcut` imports no JAX; `jointcut.aot` does.

>>> import jointcut
>>> jointcut.aot.function is jointcut.aot.call.decorator.function
True
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

_FOLDERS = ("aot", "partition", "wrappers")


def __getattr__(name: str) -> Any:
    """Import a folder, or read the version of the package that is installed."""
    if name in _FOLDERS:
        return importlib.import_module(f"jointcut.{name}")
    if name == "__version__":
        return metadata.version("jointcut")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names alone."""
    return ["__version__", *_FOLDERS]
