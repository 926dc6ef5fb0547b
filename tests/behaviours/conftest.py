"""The behaviours ask what programs mean and not how fast they run: XLA compiles them with little optimisation."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def little_optimisation() -> Iterator[None]:
    """Half of the time of a behaviour goes into LLVM otherwise."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
