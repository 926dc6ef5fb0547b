"""Hold the data of one traced call: its joint program, and the meaning of each flat position."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.options.options import Options
from jointcut.aot.trace.analyse import analyse, may_be_ruled, with_ruled_views
from jointcut.aot.trace.blame import explained
from jointcut.aot.trace.joint import Joint
from jointcut.aot.trace.primal import primal
from jointcut.aot.trace.trees import Call
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.wrappers.arguments.tree import Bound, struct
from jointcut.wrappers.metadata.convention import Convention
from jointcut.wrappers.metadata.schemas import InputAliasInfo, SubclassMeta, TensorAlias, ViewAndMutationMeta
from jointcut.wrappers.stack import Wrapped


@dataclass(frozen=True)
class Trace:
    """A function that was traced for one signature, forward and backward, with the caller's meaning of each array.

    `joint` is the closed jaxpr `(constants, arguments, cotangents) -> (outputs, gradients)`. `convention` gives the
    meaning of each flat position.

    Attributes:
        name: the function's name.
        options: the options of `aot.function`.
        bound: the arguments, bound to the function's parameters and flattened.
        inputs: a record of each argument, as far as it is known before the trace.
        wrapped: the function within its wrappers.
        program: the joint program with its roles.
        wanted: flat positions of the arguments that are differentiated.
        trace_ms: wall time of tracing.
        examples: the arguments of the call, if an error is to be measured at them and they are arrays.
    """

    name: str
    options: Options
    bound: Bound
    inputs: tuple[InputAliasInfo, ...]
    wrapped: Wrapped
    program: Joint
    wanted: tuple[int, ...]
    trace_ms: float
    examples: Bound | None = field(default=None, repr=False, compare=False)

    @property
    def owners(self) -> tuple[int, ...]:
        """The flat argument that each flat gradient belongs to."""
        return self.call.owners

    @property
    def is_scalar(self) -> bool:
        """Whether the function returns one real number (and aux), so that `value_and_grad` is defined."""
        return self.call.is_scalar

    @property
    def structs(self) -> list[Any]:
        """The types of the forward's inputs, with the shardings of committed arrays."""
        return self.placed([*map(struct, self.consts), *self.bound.unique])

    def placed(self, structs: Iterable[Any]) -> list[Any]:
        """Return types of arrays on the devices of the target, if there is one."""
        goal = self.options.goal
        return list(structs) if goal is None else list(map(goal.placed, structs))

    @property
    def convention(self) -> Convention:
        """The caller's meaning of each input array; an array passed twice is one input."""
        return self.wrapped.target.convention

    @cached_property
    def metadata(self) -> ViewAndMutationMeta:
        """The records of the function's inputs and outputs; see `analyse`.

        If an output is a view of an input, the function is traced once more, alone, to see whose derivative it has.
        """
        if not may_be_ruled(self.analysed):
            return self.analysed
        target = self.wrapped.target
        with explained(self.name):
            source = primal(target.entered, self.bound.unique, self.options.has_aux)
        return with_ruled_views(self.analysed, source.closed)

    @cached_property
    def analysed(self) -> ViewAndMutationMeta:
        """The records, in which every view of an input is one that JAX differentiates."""
        return analyse(self.program, self.bound, self.inputs)

    @cached_property
    def handed_back(self) -> dict[int, TensorAlias]:
        """Outputs that the compiled programs do not return, by position."""
        return self.analysed.handed_back

    @cached_property
    def call(self) -> Call:
        """The arguments and results as the caller sees them."""
        return Call.of(self.name, self.options, self.bound, self.program, self.wanted)

    @property
    def subclass_metadata(self) -> SubclassMeta:
        """`metadata`, with the containers of the gradients."""
        if not self.program.is_train:
            return SubclassMeta(self.metadata)
        jaxpr, _ = jaxprs.opened(self.program.closed)
        types = [v.aval for v in jaxpr.outvars[len(self.program.results.avals) :]]
        return SubclassMeta(self.metadata, self.call.gradient_metas(types))

    @property
    def joint(self) -> Any:
        """The joint program as a closed jaxpr without constants."""
        return self.program.closed

    @property
    def consts(self) -> tuple[Any, ...]:
        """The arrays that the function closes over: leading inputs of every program made from it."""
        return self.program.consts

    @property
    def in_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the input arrays, in order."""
        return tuple(slot.struct for slot in self.convention.inputs)

    @cached_property
    def plain_lowered(self) -> jax.stages.Lowered:
        """`jax.jit(jax.value_and_grad(f))`, not compiled."""
        plain, ones = self.program.plain, self.call.ones if self.is_scalar else list
        closed, structs = plain.closed, self.placed([*map(struct, plain.consts), *self.bound.unique])
        others = abstract.input_structs(closed)[len(structs) + (self.is_scalar and self.call.is_train) :]
        cotangents = self.placed(others)  # if the output is not a scalar
        whole = jax.jit(lambda *flat: runtime.evaluate(closed, *flat, *ones()), donate_argnums=plain.roles.replaced)
        return whole.lower(*structs, *cotangents)
