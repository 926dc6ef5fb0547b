"""Call flat programs in the caller's trees, without a trace of the function at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jointcut.aot.joint import Results
from jointcut.aot.options import Options
from jointcut.aot.trees import Trees
from jointcut.wrappers.convention import is_inexact
from jointcut.wrappers.tree import Bound


@dataclass(frozen=True)
class Derivative:
    """What trees need to know of a program that was differentiated elsewhere."""

    results: Results
    sparse: frozenset[int]
    is_train: bool


@dataclass(frozen=True)
class FlatCall(Trees):
    """The calls of one structure, of which `bound` is one."""

    name: str
    options: Options
    bound: Bound
    wanted: tuple[int, ...]
    derivative: Derivative

    @property
    def differentiated(self) -> Derivative:
        """What was differentiated."""
        return self.derivative


@dataclass(frozen=True)
class FlatPullback:
    """The backward of one call: `residuals` wait for a cotangent, as often as one is given.

    `run` takes flat residuals and cotangents. With `positions` it gives one tree for each of these arguments, otherwise
    those in `argnums`.
    """

    run: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] = field(repr=False)
    residuals: list[Any] = field(repr=False)
    call: FlatCall = field(repr=False)
    bound: Bound = field(repr=False)
    positions: Sequence[int] | None = field(default=None, repr=False)

    def __call__(self, cotangent: Any) -> Any:
        """The gradients; raises `CallError` where the cotangent does not fit the output."""
        leaves = iter(self.call.cotangents(cotangent))
        full = [_or_zeros(next(leaves), a) for a in self.call.derivative.results.main if is_inexact(a.dtype)]
        gradients = self.run(self.residuals, full if self.call.derivative.is_train else [])
        if self.positions is None:
            return self.call.in_argnums(gradients, self.bound)
        return self.call.gradients(gradients, self.positions, self.bound)


def _or_zeros(cotangent: Any, aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype) if cotangent is None else cotangent
