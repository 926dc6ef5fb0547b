"""Run a smaller backward if some cotangents are zero.

If an output is not differentiated, its cotangent is known to be zero: JAX passes a symbolic zero, a `float0` array, or
nothing. For each pattern of such zeros a smaller backward is made once, like `AutogradZero` in TorchScript. It does not
compute, or wait for, values that depend on zero cotangents alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.partition.lower.emit import Halves
from jointcut.partition.lower.verify import waited
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.partition.rewrite.hooks import hooks_in, refused_in_vmap
from jointcut.partition.rewrite.simplify import live
from jointcut.partition.rewrite.specialise import Specialised, without
from jointcut.wrappers.table import Table


@dataclass(frozen=True)
class Backwards:
    """The backward half, and its variants without some cotangents.

    `wrap` turns a flat function into the function that runs, like `jax.jit`. It also takes the number of residuals,
    which are the first inputs.
    """

    halves: Halves
    wrap: Callable[[Callable[..., Any], int], Callable[..., Any]]
    made: Table[Any] = field(default_factory=Table, repr=False, compare=False)

    def __call__(self, residuals: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
        """Return the flat gradients. A zero cotangent is None, and so is a gradient that must be zero."""
        zeros = tuple(i for i, ct in enumerate(cotangents) if ct is None)
        flat = [*residuals, *cotangents]
        with refused_in_vmap(hooks_in(jaxprs.opened(self.halves.backward)[0].eqns)):
            if not zeros:
                return self._compiled((), self.halves.backward, range(len(flat)))(*self._waited(range(len(flat)), flat))
            variant = self.variant(zeros)
            run = self._compiled(zeros, variant.closed, variant.used)
            results = iter(run(*self._waited(variant.used, [flat[i] for i in variant.used])))
            return [None if zero else next(results) for zero in variant.zero_outputs]

    def _waited(self, places: Iterable[int], inputs: Sequence[Any]) -> Sequence[Any]:
        return waited(self.halves.residuals, places, inputs) if self.halves.waits else inputs

    def variant(self, zeros: tuple[int, ...]) -> Specialised:
        """Return the backward for zero cotangents at these positions."""
        offset = len(self.halves.residuals)
        return self.made.of(("variant", zeros), lambda: without(self.halves.backward, [offset + i for i in zeros]))

    def _compiled(self, zeros: tuple[int, ...], closed: Any, used: Iterable[int]) -> Callable[..., Any]:
        residuals = sum(i < len(self.halves.residuals) for i in used)
        return self.made.of(zeros, lambda: self.wrap(lambda *flat: runtime.evaluate(closed, *flat), residuals))

    @property
    def read(self) -> tuple[bool, ...]:
        """Whether a gradient depends on each cotangent."""
        jaxpr, _ = jaxprs.opened(self.halves.backward)
        count = len(jaxpr.invars) - len(self.halves.residuals)
        if not count:
            return ()
        read = live(jaxpr.eqns, jaxpr.outvars).read
        return tuple(v in read for v in jaxpr.invars[-count:])


def filled(values: Sequence[Any | None], avals: Iterable[Any]) -> list[Any]:
    """Return the values, with each None replaced by an array of zeros of its type."""
    return [abstract.full(aval, 0) if x is None else x for x, aval in zip(values, avals, strict=True)]
