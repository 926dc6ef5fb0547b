"""Trace a flat function alone, and describe its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jointcut.aot.loops import plain
from jointcut.aot.loops.expected import named
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.wrappers.arguments import containers, fixed, objects
from jointcut.wrappers.arguments.paths import tree_paths
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.built_in import alias, refs
from jointcut.wrappers.built_in.flatten import Outcome
from jointcut.wrappers.built_in.guards import tangent_metas
from jointcut.wrappers.metadata.convention import is_inexact
from jointcut.wrappers.metadata.schemas import PlainTensorMeta, plain_meta
from jointcut.wrappers.wrapper import flat_form_of


@dataclass(frozen=True)
class Results:
    """The flat results of a function: `avals` of its outputs, then of its `aux`, then of its states.

    `out_tree` is the tree of the outputs, `aux_tree` the tree of the `num_aux` outputs of `aux` (None without
    `has_aux`). A state is a value that the function wrote to an object among its arguments: `states` has the flat
    position and path of that argument. If it changed more than arrays, `grown` has the new structure; the arrays are
    the last of `aux`.
    """

    avals: tuple[Any, ...]
    out_tree: Any
    aux_tree: Any
    num_aux: int
    repeated: tuple[tuple[int, int], ...] = ()  # an output, and the earlier output that is the same object
    states: tuple[tuple[int, str], ...] = ()
    grown: objects.Grown | None = None

    @classmethod
    def flat(cls, out: Any, has_aux: bool) -> tuple[list[Any], Results]:
        """Flatten the result of the user's function; raises `TraceError` if it is not a pair despite `has_aux`."""
        outcome = out if isinstance(out, Outcome) else Outcome(out)
        out, states = outcome.result, outcome.states
        if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
            cure = "Return (output, aux), or leave has_aux out."
            raise TraceError(message("has_aux=True", f"needs a pair, but the function returned {_shown(out)}.", cure))
        main, aux = out if has_aux else (out, None)
        (main, aux), _ = objects.taken_apart((main, aux))
        main, aux = fixed.fixed_results((main, aux)) if has_aux else (fixed.fixed_results(main), None)
        main_leaves, main_tree = jax.tree.flatten(main)
        aux_leaves, aux_tree = jax.tree.flatten(aux)
        leaves = [*main_leaves, *aux_leaves, *outcome.parts]
        repeated = alias.repeated(leaves)
        avals = tuple(map(jax.typeof, (*leaves, *states.values())))
        written, aux_tree = tuple(zip(states, outcome.paths, strict=True)), aux_tree if has_aux else None
        results = cls(avals, main_tree, aux_tree, len(leaves) - len(main_leaves), repeated, written, outcome.grown)
        refs.refuse_results(results.tree, leaves)
        return [*leaves, *states.values()], results

    @property
    def num_returned(self) -> int:
        """The number of outputs without the states."""
        return len(self.avals) - len(self.states)

    @property
    def num_in_tree(self) -> int:
        """The number of outputs that the caller gets: without the states, and the arrays of objects that have grown."""
        return self.num_returned - (len(self.grown.paths) if self.grown else 0)

    @property
    def main(self) -> tuple[Any, ...]:
        """The types of the outputs outside aux."""
        return self.avals[: self.num_returned - self.num_aux]

    @cached_property
    def holds_objects(self) -> bool:
        """Whether the result contains objects that can be written to."""
        return objects.stand_in(jax.tree.unflatten(self.tree, range(self.tree.num_leaves)))

    @cached_property
    def holds_fixed(self) -> bool:
        """Whether the result contains leaves that are not arrays, such as the functions of a module."""
        return fixed.stand_in(jax.tree.unflatten(self.tree, range(self.tree.num_leaves)))

    @cached_property
    def cotangent_tree(self) -> Any:
        """The tree of a cotangent of the outputs, with None for each leaf that is not an array."""
        if not self.holds_fixed:
            return self.out_tree
        return jax.tree.structure(fixed.gradients(jax.tree.unflatten(self.out_tree, range(self.out_tree.num_leaves))))

    @property
    def paths(self) -> tuple[str, ...]:
        """The user's path of each output, `result['loss']`, and of each state, `args[0].count.value`."""
        grown = self.grown.paths if self.grown else ()
        return (*tree_paths("result", self.tree), *grown, *(path for _, path in self.states))

    @cached_property
    def described(self) -> containers.Described:
        """The tree of the whole result, with a record of each plain array and container."""
        leaves = [plain_meta(i, aval) for i, aval in enumerate(self.avals[: self.num_in_tree])]
        return containers.Described.of(self.tree, leaves)

    @property
    def tree(self) -> Any:
        """The tree of the function's whole result, a pair with `has_aux`."""
        if self.aux_tree is None:
            return self.out_tree
        return jax.tree_util.treedef_tuple((self.out_tree, self.aux_tree))

    @property
    def with_cotangent(self) -> tuple[bool, ...]:
        """Whether each output can carry a cotangent: if it is floating-point and outside aux."""
        main = len(self.main)
        return tuple(is_inexact(a.dtype) and i < main for i, a in enumerate(self.avals))

    def tangents(self, order: Sequence[int] | None = None) -> tuple[PlainTensorMeta, ...]:
        """Return the type of each result's cotangent, with its position among those that a backward takes.

        They are in the order of the program's outputs: `order` gives the output of each leaf of the result.
        """
        return tangent_metas(self.avals, self.with_cotangent, order)

    def given_back(self, outputs: Sequence[Any], bound: Bound) -> tuple[Any, Any]:
        """Return the function's output and aux (None without `has_aux`) in trees, and write states to their objects.

        Raises `CallError`, and writes nothing, if one of the objects must not be written here.
        """
        if self.states:
            places = (place for place, _ in self.states)
            bound.write(dict(zip(places, outputs[self.num_returned :], strict=True)))
        if self.grown is not None:
            bound.refill(self.grown, outputs[self.num_in_tree : self.num_returned])
        whole = self.described.built(outputs)
        main, aux = (whole, None) if self.aux_tree is None else whole
        main, aux = objects.built((main, aux))[0] if self.holds_objects else (main, aux)
        return fixed.released((main, aux)) if self.holds_fixed else (main, aux)


def _shown(out: Any) -> str:
    if isinstance(out, jax.Array) or runtime.is_tracer(out):
        return f"one array, {jax.typeof(out).str_short()}"
    return f"{len(out)} values" if isinstance(out, tuple | list) else f"a {type(out).__name__}"


@dataclass(frozen=True)
class Primal:
    """The user's function as a flat jaxpr `(constants, leaves) -> outputs`, and its constants."""

    closed: Any
    consts: tuple[Any, ...]
    results: Results

    @property
    def has_references(self) -> bool:
        """Whether the function has a `jax.Ref` among its inputs, used or not, or makes one."""
        jaxpr, _ = jaxprs.opened(self.closed)
        among_inputs = any(abstract.is_reference(v.aval) for v in jaxpr.invars)
        return among_inputs or any(map(jaxprs.touches_references, jaxpr.eqns))

    def reversible(self) -> Any:
        """The jaxpr with ops that run backwards in the place of JAX's that do not."""
        return plain.reversible(self.closed)


def primal(function: Callable[..., Any], leaves: Sequence[Any], has_aux: bool) -> Primal:
    """Trace a flat function to a jaxpr without constants."""
    traced: list[Results] = []

    @flat_form_of(function)
    def flat(*xs: Any) -> list[Any]:
        with named():
            out, results = Results.flat(function(*xs), has_aux)
        traced[:] = [results]
        return out

    jaxpr, consts = jaxprs.opened(jax.make_jaxpr(flat)(*leaves))
    return Primal(jaxprs.constants_first(jaxpr), copied(consts), traced[0])


def copied(consts: Sequence[Any]) -> tuple[Any, ...]:
    """Copy numpy constants, so that later writes of their owner have no effect, as in `jax.jit`."""
    return tuple(c.copy() if isinstance(c, np.ndarray) else c for c in consts)
