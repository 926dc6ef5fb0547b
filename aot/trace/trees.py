"""Put flat results back into the caller's trees.

A `Call` maps the arguments of one signature to flat positions, and turns flat outputs and gradients into the results of
JAX's `value_and_grad` and `vjp`. It holds neither arrays nor the user's function.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import treedef_tuple

from jointcut.aot.options.options import Options
from jointcut.aot.trace.joint import Joint
from jointcut.aot.trace.primal import Results
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import abstract
from jointcut.wrappers.arguments import containers
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.built_in.guards import fitting
from jointcut.wrappers.built_in.zeros import filled
from jointcut.wrappers.metadata.convention import is_real, slot
from jointcut.wrappers.metadata.schemas import Meta, PlainTensorMeta, SubclassCreationMeta, plain_meta, zero_meta


@dataclass(frozen=True)
class Call:
    """The arguments and results of one signature, as the caller sees them.

    Attributes:
        name: the function's name.
        options: the options of `aot.function`.
        bound: the arguments of a call, as types.
        results: the results of the function.
        wanted: flat positions of the arguments that are differentiated.
        sparse: positions in `wanted` of the tables whose gradient is two arrays, rows and places.
        is_train: whether there is a backward.
        entering: flat positions of the arguments that are passed to a program, in its order.
        order: the program output for each leaf of the result; None if they are in the same order.
        is_sized: whether the sizes of arguments and results differ between calls, and differ from these.
    """

    name: str
    options: Options
    bound: Bound
    results: Results
    wanted: tuple[int, ...]
    sparse: frozenset[int]
    is_train: bool
    entering: tuple[int, ...]
    order: tuple[int, ...] | None = None
    is_sized: bool = False
    _whole: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _parts: dict[Any, list[Meta | None]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, name: str, options: Options, bound: Bound, program: Joint, wanted: tuple[int, ...]) -> Call:
        """Return the calls of a traced signature."""
        return cls(name, options, bound, program.results, wanted, program.sparse, program.is_train, bound.entering)

    @property
    def owners(self) -> tuple[int, ...]:
        """The flat argument of each flat gradient; a table's rows and places belong to the same one."""
        return tuple(i for k, i in enumerate(self.wanted) for _ in range(1 + (k in self.sparse)))

    @cached_property
    def enters_as_it_is(self) -> bool:
        """Whether all leaves of a call are passed to a program, in order."""
        return self.entering == tuple(range(len(self.bound.leaves)))

    # ------------------------------------------------------------------------------------------- outputs

    def given_back(self, outputs: Sequence[Any], bound: Bound) -> tuple[Any, Any]:
        """Return the function's output and its aux (None without `has_aux`) in the caller's trees.

        If the function wrote to objects in the call `bound`, they get their new values.
        """
        if self.order is not None:
            outputs = [outputs[i] for i in self.order]
        return self.results.given_back(outputs, bound)

    def result(self, outputs: Sequence[Any], bound: Bound) -> Any:
        """Return the function's result, `(output, aux)` with `has_aux`."""
        main, aux = self.given_back(outputs, bound)
        return (main, aux) if self.options.has_aux else main

    # ----------------------------------------------------------------------------------------- gradients

    def gradients(
        self, flat: Sequence[Any], positions: Sequence[int], bound: Bound, keep_structure: bool = False
    ) -> tuple[Any, ...]:
        """Return one tree per position; a leaf that carries no derivative gets a `float0` zero.

        With `keep_structure`, index leaves of sparse arrays are returned unchanged, as in
        `jax.experimental.sparse.grad`; `jax.vjp` returns zeros for them.
        """
        key = tuple(positions), len(bound.spans)
        if key not in self._whole:
            self._whole[key] = self._whole_trees(positions, bound)
        whole = self._whole[key]
        if whole is not None:
            return tuple(jax.tree.unflatten(tree, flat[part]) for tree, part in whole)
        return self._in_parts(flat, [place % len(bound.spans) for place in positions], bound, keep_structure)

    def _whole_trees(self, positions: Sequence[int], bound: Bound) -> list[tuple[Any, slice]] | None:
        """Return each argument's tree and its slice of the flat gradients; None unless every leaf has a gradient."""
        places = [place % len(bound.spans) for place in positions]
        spans, trees = [bound.spans[place] for place in places], bound.tree.children()[0].children()
        trees = dict(zip(bound.dynamic, trees, strict=True))
        if (
            self.sparse
            or bound.holds_more
            or not trees.keys() >= set(places)
            or list(self.wanted) != sorted(self.wanted)
        ):
            return None
        if not set(self.wanted).issuperset(i for span in spans for i in span):
            return None
        starts = [sum(i < span.start for i in self.wanted) for span in spans]
        parts = [slice(start, start + len(span)) for start, span in zip(starts, spans, strict=True)]
        return [(trees[place], part) for place, part in zip(places, parts, strict=True)]

    def _in_parts(
        self, flat: Sequence[Any], positions: Sequence[int], bound: Bound, keep_structure: bool
    ) -> tuple[Any, ...]:
        """Like `gradients`, leaf by leaf."""
        key = tuple(positions), keep_structure, len(bound.spans)
        metas = None if self.is_sized else self._parts.get(key)
        if metas is None:
            metas = self._gradient_metas(list(map(jax.typeof, flat)), positions, bound, keep_structure)
            self._parts[key] = metas
        trees = bound.gradients([meta and meta.creation_fn(flat, bound.leaves) for meta in metas])
        return tuple(trees[place] for place in positions)

    def _gradient_metas(
        self, types: Sequence[Any], positions: Sequence[int], bound: Bound, keep_structure: bool
    ) -> list[Meta | None]:
        """Return the type of each leaf's gradient; None for a leaf without one. `types` are of the flat gradients."""
        structure = self.bound.structure if keep_structure else frozenset()
        zeroed = {i for place in positions for i in bound.spans[place]} - bound.in_modules
        zeroed = zeroed if self.options.filter is None else set()
        metas: list[Meta | None] = [None] * len(bound.leaves)
        for i, leaf in enumerate(bound.leaves):
            if i in structure:
                metas[i] = plain_meta(None, jax.typeof(leaf), of_input=i)
            elif i in zeroed:
                metas[i] = zero_meta(slot("", leaf))
        flat = (plain_meta(n, aval) for n, aval in enumerate(types))
        for k, i in enumerate(self.wanted):
            metas[i] = _of_rows(next(flat), next(flat), bound.leaves[i]) if k in self.sparse else next(flat)
        return metas

    def gradient_metas(self, types: Sequence[Any]) -> tuple[Meta, ...]:
        """Return the plain arrays and containers of the gradients in `argnums`; `types` are of the flat gradients.

        They are what `gradients` returns with `keep_structure`.
        """
        positions = [place % len(self.bound.spans) for place in self.options.chosen]
        metas = self._gradient_metas(types, positions, self.bound, keep_structure=True)
        trees = self.bound.gradients([None if meta is None else i for i, meta in enumerate(metas)])
        places, tree = jax.tree.flatten(tuple(trees[place] for place in positions))
        return containers.Described.of(tree, [meta for i in places if (meta := metas[i]) is not None]).metas

    @cached_property
    def gradient_tree(self) -> Any:
        """The tree of the gradients in `argnums`; None unless its leaves are all flat gradients in order."""
        parts = self._whole_trees(self.options.chosen, self.bound)
        order = [i for _, part in parts or () for i in range(part.start, part.stop)]
        if parts is None or order != list(range(len(self.wanted))):
            return None
        trees = [tree for tree, _ in parts]
        return trees[0] if isinstance(self.options.argnums, int) else treedef_tuple(trees)

    def in_argnums(self, gradients: Sequence[Any], bound: Bound, keep_structure: bool = False) -> Any:
        """Return the gradients of the arguments in `argnums`: one tree, or a tuple of them, as in `jax.grad`."""
        trees = self.gradients(gradients, self.options.chosen, bound, keep_structure)
        return trees[0] if isinstance(self.options.argnums, int) else trees

    # ---------------------------------------------------------------------------------------- cotangents

    def cotangents(self, cotangent: Any) -> list[Any | None]:
        """Return the flat cotangents for the backward; None for one of a type for zeros (`float0`, `SymbolicZero`).

        They are in the order of the program's outputs. Raises `CallError` if the cotangent does not fit the output.
        """
        leaves = fitting(self.results.cotangent_tree, self._tangents, cotangent)
        return leaves if self.is_train else []

    @cached_property
    def _tangents(self) -> tuple[PlainTensorMeta, ...]:
        """The types of the cotangents of the outputs outside aux."""
        return self.results.tangents(self.order)[: len(self.results.main)]

    @property
    def cotangent_avals(self) -> list[Any]:
        """The types of the outputs with a flat cotangent, in the order of the program's outputs."""
        pairs = zip(self._tangents, self.results.main, strict=True)
        avals = {meta.unwrapped_idx: aval for meta, aval in pairs if meta.unwrapped_idx is not None}
        return [avals[i] for i in range(len(avals))]

    def filled(self, cotangents: Sequence[Any | None]) -> list[Any]:
        """Return the flat cotangents with arrays of zeros for None."""
        if all(ct is not None for ct in cotangents):
            return list(cotangents)
        return filled(cotangents, map(abstract.cotangent_aval, self.cotangent_avals))

    @cached_property
    def is_scalar(self) -> bool:
        """Whether the function returns one real number (and aux), so that `value_and_grad` is defined."""
        main = self.results.main
        bare = self.results.out_tree == jax.tree.structure(0)
        return bare and main[0].shape == () and is_real(main[0].dtype)

    def ones(self) -> list[Any]:
        """Return the cotangent 1 of a scalar output, none for inference; raises `TraceError` for another output."""
        main = self.results.main
        if not self.is_scalar:
            shown = ", ".join(a.str_short() for a in main) or "nothing"
            cure = (
                "Reduce it to one real number (jnp.mean, jnp.sum), return extras as aux with has_aux=True, or use vjp."
            )
            raise TraceError(message(self.name, f"returned {shown}: value_and_grad needs a real scalar.", cure))
        return [abstract.full(abstract.cotangent_aval(main[0]), 1)] if self.is_train else []


def dense(rows: Any, places: Any, shape: Sequence[int]) -> Any:
    """Return a table's gradient as an array of shape `shape`: the rows added at their places."""
    return jnp.zeros(shape, rows.dtype).at[tuple(jnp.asarray(places).T)].add(rows)


def _of_rows(rows: PlainTensorMeta, places: PlainTensorMeta, table: Any) -> SubclassCreationMeta:
    """Return the type of a table's gradient, a sparse array of the rows that were read."""
    kind = importlib.import_module("jax.experimental.sparse").BCOO
    meta = {"shape": slot("", table).shape, "indices_sorted": False, "unique_indices": False}
    return SubclassCreationMeta.of(kind, meta, [("data", rows), ("indices", places)])
