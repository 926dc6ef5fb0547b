"""Tell the true and the padded sizes of a program's values, and mask what is padded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from jointcut.partition.errors import TraceError, message
from jointcut.partition.program import sizes as symbolic
from jointcut.partition.program.jax import jaxprs, runtime, user_source
from jointcut.partition.program.jax.jaxprs import Equation, Literal


@dataclass
class Extents:
    """The sizes of one run of a program: `bucket` has the padded size of each name, `true` an integer array."""

    bucket: Mapping[str, int]
    true: Mapping[str, Any]
    _known: dict[str, Any] = field(default_factory=dict)

    def of(self, size: Any) -> Any:
        """Return the true size as an integer array; a number is returned unchanged."""
        if not symbolic.is_symbolic([size]):
            return size
        text = str(size)
        if text not in self._known:
            self._known[text] = symbolic.array_of(text, self.true)
        return self._known[text]

    def valid(self, shape: Sequence[Any], axes: Iterable[int] | None = None) -> Any:
        """Return a mask of the elements within the true sizes along some axes, by default all; None without padding."""
        padded = symbolic.numbers(shape, self.bucket)
        mask = None
        for axis in range(len(shape)) if axes is None else axes:
            if symbolic.is_symbolic([shape[axis]]):
                inside = lax.broadcasted_iota(np.int32, padded, axis) < self.of(shape[axis])
                mask = inside if mask is None else mask & inside
        return mask

    def filled(self, x: Any, shape: Sequence[Any], number: Any = 0, axes: Iterable[int] | None = None) -> Any:
        """Return a padded array with a number in place of what is padded along some axes, by default all."""
        mask = self.valid(shape, axes)
        return x if mask is None else lax.select(mask, x, lax.full_like(x, number))


@dataclass(frozen=True)
class PaddedOp:
    """One equation that runs on padded arrays.

    Attributes:
        eqn: the equation for symbolic sizes.
        sized: the same equation with the padded sizes.
        extents: the sizes.
        run: a function that runs a program inside the equation: `(program, sized program, arrays) -> arrays`.
    """

    eqn: Equation
    sized: Equation
    extents: Extents
    run: Any

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        """The shapes of the operands."""
        return [tuple(getattr(v.aval, "shape", ())) for v in self.eqn.invars]

    @property
    def out(self) -> tuple[Any, ...]:
        """The shape of the first result."""
        return tuple(getattr(self.eqn.outvars[0].aval, "shape", ()))

    @property
    def padded(self) -> tuple[int, ...]:
        """The padded shape of the first result."""
        aval: Any = self.sized.outvars[0].aval
        return tuple(aval.shape)

    def plain(self, values: Sequence[Any], **params: Any) -> list[Any]:
        """Run the equation with the padded sizes, and perhaps with other parameters."""
        eqn = self.sized.replace(params={**self.sized.params, **params}) if params else self.sized
        pairs = list(zip(eqn.invars, values, strict=True))
        invars = [v if isinstance(v, Literal) and x is v.val else jaxprs.fresh(jax.typeof(x)) for v, x in pairs]
        given = [(v, x) for v, (_, x) in zip(invars, pairs, strict=True) if not isinstance(v, Literal)]
        program = jaxprs.build([v for v, _ in given], eqn.outvars, [jaxprs.rebound(eqn, invars, eqn.outvars)])
        return runtime.evaluate(program, *(x for _, x in given))

    def filled(self, values: Sequence[Any], number: Any = 0) -> list[Any]:
        """Return operands with a number in place of what is padded."""
        return [self.extents.filled(x, shape, number) for x, shape in zip(values, self.shapes, strict=True)]

    def refuse(self, why: str) -> TraceError:
        """Return the error for an equation that cannot run on padded arrays."""
        shown = ", ".join(f"[{','.join(map(str, shape))}]" for shape in self.shapes)
        where = f"{self.eqn.primitive.name} of {shown}" if self.shapes else self.eqn.primitive.name
        error = TraceError(message(where, f"needs the size as a number: it {why}.", "Give it as a number."))
        error.add_note(user_source.source_of(self.eqn))
        return error
