"""Run the backward that a pattern of zero cotangents asks for.

A cotangent is known to be zero where nobody differentiates an output: JAX hands over a symbolic zero, a `float0` array,
or nothing. For each pattern of such zeros that occurs a smaller backward is made, once (the `AutogradZero` of
TorchScript's differentiation): what only the missing cotangents feed is neither computed nor waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.partition.lower.emit import Halves
from jointcut.partition.lower.verify import waited
from jointcut.partition.program import jaxprs
from jointcut.partition.rewrite.simplify import live
from jointcut.partition.rewrite.specialise import Specialised, without
from jointcut.wrappers.table import Table


@dataclass(frozen=True)
class Backwards:
    """The backward half, and its variants without some cotangents.

    `wrap` makes a flat function of jaxpr evaluations into what runs: `jax.jit` with options, say.
    """

    halves: Halves
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    made: Table[Any] = field(default_factory=Table, repr=False, compare=False)

    def __call__(self, residuals: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
        """The flat gradients; None for a cotangent says that it is zero, None for a gradient that it must be."""
        zeros = tuple(i for i, ct in enumerate(cotangents) if ct is None)
        if not zeros:
            flat = [*residuals, *cotangents]
            return self._compiled((), self.halves.backward)(*self._held(range(len(flat)), flat))
        variant = self.variant(zeros)
        flat = [*residuals, *cotangents]
        run = self._compiled(zeros, variant.closed)
        results = iter(run(*self._held(variant.used, [flat[i] for i in variant.used])))
        return [None if zero else next(results) for zero in variant.zero_outputs]

    def _held(self, places: Iterable[int], given: Sequence[Any]) -> Sequence[Any]:
        return waited(self.halves.residuals, places, given) if self.halves.waits else given

    def variant(self, zeros: tuple[int, ...]) -> Specialised:
        """The backward for zero cotangents at some positions (among the cotangents)."""
        offset = len(self.halves.residuals)
        return self.made.of(("variant", zeros), lambda: without(self.halves.backward, [offset + i for i in zeros]))

    def _compiled(self, zeros: tuple[int, ...], closed: Any) -> Callable[..., Any]:
        return self.made.of(zeros, lambda: self.wrap(lambda *flat: jaxprs.evaluate(closed, *flat)))

    @property
    def read(self) -> tuple[bool, ...]:
        """Which cotangents any gradient depends on."""
        jaxpr, _ = jaxprs.opened(self.halves.backward)
        count = len(jaxpr.invars) - len(self.halves.residuals)
        if not count:
            return ()
        read = live(jaxpr.eqns, jaxpr.outvars).read
        return tuple(v in read for v in jaxpr.invars[-count:])


def filled(values: Sequence[Any | None], avals: Iterable[Any]) -> list[Any]:
    """The values with an array of zeros in the place of each None, of the type in its place."""
    return [jaxprs.full(aval, 0) if x is None else x for x, aval in zip(values, avals, strict=True)]
