"""Hold one traced call, and put flat results back into the caller's trees.

What a trace knows for every later stage: the joint program, which flat position is which, what one look at the function
taught us, and the way back from flat outputs and gradients to the trees that the caller knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.analyse import analyse, plain_meta
from jointcut.aot.compile import ProgramMemory
from jointcut.aot.joint import Joint
from jointcut.aot.options import Options
from jointcut.aot.trees import Trees
from jointcut.partition import jaxprs
from jointcut.partition.displays import graph_page
from jointcut.partition.graph import Graph
from jointcut.partition.loops import read
from jointcut.partition.page.page import framed, page
from jointcut.wrappers import alias, containers
from jointcut.wrappers.convention import Convention, slot
from jointcut.wrappers.metadata import SubclassMeta, TensorAlias, ViewAndMutationMeta
from jointcut.wrappers.stack import Wrapped
from jointcut.wrappers.tree import Bound, struct


@dataclass(frozen=True)
class TracedCall(Trees):
    """A function traced for one signature into a joint forward and backward program.

    `joint` is the closed jaxpr `(constants, arguments, cotangents) -> (outputs, gradients)`, `convention` says which
    flat position is which.

    Attributes:
        name: of the function.
        options: those of `aot.function`.
        bound: the arguments, bound to the function's parameters and flattened.
        wrapped: what the wrappers made of the function.
        program: the joint program with its roles.
        wanted: flat positions of the arguments that are differentiated.
        trace_ms: wall time of tracing.
    """

    name: str
    options: Options
    bound: Bound
    wrapped: Wrapped
    program: Joint
    wanted: tuple[int, ...]
    trace_ms: float

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """In a notebook the joint program as a graph."""
        return {"text/plain": repr(self), "text/html": framed(page(graph_page(self.name, repr(self), self.graph)))}

    @property
    def differentiated(self) -> Joint:
        """The joint program."""
        return self.program

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
        same = alias.identities(inputs, jaxpr.outvars[: self.program.results.num_returned])
        # What XLA may compute once is still two arrays for a caller who computed it twice, and may give one up.
        found = {i: TensorAlias("output", j) for i, j in self.program.results.repeated}
        found |= {i: twin for i, twin in same.items() if twin.source == "input"}
        return alias.kept_out(dict(sorted(found.items())), self.donated)

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
        return ProgramMemory.of(self.plain_program())

    def plain_program(self) -> jax.stages.Compiled:
        """`jax.jit(jax.value_and_grad(f))`, compiled from the joint program uncut."""
        closed, structs = self.program.closed, [*map(struct, self.consts), *self.bound.unique]
        ones = self.ones() if self.is_scalar else ()
        given = jaxprs.input_structs(closed)[len(structs) + len(ones) :]  # cotangents of what is no scalar
        program = jax.jit(lambda *flat: jaxprs.evaluate(closed, *flat, *ones))
        return program.lower(*structs, *given).compile()

    def flat(self, bound: Bound) -> list[Any]:
        """The flat inputs of the programs for one call."""
        return [*self.consts, *(leaf for i, leaf in enumerate(bound.leaves) if i not in self.bound.duplicates)]


def unfinished(traced: TracedCall, result: Any) -> Any:
    """A program's result, its outputs first, without those that are handed back as they are."""
    if not traced.handed_back:
        return result
    leaves, tree = jax.tree.flatten(result)
    return alias.Unfinished(jax.tree.unflatten(tree, alias.replaced(leaves, traced.handed_back)))
