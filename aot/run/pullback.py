"""Hold a forward's residuals until the cotangent comes.

A `Pullback` is what every `vjp` returns: call it with a cotangent of the output and it gives the gradients. It is a
pytree, so it can leave a `jax.jit` or be kept in a training state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.trace.trees import Call
from jointcut.partition.errors import CallError, message
from jointcut.partition.figures import counted
from jointcut.partition.program import jaxprs
from jointcut.wrappers.metadata.signatures import GraphSignature

#: Runs a backward on residuals and cotangents, None for one that is zero; True keeps the residuals for another call.
Run = Callable[[Sequence[Any], Sequence[Any | None], bool], Sequence[Any]]


@dataclass(frozen=True)
class Backward:
    """The static part of a pullback: how the backward runs, and the trees of the call.

    A tree of results keeps it, and JAX keeps those of a program as long as the program: so it knows neither the user's
    function nor the arrays that one closes over, and lets both go.

    Attributes:
        call: the caller's side.
        run: the backward.
        kinds: where each residual comes from, "input", "output" or "saved".
        takes_zeros: whether it takes None for a cotangent that is zero, and not an array of zeros.
        positions: the arguments of which it gives one tree each; None gives those in `argnums`, as `jax.grad`.
        overwrites: whether a call gives up the residuals, unless it is told to keep them.
        key: the same for two calls of one program.
        signature: which input and output of the programs is which; None where no trace is at hand.
    """

    call: Call = field(compare=False)
    run: Run = field(compare=False, repr=False)
    kinds: tuple[str, ...]
    takes_zeros: bool
    positions: tuple[int, ...] | None
    overwrites: bool
    key: int
    signature: GraphSignature | None = field(default=None, compare=False, repr=False)


@jax.tree_util.register_dataclass
@dataclass
class Pullback:
    """The backward of one call, waiting for a cotangent: what the forward gave, and the inputs that are read again."""

    saved: list[Any] | None
    inputs: list[Any]
    backward: Backward = field(metadata={"static": True})

    def __repr__(self) -> str:
        """`<pullback of loss: 3 residuals>`."""
        return f"<pullback of {self.backward.call.name}: {counted(len(self.backward.kinds), 'residual')}>"

    @property
    def residuals(self) -> list[Any]:
        """All that is kept for the backward, in its order.

        Raises `CallError` where a call gave up their memory.
        """
        if self.saved is None:
            what = "was called before, and its residuals' memory has become the gradients."
            cure = "Say pullback(cotangent, keep_residuals=True) at every call but the last."
            raise CallError(message(f"The pullback of {self.backward.call.name}", what, cure))
        saved, inputs = iter(self.saved), iter(self.inputs)
        return [next(inputs if kind == "input" else saved) for kind in self.backward.kinds]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are kept for the backward, inputs of the function included."""
        return sum(jaxprs.aval_bytes(jax.typeof(r)) for r in self.residuals)

    def __call__(self, cotangent: Any, *, keep_residuals: bool = False) -> Any:
        """The gradients of a cotangent of the output.

        The pullback of a `Compiled` gives up the residuals, unless it is told to keep them for another call. Raises
        `CallError` where the cotangent does not fit the output, or the residuals are gone.
        """
        backward, residuals = self.backward, self.residuals
        call, keep = backward.call, keep_residuals or not backward.overwrites
        cotangents = call.cotangents(cotangent)
        flat = backward.run(residuals, cotangents if backward.takes_zeros else call.filled(cotangents), keep)
        if not keep:
            self.saved = None
        if backward.positions is None:
            return call.in_argnums(flat, call.bound)
        return call.gradients(flat, backward.positions, call.bound)
