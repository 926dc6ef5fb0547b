"""Describe the op that made a NaN or an infinity, and its operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.partition.program.jax import abstract
from jointcut.wrappers.metadata.convention import is_inexact


@dataclass(frozen=True)
class Culprit:
    """The op that made bad numbers from good numbers, its place in the program, and its operands."""

    primitive: str
    source: str
    scope: str
    kind: str  # "NaN" or "Inf"
    steps: tuple[int, ...]  # steps of the loops around it, outermost first, counted from 0
    operands: tuple[str, ...]  # "float32[4] in [-1, 3]"

    def __str__(self) -> str:
        """Return a sentence: `log made a NaN out of float32[4] in [-1, 3] at model.py:12 (loss), scope jvp(block)`."""
        text = f"{self.primitive} made {'a NaN' if self.kind == 'NaN' else 'an infinity'}"
        more = [f"{len(self.operands) - 4} more"] if len(self.operands) > 4 else []
        text += f" out of {_listed([*self.operands[:4], *more])}" if self.operands else ""
        text += f" at {self.source}" if self.source else ""
        text += f", scope {self.scope}" if self.scope else ""
        if self.steps:
            plural = "s" if len(self.steps) > 1 else ""
            order = "outermost first, " if plural else ""
            text += f", in step{plural} {_listed(self.steps)} of the loop{plural} around it ({order}counted from 0)"
        return text + "."


def described(x: Any) -> str:
    """Describe an array: `float32[4] in [-1, 3]`, `float32[] = 0`, `complex64[2] of magnitude in [0, 1]`."""
    aval: Any = jax.typeof(x)
    text = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
    if not abstract.is_plain(aval) or 0 in aval.shape:
        return text
    numbers = np.asarray(x)
    if jnp.issubdtype(numbers.dtype, np.complexfloating):
        text, numbers = f"{text} of magnitude", np.abs(numbers)
    numbers = numbers.astype(np.float64 if is_inexact(numbers.dtype) else np.int64)
    digits = ".4g" if is_inexact(numbers.dtype) else "d"
    if not numbers.shape:
        return f"{text} = {numbers[()]:{digits}}"
    real = numbers[~np.isnan(numbers)]
    limits = [f"in [{real.min():{digits}}, {real.max():{digits}}]"] if real.size else []
    return f"{text} {' or '.join([*limits, *['NaN'][: numbers.size - real.size]])}"


def _listed(items: Sequence[Any]) -> str:
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last
