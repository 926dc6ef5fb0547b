"""Open matplotlib axes where it is installed, and save figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from typing import Any

from jointcut.partition.errors import JointcutError, message
from jointcut.partition.figures import BYTE_UNITS


class MissingLibrary(JointcutError):
    """Matplotlib is not installed."""


@contextmanager
def optional() -> Iterator[None]:
    """Skip the picture where matplotlib is not installed."""
    try:
        yield
    except MissingLibrary:
        return


def shown(size: tuple[float, float]) -> Any:
    """Axes of a pyplot figure, `size` in inches; raises `MissingLibrary`."""
    return _module("matplotlib.pyplot").subplots(figsize=size, layout="constrained")[1]


def apart(size: tuple[float, float]) -> Any:
    """Axes of a figure outside pyplot, to be saved as a file, `size` in inches; raises `MissingLibrary`."""
    return _module("matplotlib.figure").Figure(figsize=size, layout="constrained").subplots()


def kept(axes: Any, format: str = "png", dpi: int = 110) -> bytes:
    """The figure of axes as the bytes of a file."""
    file = BytesIO()
    axes.figure.savefig(file, format=format, dpi=dpi)
    return file.getvalue()


def unit_of(most: float) -> tuple[float, str]:
    """Number of bytes and name of the unit in which amounts up to `most` are drawn.

    >>> unit_of(47_200_000), unit_of(0)
    ((1000000.0, 'MB'), (1000.0, 'kB'))
    """
    return next((unit, name) for unit, name in BYTE_UNITS if most >= unit or name == "kB")


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        cure = "pip install matplotlib, or print instead."
        raise MissingLibrary(message("plot", "needs matplotlib.", cure)) from error
