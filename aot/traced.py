"""Hold one traced call, and put flat results back into the caller's trees.

What a trace knows for every later stage: the joint program, which flat position is which, what one look at the function
taught us, and the way back from flat outputs and gradients to the trees that the caller knows.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jointcut.aot.analyse import analyse, plain_meta
from jointcut.aot.compile import ProgramMemory
from jointcut.aot.joint import Joint
from jointcut.aot.options import Options
from jointcut.partition import jaxprs
from jointcut.partition.errors import TraceError, message
from jointcut.partition.graph import Graph
from jointcut.partition.loops import read
from jointcut.wrappers import alias, containers
from jointcut.wrappers.convention import Convention, slot
from jointcut.wrappers.guards import fitting
from jointcut.wrappers.metadata import SubclassMeta, TensorAlias, ViewAndMutationMeta
from jointcut.wrappers.stack import Wrapped
from jointcut.wrappers.tree import Bound, struct


@dataclass(frozen=True)
class TracedCall:
    """A function traced for one signature into a joint forward and backward program.

    `joint` is the closed jaxpr `(constants, arguments, cotangents) -> (outputs, gradients)`, `convention` says which
    flat position is which. `wanted` are the flat argument positions that are differentiated, `wrapped` what the
    wrappers made of the function.
    """

    name: str
    options: Options
    bound: Bound
    wrapped: Wrapped
    program: Joint
    wanted: tuple[int, ...]
    trace_ms: float

    @property
    def convention(self) -> Convention:
        """What each array that enters means to the caller; one that stands at two places enters once."""
        return self.wrapped.target.convention

    @cached_property
    def metadata(self) -> ViewAndMutationMeta:
        """What one look at the function taught us of its inputs and outputs."""
        return analyse(self.program, self.bound, self.wanted, self.donated)

    @cached_property
    def donated(self) -> frozenset[int]:
        """Flat positions of the arguments whose buffers a call gives up."""
        return self.bound.leaves_of(*self.options.donated)

    @cached_property
    def handed_back(self) -> dict[int, TensorAlias]:
        """Outputs that are inputs or earlier outputs, by position: they stay out of the compiled programs."""
        jaxpr, _ = jaxprs.opened(self.program.closed)
        start = len(self.consts)
        inputs = [jaxpr.invars[start + place] for place in self.bound.places]
        same = alias.identities(inputs, jaxpr.outvars[: len(self.program.results.avals)])
        # What XLA may compute once is still two arrays for a caller who computed it twice, and may give one up.
        found = {i: TensorAlias("output", j) for i, j in self.program.results.repeated}
        found |= {i: twin for i, twin in same.items() if twin.source == "input"}
        return alias.kept_out(dict(sorted(found.items())), self.donated)

    @property
    def owners(self) -> tuple[int, ...]:
        """The flat argument that each flat gradient belongs to: a table's rows and places are two of one."""
        return tuple(i for k, i in enumerate(self.wanted) for _ in range(1 + (k in self.program.sparse)))

    @property
    def subclass_metadata(self) -> SubclassMeta:
        """The same, with how gradients are put back into containers."""
        if not self.program.is_train:
            return SubclassMeta(self.metadata)
        jaxpr, _ = jaxprs.opened(self.program.closed)
        flat = [jaxprs.struct(v.aval) for v in jaxpr.outvars[len(self.program.results.avals) :]]
        leaves = [slot("", leaf).struct for leaf in self.bound.leaves]

        def gradients(flat: Sequence[Any], leaves: Sequence[Any]) -> Any:
            return self.gradients(flat, self.options.chosen, replace(self.bound, leaves=tuple(leaves)), True)

        found, tree = jax.tree.flatten(jax.eval_shape(gradients, flat, leaves))
        return SubclassMeta(self.metadata, containers.metas(tree, [plain_meta(i, x) for i, x in enumerate(found)]))

    @property
    def joint(self) -> Any:
        """The joint program as a closed jaxpr without constants."""
        return self.program.closed

    @cached_property
    def graph(self) -> Graph:
        """The joint program as ops and values, the bodies of its loops joined."""
        return read(self.program.closed, self.program.roles)

    @property
    def consts(self) -> tuple[Any, ...]:
        """The arrays that the function closes over: leading inputs of every program made from it."""
        return self.program.consts

    @property
    def in_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arrays that enter, in order."""
        return tuple(slot.struct for slot in self.convention.inputs)

    @cached_property
    def plain_memory(self) -> ProgramMemory:
        """XLA's account of `jax.jit(jax.value_and_grad(f))`: forward and backward as they were traced, uncut."""
        closed, structs = self.program.closed, [*map(struct, self.consts), *self.bound.unique]
        ones = self.ones() if self.is_scalar else ()
        given = jaxprs.input_structs(closed)[len(structs) + len(ones) :]  # cotangents of what is no scalar
        program = jax.jit(lambda *flat: jaxprs.evaluate(closed, *flat, *ones))
        return ProgramMemory.of_jit(program, [*structs, *given])

    def flat(self, bound: Bound) -> list[Any]:
        """The flat inputs of the programs for one call."""
        return [*self.consts, *(leaf for i, leaf in enumerate(bound.leaves) if i not in self.bound.duplicates)]

    def results(self, outputs: Sequence[Any]) -> tuple[Any, Any]:
        """The function's output and its aux (None without `has_aux`) in the caller's trees."""
        count = len(outputs) - self.program.results.num_aux
        main = jax.tree.unflatten(self.program.results.out_tree, outputs[:count])
        aux = None
        if self.program.results.aux_tree is not None:
            aux = jax.tree.unflatten(self.program.results.aux_tree, outputs[count:])
        return main, aux

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
        sparse = self.program.sparse
        by_leaf = {
            i: self._of_rows(next(given), next(given), i, bound) if k in sparse else next(given)
            for k, i in enumerate(self.wanted)
        }
        out = []
        fixed = {i for i, _ in bound.static_args}
        for place in positions:
            if place in fixed:
                out.append(None)
                continue
            leaves = [
                by_leaf[i] if i in by_leaf else bound.leaves[i] if i in kept else _float0(bound.leaves[i])
                for i in bound.spans[place]
            ]
            out.append(jax.tree.unflatten(bound.argument_tree(place), leaves))
        return tuple(out)

    def _of_rows(self, rows: Any, places: Any, i: int, bound: Bound) -> Any:
        """The gradient of a table as a sparse array of the rows that were read."""
        kind = importlib.import_module("jax.experimental.sparse").BCOO
        return kind((rows, places), shape=slot("", bound.leaves[i]).shape)

    def cotangents(self, cotangent: Any) -> list[Any | None]:
        """The flat cotangents for the backward, None for one that is zero by its type (`float0`, `SymbolicZero`).

        Raises `CallError` where the cotangent does not fit the output.
        """
        results = self.program.results
        main = results.avals[: len(results.avals) - results.num_aux]
        found = fitting(results.out_tree, main, cotangent)
        return found if self.program.is_train else []

    @property
    def is_scalar(self) -> bool:
        """Whether the function returns one real number (and aux), so that `value_and_grad` is defined."""
        main = self.program.results.avals[: len(self.program.results.avals) - self.program.results.num_aux]
        bare = self.program.results.out_tree == jax.tree.structure(0)
        return bare and main[0].shape == () and jaxprs.is_real(main[0].dtype)

    def ones(self) -> list[Any]:
        """The cotangent of a scalar output, none for inference; raises `TraceError` where the output is no scalar."""
        outs = self.program.results.avals[: len(self.program.results.avals) - self.program.results.num_aux]
        if not self.is_scalar:
            shown = ", ".join(a.str_short() for a in outs) or "nothing"
            cure = (
                "Reduce it to one real number (jnp.mean, jnp.sum), return extras as aux with has_aux=True, or use vjp."
            )
            raise TraceError(message(self.name, f"returned {shown}: value_and_grad needs a real scalar.", cure))
        return [jaxprs.typed(1, outs[0])] if self.program.is_train else []


def _float0(leaf: Any) -> np.ndarray:
    return np.zeros(slot("", leaf).shape, jax.dtypes.float0)


def value_and_gradients(traced: TracedCall, outputs: Sequence[Any], gradients: Sequence[Any], bound: Bound) -> Any:
    """Results in the form of `jax.value_and_grad`: `value, grads`, or `(value, aux), grads` with `has_aux`."""
    main, aux = traced.results(outputs)
    trees = traced.gradients(gradients, traced.options.chosen, bound, keep_structure=True)
    value = (main, aux) if traced.options.has_aux else main
    return value, trees[0] if isinstance(traced.options.argnums, int) else trees


def unfinished(traced: TracedCall, result: Any) -> Any:
    """A program's result, its outputs first, without those that are handed back as they are."""
    if not traced.handed_back:
        return result
    leaves, tree = jax.tree.flatten(result)
    return alias.Unfinished(jax.tree.unflatten(tree, alias.replaced(leaves, traced.handed_back)))
