"""What the tests of the folder share: the joint program of a program of the corpus, traced once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from jointcut import aot
from programs import Program, named


@pytest.fixture(scope="session")
def traced() -> Callable[[str], Any]:
    """From the name of a program to its `Traced`: `.joint`, `.program.roles`, `.graph`."""

    @cache
    def trace(name: str) -> Any:
        return traced_now(named(name))

    return trace


def traced_now(program: Program) -> Any:
    with program.precision():
        function = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux)
        return function.trace(*program.args, **program.kwargs)
