"""Hold a forward's residuals until the cotangent is given.

Every `vjp` returns a `Pullback`: a function from a cotangent of the output to the gradients. It is a pytree, so it can
leave a `jax.jit` or be part of a training state.
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

#: A backward: residuals, cotangents (None for zero), and whether to keep the residuals for another call, to gradients.
Run = Callable[[Sequence[Any], Sequence[Any | None], bool], Sequence[Any]]


@dataclass(frozen=True)
class Backward:
    """The static part of a pullback: the backward, and the trees of the call.

    It is part of the result's tree, which JAX keeps as long as the program. So it holds neither the user's function nor
    its constants, which can be freed.

    Attributes:
        call: the arguments and results of the signature.
        run: the backward.
        kinds: the origin of each residual, "input", "output" or "saved".
        takes_zeros: whether a zero cotangent is passed as None, and not as an array of zeros.
        positions: the arguments that get one tree of gradients each; None means those in `argnums`, as in `jax.grad`.
        overwrites: whether a call overwrites the residuals by default.
        key: equal for all calls of one program.
        signature: the names of the programs' inputs and outputs; None if there is no trace.
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
    """The backward of one call: `saved` results of the forward, and `inputs` that are read again."""

    saved: list[Any] | None
    inputs: list[Any]
    backward: Backward = field(metadata={"static": True})

    def __repr__(self) -> str:
        """`<pullback of loss: 3 residuals>`."""
        return f"<pullback of {self.backward.call.name}: {counted(len(self.backward.kinds), 'residual')}>"

    @property
    def residuals(self) -> list[Any]:
        """The arrays kept for the backward, in its order.

        Raises `CallError` if a call has overwritten them.
        """
        if self.saved is None:
            what = "was called before, and its residuals' memory has become the gradients."
            cure = "Say pullback(cotangent, keep_residuals=True) at every call but the last."
            raise CallError(message(f"The pullback of {self.backward.call.name}", what, cure))
        saved, inputs = iter(self.saved), iter(self.inputs)
        return [next(inputs if kind == "input" else saved) for kind in self.backward.kinds]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays kept for the backward, including inputs of the function."""
        return sum(jaxprs.aval_bytes(jax.typeof(r)) for r in self.residuals)

    def __call__(self, cotangent: Any, *, keep_residuals: bool = False) -> Any:
        """The gradients of a cotangent of the output.

        The pullback of a `Compiled` overwrites the residuals unless `keep_residuals` is true. Raises `CallError` if the
        cotangent does not fit the output, or if the residuals have been overwritten.
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
