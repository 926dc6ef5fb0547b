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
from jax.tree_util import keystr, tree_flatten_with_path

from jointcut.aot import compile as compiling
from jointcut.aot.stages import Cut
from jointcut.partition import jaxprs, verify
from jointcut.partition.emit import Halves
from jointcut.partition.errors import CallError, message
from jointcut.wrappers.convention import is_inexact, slot
from jointcut.wrappers.tree import is_array_like

_CURE = "Give a cotangent with the structure, shapes and dtypes of the output (float0 or zeros for integers)."


@dataclass(frozen=True)
class Program:
    """The static part of a pullback: the cut, the halves it runs, and what the output looked like."""

    cut: Cut = field(compare=False)
    halves: Halves = field(compare=False)
    outputs: tuple[jax.ShapeDtypeStruct, ...] = field(compare=False)
    key: int
    made: dict[str, Any] = field(compare=False, default_factory=dict, repr=False)

    def run(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The flat gradients, in this trace or compiled."""
        if jaxprs.tracing():
            return verify.backward(self.halves, residuals, cotangents)
        if "run" not in self.made:
            run = functools.partial(verify.backward, self.halves)
            self.made["run"] = jax.jit(run, compiler_options=compiling.compiler_options())
        return self.made["run"](residuals, cotangents)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pullback:
    """The backward of one call, waiting for a cotangent: what the forward saved, and the inputs that are read again."""

    saved: list[Any]
    inputs: list[Any]
    program: Program = field(metadata={"static": True})

    @classmethod
    def of(cls, cut: Cut, halves: Halves, residuals: list[Any], main: Any) -> Pullback:
        """The pullback of one forward run."""
        shown = tuple(slot("", x).struct for x in jax.tree.leaves(main))
        kept = [x for x, r in zip(residuals, halves.residuals, strict=True) if r.kind != "input"]
        return cls(kept, [], Program(cut, halves, shown, id(halves)))

    def with_inputs(self, flat: Sequence[Any]) -> Pullback:
        """The same with the caller's own arrays, which never pass through a program."""
        return replace(self, inputs=[flat[r.index] for r in self.program.halves.residuals if r.kind == "input"])

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
        traced = self.program.cut.traced
        leaves = self._fitting(cotangent)
        flat = self.program.run(self.residuals, leaves)
        return traced.gradients(flat, range(len(traced.bound.spans)), traced.bound)

    def _fitting(self, cotangent: Any) -> list[Any]:
        """The flat cotangents of the outputs that can carry one."""
        tree = self.program.cut.traced.program.results.out_tree
        found, given = tree_flatten_with_path(cotangent)
        if given != tree:
            raise CallError(message("The cotangent", f"has the structure {given}, the output {tree}.", _CURE))
        leaves = []
        for (path, leaf), out in zip(found, self.program.outputs, strict=True):
            name = f"cotangent{keystr(path)}"
            if not is_array_like(leaf):
                raise CallError(message(name, f"is a {type(leaf).__name__}, not an array.", _CURE))
            got, exact = slot(name, leaf), not is_inexact(out.dtype)
            if got.shape != out.shape or (got.dtype != out.dtype and not exact):
                want = str(replace(got, shape=out.shape, dtype=out.dtype)).split(": ")[1]
                what = f"is {str(got).split(': ')[1]}, the output {want}."
                raise CallError(message(name, what, _CURE))
            if not exact:
                leaves.append(leaf)
        return leaves
