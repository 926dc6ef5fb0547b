"""What the tests of the folder share: reports of programs, each made once, at rates that no machine measures."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import pytest

from benchmarks.programs import load
from jointcut import aot
from jointcut.partition.prices.cost import Roofline
from programs import named, undrawn

RATES = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)


@pytest.fixture(scope="session")
def traced() -> Callable[..., Any]:
    """From the name of a program of the corpus to its `Traced`."""

    @cache
    def trace(name: str) -> Any:
        program = named(name)
        with program.precision():
            function = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux, cost=RATES)
            return function.trace(*program.args, **program.kwargs)

    return trace


@pytest.fixture(scope="session")
def suite() -> Callable[..., Any]:
    """From the name of a program of the suite to its `Traced`, at its tiny size."""

    @cache
    def trace(name: str) -> Any:
        try:
            program = undrawn(lambda: load(name, "tiny"))
        except ImportError as error:
            pytest.skip(str(error))
        with jax.numpy_dtype_promotion("standard"), jax.enable_checks(False):
            return aot.function(program.loss, has_aux=program.has_aux, cost=RATES).trace(*program.arguments)

    return trace
