"""A program is a small named function, its arguments, and one sentence that says what it tests.

A file of the corpus reads:

    @program("A perceptron of two layers.", lambda: (normal(0, 3, 2), normal(1, 4, 3)))
    def perceptron(weights, inputs):
        return jnp.sum(jnp.tanh(inputs @ weights) ** 2)

after which `perceptron` is a `Program`. Its arguments are built anew at each call of `make()`,
always the same, so that nothing touches a device while tests are collected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TAGS: Mapping[str, str] = {
    "x64": "runs with 64-bit types switched on",
    "nonscalar": "its output is no scalar: only vjp applies as it stands, other laws weigh the output",
    "scan": "holds a scan whose derivative is another scan",
    "checkpoint": "holds a jax.checkpoint of the user",
    "random": "draws random numbers",
    "half": "computes in 16 bits",
}


@dataclass(frozen=True, eq=False)
class Program:
    """One small function and the arguments to run it on.

    `lacks` maps a transform that plain JAX itself refuses for this program to a part of JAX's message: the
    laws skip it there, and `laws/test_composition.py` checks that the refusal is still true.
    """

    name: str
    sentence: str
    function: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    argnums: int | tuple[int, ...] = 0
    has_aux: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rtol: float = 1e-4
    atol: float = 1e-5
    tags: frozenset[str] = frozenset()
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments, built now."""
        return self.make()

    @property
    def scalar(self) -> bool:
        """Whether jax.grad applies to the function as it stands."""
        return "nonscalar" not in self.tags

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the program is built and run."""
        return jax.enable_x64(True) if "x64" in self.tags else contextlib.nullcontext()


def program(
    sentence: str, make: Callable[[], tuple[Any, ...]], *, tags: str = "", **fields: Any
) -> Callable[..., Program]:
    """Turn the decorated function into a `Program`; `tags` are words of `TAGS` with spaces between."""
    words = frozenset(tags.split())
    assert words <= TAGS.keys(), words - TAGS.keys()

    def decorate(function: Callable[..., Any]) -> Program:
        return Program(function.__name__, sentence, function, make, tags=words, **fields)

    return decorate


def programs_of(module: ModuleType) -> tuple[Program, ...]:
    """The programs that a module defines, in its order."""
    return tuple(value for value in vars(module).values() if isinstance(value, Program))


def normal(seed: int, *shape: int, dtype: Any = np.float32, scale: float = 0.5) -> jax.Array:
    """An array of normal numbers, the same for the same seed."""
    draws = scale * np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(draws.astype(np.dtype(dtype)))


def integers(seed: int, *shape: int, below: int) -> jax.Array:
    """An array of int32 from 0 up to `below`, the same for the same seed."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape).astype(np.int32))
