"""Put flat results back into the caller's trees.

A traced call, an exported pair and an entry of the cache have in common what a call needs before and after its
programs run: which flat position is which argument, and the way from flat outputs and gradients to what JAX's own
`value_and_grad` and `vjp` would return.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.joint import Results
from jointcut.aot.options import Options
from jointcut.partition import jaxprs
from jointcut.partition.errors import TraceError, message
from jointcut.wrappers.convention import is_real, slot
from jointcut.wrappers.guards import fitting
from jointcut.wrappers.tree import Bound


class Differentiated(Protocol):
    """What trees need to know of a program: its results, the tables whose gradients are rows, whether it has any."""

    @property
    def results(self) -> Results:
        """What the function returns."""
        ...

    @property
    def sparse(self) -> frozenset[int]:
        """Places among the differentiated leaves of those whose gradient is rows and their places."""
        ...

    @property
    def is_train(self) -> bool:
        """Whether there is a backward."""
        ...


class Trees:
    """The caller's side of one signature: `bound` is a call of it, `wanted` are its differentiated flat positions."""

    name: str
    options: Options
    bound: Bound
    wanted: tuple[int, ...]

    @property
    def differentiated(self) -> Differentiated:
        """What was differentiated."""
        raise NotImplementedError

    @property
    def owners(self) -> tuple[int, ...]:
        """The flat argument that each flat gradient belongs to: a table's rows and places are two of one."""
        sparse = self.differentiated.sparse
        return tuple(i for k, i in enumerate(self.wanted) for _ in range(1 + (k in sparse)))

    def results(self, outputs: Sequence[Any], bound: Bound) -> tuple[Any, Any]:
        """The function's output and its aux (None without `has_aux`) in the caller's trees.

        What the function wrote to objects of the call `bound` is written to them.
        """
        return self.differentiated.results.given_back(outputs, bound)

    def gradients(
        self, flat: Sequence[Any], positions: Sequence[int], bound: Bound, keep_structure: bool = False
    ) -> tuple[Any, ...]:
        """One tree per position of `positions`; a leaf that carries no derivative gets a `float0` zero.

        With `keep_structure` those that say where a sparse array has its numbers stay as they are, as
        `jax.experimental.sparse.grad` has it, where `jax.vjp` gives zeros.
        """
        kept = self.bound.structure if keep_structure else frozenset()
        positions = [place % len(bound.spans) for place in positions]
        given = iter(flat)
        sparse = self.differentiated.sparse
        by_leaf = {
            i: self._of_rows(next(given), next(given), i, bound) if k in sparse else next(given)
            for k, i in enumerate(self.wanted)
        }
        asked = {i for place in positions for i in bound.spans[place]} - bound.in_modules
        asked = asked if self.options.filter is None else set()
        leaves = [
            by_leaf[i] if i in by_leaf else leaf if i in kept else _float0(leaf) if i in asked else None
            for i, leaf in enumerate(bound.leaves)
        ]
        trees = bound.gradients(leaves)
        return tuple(trees[place] for place in positions)

    def _of_rows(self, rows: Any, places: Any, i: int, bound: Bound) -> Any:
        """The gradient of a table as a sparse array of the rows that were read."""
        kind = importlib.import_module("jax.experimental.sparse").BCOO
        return kind((rows, places), shape=slot("", bound.leaves[i]).shape)

    def cotangents(self, cotangent: Any) -> list[Any | None]:
        """The flat cotangents for the backward, None for one that is zero by its type (`float0`, `SymbolicZero`).

        Raises `CallError` where the cotangent does not fit the output.
        """
        results = self.differentiated.results
        found = fitting(results.out_tree, results.main, cotangent)
        return found if self.differentiated.is_train else []

    @property
    def is_scalar(self) -> bool:
        """Whether the function returns one real number (and aux), so that `value_and_grad` is defined."""
        results = self.differentiated.results
        bare = results.out_tree == jax.tree.structure(0)
        return bare and results.main[0].shape == () and is_real(results.main[0].dtype)

    def ones(self) -> list[Any]:
        """The cotangent of a scalar output, none for inference; raises `TraceError` where the output is no scalar."""
        outs = self.differentiated.results.main
        if not self.is_scalar:
            shown = ", ".join(a.str_short() for a in outs) or "nothing"
            cure = (
                "Reduce it to one real number (jnp.mean, jnp.sum), return extras as aux with has_aux=True, or use vjp."
            )
            raise TraceError(message(self.name, f"returned {shown}: value_and_grad needs a real scalar.", cure))
        return [jaxprs.full(jaxprs.cotangent_aval(outs[0]), 1)] if self.differentiated.is_train else []

    def value_and_gradients(self, outputs: Sequence[Any], gradients: Sequence[Any], bound: Bound) -> Any:
        """Results in the form of `jax.value_and_grad`: `value, grads`, or `(value, aux), grads` with `has_aux`."""
        main, aux = self.results(outputs, bound)
        value = (main, aux) if self.options.has_aux else main
        return value, self.in_argnums(gradients, bound, keep_structure=True)

    def in_argnums(self, gradients: Sequence[Any], bound: Bound, keep_structure: bool = False) -> Any:
        """The gradients of the arguments in `argnums`: one tree, or a tuple of them, as in `jax.grad`."""
        trees = self.gradients(gradients, self.options.chosen, bound, keep_structure)
        return trees[0] if isinstance(self.options.argnums, int) else trees


def dense(rows: Any, places: Any, shape: Sequence[int]) -> Any:
    """A table's gradient as an array of its shape: the rows are added where they belong."""
    return jnp.zeros(shape, rows.dtype).at[tuple(jnp.asarray(places).T)].add(rows)


def _float0(leaf: Any) -> np.ndarray:
    return np.zeros(slot("", leaf).shape, jax.dtypes.float0)
