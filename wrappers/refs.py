"""Turn writes to references into extra results, then write them back.

In a program of our own a `jax.Ref` is an argument, and XLA writes its buffer in place (MUTATED_IN_GRAPH). JAX gives a
custom derivative to pure functions only, so inside somebody's `jax.grad` or `jax.vmap` the function is made pure: what
a reference holds is an input, its new state an extra result that is written back after the call (MUTATED_OUT_GRAPH).

Differentiation treats a reference as JAX does. One that is not differentiated may be written with what carries no
derivative only (`jax.lax.stop_gradient`); what is read from it is a constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jointcut.partition import jaxprs
from jointcut.partition.errors import TraceError, message


@dataclass(frozen=True)
class Pure:
    """A jaxpr made pure: `references` are positions of its inputs, `written` those among them with a new state.

    Its results are the function's, then the new states.
    """

    closed: Any
    references: tuple[int, ...]
    written: tuple[int, ...]

    @classmethod
    def of(cls, closed: Any) -> Pure | None:
        """The jaxpr without references, None where JAX cannot take them out (a custom derivative that writes one)."""
        jaxpr, _ = jaxprs.opened(closed)
        references = tuple(i for i, v in enumerate(jaxpr.invars) if jaxprs.is_reference(v.aval))
        touched = {var for eqn in jaxpr.eqns for var, is_written in reads_and_writes(eqn) if is_written}
        written = tuple(i for i in references if jaxpr.invars[i] in touched)
        try:
            pure = jaxprs.discharged(closed)
        except NotImplementedError:
            return None
        inner, _ = jaxprs.opened(pure)
        count = len(jaxpr.outvars)
        states = [inner.outvars[count + references.index(i)] for i in written]
        kept = jaxprs.build(inner.invars, [*inner.outvars[:count], *states], inner.eqns)
        return cls(kept, references, written)

    def read(self, flat: Sequence[Any]) -> list[Any]:
        """The flat inputs with what references hold in their place."""
        held = set(self.references)
        return [x[...] if i in held else x for i, x in enumerate(flat)]

    def write_back(self, flat: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Write the new states, and return the outputs without them."""
        count = len(outputs) - len(self.written)
        for i, state in zip(self.written, outputs[count:], strict=True):
            flat[i][...] = state
        return list(outputs[:count])


def reads_and_writes(eqn: Any) -> Iterator[tuple[Any, bool]]:
    """The references that an equation was given and touches, each with whether it is written."""
    for effect in eqn.effects:
        if hasattr(effect, "input"):
            yield effect.input, type(effect).__name__ != "ReadEffect"


def refuse_results(paths: Sequence[str], avals: Sequence[Any]) -> None:
    """Raise `TraceError` where a function returns a reference."""
    for path, aval in zip(paths, avals, strict=True):
        if jaxprs.is_reference(aval):
            what = "is a jax.Ref, which a compiled function cannot return."
            raise TraceError(
                message(path, what, "Return what it holds, ref[...]; the caller has the reference itself.")
            )
