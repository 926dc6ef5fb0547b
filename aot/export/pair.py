"""Hold a traced call and its halves for export, and describe their arrays."""

from __future__ import annotations

import itertools
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import jax

from jointcut.aot.export.contract import Contract, StaticArgument, Tree
from jointcut.aot.run.runnable import Runnable
from jointcut.aot.trace.data import Trace
from jointcut.aot.trace.joint import Joint, constant_key, joint
from jointcut.aot.trace.signature import (
    gradients_of,
    graph_signature,
    inputs_of,
    outputs_of,
    places_of,
    tangents_of,
)
from jointcut.partition.errors import RecordError
from jointcut.partition.lower.emit import Halves, Residual
from jointcut.partition.plans import planfile
from jointcut.partition.plans.backend import Backend
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.sizes import numbers
from jointcut.wrappers.built_in.autograd import Wrap
from jointcut.wrappers.metadata.descriptors import (
    GradientOutput,
    Input,
    Output,
    ResidualInput,
    Size,
    Tangent,
    plain_tree,
)
from jointcut.wrappers.metadata.signatures import GraphSignature

_REASONS = {
    "input": "an input, which the caller holds",
    "output": "an output, which the caller holds",
    "saved": "a loop that runs in segments starts from it, or reads it when it runs again",
}


@dataclass(frozen=True)
class Pair:
    """A traced call and its halves, which follow the plan of `made`.

    If `traced` and `halves` have symbolic sizes, `made` is a cut with the numbers in `sizes`.
    """

    made: Runnable
    traced: Trace
    halves: Halves
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, made: Runnable, platforms: Sequence[str]) -> Pair:
        """Return the pair of a cut, with the sizes that it was traced for."""
        return cls(made, made.trace, made.split.on(Backend.of(platforms)).halves, {})

    @cached_property
    def alone(self) -> Joint:
        """The function without its derivative."""
        target, leaves = self.traced.wrapped.target, self.traced.bound.unique
        paths = [slot.path for slot in target.convention.inputs]
        has_aux = self.traced.options.has_aux
        return joint(target.function, leaves, has_aux, [False] * len(leaves), paths, target.places)

    @property
    def again(self) -> Wrap:
        """The wrapper with which the halves are differentiated once more."""
        return self.made.again

    @cached_property
    def constants(self) -> list[Any]:
        """The arrays that the function and its derivative close over, each once."""
        return list({constant_key(c): c for c in (*self.traced.consts, *self.alone.consts)}.values())

    def contract(self, platforms: tuple[str, ...], order: int, programs: Mapping[str, dict[str, Any]]) -> Contract:
        """Return the contract of the pair; `programs` are its entries for each program."""
        traced, options = self.traced, self.traced.options
        train = traced.program.is_train
        return Contract(
            name=traced.name,
            inputs=self.inputs,
            outputs=self.outputs,
            residuals=self.residuals if train else (),
            tangents=self.tangents if train else (),
            gradients=self.gradients if train else (),
            platforms=platforms,
            mlir_platform=platforms[0],
            argnums=options.argnums if isinstance(options.argnums, int) else tuple(options.argnums),
            has_aux=options.has_aux,
            positional=len(traced.bound.spans),
            statics=tuple(StaticArgument.of(*static) for static in traced.bound.statics),
            order=order,
            sizes=dict(self.sizes),
            graph_signature=self.graph_signature,
            result_tree=_json_of(traced.program.results.tree),
            plan=json.loads(planfile.dumps(self.made.split.plan, self.made.split.graph)),
            programs=dict(programs),
            versions=versions(),
        )

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """Constants, then the leaves of the arguments."""
        return inputs_of(self.traced, self.constants, range(len(self.traced.bound.leaves)))

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """The results of the function."""
        return outputs_of(self.traced)

    @property
    def residuals(self) -> tuple[ResidualInput, ...]:
        """The inputs of the backward that come from the forward."""
        return residuals_of(self.made, self.halves, self.constants, self.sizes)

    @property
    def tangents(self) -> tuple[Tangent, ...]:
        """The cotangents that the backward takes, one for each output that can carry one."""
        avals = abstract.input_structs(self.halves.backward)[len(self.halves.residuals) :]
        return tangents_of(self.traced.program, self.outputs, avals)

    @property
    def gradients(self) -> tuple[GradientOutput, ...]:
        """The results of the backward."""
        of = [self.inputs[len(self.constants) + owner] for owner in self.traced.owners]
        avals = [v.aval for v in jaxprs.opened(self.halves.backward)[0].outvars]
        return gradients_of(self.traced.program, of, avals)

    @property
    def graph_signature(self) -> GraphSignature:
        """PyTorch's record; its trees are dicts and tuples, so that it can be read anywhere."""
        signature = graph_signature(self.traced, len(self.constants))
        paths = dict(zip(self.traced.bound.paths(), (path for path, _ in places_of(self.traced)), strict=True))

        def renamed(names: Mapping[str, str]) -> dict[str, str]:
            return {name: paths[path] for name, path in names.items()}

        backward = signature.backward_signature
        if backward is not None:
            parameters, others = renamed(backward.gradients_to_parameters), renamed(backward.gradients_to_user_inputs)
            backward = replace(backward, gradients_to_parameters=parameters, gradients_to_user_inputs=others)
        return replace(
            signature,
            parameters=tuple(paths[path] for path in signature.parameters),
            buffers=tuple(paths[path] for path in signature.buffers),
            inputs_to_parameters=renamed(signature.inputs_to_parameters),
            inputs_to_buffers=renamed(signature.inputs_to_buffers),
            buffers_to_mutate=renamed(signature.buffers_to_mutate),
            in_spec=_plain_spec([i.keys for i in self.inputs if i.keys]),
            out_spec=_plain_spec([o.keys for o in self.outputs if o.kind != "state"]),
            backward_signature=backward,
        )


def residuals_of(
    made: Runnable, halves: Halves, constants: Sequence[Any], sizes: Mapping[str, int] = MappingProxyType({})
) -> tuple[ResidualInput, ...]:
    """Describe the residuals of halves, which follow the plan of `made`; `constants` are the leading inputs."""
    saved = {s.value: s for s in made.split.plan.saved}
    consts, graph = made.trace.consts, made.split.schedule.graph

    def described(residual: Residual, aval: Any) -> ResidualInput:
        index, kept = residual.index, saved.get(residual.value)
        if residual.kind == "input" and index < len(consts):
            index = next(i for i, c in enumerate(constants) if constant_key(c) == constant_key(consts[index]))
        elif residual.kind == "input":
            index += len(constants) - len(consts)
        value = graph.values[residual.value]
        stacked = numbers(aval.shape[: len(aval.shape) - len(value.shape)], sizes)  # in segments, only some steps
        return ResidualInput.like(
            aval,
            name=f"{'primals' if residual.kind == 'input' else residual.kind}_{index + 1}",
            kind=residual.kind,
            index=index,
            bytes=math.prod(stacked) * value.bytes,
            op="" if kept is None else kept.op,
            scope="" if kept is None else kept.scope,
            source="" if kept is None else kept.source,
            reason=_REASONS[residual.kind] if kept is None else kept.reason,
        )

    pairs = zip(halves.residuals, abstract.input_structs(halves.backward), strict=False)  # cotangents follow
    return tuple(itertools.starmap(described, pairs))


def _plain_spec(keys: Sequence[tuple[Size, ...]]) -> Any:
    return jax.tree.structure(plain_tree([(k, 0) for k in keys]))


def _json_of(tree: Any) -> str | None:
    """Return the JSON form of a tree; None if its classes have none."""
    try:
        return Tree(tree).to_json()
    except RecordError:
        return None


def versions() -> dict[str, str]:
    """Return the versions of jointcut, jax, jaxlib and Python; `unknown` for a package that is not installed."""
    numbers = {"python": platform.python_version()}
    for name in ("jointcut", "jax", "jaxlib"):
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            numbers[name] = "unknown"
    return numbers
