"""Hold a forward's residuals until the cotangent comes.

A `Pullback` is what `vjp` returns: call it with a cotangent of the output, as often as you like, and it gives one
cotangent tree per positional argument. It is a pytree, so it can leave a `jax.jit` or be kept in a training state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.flat import FlatCall
from jointcut.aot.stages import Cut
from jointcut.partition import jaxprs
from jointcut.partition.emit import Halves
from jointcut.partition.figures import counted
from jointcut.wrappers.metadata import GraphSignature
from jointcut.wrappers.table import Table
from jointcut.wrappers.zeros import Backwards, filled


@dataclass(frozen=True)
class Program:
    """The static part of a pullback: the halves it runs, and the trees of the call.

    A tree of results keeps it, and JAX keeps those of a program as long as the program: so it knows neither the user's
    function nor the arrays that one closes over, and lets both go.
    """

    call: FlatCall = field(compare=False)
    signature: GraphSignature = field(compare=False, repr=False)
    halves: Halves = field(compare=False)
    key: int
    made: Table[Backwards] = field(compare=False, default_factory=Table, repr=False)

    def run(self, residuals: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any]:
        """The flat gradients, in this trace or compiled; None stands for a cotangent that is zero."""
        backwards = self.made.of("backward", lambda: Backwards(self.halves, functools.partial(jax.jit, inline=True)))
        gradients = backwards(residuals, cotangents)
        return filled(gradients, (v.aval for v in jaxprs.opened(self.halves.backward)[0].outvars))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pullback:
    """The backward of one call, waiting for a cotangent: what the forward saved, and the inputs that are read again."""

    saved: list[Any]
    inputs: list[Any]
    program: Program = field(metadata={"static": True})

    @classmethod
    def of(cls, cut: Cut, halves: Halves, residuals: list[Any]) -> Pullback:
        """The pullback of one forward run."""
        kept = [x for x, r in zip(residuals, halves.residuals, strict=True) if r.kind != "input"]
        return cls(kept, [], Program(FlatCall.of(cut.traced), cut.signature, halves, id(halves)))

    def with_inputs(self, consts: Sequence[Any], leaves: Sequence[Any]) -> Pullback:
        """The same with the caller's own arrays, which never pass through a program."""
        twice = self.program.call.bound.duplicates
        flat = [*consts, *(leaf for i, leaf in enumerate(leaves) if i not in twice)]
        kept = [flat[r.index] for r in self.program.halves.residuals if r.kind == "input"]
        return replace(self, inputs=[jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in kept])

    def __repr__(self) -> str:
        """`<pullback of loss: 3 residuals>`."""
        return f"<pullback of {self.program.call.name}: {counted(len(self.program.halves.residuals), 'residual')}>"

    @property
    def residuals(self) -> list[Any]:
        """All that is kept for the backward, in its order."""
        saved, inputs = iter(self.saved), iter(self.inputs)
        return [next(inputs if r.kind == "input" else saved) for r in self.program.halves.residuals]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are kept for the backward, inputs of the function included."""
        return sum(jaxprs.aval_bytes(jax.typeof(r)) for r in self.residuals)

    def __call__(self, cotangent: Any) -> tuple[Any, ...]:
        """One cotangent per positional argument of the function.

        Raises `CallError` where the cotangent does not fit the output.
        """
        call = self.program.call
        flat = self.program.run(self.residuals, call.cotangents(cotangent))
        return call.gradients(flat, range(len(call.bound.spans)), call.bound)
