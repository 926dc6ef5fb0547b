"""Call a compiled backward, which gives up its residuals."""

from __future__ import annotations

from typing import Any

from jointcut.partition import jaxprs
from jointcut.partition.errors import CallError, message
from jointcut.wrappers.tree import Bound
from jointcut.wrappers.zeros import filled


class CompiledPullback:
    """The backward of one run of compiled halves, which gives up its residuals when it is called."""

    def __init__(self, compiled: Any, residuals: list[Any], bound: Bound) -> None:
        """Made by `Compiled.vjp`; not by hand."""
        self._compiled, self._residuals, self._bound = compiled, residuals, bound
        self._gone = False

    def __call__(self, cotangent: Any, *, keep_residuals: bool = False) -> Any:
        """The gradients of the arguments; with `keep_residuals` it may be called again."""
        traced = self._compiled.cut.traced
        if self._gone:
            what = "was called before, and its residuals' memory has become the gradients."
            cure = "Say pullback(cotangent, keep_residuals=True) at every call but the last."
            raise CallError(message(f"The pullback of {traced.name}", what, cure))
        leaves = traced.cotangents(cotangent)
        taken = jaxprs.opened(self._compiled.cut.backward)[0].invars[len(self._residuals) :]
        full = filled(leaves, (v.aval for v in taken))
        flat = self._compiled._backward_that(overwrite=not keep_residuals)(*self._residuals, *full)
        self._gone = not keep_residuals
        return traced.in_argnums(flat, self._bound)
