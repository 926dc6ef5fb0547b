"""Call flat programs in the caller's trees, without a trace of the function at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.aot.joint import Results
from jointcut.aot.options import Options
from jointcut.aot.traced import TracedCall
from jointcut.aot.trees import Trees
from jointcut.wrappers.convention import is_inexact
from jointcut.wrappers.tree import Bound
from jointcut.wrappers.zeros import filled


@dataclass(frozen=True)
class Derivative:
    """What trees need to know of a program that was differentiated elsewhere.

    `order` tells which output of the program stands at each leaf of the result.
    """

    results: Results
    order: tuple[int, ...]
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

    @classmethod
    def of(cls, traced: TracedCall) -> FlatCall:
        """The calls of a signature that was traced here, without the trace."""
        program, order = traced.program, tuple(range(len(traced.program.results.avals)))
        derivative = Derivative(program.results, order, program.sparse, program.is_train)
        return cls(traced.name, traced.options, traced.bound, traced.wanted, derivative)

    @property
    def differentiated(self) -> Derivative:
        """What was differentiated."""
        return self.derivative

    def results(self, outputs: Sequence[Any], bound: Bound) -> tuple[Any, Any]:
        """As `Trees.results`, of the outputs in the order of the program."""
        return super().results([outputs[i] for i in self.derivative.order], bound)


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
        gradients = self.run(self.residuals, self._cotangents(cotangent))
        if self.positions is None:
            return self.call.in_argnums(gradients, self.bound)
        return self.call.gradients(gradients, self.positions, self.bound)

    def _cotangents(self, cotangent: Any) -> list[Any]:
        """Those that the program takes, in the order of its outputs; none where there is no backward."""
        derivative, found = self.call.derivative, self.call.cotangents(cotangent)
        if not derivative.is_train:
            return []
        leaves = zip(derivative.order, derivative.results.main, strict=False)  # aux comes last, and carries none
        carrying = [(i, aval) for i, aval in leaves if is_inexact(aval.dtype)]
        full = filled(found, (aval for _, aval in carrying))
        given = dict(zip((i for i, _ in carrying), full, strict=True))
        return [given[i] for i in sorted(given)]
